"""Formats of tool calls and thinking of the model families: one row of data per format.

A row says how the format is recognised, how a call is written, and which syntax that is. It drives
the readers of answers, the grammars of forced calls, and calls written into a history. `call` and
`parameter` are templates:

    $name $id $number       of the call; $number counts from 0, $count from 1
    $arguments              all of them, in the syntax of the row
    $parameters             each of them by the row's `parameter`, whose fields are
    $key $value             the value of a text as it is, any other as JSON
    $string $type           whether the value is a text ("true"), and its JSON type
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any

from mlxserve.text.parsing.markers import find_marker, overlap


class Syntax(Enum):
    """The syntaxes of a call's arguments, each with a reader."""

    JSON = auto()  # {"name": ..., "arguments": {...}}, also several, also in a list
    HEADED = auto()  # the name in markup, then the arguments as JSON
    ELEMENTS = auto()  # each argument in markup of its own
    PYTHON = auto()  # name(key=value, ...)
    OBJECT = auto()  # call:name{key:value, ...}, texts in quotes of the format's own
    TAGS = auto()  # each argument in a tag of its name, objects and lists as nested tags


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Messages inside an answer, each with a header that says what it is.

    opens: what a header may begin with; text that begins otherwise has no header
    begins: the markers of `opens` that begin a header also inside a message that was not ended
    messages: markers that end a header; one of the row's `starts` begins a call in JSON
    thinking: channels, recipients, or markers after the header, of thinking
    texts: names in the header of a text, where those of other headers are tools
    ends: markers that end a message
    calls: the prefix of recipients that are tools; None if calls have markers of their own
    """

    opens: tuple[str, ...]
    begins: tuple[str, ...]
    messages: tuple[str, ...]
    thinking: frozenset[str]
    ends: tuple[str, ...] = ()
    calls: str | None = None
    texts: frozenset[str] = frozenset()

    def split(self, text: str) -> tuple[str, str, str]:
        """Split a text at the end of its header, like `str.partition`."""
        _, marker = find_marker(text, self.messages, is_whole=True)
        return text.partition(marker) if marker else (text, "", "")

    def may_be(self, header: str, tools: Collection[str], *, is_whole: bool) -> bool:
        """True if this is a header, or the beginning of one."""
        begun = header.lstrip()
        if self.texts:
            names = [
                f"{lead}{name}" for lead in ("", *self.opens) for name in (*self.texts, *tools)
            ]
            return any(name == begun or (name.startswith(begun) and not is_whole) for name in names)
        is_begun = not is_whole and any(marker.startswith(begun) for marker in self.opens)
        if begun and not is_begun and not begun.startswith(self.opens):
            return False
        if not is_whole:
            header = header[: len(header) - overlap(header, (*self.opens, *self.messages))]
        return len(header) <= LONGEST_HEADER and bool(_header(self.opens).fullmatch(header))

    def read(self, header: str, marker: str, tools: Collection[str]) -> tuple[bool, str | None]:
        """Return (whether the message is thinking, the tool that it calls).

        There is no tool if the request has none.
        """
        recipients = re.findall(r"to=([^\s<]+)", header)
        to = recipients[-1] if recipients else ""
        if self.texts:
            name = header.strip().removeprefix(self.opens[0])
            return False, name if name in tools else None
        if tools and self.calls and (to.startswith(self.calls) or to in tools):
            return False, to.removeprefix(self.calls)
        channels = re.findall(r"<\|channel\|>\s*(\w+)", header)
        return bool(self.thinking & {channels[-1] if channels else to, marker}), None


LONGEST_HEADER = 512  # characters of markup that holds a name


@lru_cache(maxsize=8)
def _header(opens: tuple[str, ...]) -> re.Pattern[str]:
    """Markers, each with a word after it, a role and a recipient; then a word, such as `json`."""
    markers = "|".join(re.escape(marker) for marker in opens if marker.startswith("<|"))
    return re.compile(
        rf"\s*+(?:(?:(?:{markers})[ \t]*+[\w.]*+|assistant|to=[^\s<]*+)[ \t]*+)*+"
        r"(?:\w++[ \t]*+)?"
    )


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One format of calls.

    cues: groups of words; a template with all words of a group has this format
    known: token texts; a vocabulary with all of them has this format
    starts, ends: markers around a section of calls; the first of each is the one that is written.
        Without ends a section ends with its last call
    call, parameter: templates of the written form
    header: for `Syntax.HEADED`, a regular expression of what precedes the arguments
    block: for `Syntax.ELEMENTS`, what surrounds arguments that are written as JSON after all
    opening, joint, closing: around and between the calls of a section; without a joint each call
        has a section of its own
    quote: of texts, for `Syntax.OBJECT`; before each tag, for `Syntax.TAGS`
    is_cdata: a value may be in <![CDATA[...]]>
    is_bare: calls may be without the markers
    is_marked: calls are written with the markers
    is_padded: a value may have line breaks around it that are not part of it
    text_starts, text_ends: markers around the text of an answer, which are not shown
    channels: None if the answer is a single message
    """

    name: str
    syntax: Syntax
    _: KW_ONLY
    cues: tuple[tuple[str, ...], ...] = ()
    known: tuple[str, ...] = ()
    starts: tuple[str, ...] = ("<tool_call>",)
    ends: tuple[str, ...] = ()
    call: str
    parameter: str = ""
    header: str = ""
    block: tuple[str, str] = ("", "")
    opening: str = ""
    joint: str | None = None
    closing: str = ""
    quote: str = ""
    is_bare: bool = False
    is_marked: bool = True
    is_padded: bool = False
    is_cdata: bool = False
    text_starts: tuple[str, ...] = ()
    text_ends: tuple[str, ...] = ()
    channels: Channels | None = None

    @property
    def start(self) -> str:
        """The marker that is written before calls."""
        return self.starts[0] if self.is_marked and self.starts else ""

    @property
    def end(self) -> str:
        return self.ends[0] if self.is_marked and self.ends else ""

    @property
    def call_markers(self) -> tuple[str, ...]:
        """The texts of calls, in which special tokens may occur."""
        extra = ("[CALL_ID]", "[ARGS]") if "[TOOL_CALLS]" in self.starts else ()
        return (*self.starts, *self.ends, self.call, self.parameter, self.quote, *extra)

    @property
    def other_markers(self) -> tuple[str, ...]:
        """The texts around messages, in which special tokens may occur."""
        channels = self.channels
        heads = (*channels.opens, *channels.messages, *channels.ends) if channels else ()
        return (*self.text_starts, *self.text_ends, *heads)


NAME = r"[\w.:/-]+"  # a tool's name, as the API accepts it
NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_.:/-")
# Longest first, so that a shorter marker does not hide a longer one.
THINKING: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<ifm|think>", "</ifm|think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|think|>", "<|end|><|begin|>assistant"),
    ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
    ("Here is my thought process:", "Here is my response:"),
    ("<thought>", "</thought>"),
)
# Openers that models also write without their label.
UNLABELLED = {"<|channel>thought": "<|channel>"}
_JSON_CALL = '{"name": "$name", "arguments": $arguments}'
_LISTED: dict[str, Any] = {"opening": "[", "joint": ", ", "closing": "]"}
_FUNCTION = "\n<function=$name>\n$parameters</function>\n"
_MISTRAL = rf"(?P<name>{NAME})\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\]"
_DEEPSEEK = (
    rf"(?:<｜tool▁call▁begin｜>)?\s*(?P<is_v3>function<｜tool▁sep｜>)?(?P<name>{NAME})"
    r"(?(is_v3)\s*```json|<｜tool▁sep｜>)"
)
_HARMONY = Channels(
    opens=(
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
        "<|end|>",
        "assistant",
        "to=",
    ),
    begins=("<|start|>", "<|channel|>"),
    messages=("<|message|>",),
    thinking=frozenset({"analysis"}),
    ends=("<|end|>", "<|call|>"),
    calls="functions.",
)
_MUSE = Channels(
    opens=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "assistant", "to="),
    begins=("<|start|>",),
    messages=("<|message|>",),
    thinking=frozenset({"self"}),
    ends=("<|eom|>", "<|eot|>"),
)
_INKLING = Channels(
    opens=("<|message_model|>",),
    begins=("<|message_model|>",),
    messages=("<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"),
    thinking=frozenset({"<|content_thinking|>"}),
    ends=("<|end_message|>",),
)
_FUNCTIONARY = Channels(
    opens=(">>>",),
    begins=(">>>",),
    messages=("\n",),
    thinking=frozenset(),
    texts=frozenset({"all"}),
)
# The first row that a template matches is taken, so the more special rows come first.
# fmt: off
FORMATS: tuple[CallFormat, ...] = (
    CallFormat("harmony", Syntax.HEADED,
        known=("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"), starts=(),
        ends=("<|call|>", "<|end|>"),
        call="<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments",
        channels=_HARMONY),
    CallFormat("inkling", Syntax.JSON, known=("<|message_model|>", "<|content_invoke_tool_json|>"),
        cues=(("<|content_invoke_tool_json|>",),), starts=("<|content_invoke_tool_json|>",),
        ends=("<|end_message|>",), call='{"name": "$name", "args": $arguments}', channels=_INKLING),
    CallFormat("functionary_v3_2", Syntax.HEADED, cues=((">>>all", ">>>${recipient}"),), starts=(),
        call="$name\n$arguments", joint=">>>", channels=_FUNCTIONARY),
    CallFormat("kimi_k3", Syntax.ELEMENTS, known=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        starts=("<|open|>tools<|sep|>",), ends=("<|close|>tools<|sep|>",),
        call='<|open|>call tool="$name" index="$count"<|sep|>$parameters<|close|>call<|sep|>',
        parameter='<|open|>argument key="$key" type="$type"<|sep|>$value<|close|>argument<|sep|>',
        block=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"), joint="",
        text_starts=("<|open|>response<|sep|>",),
        text_ends=("<|close|>response<|sep|>", "<|close|>message<|sep|>")),
    CallFormat("gemma4", Syntax.OBJECT, cues=(("<|tool_call>", "<tool_call|>"),),
        starts=("<|tool_call>",), ends=("<tool_call|>",), call="call:$name$arguments", is_bare=True,
        quote='<|"|>'),
    CallFormat("step3", Syntax.ELEMENTS, cues=(("steptml:invoke",),), starts=("<｜tool_calls_begin｜>",),
        ends=("<｜tool_calls_end｜>",), joint="",
        call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="$name">$parameters'
        "</steptml:invoke><｜tool_call_end｜>",
        parameter='<steptml:parameter name="$key">$value</steptml:parameter>'),
    CallFormat("pythonic", Syntax.PYTHON,
        cues=(("<|tool_list_start|>",), ("<|tool_call_start|>",), ("List of tools: [",)),
        known=("<|tool_call_start|>", "<|tool_call_end|>"), starts=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>",), call="$name($arguments)", is_bare=True, **_LISTED),
    CallFormat("olmo3", Syntax.PYTHON, cues=(("<function_calls>",),), starts=("<function_calls>",),
        ends=("</function_calls>",), call="$name($arguments)", opening="\n", joint="\n",
        closing="\n"),
    CallFormat("bare_pythonic", Syntax.PYTHON, cues=(("func_name1(",),),
        starts=("<|python_start|>", "```tool_code\n"), ends=("<|python_end|>", "```"),
        # Llama 4, Gemma 3 and Llama 3.2 with such templates, ToolACE
        call="$name($arguments)", is_bare=True, is_marked=False, **_LISTED),
    CallFormat("seed_oss", Syntax.ELEMENTS, cues=(("<seed:tool_call>",),), starts=("<seed:tool_call>",),
        ends=("</seed:tool_call>",), call=_FUNCTION,
        parameter="<parameter=$key>$value</parameter>\n", is_padded=True),
    CallFormat("qwen3_coder", Syntax.ELEMENTS, cues=(("<tool_call>", "<function=", "<parameter="),),
        ends=("</tool_call>",), call=_FUNCTION,
        # Also Qwen 3.5, Step 3.5, Nemotron 3.
        parameter="<parameter=$key>\n$value\n</parameter>\n"),
    CallFormat("kimi_k2", Syntax.HEADED, cues=(("<|tool_calls_section_begin|>",),),
        starts=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        ends=("<|tool_calls_section_end|>",), joint="",
        call="<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>$arguments"
        "<|tool_call_end|>",
        header=rf"(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<name>{NAME}):\d+)\s*"
        r"<\|tool_call_argument_begin\|>"),
    CallFormat("deepseek_v3", Syntax.HEADED, cues=(("<｜tool▁sep｜>", "```json"),),
        starts=("<｜tool▁calls▁begin｜>",), ends=("<｜tool▁calls▁end｜>",), joint="\n",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```"
        "<｜tool▁call▁end｜>", header=_DEEPSEEK),  # also R1 and its distills
    CallFormat("deepseek_v31", Syntax.HEADED, cues=(("<｜tool▁sep｜>",),),
        starts=("<｜tool▁calls▁begin｜>",), ends=("<｜tool▁calls▁end｜>",), joint="",
        call="<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>", header=_DEEPSEEK),
    CallFormat("solar_open", Syntax.HEADED, cues=(("<|tool_call:begin|>",),),
        starts=("<|tool_calls|>",), ends=("<|calls|>",), joint="",
        call="<|tool_call:begin|>$id<|tool_call:name|>$name<|tool_call:args|>$arguments"
        "<|tool_call:end|>",
        header=r"<\|tool_call:begin\|>(?P<id>[^<]*)<\|tool_call:name\|>"
        rf"(?P<name>{NAME})<\|tool_call:args\|>", text_starts=("<|content|>",), text_ends=("<|end|><|begin|>assistant",)),
    CallFormat("minicpm5", Syntax.ELEMENTS, cues=(('<function name="', '<param name="'),),
        starts=("<function name=",), call='"$name">$parameters</function>',
        parameter='<param name="$key">$value</param>\n', is_cdata=True),
    CallFormat("mistral_id", Syntax.HEADED, cues=(("[TOOL_CALLS]", "[CALL_ID]"),),
        # Mistral Small 3.2
        starts=("[TOOL_CALLS]",), call="$name[CALL_ID]$id[ARGS]$arguments", header=_MISTRAL),
    CallFormat("mistral", Syntax.HEADED, cues=(("[TOOL_CALLS]", "[ARGS]"),), starts=("[TOOL_CALLS]",),
        call="$name[ARGS]$arguments", header=_MISTRAL),
    CallFormat("muse_spark", Syntax.ELEMENTS, cues=(("<atem:function_calls>",),),
        starts=("<atem:function_calls>",), ends=("</atem:function_calls>",), opening="\n", joint="",
        call='<atem:invoke name="$name">\n$parameters</atem:invoke>\n',
        parameter='<atem:parameter name="$key">$value</atem:parameter>\n', channels=_MUSE),
    CallFormat("cohere", Syntax.JSON, cues=(("<|START_ACTION|>",),), starts=("<|START_ACTION|>",),
        ends=("<|END_ACTION|>",),
        call='{"tool_call_id": "$number", "tool_name": "$name", "parameters": $arguments}',
        opening="[\n    ", joint=",\n    ", closing="\n]",
        # Command A and R7B
        text_starts=("<|START_RESPONSE|>", "<|START_TEXT|>"),
        text_ends=("<|END_RESPONSE|>", "<|END_TEXT|>")),
    CallFormat("command_r", Syntax.JSON, cues=(("Action:", "```json", "tool_name"),),
        starts=("Action:\n```json\n", "Action: ```json\n"), ends=("```",),
        call='{"tool_name": "$name", "parameters": $arguments}', opening="[\n    ", joint=",\n    ",
        closing="\n]\n"),
    CallFormat("gigachat3", Syntax.JSON,
        cues=(("function call<|role_sep|>",), ("function call", "<|role_sep|>", "<|message_sep|>")),
        starts=("<|message_sep|>\n\nfunction call<|role_sep|>\n",), call=_JSON_CALL),
    CallFormat("phi4_mini", Syntax.JSON, cues=(("<|tool|>", "<|/tool|>"),),
        known=("<|tool_call|>", "<|/tool_call|>"), starts=("<|tool_call|>", "functools"),
        ends=("<|/tool_call|>",), call=_JSON_CALL, **_LISTED),
    CallFormat("functools", Syntax.JSON, cues=(("functools[",),), starts=("functools",),
        call=_JSON_CALL, **_LISTED),  # Firefunction, whose template takes tools as a text
    CallFormat("granite", Syntax.JSON, cues=(("<|tool_call|>",),),
        starts=("<|tool_call|>", "<tool_call>"), call=_JSON_CALL,
        text_starts=("<response>",), text_ends=("</response>",), **_LISTED),
    CallFormat("hunyuan", Syntax.JSON, cues=(("<tool_calls>", "<answer>"),), starts=("<tool_calls>",),
        ends=("</tool_calls>",), call=_JSON_CALL, text_starts=("<answer>",), text_ends=("</answer>",),
        **_LISTED),
    CallFormat("functionary", Syntax.HEADED, cues=(("<function=", "</function>"),),
        starts=("<function=",), call="$name>$arguments</function>", header=f"(?P<name>{NAME})>"),
    CallFormat("ernie", Syntax.JSON, cues=(("<tool_call>", "<tool_output>", "<response>"),),
        ends=("</tool_call>",), call=f"\n{_JSON_CALL}\n", text_starts=("<response>",),
        text_ends=("</response>",)),
    CallFormat("json_tools", Syntax.JSON, cues=(("<tool_call>",), ("SmolLM", "/no_think")), ends=("</tool_call>",),
        call=f"\n{_JSON_CALL}\n"),  # Hermes, Qwen 2.5 and 3, QwQ, MiMo, SmolLM3, Granite 4, Reka
    CallFormat("llama3", Syntax.JSON, cues=(("<|python_tag|>",), ("dictionary of argument name",)),
        starts=("<|python_tag|>", "<|python_start|>"), ends=("<|python_end|>",),
        # 3.1 to 3.3, and Llama 4 with its own template
        call='{"name": "$name", "parameters": $arguments}', is_bare=True, is_marked=False),
    CallFormat("xlam", Syntax.JSON, cues=(('"name": "tool_call_name"',),),
        starts=("<tool_call>", "[TOOL_CALLS]"), ends=("</tool_call>",), call=_JSON_CALL,
        is_bare=True, is_marked=False, **_LISTED),
)
# fmt: on
# Models of other formats slip into this one, also without a marker.
FUNCTIONS = next(row for row in FORMATS if row.name == "qwen3_coder")

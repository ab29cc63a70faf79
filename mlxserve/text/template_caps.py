"""TemplateCaps: a chat template's capabilities, probed with a few small conversations.

Templates raise, or silently drop text, for conversations that their authors did not think of: a
system message further down, two calls in an answer, an id of another length. A probe counts as
taken only if it renders with all its texts, in their order: some templates move every system
message to the front, which changes the beginning of the prompt with each new one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from mlxserve.text.control_probing import find_controls
from mlxserve.text.controls import BUDGET, EFFORT, SWITCH, Controls
from mlxserve.text.probes import TOOL, Message, Probe, RenderEach

# Template variables that clients may always set; a template that does not read them ignores them.
ALWAYS_ALLOWED = frozenset({SWITCH, "thinking", EFFORT, BUDGET})
# transformers gives templates the first one as `thinking`, too.
REASONING_NAMES = ("reasoning_content", "reasoning")


class CallIds(StrEnum):
    """The ids of calls that a template accepts."""

    ANY = "any"
    NINE = "nine letters or digits"
    NONE = "none"  # it shows none


class Arguments(StrEnum):
    """The form in which a template takes the arguments of an earlier call."""

    TEXT = "text"
    OBJECT = "object"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCaps:
    """The capabilities of a chat template: the conversations that it accepts and shows.

    late_system: a system message after the first other one, left in its place
    user_after_result: a user message directly after a tool's result
    text_with_calls: a text before calls in one message, also after the answer that follows
    text_before_calls: a text before calls as a message of its own
    unanswered_calls: a call without a result, before a user message or at the end
    without_tools: no list of tools; False if the template wants an empty one
    text_and_reasoning: a text beside reasoning in an answer with calls
    late_results: another message between a call and its result
    orphan_results: a tool's result without a call before it
    bare_tools: tools without a description
    loose_types: tools whose parameters have several types, or none; some templates recurse without
        end
    images: an image in a user's message
    result_images: an image in a tool's result; True if the template shows no images at all
    calls, results: earlier calls and the results of tools are in the prompt
    answer_first: an assistant's message before the first user's
    empty_answers: an assistant's message without a text
    reasoning: the member that holds an earlier answer's reasoning; None if none is shown
    variables: names that the template reads, other than those of the conversation
    controls: how clients choose whether the model thinks, and with how much effort
    """

    system: bool = True
    several_systems: bool = True
    late_system: bool = True
    repeated_users: bool = True
    repeated_answers: bool = True
    answer_first: bool = True
    empty_answers: bool = True
    without_user: bool = True
    calls: bool = True
    results: bool = True
    parallel_calls: bool = True
    user_after_result: bool = True
    text_with_calls: bool = True
    text_before_calls: bool = True
    unanswered_calls: bool = True
    without_tools: bool = True
    text_and_reasoning: bool = True
    late_results: bool = True
    orphan_results: bool = True
    images: bool = False
    result_images: bool = True
    bare_tools: bool = True
    loose_types: bool = True
    developer: bool = True
    call_ids: CallIds = CallIds.ANY
    arguments: Arguments = Arguments.OBJECT
    reasoning: str | None = "reasoning_content"
    variables: frozenset[str] = field(default_factory=frozenset)
    controls: Controls = field(default_factory=Controls)

    def card(self) -> dict[str, Any]:
        """Return the capabilities as JSON."""
        return {**asdict(self), "variables": sorted(self.variables)}


_NINE, _NINE_2 = "zqcall001", "zqcall002"
_LONG = "call_zq0123456789abcdef"
_BARE_TOOL = {"type": "function", "function": {"name": "zqtool", "parameters": {}}}
_LOOSE_TYPES = {
    "zqkey": {"type": ["string", "null"]},
    "zqeither": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "zqnothing": {"type": "null"},
}
_LOOSE_FUNCTION = {
    **TOOL["function"],
    "parameters": {"type": "object", "properties": _LOOSE_TYPES},
}
_LOOSE_TOOL = {"type": "function", "function": _LOOSE_FUNCTION}
_OBJECT = {"zqkey": "zqvalue"}
_TEXT = json.dumps(_OBJECT)


def _said(role: str, text: str, **members: Any) -> Message:
    return {"role": role, "content": text, **members}


def _call(arguments: object, call_id: str = _NINE) -> dict[str, Any]:
    function = {"name": "zqtool", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _result(text: str = "zqresult", call_id: str = _NINE) -> Message:
    return _said("tool", text, tool_call_id=call_id, name="zqtool")


def _parts(text: str, *, has_image: bool) -> list[dict[str, Any]]:
    return [*([{"type": "image"}] if has_image else ()), {"type": "text", "text": text}]


_A, _B, _C = _said("user", "zqa"), _said("user", "zqb"), _said("user", "zqc")
_ANSWER = _said("assistant", "zqanswer")
_PLAIN: Mapping[str, tuple[list[Message], tuple[str, ...]]] = {
    "base": ([_A], ("zqa",)),
    "system": ([_said("system", "zqs"), _A], ("zqs", "zqa")),
    "several_systems": (
        [_said("system", "zqs"), _said("system", "zqt"), _A],
        ("zqs", "zqt", "zqa"),
    ),
    "late_system": ([_A, _said("system", "zqs"), _ANSWER, _B], ("zqa", "zqs", "zqanswer", "zqb")),
    "repeated_users": ([_A, _B, _ANSWER, _C], ("zqa", "zqb", "zqanswer", "zqc")),
    "repeated_answers": (
        [_A, _ANSWER, _said("assistant", "zqagain"), _B],
        ("zqanswer", "zqagain", "zqb"),
    ),
    "answer_first": ([_ANSWER, _B], ("zqanswer", "zqb")),
    "empty_answers": ([_A, _said("assistant", ""), _B], ("zqa", "zqb")),
    "without_user": ([_said("system", "zqs")], ("zqs",)),
    "developer": ([_said("developer", "zqs"), _A], ("zqs", "zqa")),
}


_IMAGES = {"image": True, "no image": False}
# A part as Python or JSON writes it, by a template that expects a text.
_WRITTEN_PART = re.compile(r"""['"]type['"]:\s*['"]image""")


def find_abilities(render_each: RenderEach, literals: Mapping[str, Sequence[str]]) -> TemplateCaps:
    """Probe the capabilities of the template that `render_each` renders.

    literals: the strings that the template compares each of its variables with

    A template that does not even render a user's message is taken to be able to do everything, so
    that requests report its own error.
    """
    variables = frozenset(literals)
    probes = {name: Probe(messages) for name, (messages, _) in _PLAIN.items()}
    for name, has_image in _IMAGES.items():
        probes[name] = Probe([{"role": "user", "content": _parts("zqa", has_image=has_image)}])
    for kind, arguments in (("object", _OBJECT), ("text", _TEXT)):
        probes |= {f"{kind}.{name}": probe for name, probe in _with_calls(arguments).items()}
    without_tools = _renders_without_tools(render_each)
    if not without_tools:
        render_each = _with_empty_lists(render_each)
    texts = dict(zip(probes, render_each(list(probes.values())), strict=True))
    if texts["base"] is None:
        return TemplateCaps(variables=variables)
    plain: dict[str, Any] = {
        name: _holds(texts[name], marks) for name, (_, marks) in _PLAIN.items()
    }
    plain.pop("base")
    plain["images"] = _shows_image(texts["image"], texts["no image"], "zqa")
    with_calls = _abilities_of_calls(texts)
    kind = "text" if with_calls["arguments"] is Arguments.TEXT else "object"
    if texts["object.tools"] is not None and texts["object.alone"] is None:
        plain["without_user"] = False
    # A template may show it only before a last message of the user's.
    plain["system"] &= not with_calls["calls"] or _holds(texts[f"{kind}.system"], ("zqs",))
    # With tools the first message may be taken for the user's, whoever said it.
    plain["answer_first"] &= not with_calls["calls"] or _holds(
        texts[f"{kind}.first"], ("zqvalue", "zqb")
    )
    if not plain["system"]:
        plain["several_systems"] = plain["late_system"] = False
    controls = find_controls(render_each, literals)
    return TemplateCaps(
        **plain,
        **with_calls,
        without_tools=without_tools,
        variables=variables,
        controls=controls,
    )


def _renders_without_tools(render_each: RenderEach) -> bool:
    """False for a template that loops over tools which may be absent."""
    absent, empty = render_each([Probe([_A]), Probe([_A], [])])
    return absent is not None or empty is None


def _with_empty_lists(render_each: RenderEach) -> RenderEach:
    return lambda probes: render_each(
        [probe if probe.tools is not None else probe._replace(tools=[]) for probe in probes]
    )


def _with_calls(arguments: object) -> dict[str, Probe]:
    calls = _said("assistant", "", tool_calls=[_call(arguments)])
    long = _said("assistant", "", tool_calls=[_call(arguments, _LONG)])
    two = _said("assistant", "", tool_calls=[_call(arguments), _call(arguments, _NINE_2)])
    second = _result("zqsecond", _NINE_2)
    conversations = {
        "loop": [_A, calls, _result()],
        "ids": [_A, long, _result(call_id=_LONG)],
        "two": [_A, two, _result(), second],
        "user": [_A, calls, _result(), _B, _ANSWER, _C],
        "said": [_A, {**calls, "content": "zqsaid"}, _result(), _ANSWER, _B],
        "denied": [_A, calls, _B, _ANSWER, _C],
        "ended": [_A, calls],
        "system": [_said("system", "zqs"), _A, calls, _result()],
        "first": [calls, _result(), _B],
        "apart": [_A, _said("assistant", "zqsaid"), calls, _result(), _ANSWER, _B],
        "late": [_A, calls, _B, _result(), _ANSWER, _C],
        "orphan": [_A, _said("tool", "zqresult", tool_call_id=_NINE), _ANSWER, _B],
        **{
            name: [_A, calls, {**_result(), "content": _parts("zqresult", has_image=has_image)}]
            for name, has_image in _IMAGES.items()
        },
        **{name: [_A, {**calls, name: "zqthought"}, _result()] for name in REASONING_NAMES},
        **{
            f"said {name}": [_A, {**calls, "content": "zqsaid", name: "zqthought"}, _result()]
            for name in REASONING_NAMES
        },
    }
    return {
        **{name: Probe(messages, [TOOL]) for name, messages in conversations.items()},
        "bare": Probe([_A], [_BARE_TOOL]),
        "loose": Probe([_A], [_LOOSE_TOOL]),
        "tools": Probe([_A], [TOOL]),
        "alone": Probe([_said("system", "zqs")], [TOOL]),
    }


def _abilities_of_calls(texts: Mapping[str, str | None]) -> dict[str, Any]:
    arguments = _arguments(texts["object.loop"], texts["text.loop"])
    kind = "text" if arguments is Arguments.TEXT else "object"
    shown = {name: texts[f"{kind}.{name}"] for name in ("loop", "ids", "two", "user", "orphan")}
    loop = shown["loop"]
    calls, results = _holds(loop, ("zqvalue",)), _holds(loop, ("zqresult",))
    reasoning = [n for n in REASONING_NAMES if _holds(texts[f"{kind}.{n}"], ("zqthought",))]
    both = texts[f"{kind}.said {reasoning[0]}"] if reasoning else ""
    ids = CallIds.ANY
    if loop is not None and shown["ids"] is None:
        ids = CallIds.NINE
    elif shown["ids"] is not None and _LONG not in shown["ids"]:
        ids = CallIds.NONE
    one = ("zqvalue",) if calls else ()
    two = (*one, *one)
    return {
        "calls": calls,
        "results": results,
        "parallel_calls": loop is None
        or _holds(shown["two"], (*two, "zqsecond") if results else two),
        "user_after_result": loop is None or _holds(shown["user"], ("zqb", "zqanswer", "zqc")),
        "text_with_calls": loop is None or _holds(texts[f"{kind}.said"], ("zqsaid",)),
        "text_before_calls": loop is None
        or _holds(texts[f"{kind}.apart"], ("zqsaid", "zqresult", "zqanswer", "zqb")),
        "unanswered_calls": loop is None
        or (
            _holds(texts[f"{kind}.denied"], (*one, "zqb", "zqanswer", "zqc"))
            and _holds(texts[f"{kind}.ended"], one)
        ),
        "text_and_reasoning": both is not None,
        "late_results": not results
        or _holds(texts[f"{kind}.late"], ("zqb", "zqresult", "zqanswer", "zqc")),
        "orphan_results": _holds(shown["orphan"], ("zqa", "zqresult", "zqanswer", "zqb")),
        "result_images": not results
        or not _shows_image(texts["image"], texts["no image"], "zqa")
        or _shows_image(texts[f"{kind}.image"], texts[f"{kind}.no image"], "zqresult"),
        "bare_tools": texts["object.bare"] is not None,
        "loose_types": texts["object.loose"] is not None or texts["object.tools"] is None,
        "call_ids": ids,
        "arguments": arguments,
        "reasoning": reasoning[0] if reasoning else None,
    }


def _arguments(as_object: str | None, as_text: str | None) -> Arguments:
    """Prefer text if it stays as the model wrote it: an object is rewritten with other blanks.

    A template with a syntax of its own for objects may print a text as it is, which no model wrote.
    """
    if as_object is None and as_text is not None:
        return Arguments.TEXT
    if as_object is None or as_text is None or _TEXT not in as_text:
        return Arguments.OBJECT
    is_json = _TEXT.replace(" ", "") in as_object.replace(" ", "")
    return Arguments.TEXT if is_json or str(_OBJECT) in as_object else Arguments.OBJECT


def _shows_image(text: str | None, without: str | None, mark: str) -> bool:
    """True if the prompt shows an image beside this mark, as something else than a written part."""
    if text is None or not _holds(text, (mark,)):
        return False
    return text != without and _WRITTEN_PART.search(text) is None


def _holds(text: str | None, marks: Sequence[str]) -> bool:
    """True if the rendered text has all of these marks in this order."""
    if text is None:
        return False
    at = 0
    for mark in marks:
        at = text.find(mark, at)
        if at < 0:
            return False
        at += len(mark)
    return True

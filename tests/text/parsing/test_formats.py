"""Every family's calls and thinking, as its models write them and as they get them wrong."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest

from mlxserve.text.conversation import arguments_object
from mlxserve.text.format_choice import recognise
from mlxserve.text.parsing.json_text import repaired_json
from mlxserve.text.parsing.turn import AssistantTurn
from mlxserve.text.parsing.values import json_value
from tests.text.parsing.answers import (
    CALL_HEADERS,
    ROWS,
    TEXT_HEADERS,
    markup,
    parse,
    parse_in_pieces,
    tool,
)

CALLED = [("look", {"at": "ü", "n": 2})]
OBJECT = '{"at": "ü", "n": 2}'
NAMED = f'{{"name": "look", "arguments": {OBJECT}}}'
# A sentence of a model, then the call `look` with "ü" and 2.
WRITTEN = {
    "json_tools": f"<tool_call>\n{NAMED}\n</tool_call>",
    "json_tools, spread out": '<tool_call>{ "arguments" : {"at": "ü", "n": 2} , "name" : "look" }</tool_call>',
    "json_tools, not closed": f"<tool_call>\n{NAMED}",
    "json_tools, in a list": f"<tool_call>[{NAMED}]</tool_call>",
    "json_tools, OpenAI's": f'<tool_call>{{"type": "function", "function": {NAMED}}}</tool_call>',
    "json_tools, arguments as text": '<tool_call>{"name": "look", "arguments": '
    '"{\\"at\\": \\"ü\\", \\"n\\": 2}"}</tool_call>',
    "json_tools, as Qwen 3 Coder": "<tool_call>\n<function=look>\n<parameter=at>\nü\n</parameter>\n"
    "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>",
    "ernie": f"<tool_call>\n{NAMED}\n</tool_call>\n",
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=at>\nü\n</parameter>\n<parameter=n>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "qwen3_coder, no marker": "<function=look>\n<parameter=at>\nü\n</parameter>\n<parameter=n>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "qwen3_coder, on a line": "<tool_call><function=look><parameter=at>ü</parameter><parameter=n>2"
    "</parameter></function></tool_call>",
    "qwen3_coder, as Hermes": f"<tool_call>\n{NAMED}\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=look>\n<parameter=at>ü</parameter>\n<parameter=n>2"
    "</parameter>\n</function>\n</seed:tool_call>",
    "glm45": "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>ü</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "glm47": "<tool_call>look<arg_key>at</arg_key><arg_value>ü</arg_value><arg_key>n</arg_key>"
    "<arg_value>2</arg_value></tool_call>",
    "hunyuan_v3": "<tool_calls>\n<tool_call>look<tool_sep>\n<arg_key>at</arg_key>\n<arg_value>ü"
    "</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n</tool_calls>",
    "longcat": "<longcat_tool_call>look\n<longcat_arg_key>at</longcat_arg_key>\n<longcat_arg_value>ü"
    "</longcat_arg_value>\n<longcat_arg_key>n</longcat_arg_key>\n<longcat_arg_value>2"
    "</longcat_arg_value>\n</longcat_tool_call>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="look">'
    '<steptml:parameter name="at">ü</steptml:parameter><steptml:parameter name="n">2'
    "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">ü</parameter>\n'
    '<parameter name="n">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="look">]<]minimax[>[<at>ü'
    "]<]minimax[>[</at>]<]minimax[>[<n>2]<]minimax[>[</n>]<]minimax[>[</invoke>\n"
    "]<]minimax[>[</tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="at" '
    'string="true">ü</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">2'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="at" '
    'string="true">ü</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">2'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{OBJECT}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    f"{OBJECT}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    f"<|tool_call_argument_begin|> {OBJECT}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k2, no section": f"<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{OBJECT}",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="at" '
    'type="string"<|sep|>ü<|close|>argument<|sep|><|open|>argument key="n" type="integer"<|sep|>'
    "2<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "kimi_k3, in a block": '<|open|>tools<|sep|>\n<|open|>call tool="look" index="1"<|sep|>\n'
    f'<|open|>json type="object"<|sep|>{OBJECT}<|close|>json<|sep|>\n<|close|>call<|sep|>\n'
    "<|close|>tools<|sep|>",
    "solar_open": "<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>look<|tool_call:args|>"
    f"{OBJECT}<|tool_call:end|>",
    "minicpm5": '<function name="look"><param name="at">ü</param><param name="n">2</param></function>',
    "minicpm5, CDATA": '<function name="look"><param name="at"><![CDATA[ü]]></param>\n'
    '<param name="n">2</param>\n</function>',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="look">\n<atem:parameter name="at">ü'
    '</atem:parameter>\n<atem:parameter name="n">2</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>",
    "inkling": f'<|content_invoke_tool_json|>{{"name": "look", "args": {OBJECT}}}<|end_message|>',
    "inkling, in a message": "<|end_message|><|message_model|>look<|content_invoke_tool_json|>"
    f'{{"name": "look", "args": {OBJECT}}}<|end_message|>',
    "functionary_v3_2": f">>>look\n{OBJECT}",
    "mistral": f"[TOOL_CALLS]look[ARGS]{OBJECT}",
    "mistral, with an id": f"[TOOL_CALLS]look[CALL_ID]123456789[ARGS] {OBJECT}",
    "mistral, as a list": f"[TOOL_CALLS] [{NAMED}]",
    "mistral_id": f"[TOOL_CALLS]look[CALL_ID]123456789[ARGS]{OBJECT}",
    "mistral_list": f'[TOOL_CALLS][{{"name": "look", "arguments": {OBJECT}, "id": "123456789"}}]',
    "functionary": f"<function=look>{OBJECT}</function>",
    "gemma4": '<|tool_call>call:look{at:<|"|>ü<|"|>,n:2}<tool_call|>',
    "gemma4, spread out": '<|tool_call>call:look{ at: <|"|>ü<|"|>,\n  n : 2 }<tool_call|>',
    "gemma4, no marker": 'call:look{at:<|"|>ü<|"|>,n:2}',
    "gemma4, a colon too much": '<|tool_call>:call:look{at:<|"|>ü<|"|>,n:2}<tool_call|>',
    "function_gemma": "<start_function_call>call:look{at:<escape>ü<escape>,n:2}<end_function_call>",
    "pythonic": '<|tool_call_start|>[look(at="ü", n=2)]<|tool_call_end|>',
    "pythonic, single quotes": "<|tool_call_start|>[look(at='ü',n=2,)]<|tool_call_end|>",
    "pythonic, bare": '[look(at="ü", n=2)]',
    "pythonic, as JSON": f"<|tool_call_start|>[{NAMED}]<|tool_call_end|>",
    "bare_pythonic": "[look(at='ü', n=2)]",
    "bare_pythonic, Llama 4": '<|python_start|>[look(at="ü", n=2)]<|python_end|>',
    "bare_pythonic, Gemma 3": '```tool_code\nlook(at="ü", n=2)\n```',
    "olmo3": "<function_calls>\nlook(at='ü', n=2)\n</function_calls>",
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", "parameters": '
    f"{OBJECT}}}\n]<|END_ACTION|>",
    "command_r": f'Action:\n```json\n[\n    {{"tool_name": "look", "parameters": {OBJECT}}}\n]\n```',
    "apertus": f'<|tools_prefix|>[{{"look": {OBJECT}}}]<|tools_suffix|>',
    "internlm2": f'<|action_start|><|plugin|>\n{{"name": "look", "parameters": {OBJECT}}}<|action_end|>',
    "gigachat3": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{NAMED}",
    "gigachat31": f"<|function_call|>{NAMED}",
    "phi4_mini": f"<|tool_call|>[{NAMED}]<|/tool_call|>",
    "phi4_mini, functools": f"functools[{NAMED}]",
    "functools": f" functools[{NAMED}]",
    "granite": f"<|tool_call|>[{NAMED}]",
    "granite, 3.1": f"<tool_call>[{NAMED}]",
    "granite_code": f"<function_call> {NAMED}",
    "nemotron_nano": f"<TOOLCALL>[{NAMED}]</TOOLCALL>",
    "hunyuan": f"<tool_calls>[{NAMED}]</tool_calls>",
    "tool_calls": f"<tool_calls>[{NAMED}]</tool_calls>",
    "tool_calls, MiniMax M1": f"<tool_calls>\n{NAMED}\n</tool_calls>",
    "llama3": f'{{"name": "look", "parameters": {OBJECT}}}',
    "llama3, with a tag": f'<|python_tag|>{{"name": "look", "parameters": {OBJECT}}}',
    "llama3, as Functionary": f"<function=look>{OBJECT}</function>",
    "xlam": f"[{NAMED}]",
    "xlam, in Mistral's markers": f"[TOOL_CALLS][{NAMED}]",
    "xlam, in Hermes' markers": f"<tool_call>[{NAMED}]</tool_call>",
}
MESSAGES = {"harmony"}  # whose calls are messages of their own


def row_of(case: str) -> str:
    return case.split(",")[0]


def test_every_format_has_a_case() -> None:
    assert {row_of(case) for case in WRITTEN} | MESSAGES == set(ROWS)


def test_a_call_is_read_in_pieces_of_any_size() -> None:
    for case in WRITTEN:
        family = markup(row_of(case))
        lead = TEXT_HEADERS.get(row_of(case), "")
        found = parse_in_pieces(f"{lead}Yes. {WRITTEN[case]}", family)
        assert (found.text, found.calls) == ("Yes.", CALLED), case


def test_a_call_that_was_cut_off_is_never_another_call() -> None:
    for case in WRITTEN:
        family, text = markup(row_of(case)), WRITTEN[case]
        text = f"{CALL_HEADERS.get(row_of(case), '')}{text}"
        for end in range(len(text)):
            for name, arguments in parse(text[:end], family).calls:
                assert (name, arguments) in CALLED or isinstance(arguments, str), text[:end]
                assert arguments != "", "an empty text is taken for no arguments"


ODD = [
    *(
        "NaN",
        "1e999",
        "1e9_9",
        "(1e999,)",
        '"\\ud83d"',
        "'\\ud83d'",
        '["\\ud83d\n"]',
        "0x" + "f" * 5_000,
    ),
    *("7" * 5_000, "[" * 1_100 + "]" * 1_100, "[" + "-" * 3_000 + "1]"),
]


@pytest.mark.slow
@pytest.mark.parametrize("value", ODD, ids=[one[:12] for one in ODD])
def test_no_value_makes_a_reader_fail_or_leaves_text_that_cannot_be_sent(value: str) -> None:
    for case, text in WRITTEN.items():
        lead = CALL_HEADERS.get(row_of(case), "")
        for replaced in ('"ü"', "ü", "2"):
            found = parse(lead + text.replace(replaced, value), markup(row_of(case)), parsed=str)
            for name, arguments in found.calls:
                f"{name}{arguments}{found.text}".encode()
                if (parsed := arguments_object(arguments)) is not None:
                    assert parsed == json.loads(arguments), case


NOISE = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=look>",
    "{",
    "}",
    "[",
    "]",
]
NOISE += [
    "\n",
    " ",
    '"',
    "'",
    ",",
    ":",
    "(",
    ")",
    "<",
    "<|",
    "look",
    '{"name": "look"',
    "Hm. ",
    "ü",
]


def test_any_mixture_of_a_formats_pieces_is_read_in_pieces_of_any_size() -> None:
    for case in WRITTEN:
        rng, family, text = Random(case), markup(row_of(case)), WRITTEN[case]
        cuts = [(a, rng.randrange(a, len(text))) for a in rng.sample(range(len(text)), 6)]
        fragments = [
            *NOISE,
            *(text[a:b] for a, b in cuts),
            *re.split(r"(?<=[>\]}])", text),
            *[text] * 5,
        ]
        if family.format and family.format.channels:
            fragments += ["to=look", "to=user", "<|message|>", "<|eom|>"] * 3
        for _ in range(10):
            parse_in_pieces("".join(rng.choices(fragments, k=rng.randrange(1, 12))), family)


@pytest.mark.parametrize(
    "name", [row.name for row in ROWS.values() if row.ends and row.joint is None]
)
def test_a_section_that_was_not_closed_ends_at_the_next_one(name: str) -> None:
    row = ROWS[name]
    if not row.start or row.channels:
        return
    section = WRITTEN[name].removesuffix("\n").removesuffix(row.end)
    other = WRITTEN[name].replace("look", "rest").replace("ü", "é")
    found = parse_in_pieces(section + other, markup(name))
    assert found.calls == [*CALLED, ("rest", {"at": "é", "n": 2})]
    assert found.text.strip() == ""


def harmony(channel: str, text: str) -> str:
    return f"<|channel|>{channel}<|message|>{text}"


AGAIN = "<|end|><|start|>assistant"
CALLS_A_B = [("a", {"q": "1"}), ("b", {"q": "2"})]
# (format, answer, content, reasoning, calls)
ANSWERS: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    # ---- texts keep every character
    (
        "glm45",
        "<tool_call>write\n<arg_key>content</arg_key>\n<arg_value>    def f():\n        return 1\n"
        "</arg_value>\n</tool_call>",
        "",
        "",
        [("write", {"content": "    def f():\n        return 1\n"})],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="write"><parameter name="content">\tif x:\n</parameter>'
        "</invoke></minimax:tool_call>",
        "",
        "",
        [("write", {"content": "\tif x:\n"})],
    ),
    (
        "glm47",
        "<tool_call>write<arg_key>content</arg_key><arg_value> </arg_value></tool_call>",
        "",
        "",
        [("write", {"content": " "})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=content>\n\n<tool_call> and </tool_call>\n\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        "",
        [("write", {"content": "\n<tool_call> and </tool_call>\n"})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=content>\nnull\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        "",
        [("write", {"content": "null"})],
    ),
    # ---- values by their schema
    (
        "qwen3_coder",
        "<tool_call><function=typed><parameter=either>5</parameter><parameter=n>three</parameter>"
        "<parameter=big>12345678901234567890</parameter><parameter=maybe>null</parameter>"
        "<parameter=flag>True</parameter><parameter=list>['a', 1]</parameter>"
        '<parameter=unknown>{"a": [1]}</parameter></function></tool_call>',
        "",
        "",
        [
            (
                "typed",
                {
                    "either": 5,
                    "n": "three",
                    "big": 12345678901234567890,
                    "maybe": None,
                    "flag": True,
                    "list": ["a", 1],
                    "unknown": {"a": [1]},
                },
            )
        ],
    ),
    (
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="typed">]<]minimax[>[<list>]<]minimax[>['
        "<item>a]<]minimax[>[</item>]<]minimax[>[<item>b</item>]<]minimax[>[</list>]<]minimax[>[<tree>"
        "]<]minimax[>[<x>1]<]minimax[>[</x>]<]minimax[>[</tree>]<]minimax[>[</invoke>\n"
        "]<]minimax[>[</tool_call>",
        "",
        "",
        [("typed", {"list": ["a", "b"], "tree": {"x": 1}})],
    ),
    # ---- two calls, the first never closed
    (
        "qwen3_coder",
        "<tool_call>\n<function=a>\n<parameter=q>\n1\n</parameter>\n</function>\n<tool_call>\n"
        "<function=b>\n<parameter=q>\n2\n</parameter>\n</function>\n</tool_call>",
        "",
        "",
        CALLS_A_B,
    ),
    (
        "qwen3_coder",  # not even its value: it is no call, least of all with the other's value
        "<tool_call>\n<function=a>\n<parameter=q>\n1\n<tool_call>\n<function=b>\n<parameter=q>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=a>\n<parameter=q>\n1",
        "",
        [("b", {"q": "2"})],
    ),
    (
        "json_tools",
        '<tool_call>{"name": "a", "arguments": {"q": "1"}}<tool_call>{"name": "b", "arguments": '
        '{"q": "2"}}</tool_call>',
        "",
        "",
        CALLS_A_B,
    ),
    # ---- names
    ("mistral", '[TOOL_CALLS]fs/read[ARGS]{"q": "1"}', "", "", [("fs/read", {"q": "1"})]),
    (
        "kimi_k2",
        '<|tool_call_begin|>functions.fs:read:12<|tool_call_argument_begin|>{"q": "1"}',
        "",
        "",
        [("fs:read", {"q": "1"})],
    ),
    (
        "harmony",
        harmony("commentary to=functions.fs/read.all <|constrain|>json", '{"q": "1"}'),
        "",
        "",
        [("fs/read.all", {"q": "1"})],
    ),
    (
        "pythonic",
        "<|tool_call_start|>[resolve-library-id(q='x')]<|tool_call_end|>",
        "",
        "",
        [("resolve-library-id", {"q": "x"})],
    ),
    (
        "gemma4",
        '<|tool_call>call:github.create_issue{a-b:<|"|>x<|"|>, b.c:[1,2]}<tool_call|>',
        "",
        "",
        [("github.create_issue", {"a-b": "x", "b.c": [1, 2]})],
    ),
    # ---- names of arguments in quotes
    (
        "gemma4",
        '<|tool_call>call:look{"at":<|"|>ü<|"|>,"\\u006e" : 2}<tool_call|>',
        "",
        "",
        CALLED,
    ),
    *(
        ("gemma4", f'<|tool_call>call:look{{"{key}":1}}<tool_call|>', text, "", [])
        for key in ("\\q", "\\u12", "\\x41", "\\u", "a\\ ")
        for text in [f'<|tool_call>call:look{{"{key}":1}}<tool_call|>']
    ),
    # ---- quotes that were not escaped: repaired, or else text
    (
        "pythonic",
        "<|tool_call_start|>[bash(command='sed -n '360,450p' /testbed/common.py')]<|tool_call_end|>",
        "",
        "",
        [("bash", {"command": "sed -n '360,450p' /testbed/common.py"})],
    ),
    (
        "olmo3",
        "<function_calls>\nbash(command='echo 'a' 'b'')\nlook(n=1)\n</function_calls>",
        "",
        "",
        [("bash", {"command": "echo 'a' 'b'"}), ("look", {"n": 1})],
    ),
    (
        "pythonic",
        "<|tool_call_start|>[bash('ls')]<|tool_call_end|>",
        "<|tool_call_start|>[bash('ls')]<|tool_call_end|>",
        "",
        [],
    ),
    (
        "pythonic",
        "<|tool_call_start|>[typed(list={'b', 1}, n=007, tree={'x': (1, None), 2: True}), rest()]"
        "<|tool_call_end|>",
        "",
        "",
        [("typed", {"list": ["b", 1], "n": 7, "tree": {"x": [1, None], "2": True}}), ("rest", {})],
    ),
    (
        "pythonic",
        "<|tool_call_start|>[pad(a=-000, b=-042, c=00, d=007.5)]<|tool_call_end|>",
        "",
        "",
        [("pad", {"a": 0, "b": -42, "c": 0, "d": 7.5})],
    ),
    (
        "pythonic",
        "<|tool_call_start|>[bash(command='python -c \"f(x, s='\\,'))\"\nls'), rest()]<|tool_call_end|>",
        "",
        "",
        [("bash", {"command": "python -c \"f(x, s='\\,'))\"\nls"}), ("rest", {})],
    ),
    ("gemma4", "I call: you. call:nobody{a:1}", "I call: you. call:nobody{a:1}", "", []),
    # ---- JSON in Python's words
    *(
        (name, written, "", "", [("typed", {"either": "it's", "flag": True, "maybe": None})])
        for arguments in ["{'either': 'it's', 'flag': True, 'maybe': None,}"]
        for name, written in [
            (
                "json_tools",
                f"<tool_call>{{'name': 'typed', 'arguments': {arguments},}}</tool_call>",
            ),
            ("pythonic", f"[{{'name': 'typed', 'arguments': {arguments}}},]"),
            ("mistral", f"[TOOL_CALLS]typed[ARGS]{arguments}"),
            ("mistral_list", f"[TOOL_CALLS][{{'name': 'typed', 'arguments': {arguments}}}]"),
            ("apertus", f"<|tools_prefix|>[{{'typed': {arguments}}}]<|tools_suffix|>"),
            ("harmony", harmony("commentary to=functions.typed json", arguments)),
            ("llama3", f'{{"name": "typed", "parameters": {arguments}}}'),
        ]
    ),
    # ---- Llama 3: without a marker
    (
        "llama3",
        '{"name": "a", "parameters": {"q": "1"}}; {"name": "b", "parameters": {"q": "2"}}',
        "",
        "",
        CALLS_A_B,
    ),
    (
        "llama3",
        '[{"name": "a", "parameters": {"q": "1"}}, {"name": "b", "parameters": {"q": "2"}}]',
        "",
        "",
        CALLS_A_B,
    ),
    (
        "llama3",
        'I call. {"name": "a", "parameters": {"q": "1"}}',
        "I call.",
        "",
        [("a", {"q": "1"})],
    ),
    ("llama3", 'As JSON: {"name": "Ann"}', 'As JSON: {"name": "Ann"}', "", []),
    ("pythonic", "See [look] and [1], [x](y).", "See [look] and [1], [x](y).", "", []),
    ("json_tools", "Write <function=NAME> here.", "Write <function=NAME> here.", "", []),
    # ---- thinking
    (
        "json_tools",
        "<think>I could call <tool_call>x</tool_call> but no.</think>\n\nAnswer.",
        "Answer.",
        "I could call <tool_call>x</tool_call> but no.",
        [],
    ),
    (
        "kimi_k2",
        "<think>Two calls<|tool_calls_section_begin|><|tool_call_begin|>functions.a:0"
        '<|tool_call_argument_begin|>{"q": "1"}<|tool_call_end|><|tool_call_begin|>functions.b:1'
        '<|tool_call_argument_begin|>{"q": "2"}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        "Two calls",
        CALLS_A_B,
    ),
    ("json_tools", "not opened</think>Answer", "not opened</think>Answer", "", []),
    ("json_tools", "</think>\n\nAnswer", "Answer", "", []),
    ("json_tools", "<think>a</think><think>b</think>c", "c", "a\n\nb", []),
    # ---- gpt-oss
    (
        "harmony",
        harmony("analysis", "Asked.") + AGAIN + harmony("final <|constrain|>json", '{"x":1}'),
        '{"x":1}',
        "Asked.",
        [],
    ),
    ("harmony", harmony("final json", '{"x":1}'), '{"x":1}', "", []),
    ("harmony", harmony("summary", "Said."), "Said.", "", []),
    ("harmony", "Said without a header.", "Said without a header.", "", []),
    (
        "harmony",
        harmony("analysis", "one") + AGAIN + harmony("analysis", "two") + AGAIN,
        "",
        "one\n\ntwo",
        [],
    ),
    (
        "harmony",
        " to=functions.look<|channel|>analysis <|constrain|>json" + '<|message|>{"n": 1}',
        "",
        "",
        [("look", {"n": 1})],
    ),
    (
        "harmony",
        harmony("commentary to=assistant<|channel|>analysis", "Hm."),
        "",
        "Hm.",
        [],
    ),
    ("harmony", harmony("commentary to=python <|constrain|>code", "1 + 1"), "1 + 1", "", []),
    # ---- Inkling's and Functionary's messages
    (
        "inkling",
        "<|message_model|><|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Yes."
        '<|end_message|><|message_model|>a<|content_invoke_tool_json|>{"name": "a", "args": {"q": "1"}}'
        '<|end_message|><|message_model|>b<|content_invoke_tool_json|>{"name": "b", "args": {"q": "2"}}',
        "Yes.",
        "Hm.",
        CALLS_A_B,
    ),
    ("functionary_v3_2", 'a\n{"q": "1"}>>>b\n{"q": "2"}', "", "", CALLS_A_B),
    ("functionary_v3_2", "all\nSee >>> a\n>>>c\n{}", "See >>> a\n>>>c\n{}", "", []),
    ("functionary_v3_2", "rest\nis what I need", "rest\nis what I need", "", []),
    # ---- Muse Spark's messages
    (
        "muse_spark",
        "to=self<|message|>Hm.<|eom|><|start|>assistant to=look<|message|><atem:function_calls>\n"
        '<atem:invoke name="look">\n<atem:parameter name="at"> x\n</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls><|eom|><|start|>assistant to=user<|message|>Done.",
        "Done.",
        "Hm.",
        [("look", {"at": " x\n"})],
    ),
    # ---- markers around the text
    ("cohere", "<|START_RESPONSE|>Hi <b><|END_RESPONSE|>", "Hi <b>", "", []),
    ("hunyuan", "<think>\nHm.\n</think>\n<answer>\nHi\n</answer>", "Hi", "Hm.", []),
    # ---- text around a call
    (
        "json_tools",
        f"one <tool_call>{NAMED}</tool_call> two",
        "one  two",
        "",
        CALLED,
    ),
    (
        "json_tools",
        f"```xml\n<tool_call>{NAMED}</tool_call>\n```",
        "```xml\n\n```",
        "",
        CALLED,
    ),
    ("json_tools", f"<tool_call>{NAMED}</tool_call>\n\nDone.\n", "Done.", "", CALLED),
]


def test_answers_of_real_models() -> None:
    for name, text, said, thought, calls in ANSWERS:
        found = parse_in_pieces(text, markup(name))
        assert (found.text, found.reasoning, found.calls) == (said, thought, calls), name


def test_what_was_cut_off_is_shown() -> None:
    for name, text in [
        ("glm47", "<tool_call>wri"),
        ("glm47", "<tool_call>write<arg_key>path</arg_key><arg_value>a.py</arg_value>"),
        (
            "glm45",
            "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n<arg_key>c",
        ),
        ("minicpm5", '<function name="write"><param name="path">a.py</param><param name="c'),
        ("json_tools", '<tool_call>{"name": "write", "argu'),
        ("llama3", '{"name": "write", "parameters": '),
    ]:
        found = parse_in_pieces(text, markup(name))
        assert found.calls == [], name
        assert text.endswith(found.text), name
        assert len(found.text) > 2, name


def test_json_is_repaired_where_it_has_other_words_for_the_same() -> None:
    for written, value in [
        ('{"a": [1, 2, ], }', {"a": [1, 2]}),
        ("""{'q': 'say "x" \\'y\\'\nz'}""", {"q": "say \"x\" 'y'\nz"}),
        ("{'a': ['x' , 'y' ,] , 'b': {'c': None , 'd': False} }", None),
        ('{"x": "True, None, \'y\', ]"}', {"x": "True, None, 'y', ]"}),
        ('{"a": "don\\\'t"}', {"a": "don't"}),
        ('{"a": 1e5, "b": -2.5}', {"a": 1e5, "b": -2.5}),
    ]:
        value = value or {"a": ["x", "y"], "b": {"c": None, "d": False}}
        assert json.loads(repaired_json(written)) == value, written
    for kept in ('{"a": NaN}', '{"a": 1 2}', '{"a": yes}', "{'a': 'b'", '{"a": [1,', "{a: 1}"):
        with pytest.raises(ValueError, match=r"column|NaN"):
            json_value(repaired_json(kept))


def test_numbers_keep_all_their_digits() -> None:
    text = "<tool_call>typed<arg_key>n</arg_key><arg_value>0.12345678901234567890</arg_value></tool_call>"
    [(_, arguments)] = parse(text, markup("glm47"), parsed=str).calls
    assert arguments == '{"n": 0.12345678901234567890}'


THINKS = {
    "mistral": ("[THINK]", "[/THINK]"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "solar_open": ("<|think|>", "<|end|><|begin|>assistant"),
    "tool_calls": ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "gemma4": ("<|channel>thought", "<channel|>"),
}


def test_thinking_in_a_familys_own_markers_is_told_from_text() -> None:
    for name in THINKS:
        begin, end = THINKS[name]
        found = parse_in_pieces(f"{begin}I'm\nthinking{end}Hello!", markup(name, THINKS[name]))
        assert (found.reasoning, found.text) == ("I'm\nthinking", "Hello!"), name


def test_without_tools_a_call_of_any_format_is_text() -> None:
    for case, text in WRITTEN.items():
        if row_of(case) not in TEXT_HEADERS:
            assert parse(text, markup(row_of(case)), AssistantTurn()).text == text, case


# ---- which template asks for which format

TEMPLATES = {
    '<tool_call>\n{"name": <function-name>, ...}\n</tool_call> {{ tool_call.name }}': "json_tools",
    "<tool_call>\\n<function=example>\\n<parameter=x>": "qwen3_coder",
    "{{ '<tool_call>' }}{{ '<function=' }}{{ '<parameter=' }}": "qwen3_coder",
    "<seed:tool_call>\n<function=f>\n<parameter=p>": "seed_oss",
    "<｜tool▁calls▁begin｜> + tool['type'] + '<｜tool▁sep｜>' + '\\n```json'": "deepseek_v3",
    "<｜tool▁calls▁begin｜> + name + '<｜tool▁sep｜>'": "deepseek_v31",
    "<|tool_calls_section_begin|><|tool_call_begin|>": "kimi_k2",
    "[TOOL_CALLS] + name + [CALL_ID] + id + [ARGS]": "mistral_id",
    "[TOOL_CALLS] + name + [ARGS]": "mistral",
    '"parameters": dictionary of argument name and its value': "llama3",
    "<|python_tag|>": "llama3",
    "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]": "bare_pythonic",
    "<function=example_function_name>{...}</function> <|python_tag|>": "functionary",
    "List of tools: <|tool_list_start|>[": "pythonic",
    "<function_calls>\nget_weather(": "olmo3",
    "<|START_ACTION|>[": "cohere",
    "Action:\n```json\n[{ 'tool_name'": "command_r",
    "<|tool_call|>": "granite",
    "'<|tool|>' + tools + '<|/tool|>'": "phi4_mini",
    "function call<|role_sep|>": "gigachat3",
    '[{"name": "tool_call_name", "arguments"': "xlam",
    "<|tool_call:begin|>": "solar_open",
    "<tool_call> <tool_output> <response>": "ernie",
}


def test_a_format_is_recognised_by_its_template() -> None:
    for template in TEMPLATES:
        first = recognise(f"{{{{ tools }}}} {template}")[0]
        assert first.name == TEMPLATES[template], template


def test_a_format_is_recognised_by_tokens_and_by_name_where_the_template_is_silent() -> None:
    [kimi] = recognise("{{ tools }}", {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"})
    assert kimi.name == "kimi_k3"
    [named] = recognise("", named="json_tools")
    assert named.name == "json_tools"
    assert recognise("{{ tools }}", {"<|open|>"}, "of next year") == ()


def test_written_arguments_are_json() -> None:
    for case, text in WRITTEN.items():
        for _, arguments in parse(text, markup(row_of(case)), parsed=str).calls:
            assert json.loads(arguments) == CALLED[0][1]
    assert tool("x")["type"] == "function"

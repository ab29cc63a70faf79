"""A marker means something in its place; elsewhere it is text, so that an answer may speak of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from mlxserve.text.parsing.markup import Markup
from mlxserve.text.parsing.turn import AssistantTurn
from tests.text.parsing.answers import (
    HTML,
    ROWS,
    TEXT_HEADERS,
    TURN,
    ParsedAnswer,
    markup,
    parse,
    parse_in_pieces,
)
from tests.text.parsing.test_formats import CALLED, THINKS, WRITTEN, harmony, row_of

SHAPES = (
    "The tag is {0}; after it there is more.",
    "Use `{0}` to open it, and `{0}` again.",
    "```python\nSTART = '{0}'\nprint(START)\n```\nThat is all.",
    "A list:\n- {0}\n- none\n",
    "Text.\n\n{0}\n\nMore text.",
    "It ends with `{0}`",
)
K3 = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
THINKING = {**THINKS, "kimi_k3": K3}
ANY = [name for name in ROWS if name not in TEXT_HEADERS]


def family(name: str) -> Markup:
    return markup(name, THINKING.get(name, HTML))


def markers_of(name: str) -> list[str]:
    """Of a format's thinking, calls, texts and headers."""
    row, found = ROWS[name], family(name)
    channels = row.channels
    headers = (*channels.opens, *channels.messages, *channels.ends) if channels else ()
    pieces = re.split(r"\$\w+", f"{row.call}$_{row.parameter}")
    around = (*row.starts, *row.ends, *row.text_starts, *row.text_ends, *(found.thinking or ()))
    return sorted({one for one in (*around, *headers, *pieces) if one.strip()})


def leads_of(name: str) -> list[tuple[str, bool, str]]:
    """What precedes a text: (the answer so far, whether the prompt opened thinking, the thoughts)."""
    if name in TEXT_HEADERS:
        return [(TEXT_HEADERS[name], False, "")]
    begin, end = THINKING.get(name, HTML)
    return [
        ("", False, ""),
        (f"\n{begin}\nHm.\n{end}\n\n", False, "Hm."),
        (f"Hm.{end}", True, "Hm."),
    ]


def sized(text: str, size: int) -> Sequence[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("name", ROWS)
def test_an_answer_that_speaks_of_a_marker_is_unchanged(name: str) -> None:
    for marker in markers_of(name):
        for shape in SHAPES:
            text = shape.format(marker)
            for lead, is_thinking, thought in leads_of(name):
                for turn, size in ((TURN, 1_000), (TURN, 1), (TURN, 3), (AssistantTurn(), 2)):
                    pieces = sized(lead + text, size)
                    found = parse("", family(name), turn, pieces=pieces, is_thinking=is_thinking)
                    expected = ParsedAnswer(text, thought, [], 0)
                    assert found == expected, (marker, text, lead, size)


@pytest.mark.parametrize("name", ROWS)
def test_an_answer_that_speaks_of_a_marker_may_end_anywhere(name: str) -> None:
    """Only what ends a text or a message is not text where it is the last of an answer."""
    row = ROWS[name]
    ends = (*row.text_ends, *(row.channels.ends if row.channels else ()))
    lead, is_thinking, thought = leads_of(name)[-1]
    for marker in markers_of(name):
        text = f"It writes {marker} first."
        for cut in range(1, len(text)):
            found = parse(lead + text[:cut], family(name), is_thinking=is_thinking)
            expected = text[:cut].rstrip() if thought or row.channels else text[:cut]
            end = next((end for end in ends if expected.endswith(end)), "")
            expected = expected.removesuffix(end)
            assert found.text.rstrip() == expected.rstrip(), (marker, text[:cut])
            assert (found.reasoning, found.calls) == (thought, [])


@pytest.mark.parametrize("name", ANY)
def test_thinking_opens_where_an_answer_begins_and_after_a_call(name: str) -> None:
    begin, end = THINKING.get(name, HTML)
    call = next(text for case, text in WRITTEN.items() if row_of(case) == name)
    for blanks in ("", "\n", " \n\n"):
        found = parse_in_pieces(f"{blanks}{begin}Hm.{end}{blanks}Yes.", family(name))
        assert (found.text, found.reasoning) == ("Yes.", "Hm."), blanks
        text = f"Yes. {call}{blanks}{begin}Hm.{end}\n\nThe tag is {begin} here."
        found = parse_in_pieces(text, family(name))
        assert (found.reasoning, found.calls) == ("Hm.", CALLED), blanks
        assert found.text == f"Yes.\n\nThe tag is {begin} here."
        text = f"Yes.{blanks}{begin}Hm.{end} So."
        found = parse_in_pieces(text, family(name))
        assert (found.text, found.reasoning) == (text, "")


CALL = '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>'
OTHER = CALL.replace("look", "find")
LOOK: list[tuple[str, Any]] = [("look", {"n": 1})]
AGAIN = "<|start|>assistant"
# (format, answer, content, reasoning, calls)
ANSWERS: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    # ---- thinking
    (
        "json_tools",
        "<think>R</think>It said: <think>is literal</think>",
        "It said: <think>is literal</think>",
        "R",
        [],
    ),
    ("json_tools", "<think>a</think>\n<think>b</think>c", "c", "a\n\nb", []),
    ("json_tools", "</think>\n\nYes </think>.", "Yes </think>.", "", []),
    (
        "json_tools",
        "<think>I could write <tool_call> here",
        "",
        "I could write <tool_call> here",
        [],
    ),
    ("json_tools", f"<think>Not <tool_call> but {CALL}", "", "Not <tool_call> but", LOOK),
    ("json_tools", f"<think>I look. {CALL}\n\nDone.", "Done.", "I look.", LOOK),
    # ---- a call in thinking that nothing follows was meant
    ("json_tools", f"<think>I look.\n{CALL}\n</think>\n", "", "I look.", LOOK),
    ("json_tools", f"<think>I look. {CALL} Then I wait.</think>", "", "I look. Then I wait.", LOOK),
    ("json_tools", f"<think>{CALL}{OTHER}</think>\n\n", "", "", [*LOOK, ("find", {"n": 1})]),
    ("json_tools", f"<think>{CALL} or {OTHER}</think>", "", f"{CALL} or {OTHER}", []),
    ("json_tools", f"<think>{CALL}</think>\n\nNo.", "No.", CALL, []),
    ("json_tools", f"<think>Or {CALL}</think>\n{OTHER}", "", f"Or {CALL}", [("find", {"n": 1})]),
    ("json_tools", "<think>Hm <tool_call> hm</think>\n", "", "Hm <tool_call> hm", []),
    # ---- calls
    (
        "json_tools",
        f"It writes <tool_call> first.\n{CALL}",
        "It writes <tool_call> first.",
        "",
        LOOK,
    ),
    ("json_tools", f"{CALL}\n</tool_call>\n", "", "", LOOK),
    ("json_tools", f"{CALL}</tool_call> and </tool_call>", "and </tool_call>", "", LOOK),
    ("json_tools", f"Like `{OTHER}`.", f"Like `{OTHER}`.", "", []),
    ("json_tools", f"I run `ls` {OTHER}", "I run `ls`", "", [("find", {"n": 1})]),
    ("json_tools", f"```\nx\n```\n{CALL}", "```\nx\n```", "", LOOK),
    (
        "xlam",
        "[TOOL_CALLS] is a marker, [ is none.",
        "[TOOL_CALLS] is a marker, [ is none.",
        "",
        [],
    ),
    # ---- markers around a text
    (
        "hunyuan",
        "<answer>\nUse </answer> at the end.\n</answer>\n",
        "Use </answer> at the end.",
        "",
        [],
    ),
    (
        "cohere",
        "<|START_RESPONSE|>Hi <|END_RESPONSE|> you<|END_RESPONSE|>",
        "Hi <|END_RESPONSE|> you",
        "",
        [],
    ),
    # ---- a marker that can only open another part ends the open one
    ("harmony", harmony("analysis", "Hm.") + AGAIN + harmony("final", "Yes."), "Yes.", "Hm.", []),
    ("harmony", harmony("analysis", "Hm.") + harmony("final", "Yes."), "Yes.", "Hm.", []),
    (
        "harmony",
        harmony("final", "One.") + AGAIN + harmony("final", "Two."),
        "One.\n\nTwo.",
        "",
        [],
    ),
    (
        "harmony",
        harmony("analysis", "Hm.")
        + AGAIN
        + harmony("commentary to=functions.look json", '{"n": 1}'),
        "",
        "Hm.",
        LOOK,
    ),
    ("harmony", harmony("analysis", "Hm.<|end|>Yes."), "Yes.", "Hm.", []),
    (
        "harmony",
        harmony("analysis", "It is `<|start|>`, then."),
        "",
        "It is `<|start|>`, then.",
        [],
    ),
    ("harmony", "<|channel|>final\nHello", "<|channel|>final\nHello", "", []),
    ("harmony", "assistants are of use here, too.", "assistants are of use here, too.", "", []),
    (
        "kimi_k3",
        f"{K3[0]}Hm.<|open|>response<|sep|>Yes.<|close|>response<|sep|>",
        "Yes.",
        "Hm.",
        [],
    ),
    ("gemma4", "<|channel>Hm.<channel|>Yes.", "Yes.", "Hm.", []),
    ("gemma4", "A <|channel>x<channel|>.", "A <|channel>x<channel|>.", "", []),
]


def test_each_marker_means_something_in_its_place() -> None:
    for name, text, said, thought, calls in ANSWERS:
        found = parse_in_pieces(text, family(name))
        assert (found.text, found.reasoning, found.calls) == (said, thought, calls), text


def test_thinking_that_the_prompt_opened_may_be_opened_again() -> None:
    for text, said, thought in [
        ("<think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm."),
        ("Hm, <think> is a tag.\n</think>\n\nYes.", "Yes.", "Hm, <think> is a tag."),
        ("Hm.</think></think>\n\nYes.", "Yes.", "Hm."),
    ]:
        found = parse(text, is_thinking=True)
        assert (found.text, found.reasoning) == (said, thought)
    opened = parse("Hm.<|open|>response<|sep|>Yes.", family("kimi_k3"), is_thinking=True)
    assert (opened.text, opened.reasoning) == ("Yes.", "Hm.")

"""The format of a model's calls is the one that reads what its chat template writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from mlxserve.text.call_probes import CallTexts, call_texts, reads
from mlxserve.text.format_choice import choose_among, recognise
from mlxserve.text.learnt_formats import learnt_formats
from mlxserve.text.parsing.formats import FORMATS, CallFormat, Syntax
from mlxserve.text.parsing.writing import write_calls
from mlxserve.text.probes import Probe
from mlxserve.text.response_template import format_in
from mlxserve.text.template_caps import Arguments, TemplateCaps, find_abilities
from mlxserve.text.tokenizer import Tokenizer
from tests.text.calling_templates import AS_TEXTS, CALLING, FUNCTIONARY, UNREADABLE
from tests.text.learnt_rows import LEARNT
from tests.text.rendering import renderer, worker

ROWS = {row.name: row for row in (*FORMATS, *LEARNT)}
# Messages with headers, calls without their names, and a marker with blanks in it.
NOT_LEARNT = {"harmony", "muse_spark", "functionary_v3_2", "kimi_k3", "step3"}
_CAPS = TemplateCaps(calls=True)


@cache
def texts_of(template: str) -> CallTexts:
    render_each = renderer(template)
    caps = find_abilities(render_each, worker().variables(template))
    texts = call_texts(render_each, caps)
    assert texts is not None
    return texts


def written_by(row: CallFormat) -> CallTexts:
    """What a template would write that writes calls as a row does."""

    def rendered(probe: Probe) -> str:
        pieces = []
        for message in probe.messages:
            calls = message.get("tool_calls") or ()
            written = [(c["function"]["name"], c["function"]["arguments"], c["id"]) for c in calls]
            text = write_calls(row, written) if written else message["content"]
            pieces.append(f"<|{message['role']}|>{text}<|end_of_turn|>")
        variables = probe.variables or {"add_generation_prompt": True}
        return "".join(pieces) + ("<|assistant|>" if variables["add_generation_prompt"] else "")

    def render_each(probes: Sequence[Probe]) -> list[str | None]:
        return [rendered(probe) for probe in probes]

    texts = call_texts(render_each, _CAPS)
    assert texts is not None
    return texts


def is_read(row: CallFormat | None, texts: CallTexts) -> bool:
    """True if a row reads every call of a template, and leaves no text."""
    both = [texts.one, *([texts.two] if texts.two else []), *texts.hard]
    return row is not None and all(reads(row, text) for text in both)


@pytest.mark.parametrize("name", CALLING)
def test_a_format_that_nobody_has_seen_is_learnt(name: str) -> None:
    choice = choose_among([], texts_of(CALLING[name]))
    assert choice.reads_back
    assert is_read(choice.row, texts_of(CALLING[name])), choice.row


@pytest.mark.parametrize("name", AS_TEXTS)
def test_a_format_is_learnt_from_a_template_that_writes_numbers_as_texts(name: str) -> None:
    texts = texts_of(AS_TEXTS[name])
    row, reads_back = choose_among([], texts)
    assert reads_back
    assert row is not None
    assert not reads(row, texts.one)
    assert reads(row, texts.one.as_texts())


def test_a_row_that_reads_numbers_as_numbers_comes_first() -> None:
    texts = texts_of(CALLING["elements in a section"])
    untyped = replace(ROWS["minimax_m2"], starts=("<asks>",), ends=("</asks>",))
    assert not reads(untyped, texts.one)
    assert choose_among([untyped], texts)[0] == choose_among([], texts)[0]


@pytest.mark.parametrize("name", sorted(ROWS.keys() - NOT_LEARNT))
def test_each_row_is_learnt_from_what_it_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxserve.text.format_choice.FORMATS", ())
    texts = written_by(ROWS[name])
    choice = choose_among([], texts)
    assert choice.reads_back
    assert choice.row is not None
    assert choice.row.name == "learnt"
    if ROWS[name] in LEARNT:
        assert choice.row == replace(ROWS[name], name="learnt")
    assert sum(reads(choice.row, text) for text in texts.hard) >= len(texts.hard) - 1


@pytest.mark.parametrize("name", CALLING)
def test_a_learnt_row_writes_what_the_template_writes(name: str) -> None:
    texts = texts_of(CALLING[name])
    row = choose_among([], texts).row
    assert row is not None
    # The template writes values in Python's syntax as JSON.
    hard = () if row.syntax is Syntax.PYTHON else texts.hard
    for text in (texts.one, texts.two, *hard):
        assert text is not None
        calls = [(tool, arguments, None) for tool, arguments in text.calls]
        assert _without_blanks(write_calls(row, calls)) == _without_blanks(text.text)


@pytest.mark.parametrize("is_cdata", [True, False])
def test_sections_of_literal_text_in_values_are_learnt_where_a_template_writes_them(
    *, is_cdata: bool
) -> None:
    row = replace(ROWS["minicpm5"], is_cdata=is_cdata)
    texts = written_by(row)
    assert any("<![CDATA[" in each.text for each in texts.hard) == is_cdata
    learnt = next(learnt_formats(texts))
    assert learnt.is_cdata == is_cdata
    assert reads(learnt, texts.hard[0])


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def test_the_row_is_chosen_by_what_it_reads_and_not_by_words() -> None:
    template = CALLING["an object between markers"]
    by_words = recognise(f"{template}<|tool_call|><tool_calls><|python_tag|>")
    assert [row.name for row in by_words] == ["granite", "llama3"]
    choice = choose_among(by_words, texts_of(template))
    assert choice.row is not None
    assert choice.row.starts == ("<ask>",)
    hermes = template.replace("ask>", "tool_call>")
    assert choose_among(recognise(hermes), texts_of(hermes)) == (ROWS["json_tools"], True)


def test_messages_for_tools_are_read_from_what_the_template_writes() -> None:
    choice = choose_among(recognise(FUNCTIONARY), texts_of(FUNCTIONARY))
    assert choice == (ROWS["functionary_v3_2"], True)


def test_a_template_that_no_row_reads_keeps_the_likeliest_and_says_so() -> None:
    texts = texts_of(UNREADABLE)
    assert choose_among([ROWS["granite"]], texts) == (ROWS["granite"], False)
    assert choose_among([], texts) == (None, False)
    assert choose_among([ROWS["granite"]], None) == (ROWS["granite"], None)


def test_a_tokenizer_learns_its_format_from_its_template(
    tokenizer_with: Callable[[list[str], str], Tokenizer],
) -> None:
    tokenizer = tokenizer_with([], CALLING["elements in a section"])
    assert tokenizer.template.call_format.reads_back
    row = tokenizer.markup.format
    assert row is not None
    assert (row.name, row.start, row.end) == ("learnt", "<asks>", "</asks>")
    assert tokenizer.template.caps.arguments is Arguments.OBJECT


def test_a_format_that_is_not_read_back_is_logged(
    tokenizer_with: Callable[[list[str], str], Tokenizer], caplog: pytest.LogCaptureFixture
) -> None:
    assert not tokenizer_with([], UNREADABLE).markup.can_call
    assert "No known format of tool calls reads" in caplog.text


def response_template(content: str, **field: Any) -> dict[str, Any]:
    calls = {"open": "<ask>", "close": "</ask>", "content": content, "repeats": True, **field}
    return {"start_anchor": "<|assistant|>", "fields": {"content": {}, "tool_calls": calls}}


def test_the_response_template_of_a_tokenizer_is_a_row() -> None:
    own = format_in(response_template("json"))
    assert own is not None
    assert choose_among([own], texts_of(CALLING["an object between markers"])) == (own, True)
    listed = {"open": "<|asks|>", "close": "<|/asks|>"}
    python = format_in(response_template("python-call-list", **listed))
    assert python is not None
    assert choose_among([python], texts_of(CALLING["calls in Python's syntax"])) == (python, True)
    transform = {"function": {"name": "{name}", "arguments": "{parameters}"}}
    each = format_in(response_template("json", **listed, transform_each=True, transform=transform))
    assert each is not None
    assert choose_among([each], texts_of(CALLING["a list of objects"])) == (each, True)
    call = write_calls(each, [("look", {"n": 1}, None)])
    assert json.loads(call[len("<|asks|>") : -len("<|/asks|>")]) == [
        {"name": "look", "parameters": {"n": 1}}
    ]


def test_a_response_template_that_no_row_can_express_is_left_out() -> None:
    for spec in (
        None,
        {},
        {"fields": {}},
        {"fields": {"tool_calls": []}},
        response_template("xml-inline"),
        {"fields": {"tool_calls": {"open_pattern": "<(?P<name>.*)>", "content": "json"}}},
    ):
        assert format_in(spec) is None, spec


def test_the_response_template_of_a_folder_is_read(
    tokenizer_with: Callable[[list[str], str], Tokenizer], tmp_path: Any
) -> None:
    tokenizer_with([], CALLING["an object between markers"])
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**config, "response_template": response_template("json")}), "utf-8")
    row = Tokenizer(tmp_path).markup.format
    assert row is not None
    assert row.name == "response_template"

"""The efforts that a template accepts, and the mapping of the others."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlxserve.hub.embedded import model_path
from mlxserve.text.controls import EFFORT, LADDER, SWITCH, Controls, find_controls, has_controls
from mlxserve.text.probes import Probe
from mlxserve.text.template_caps import TemplateCaps
from mlxserve.text.tokenizer import Tokenizer
from tests.text.effort_rules import EFFORT_RULES, SHOWN
from tests.text.rendering import renderer, worker

MESSAGES = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
USER = [{"role": "user", "content": "hi"}]


def template(rule: str) -> str:
    return EFFORT_RULES[rule] + MESSAGES


@cache
def controls(rule: str) -> Controls:
    return find_controls(renderer(template(rule)), worker().variables(template(rule)))


def prompt(rule: str, variables: dict[str, Any]) -> str:
    attempt = next(controls(rule).attempts(variables))
    [text] = renderer(template(rule))([Probe(USER, None, attempt.variables)])
    assert text is not None, (rule, variables, attempt)
    return text


def requested(word: str) -> dict[str, Any]:
    """The variables that the APIs translate an effort to."""
    if word == "on":
        return {SWITCH: True}
    return {SWITCH: word not in ("none", "minimal"), **({} if word == "none" else {EFFORT: word})}


@pytest.mark.parametrize("rule", SHOWN)
@pytest.mark.parametrize("word", [*LADDER, "on"])
def test_the_prompt_holds_the_nearest_effort(rule: str, word: str) -> None:
    text = prompt(rule, requested(word))
    assert text.count("[effort") == bool(SHOWN[rule][word])
    assert SHOWN[rule][word] in text
    assert text.endswith("<hi>")


def test_the_efforts_that_a_template_knows_are_found() -> None:
    known = {
        "qwen 3.8": (EFFORT, ("low", "medium", "xhigh"), "xhigh"),
        "hy 3": (EFFORT, ("no_think", "low", "high"), "no_think"),
        "hy 4": (EFFORT, ("no_think", "high"), "high"),
        "gpt-oss": (EFFORT, ("low", "medium", "high"), "medium"),
        "muse": ("reasoning_strength", ("low", "medium", "high"), "high"),
        "kimi k3": ("thinking_effort", ("low", "high", "max"), "max"),
        "glm 5.3": (EFFORT, ("low", "high", "max"), "max"),
        "deepseek v4": (EFFORT, ("max",), None),
        "deepseek v4 flash": (EFFORT, ("high", "max"), None),
        "solar": (EFFORT, ("minimal", "low", "high"), "high"),
        "mistral small 4": (EFFORT, ("none", "high"), "none"),
        "always thinks": (EFFORT, ("high", "max"), "max"),
        "refuses it beside a tool": (EFFORT, ("low", "high"), "high"),
    }
    for rule, expected in known.items():
        [efforts] = controls(rule).efforts
        assert (efforts.variable, efforts.values, efforts.default) == expected, rule
    assert controls("ignores it").efforts == ()


def test_the_variables_that_turn_thinking_off_and_on_are_found() -> None:
    switched = ({SWITCH: False}, {SWITCH: True})
    expected = {
        "qwen 3.8": switched,
        "deepseek v4": switched,
        "ignores it": switched,
        "hy 3": ({EFFORT: "no_think"}, {EFFORT: "high"}),
        "hy 4": ({EFFORT: "no_think"}, {EFFORT: "high"}),
        "mistral small 4": ({EFFORT: "none"}, {EFFORT: "high"}),
        "gpt-oss": ({}, {}),
        "always thinks": ({}, {}),
    }
    for rule, (off, on) in expected.items():
        assert (controls(rule).off, controls(rule).on) == (off, on), rule
        assert controls(rule).always_thinks == (rule == "always thinks")


def test_the_mapping_is_monotonic_and_keeps_what_the_template_knows() -> None:
    for rule in SHOWN:
        for efforts in controls(rule).efforts:
            for word in {*LADDER} & {*efforts.values}:
                assert efforts.mapping[word] == word
            mapped = [efforts.mapping[word] for word in LADDER]
            places = [efforts.values.index(each) for each in mapped if each is not None]
            assert places == sorted(places), rule


@pytest.mark.parametrize(
    ("rule", "variables", "changes"),
    [
        ("qwen 3.8", {SWITCH: True, EFFORT: "high"}, ("effort high is xhigh",)),
        ("qwen 3.8", {SWITCH: True, EFFORT: "low"}, ()),
        ("qwen 3.8", {SWITCH: False, EFFORT: "high"}, ()),  # which has no effect
        ("qwen 3.8", {SWITCH: False}, ()),
        ("hy 3", {SWITCH: False, EFFORT: "high"}, ()),
        ("hy 3", {SWITCH: True}, ()),
        ("hy 3", {SWITCH: True, EFFORT: "medium"}, ("effort medium is low",)),
        ("gpt-oss", {SWITCH: False}, ("effort none is low",)),
        ("gpt-oss", {}, ()),
        ("deepseek v4", {SWITCH: True, EFFORT: "high"}, ("effort high is the template's default",)),
        ("ignores it", {SWITCH: True, EFFORT: "max"}, ()),
        ("always thinks", {SWITCH: False}, ("thinking stays on", "effort none is high")),
    ],
)
def test_changes_are_reported(
    rule: str, variables: dict[str, Any], changes: tuple[str, ...]
) -> None:
    assert next(controls(rule).attempts(variables)).changes == changes


def test_values_that_are_not_on_the_ladder_are_not_mapped() -> None:
    text = "{{ '[loud]' if reasoning_effort == 'loud' }}{{ reasoning_effort or '-' }}"
    loud = find_controls(renderer(text), worker().variables(text))
    assert loud.efforts[0].values[-1] == "loud"
    for value in ("loud", "no_think", "Extreme", 7, True):
        [first, *_] = loud.attempts({EFFORT: value})
        assert (first.variables, first.changes) == ({EFFORT: value}, ())


def test_a_variable_of_another_name_is_mapped_and_the_request_s_effort_wins() -> None:
    assert "[effort high]" in prompt("kimi k3", {"thinking_effort": "high"})
    assert "[effort low]" in prompt("kimi k3", {"thinking_effort": "medium"})
    assert "[effort low]" in prompt("kimi k3", {"thinking_effort": "max", EFFORT: "low"})
    assert "[effort no_think]" in prompt("hy 3", {EFFORT: None})


def test_the_effort_none_turns_thinking_off_without_a_switch_beside_it() -> None:
    assert "[effort" not in prompt("qwen 3.8", {EFFORT: "none"})
    assert "[effort no_think]" in prompt("hy 4", {EFFORT: "none"})
    assert "[effort low]" in prompt("gpt-oss", {EFFORT: "none"})


def test_literals_are_those_that_a_variable_is_compared_with() -> None:
    literals = worker().variables(
        "{% set a = reasoning_effort | default('low') %}{% set b = a or 'max' %}"
        "{% set line = 'Effort: ' ~ a %}{% if line == 'minimal' or other == 'xhigh' %}none{% endif %}"
        "{{ 'high' if b != 'medium' else 'No word' }}{{ messages[0].role == 'user' }}"
    )
    assert set(literals[EFFORT]) == {"low", "max", "high", "medium"}
    assert literals["other"] == ["xhigh"]


def test_the_second_attempt_has_no_effort() -> None:
    first, second = controls("refuses it in a long conversation").attempts({EFFORT: "high", "x": 1})
    assert first.variables == {EFFORT: "high", "x": 1}
    assert second.variables == {"x": 1}
    assert second.changes == ("effort high is left out, which the template refuses",)
    assert [each.variables for each in Controls().attempts({SWITCH: True})] == [{SWITCH: True}]
    assert len(list(Controls().attempts({EFFORT: "high"}))) == 2


def test_a_template_that_renders_nothing_has_no_controls() -> None:
    silent = find_controls(lambda probes: [None] * len(probes), {EFFORT: ()})
    assert (silent.off, silent.on, silent.efforts) == ({}, {}, ())
    assert not silent.always_thinks


def test_effort_variables_are_recognised_by_name() -> None:
    for name in (SWITCH, EFFORT, "thinking_effort", "effort", "reasoning_strength", "effort_level"):
        assert has_controls({name: 1}), name
    for name in ("effort_note", "preserve_thinking", "level", "strength"):
        assert not has_controls({name: 1}), name


# ---- with a tokenizer


def tokenizer_of(folder: Path, **settings: Any) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(model_path() / name, folder / name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **settings}))
    return Tokenizer(folder)


def test_the_controls_of_a_template_are_among_its_abilities(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, chat_template=template("qwen 3.8"))
    assert tokenizer.template.caps.controls == controls("qwen 3.8")
    card = json.loads(json.dumps(tokenizer.template.caps.card()))
    assert card["controls"]["off"] == {SWITCH: False}
    [efforts] = card["controls"]["efforts"]
    assert efforts["values"] == ["low", "medium", "xhigh"]
    assert efforts["mapping"]["high"] == "xhigh"
    assert TemplateCaps().card()["controls"]["efforts"] == ()


def test_an_effort_that_is_refused_in_a_conversation_is_left_out_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_of(tmp_path, chat_template=template("refuses it in a long conversation"))
    changes: list[str] = []
    for messages in (USER, USER * 3, USER * 3):
        ids = tokenizer.render(messages, on_change=changes.append, reasoning_effort="high")
        expected = "[effort high]" if len(messages) < 3 else "[effort medium]"
        assert tokenizer.decode(ids) == expected + "<hi>" * len(messages)
    change = "effort high is left out, which the template refuses"
    assert changes == [change] * 2
    assert [change in record.message for record in caplog.records] == [True]


def test_a_python_template_without_efforts_gets_none(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, chat_template_type="deepseek_v32")
    plain = tokenizer.render(USER, enable_thinking=True)
    changes: list[str] = []
    for word in LADDER[1:]:
        ids = tokenizer.render(
            USER, on_change=changes.append, enable_thinking=True, reasoning_effort=word
        )
        assert ids == plain
    assert changes == [f"effort {word} is left out" for word in LADDER[1:]]
    assert tokenizer.template.caps.variables == frozenset()

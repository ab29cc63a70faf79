"""The efforts that a template accepts, and the mapping of the others."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlxserve.hub.embedded import model_path
from mlxserve.text.control_probing import find_controls
from mlxserve.text.controls import BUDGET, EFFORT, LADDER, SWITCH, Controls, has_controls, with_word
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
    messages = [
        dict(message) for message in (with_word(USER, attempt.word) if attempt.word else USER)
    ]
    [text] = renderer(template(rule))([Probe(messages, None, attempt.variables)])
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
        "kimi k3": ({"thinking": False}, {"thinking": True}),
        "granite 3.3": ({"thinking": False}, {"thinking": True}),
        "minimax m3": ({"thinking_mode": "disabled"}, {"thinking_mode": "adaptive"}),
        "a switch with two words": ({"thinking_option": "off"}, {}),
        "a negative switch": ({"disable_thinking": True}, {"disable_thinking": False}),
        "seed oss": ({BUDGET: 0}, {}),
        "nemotron nano 2": ({}, {}),
        "cohere 2": ({"reasoning": False}, {"reasoning": True}),
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


def test_values_that_are_not_on_the_ladder_are_sent_if_the_template_knows_them() -> None:
    text = "{{ '[loud]' if reasoning_effort == 'loud' }}{{ reasoning_effort or '-' }}"
    loud = find_controls(renderer(text), worker().variables(text))
    assert loud.efforts[0].values[-1] == "loud"
    for value in ("loud", 7, True):
        [first, *_] = loud.attempts({EFFORT: value})
        assert (first.variables, first.changes) == ({EFFORT: value}, ())
    [first, *_] = loud.attempts({EFFORT: "extreme"})
    assert (first.variables, first.changes) == ({}, ("effort extreme is the template's default",))
    [first, *_] = loud.attempts({EFFORT: "no_think"})
    assert first.variables == {SWITCH: False, EFFORT: "low"}
    [first, *_] = Controls().attempts({EFFORT: "extreme"})
    assert (first.variables, first.changes) == ({}, ("effort extreme is left out",))


def test_a_variable_of_another_name_is_mapped_and_the_request_s_effort_wins() -> None:
    assert "[effort high]" in prompt("kimi k3", {"thinking_effort": "high"})
    assert "[effort low]" in prompt("kimi k3", {"thinking_effort": "medium"})
    assert "[effort low]" in prompt("kimi k3", {"thinking_effort": "max", EFFORT: "low"})
    assert "[effort no_think]" in prompt("hy 3", {EFFORT: None})


def test_the_effort_none_turns_thinking_off_without_a_switch_beside_it() -> None:
    assert "[effort" not in prompt("qwen 3.8", {EFFORT: "none"})
    assert "[effort no_think]" in prompt("hy 4", {EFFORT: "none"})
    assert "[effort low]" in prompt("gpt-oss", {EFFORT: "none"})


@pytest.mark.parametrize("rule", EFFORT_RULES)
def test_every_variable_of_any_value_is_rendered(rule: str) -> None:
    """A request is rendered with whatever it asks for: some attempt is accepted."""
    names = {SWITCH, EFFORT, BUDGET, *worker().variables(template(rule))}
    values = (None, True, False, 0, 77, 0.5, -1, "", "huge", "off", *LADDER, ["high"], {"a": "b"})
    requests = [{name: value} for name in sorted(names - {"messages", "tools"}) for value in values]
    requests += [{SWITCH: s, EFFORT: e} for s in (True, False) for e in ("huge", "none", "max")]
    for requested in requests:
        attempts = list(controls(rule).attempts(requested))
        rendered = renderer(template(rule))([Probe(USER, None, a.variables) for a in attempts])
        assert any(rendered), requested


def test_the_summary_of_the_controls_is_in_the_words_of_the_apis() -> None:
    keys = ("can_be_off", "efforts", "default_effort", "budget")
    for rule, values in {
        "qwen 3.8": (True, ["low", "medium", "xhigh"], "xhigh", False),
        "hy 3": (True, ["low", "high"], None, False),
        "gpt-oss": (False, ["low", "medium", "high"], "medium", False),
        "granite 3.3": (True, [], None, False),
        "nemotron nano 2": (True, [], None, False),
        "seed oss": (True, [], None, True),
    }.items():
        assert controls(rule).summary() == dict(zip(keys, values, strict=True)), rule
    assert Controls().summary() == {}


def test_literals_are_those_that_a_variable_is_compared_with() -> None:
    literals = worker().variables(
        "{% set a = reasoning_effort | default('low') %}{% set b = a or 'max' %}"
        "{% set line = 'Effort: ' ~ a %}{% if line == 'minimal' or other == 'xhigh' %}none{% endif %}"
        "{{ 'high' if b != 'medium' else 'No word' }}{{ messages[0].role == 'user' }}"
    )
    assert set(literals[EFFORT]) == {"low", "max", "high", "medium"}
    assert literals["other"] == ["xhigh"]


def test_later_attempts_have_no_effort_and_then_no_variables() -> None:
    requested = {EFFORT: "high", "x": 1, "continue_final_message": True}
    first, second, third = controls("refuses it in a long conversation").attempts(requested)
    assert first.variables == requested
    assert second.variables == {"x": 1, "continue_final_message": True}
    assert second.changes == ("effort high is left out, which the template refuses",)
    assert third.variables == {"continue_final_message": True}
    assert third.changes == ("reasoning_effort, x: left out, which the template refuses",)
    assert [each.variables for each in Controls().attempts({SWITCH: True})] == [{SWITCH: True}, {}]
    assert [each.variables for each in Controls().attempts({})] == [{}]
    assert len(list(Controls().attempts({EFFORT: "high"}))) == 2


def test_a_mode_is_recognised_by_the_marker_that_the_prompt_ends_with() -> None:
    text = MESSAGES + "<think>{% if reasoning_mode != 'deep' %}</think>{% endif %}"
    found = find_controls(renderer(text), worker().variables(text))
    assert (found.off, found.on) == ({"reasoning_mode": False}, {"reasoning_mode": "deep"})
    text = MESSAGES + "<think>{% if reasoning_mode == 'fast' %}</think>{% endif %}"
    found = find_controls(renderer(text), worker().variables(text))
    assert (found.off, found.on) == ({"reasoning_mode": "fast"}, {})


def test_variables_for_earlier_answers_are_no_switches() -> None:
    for name in ("preserve_thinking", "clear_thinking", "truncate_history_thinking", "mood"):
        text = f"{{{{ 'a' if {name} else 'b' }}}}" + MESSAGES
        assert find_controls(renderer(text), worker().variables(text)) == Controls()


def test_a_budget_is_set_under_the_templates_name() -> None:
    assert "[effort 77]" in prompt("seed oss", {BUDGET: 77})
    assert "[effort 77]" in prompt("seed oss", {BUDGET: 77, EFFORT: "low"})
    assert "[effort nothing]" in prompt("seed oss", {BUDGET: 77, SWITCH: False})
    text = "{{ max_thinking_tokens or 'free' }}"
    renamed = find_controls(renderer(text), worker().variables(text))
    assert (renamed.budget, renamed.off) == ("max_thinking_tokens", {})
    [first, *_] = renamed.attempts({BUDGET: 77})
    assert first.variables == {"max_thinking_tokens": 77}
    [first, *_] = renamed.attempts({EFFORT: "low"})
    assert first.changes == ("effort low is a budget of 1024 tokens",)
    [first, *_] = Controls().attempts({BUDGET: 77})
    assert (first.variables, first.changes) == ({}, ())


def test_the_word_that_turns_thinking_off_ends_the_system_message() -> None:
    assert controls("nemotron nano 2").off_word == "/no_think"
    assert with_word(USER, "/no_think") == [{"role": "system", "content": "/no_think"}, *USER]
    for content, expected in [
        ("Be kind.", "Be kind. /no_think"),
        ("", "/no_think"),
        (None, "/no_think"),
        (
            [{"type": "text", "text": "Be kind."}],
            [{"type": "text", "text": "Be kind."}, {"type": "text", "text": " /no_think"}],
        ),
    ]:
        said = with_word([{"role": "system", "content": content}, *USER], "/no_think")
        assert said == [{"role": "system", "content": expected}, *USER]


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

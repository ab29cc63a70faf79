"""All efforts on all APIs, with the rules of public templates: no request is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import cycle
from typing import Any

import pytest

from mlxserve.text.controls import LADDER
from tests.api.agent_requests import CHAT, CLAUDE, MESSAGES, RESPONSES
from tests.api.families import Family
from tests.text.effort_rules import EFFORT_RULES, SHOWN

HELLO = [{"role": "user", "content": "Hi"}]
OLLAMA, GENERATE = "/api/chat", "/api/generate"
REASONING_MODEL = "{# <think> #}"  # Ollama's routes refuse `think` for other models
ON = {"chat_template_kwargs": {"enable_thinking": True}}


def _chat(level: str) -> dict[str, Any]:
    return {"messages": HELLO, **(ON if level == "on" else {"reasoning_effort": level})}


def _responses(level: str) -> dict[str, Any]:
    return {"input": "Hi", **(ON if level == "on" else {"reasoning": {"effort": level}})}


def _messages(level: str) -> dict[str, Any]:
    effort = {} if level == "on" else {"output_config": {"effort": level}}
    return {"messages": HELLO, "max_tokens": 9, "thinking": {"type": "adaptive"}, **effort}


def _think(level: str) -> dict[str, Any]:
    return {"think": True if level == "on" else level, "model": "local", "stream": False}


BODIES: Mapping[str, Callable[[str], dict[str, Any]]] = {
    CHAT: _chat,
    RESPONSES: _responses,
    MESSAGES: _messages,
    OLLAMA: lambda level: {"messages": HELLO, **_think(level)},
    GENERATE: lambda level: {"prompt": "Hi", **_think(level)},
}


def _each_once(rules: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of (rule, path) with each rule and each path: an API reads a body before any rule is asked.

    All paths are with the first rule, the others take turns.
    """
    first, *others = rules
    return [(first, path) for path in BODIES] + list(zip(others, cycle(BODIES)))


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Family]]:
    made: list[Family] = []

    @cache
    def family(rule: str, **variables: str) -> Family:
        before = EFFORT_RULES[rule] + REASONING_MODEL
        folder = tmp_path_factory.mktemp("effort")
        made.append(Family(folder, lambda template: before + template, **variables))
        return made[-1]

    yield family
    for each in made:
        each.chat.close()


@pytest.mark.parametrize(("rule", "path"), _each_once(SHOWN))
def test_each_effort_is_mapped_to_the_nearest_that_the_template_accepts(
    family_of: Callable[..., Family], rule: str, path: str
) -> None:
    family = family_of(rule)
    for level in (*LADDER, "on"):
        family.post(path, BODIES[path](level))
        shown = SHOWN[rule][level]
        assert shown in family.prompt, level
        assert family.prompt.count("[effort ") == bool(shown), level


@pytest.mark.parametrize("path", BODIES)
def test_the_header_reports_the_mapped_effort(family_of: Callable[..., Family], path: str) -> None:
    fitted = "fitted to the chat template: "
    for rule, level, warning in [
        ("qwen 3.8", "high", f"{fitted}effort high is xhigh"),
        ("qwen 3.8", "max", f"{fitted}effort max is xhigh"),
        ("qwen 3.8", "medium", None),
        ("qwen 3.8", "none", None),
        ("qwen 3.8", "on", None),
        ("hy 3", "medium", f"{fitted}effort medium is low"),
        ("hy 3", "none", None),
        ("gpt-oss", "xhigh", f"{fitted}effort xhigh is high"),
        ("gpt-oss", "none", f"{fitted}effort none is low"),
        ("always thinks", "none", f"{fitted}thinking stays on, effort none is high"),
        ("ignores it", "high", None),
    ]:
        reply = family_of(rule).post(path, BODIES[path](level))
        assert reply.headers.get("x-mlxserve-warning") == warning, (rule, level)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
def test_an_effort_that_is_refused_in_a_conversation_is_left_out_with_a_warning(
    family_of: Callable[..., Family], path: str
) -> None:
    family = family_of("refuses it in a long conversation")
    long = [*HELLO, {"role": "assistant", "content": "Hello."}, *HELLO]
    body = {**BODIES[path]("high"), "input" if path == RESPONSES else "messages": long}
    for stream in (False, True):
        reply = family.post(path, {**body, "stream": stream})
        assert (
            reply.headers["x-mlxserve-warning"]
            == "fitted to the chat template: effort high is left out, which the template refuses"
        )
        assert "[effort medium]" in family.prompt


def test_a_session_of_claude_code_extends_its_prompt_at_each_effort(
    family_of: Callable[..., Family],
) -> None:
    family = family_of("qwen 3.8")
    for level in ("low", "medium", "high", "xhigh", "max"):
        messages: list[dict[str, Any]] = [*HELLO]
        previous = ""
        for turn in range(3):
            body = {**CLAUDE, "output_config": {"effort": level}, "messages": messages}
            family.post(MESSAGES, body)
            assert f"[effort {SHOWN['qwen 3.8'][level][8:]}" in family.prompt
            assert family.prompt.startswith(previous.removesuffix("assistant\n"))
            previous = family.prompt
            counted = {k: v for k, v in body.items() if k not in ("max_tokens", "stream")}
            tokens = family.post(f"{MESSAGES}/count_tokens", counted).json()["input_tokens"]
            assert tokens == len(family.engine.requests[-1].token_ids), turn
            messages += [{"role": "assistant", "content": "Done."}, *HELLO]


def test_efforts_among_the_variables_of_requests_and_of_the_server_are_mapped(
    family_of: Callable[..., Family],
) -> None:
    kwargs = {"chat_template_kwargs": {"reasoning_effort": "high"}}
    family = family_of("qwen 3.8")
    family.post(CHAT, {"messages": HELLO, **ON})
    assert "[effort xhigh]" in family.prompt
    family.post(CHAT, {"messages": HELLO, "reasoning_effort": "low", **kwargs})
    assert "[effort xhigh]" in family.prompt
    served = family_of("qwen 3.8", reasoning_effort="minimal")
    served.post(CHAT, {"messages": HELLO, **ON})
    assert "[effort low]" in served.prompt
    served.post(CHAT, {"messages": HELLO, "reasoning_effort": "max"})
    assert "[effort xhigh]" in served.prompt
    kimi = family_of("kimi k3", thinking_effort="max")
    kimi.post(CHAT, {"messages": HELLO, **ON})
    assert "[effort max]" in kimi.prompt
    kimi.post(CHAT, {"messages": HELLO, "reasoning_effort": "low"})
    assert "[effort low]" in kimi.prompt


def test_a_conversation_is_forgotten_with_its_mapped_effort(
    family_of: Callable[..., Family],
) -> None:
    family = family_of("qwen 3.8")
    forgotten: list[Any] = []

    async def forget_prompts(prompts: Any, *_: Any) -> Any:
        forgotten.extend(family.tokenizer.decode(prompt) for prompt in prompts)
        from mlxserve.request import Forgotten

        return Forgotten()

    family.engine.forget_prompts = forget_prompts  # type: ignore[attr-defined]
    answered = [*HELLO, {"role": "assistant", "content": "Hello."}]
    family.post("/api/v1/cache/forget", {"conversations": [answered], "reasoning_effort": "high"})
    assert any("[effort xhigh]" in prompt for prompt in forgotten)


def test_the_efforts_are_on_the_model_s_card(family_of: Callable[..., Family]) -> None:
    card = family_of("qwen 3.8").client.get("/api/v1/model").json()["chat_template"]
    [efforts] = card["controls"]["efforts"]
    assert (efforts["variable"], efforts["default"]) == ("reasoning_effort", "xhigh")
    assert efforts["values"] == ["low", "medium", "xhigh"]


def test_what_can_be_chosen_is_on_the_cards_of_the_listings(
    family_of: Callable[..., Family],
) -> None:
    client = family_of("qwen 3.8").client
    thinking = {
        "can_be_off": True,
        "efforts": ["low", "medium", "xhigh"],
        "default_effort": "xhigh",
        "budget": False,
    }
    assert client.get("/v1/models").json()["data"][0]["thinking"] == thinking
    assert client.get("/v1/models/local").json()["thinking"] == thinking
    assert client.post("/api/show", json={"model": "local"}).json()["thinking"] == thinking


# How clients of any API turn thinking off.
OFF: Sequence[Mapping[str, Any]] = (
    {"enable_thinking": False},
    {"think": False},
    {"think": "none"},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "Off"},
    {"reasoning_effort": False},
    {"thinking_budget": 0},
    {"thinking_token_budget": 0},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}},
    {"reasoning_effort": "high", "enable_thinking": False},
)
# How they turn it on, beside any of the words that mean nothing here.
ON_SPELLINGS: Sequence[Mapping[str, Any]] = (
    {"enable_thinking": True},
    {"think": True},
    {"reasoning_effort": "huge", "enable_thinking": True},
    {"reasoning_effort": "auto", "think": True},
    {"chat_template_kwargs": {"thinking": True}},
    {"chat_template_kwargs": {"enable_thinking": True, "mood": {"is": ["good"]}, "tokenize": True}},
)
UNKNOWN: Sequence[object] = ("huge", "auto", "", " ", 7, 0.5, None, ["high"], {"level": "high"})


def _plain(path: str) -> dict[str, Any]:
    """A body without a word about thinking."""
    body = BODIES[path]("on")
    return {k: v for k, v in body.items() if k not in ("think", "thinking", "chat_template_kwargs")}


# One of each kind of control; tests/text/test_controls.py has all rules.
KINDS = (
    "qwen 3.8",
    "hy 3",
    "kimi k3",
    "gpt-oss",
    "granite 3.3",
    "minimax m3",
    "seed oss",
    "nemotron nano 2",
    "always thinks",
)


@pytest.mark.parametrize(("rule", "path"), _each_once(KINDS))
def test_each_spelling_of_every_api_turns_thinking_off_and_on(
    family_of: Callable[..., Family], rule: str, path: str
) -> None:
    family = family_of(rule)
    for level, spellings in (("none", OFF), ("on", ON_SPELLINGS)):
        for fields in spellings:
            family.post(path, {**_plain(path), **fields})
            assert SHOWN[rule][level] in family.prompt, fields
            assert family.prompt.count("[effort ") == bool(SHOWN[rule][level]), fields


@pytest.mark.parametrize(("rule", "path"), _each_once(["qwen 3.8", "hy 3", "seed oss"]))
def test_no_effort_and_no_variable_is_refused(
    family_of: Callable[..., Family], rule: str, path: str
) -> None:
    family = family_of(rule)
    nested = {"output_config": "effort", "reasoning": "effort"}
    for value in UNKNOWN:
        for name in ("reasoning_effort", "think"):
            family.post(path, {**_plain(path), name: value})
        for name, member in nested.items():
            family.post(path, {**_plain(path), name: {member: value}})
        for name in ("mood", "thinking", "messages", "self", "thinking_mode", "reasoning_effort"):
            family.post(path, {**_plain(path), "chat_template_kwargs": {name: value}})


def test_the_header_names_what_was_left_out(family_of: Callable[..., Family]) -> None:
    for rule, fields, warning in [
        ("qwen 3.8", {"reasoning_effort": "huge"}, "effort huge is the template's default"),
        ("ignores it", {"reasoning_effort": "huge"}, "effort huge is left out"),
        ("ignores it", {"chat_template_kwargs": {"mood": 1}}, "does not read mood"),
        ("ignores it", {"chat_template_kwargs": {"tokenize": 1}}, "tokenize cannot be set"),
        ("seed oss", {"reasoning_effort": "low"}, "effort low is a budget of 1024 tokens"),
    ]:
        reply = family_of(rule).post(CHAT, {"messages": HELLO, **fields})
        assert warning in reply.headers["x-mlxserve-warning"], (rule, fields)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
def test_a_switch_that_is_refused_in_a_conversation_is_left_out_with_a_warning(
    family_of: Callable[..., Family], path: str
) -> None:
    family = family_of("refuses every variable in a long conversation")
    long = [*HELLO, {"role": "assistant", "content": "Hello."}, *HELLO]
    body = {**BODIES[path]("none"), "input" if path == RESPONSES else "messages": long}
    reply = family.post(path, body)
    assert "enable_thinking: left out, which" in reply.headers["x-mlxserve-warning"]
    assert "[effort on]" in family.prompt

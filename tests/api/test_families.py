"""What agents send is answered by every API with the rules of strict templates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlxserve.chat.language_model import language_model
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.hub.embedded import model_path
from mlxserve.text.tokenizer import Tokenizer
from tests.api.agent_requests import CHAT, MESSAGES, REQUESTS, RESPONSES, SCHEMA
from tests.api.families import Family
from tests.api.scripted_engine import ScriptedEngine
from tests.text.template_rules import GUARDS

TASK = "Fix it"


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made: list[Family] = []

    @cache
    def family(rule: str) -> Family:
        folder = tmp_path_factory.mktemp("family")
        made.append(Family(folder, lambda template: GUARDS[rule] + template))
        return made[-1]

    yield family
    for each in made:
        each.chat.close()


@pytest.mark.parametrize("rule", GUARDS)
@pytest.mark.parametrize("request_of", REQUESTS)
def test_what_agents_send_is_answered(families: Any, rule: str, request_of: str) -> None:
    family = families(rule)
    path, body = REQUESTS[request_of]
    streamed = family.post(path, body).text
    assert "error" not in streamed or '"error":null' in streamed
    body = {key: value for key, value in body.items() if not key.startswith("stream")}
    assert "Done." in family.post(path, body).text
    if "title" not in request_of:
        assert any(mark in family.prompt for mark in (TASK, "Look"))
    assert "cch=" not in family.prompt


THOUGHT = """<think>
Plan: I read é first.
</think>

I read.
<tool_call>
{"name": "read", "arguments": {"path": "a.py"}}
</tool_call>"""
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'


@pytest.mark.parametrize("rule", GUARDS)
def test_our_own_calls_come_back_on_every_route(families: Any, rule: str) -> None:
    """Also two in one answer: `parallel_tool_calls` is on by default."""
    family = families(rule)
    two = f"Both.{CALL}\n{CALL}"
    asked: list[Any] = [{"role": "user", "content": TASK}]

    tools = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]
    said = family.post(CHAT, {"messages": asked, "tools": tools}, two).json()["choices"][0][
        "message"
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"r{number}"}
        for number, call in enumerate(said["tool_calls"])
    ]
    family.post(CHAT, {"messages": [*asked, said, *results], "tools": tools})
    check(family.prompt)

    named = [{"name": "read", "input_schema": SCHEMA}]
    body = {"max_tokens": 100, "tools": named}
    content = family.post(MESSAGES, {**body, "messages": asked}, two).json()["content"]
    used = [block for block in content if block["type"] == "tool_use"]
    told = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": f"r{number}"}
        for number, block in enumerate(used)
    ]
    answered = [{"role": "assistant", "content": content}, {"role": "user", "content": told}]
    family.post(MESSAGES, {**body, "messages": [*asked, *answered]})
    check(family.prompt)

    flat = [{"type": "function", "name": "read", "parameters": SCHEMA}]
    output = family.post(RESPONSES, {"input": asked, "tools": flat}, two).json()["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"r{number}"}
        for number, item in enumerate(calls)
    ]
    family.post(RESPONSES, {"input": [*asked, *output, *outputs], "tools": flat})
    check(family.prompt)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """A family whose template shows the thinking of earlier answers."""
    thinking = "('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if message.reasoning_content else '')"
    said = "(message.content or '')"
    family = Family(
        tmp_path_factory.mktemp("thinker"),
        lambda template: template.replace(said, f"{thinking} + {said}"),
    )
    yield family
    family.chat.close()


def test_the_next_prompt_holds_the_thinking_that_anthropics_client_was_not_shown(
    thinker: Family,
) -> None:
    asked = [{"role": "user", "content": TASK}]
    body = {
        "max_tokens": 500,
        "tools": [{"name": "read", "input_schema": SCHEMA}],
        "thinking": {"type": "adaptive", "display": "omitted"},
    }
    content = thinker.post(MESSAGES, {**body, "messages": asked}, THOUGHT).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
    assert content[0]["thinking"] == ""
    told = {"type": "tool_result", "tool_use_id": content[2]["id"], "content": "r0"}
    answered = [{"role": "assistant", "content": content}, {"role": "user", "content": [told]}]
    thinker.post(MESSAGES, {**body, "messages": [*asked, *answered]})
    check_continues(thinker)


def test_the_next_prompt_holds_the_reasoning_that_responses_client_keeps_encrypted(
    thinker: Family,
) -> None:
    asked = [{"role": "user", "content": TASK}]
    body = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}],
    }
    output = thinker.post(RESPONSES, {**body, "input": asked}, THOUGHT).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    unread = {**output[0], "content": None}
    told = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "r0"}
    thinker.post(RESPONSES, {**body, "input": [*asked, unread, *output[1:], told]})
    check_continues(thinker)


def check_continues(family: Family) -> None:
    """The last prompt begins with the one before and with all tokens of its answer."""
    before, after = (list(request.token_ids) for request in family.engine.requests[-2:])
    known = [*before, *family.tokenizer.encode(THOUGHT)]
    assert after[: len(known)] == known
    assert "I read é first" in family.prompt


def check(prompt: str) -> None:
    """Both calls and their results are in it, each result after its call."""
    conversation = prompt.split(TASK)[1]
    assert conversation.count('"path": "a.py"') == 2
    assert (
        conversation.index('"path": "a.py"') < conversation.index("r0") < conversation.index("r1")
    )


@pytest.mark.parametrize("rule", GUARDS)
def test_what_was_changed_for_the_template_is_in_the_header_and_at_the_models_card(
    families: Any, rule: str
) -> None:
    family = families(rule)
    path, body = REQUESTS["Claude Code: two calls, an image, steering and a reminder"]
    warning = family.post(path, body).headers["x-mlxserve-warning"]
    assert "left out: image" in warning
    expected = {
        "qwen 3.5": "later system messages are user messages",
        "mistral small 3.2": "ids of calls have nine characters",
        "llama 3.3": "each call is a message before its result",
    }
    assert expected.get(rule, "left out") in warning
    card = family.client.get("/api/v1/model").json()
    assert card["id"] == "local"
    assert card["chat_template"]["late_system"] is (rule in ("llama 3.3", "gpt-oss"))


def test_the_refusal_of_a_long_prompt_has_each_apis_words(families: Any) -> None:
    family = families("qwen 3.5")
    messages = [{"role": "user", "content": "word " * 9_000}]
    reply = family.client.post(CHAT, json={"messages": messages})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 4096 tokens. However, your prompt has "
    )
    assert "raise max_model_len" in error["message"]
    told = family.client.post(MESSAGES, json={"messages": messages, "max_tokens": 9}).json()[
        "error"
    ]
    assert told["message"].startswith("prompt is too long: ")
    assert " tokens > 4096 maximum. Shorten the prompt" in told["message"]


def test_variables_that_the_template_does_not_read_are_left_out_with_a_warning(
    families: Any,
) -> None:
    family = families("qwen 3.5")
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for name in (
        "tokenize",
        "tools",
        "messages",
        "add_generation_prompt",
        "max_characters",
        "self",
    ):
        reply = family.post(CHAT, {**body, "chat_template_kwargs": {name: False}})
        told = f"chat_template_kwargs: {name} cannot be set"
        assert reply.headers["x-mlxserve-warning"] == told
    reply = family.post(CHAT, {**body, "chat_template_kwargs": {"mood": True}})
    assert reply.headers["x-mlxserve-warning"].endswith("the chat template does not read mood")
    family.post(CHAT, {**body, "chat_template_kwargs": {"enable_thinking": False}})


def test_variables_that_the_server_sets_apply_where_a_request_does_not(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(model_path() / name, tmp_path / name)
    template = "{{ messages[0].content }}{{ ' kept' if preserve_thinking else ' dropped' }}"
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(tmp_path)
    chat = language_model(
        ScriptedEngine(tokenizer),  # type: ignore[arg-type]
        tokenizer,
        name="local",
        vocab_size=tokenizer.vocab_size,
        default_params=SamplingParams(),
        template_kwargs={"preserve_thinking": True},
    )
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.decode(chat.writer.render(messages)) == "Hi kept"
    assert tokenizer.decode(chat.writer.render(messages, preserve_thinking=False)) == "Hi dropped"
    chat.close()

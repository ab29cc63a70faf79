"""Ollama's routes over a scripted chat: what they take, what they answer, and what they refuse."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.api.ollama_models import OLLAMA_VERSION, RUNNING
from mlxserve.api.server.drain import Drain
from mlxserve.core.errors import EngineStopped, PromptTooLong, QueueFull
from mlxserve.core.sampling_params import SamplingParams, Structure, StructureKind
from mlxserve.request import FinishReason, TokenLogprob
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolCallDelta
from tests.api.fake_chat import FakeChat
from tests.api.ollama.requests import (
    CONTINUE_CHAT,
    CONTINUE_COMPLETION,
    CONTINUE_EMBED,
    CONTINUE_SHOW,
    OPEN_WEBUI,
    PIXEL,
    TOOL,
    ZED,
)

USER = {"role": "user", "content": "Hi"}
USAGE = Usage(10, 3, 4)
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def ask(client: TestClient, path: str = "chat", **fields: Any) -> httpx2.Response:
    prompt: dict[str, Any] = {"messages": [USER]} if path == "chat" else {}
    if path == "generate":
        prompt = {"prompt": "Hi"}
    return client.post(f"/api/{path}", json={"model": "fake", **prompt, **fields})


def whole(client: TestClient, path: str = "chat", **fields: Any) -> dict[str, Any]:
    reply = ask(client, path, stream=False, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/json"
    return reply.json()


def lines(reply: httpx2.Response) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text.splitlines()]


def warning(reply: httpx2.Response) -> str:
    return reply.headers.get("x-mlxserve-warning", "")


def refused(reply: httpx2.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert list(body) == ["error"]
    return body["error"]


# Answers.


def test_a_chat_is_a_stream_of_lines_by_default(client: TestClient) -> None:
    first, second, last = lines(ask(client))
    assert first["message"] == {"role": "assistant", "content": "Hel"}
    assert second["message"]["content"] == "lo"
    assert not first["done"]
    assert not second["done"]
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"], last["model"]) == (True, "stop", "fake")
    assert (last["prompt_eval_count"], last["eval_count"]) == (2, 2)
    for line in (first, second, last):
        assert datetime.fromisoformat(line["created_at"]).tzinfo is not None
        assert line["created_at"].endswith("Z")


def test_a_whole_chat_has_what_the_stream_adds_up_to(client: TestClient) -> None:
    reply = whole(client, model="fake:latest")
    assert reply["message"] == {"role": "assistant", "content": "Hello"}
    assert (reply["done"], reply["done_reason"]) == (True, "stop")
    assert reply["model"] == "fake:latest"  # as it was asked for
    assert reply["cache"] is None


@pytest.mark.parametrize("path", ["chat", "generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_durations_are_nanoseconds_that_add_up(client: TestClient, path: str, stream: bool) -> None:
    reply = lines(ask(client, path))[-1] if stream else whole(client, path)
    assert all(isinstance(reply[name], int) for name in DURATIONS)
    assert reply["prompt_eval_duration"] > 0
    assert reply["eval_duration"] > 0
    parts = sum(reply[name] for name in DURATIONS[1:])
    assert parts <= reply["total_duration"] < 60 * 10**9


def test_a_null_stream_is_a_stream(client: TestClient) -> None:
    assert len(lines(ask(client, stream=None))) == 3


def test_an_answer_that_reached_its_limit_says_so(client: TestClient, chat: FakeChat) -> None:
    chat.script = [Delta("He", (72,), (), FinishReason.LENGTH, USAGE)]
    assert whole(client)["done_reason"] == "length"
    assert lines(ask(client))[-1]["done_reason"] == "length"


def test_thinking_is_a_member_of_its_own(client: TestClient, chat: FakeChat) -> None:
    chat.can_think = True
    chat.script = [
        Delta(token_ids=(1,), reasoning="I"),
        Delta(token_ids=(2,), reasoning=" think", text="So"),
        Delta(".", (3,), (), FinishReason.STOP, USAGE),
    ]
    assert whole(client, think=True)["message"] == {
        "role": "assistant",
        "content": "So.",
        "thinking": "I think",
    }
    streamed = [line["message"] for line in lines(ask(client, think=True))]
    assert streamed[0] == {"role": "assistant", "content": "", "thinking": "I"}
    assert streamed[1] == {"role": "assistant", "content": "So", "thinking": " think"}
    generated = whole(client, "generate", think=True)
    assert (generated["response"], generated["thinking"]) == ("So.", "I think")


CALLS = [
    Delta("Wait.", (1,)),
    Delta(token_ids=(2,), tool_calls=(ToolCallDelta(0, "call_a", "read", '{"pa'),)),
    Delta(
        token_ids=(3,),
        tool_calls=(
            ToolCallDelta(0, arguments='th": "ä"}'),
            ToolCallDelta(1, "call_b", "list", ""),
        ),
    ),
    Delta(token_ids=(4,), tool_calls=(ToolCallDelta(1, arguments='{"deep": '),)),
    Delta(token_ids=(5,), tool_calls=(ToolCallDelta(1, arguments="true}"),)),
    Delta("", (6,), (), FinishReason.TOOL_CALLS, USAGE),
]
RENDERED = [
    {"id": "call_a", "function": {"index": 0, "name": "read", "arguments": {"path": "ä"}}},
    {"id": "call_b", "function": {"index": 1, "name": "list", "arguments": {"deep": True}}},
]


def test_calls_are_whole_and_their_arguments_objects(client: TestClient, chat: FakeChat) -> None:
    chat.script = CALLS
    reply = whole(client, tools=[TOOL])
    assert reply["message"] == {"role": "assistant", "content": "Wait.", "tool_calls": RENDERED}
    assert reply["done_reason"] == "stop"  # Ollama has no other word


def test_each_call_is_a_line_as_soon_as_it_is_complete(client: TestClient, chat: FakeChat) -> None:
    chat.script = CALLS
    *pieces, last = lines(ask(client, tools=[TOOL]))
    assert [piece["message"].get("tool_calls") for piece in pieces] == [
        None,
        [RENDERED[0]],
        [RENDERED[1]],
    ]
    assert "tool_calls" not in last["message"]


def test_a_call_that_was_cut_off_is_no_call_with_fewer_arguments(
    client: TestClient, chat: FakeChat
) -> None:
    chat.script = [
        Delta(token_ids=(1,), tool_calls=(ToolCallDelta(0, "call_a", "read", '{"a": 1'),)),
        Delta("", (), (), FinishReason.LENGTH, USAGE),
    ]
    cut = {"INVALID_JSON": '{"a": 1'}
    [call] = whole(client, tools=[TOOL])["message"]["tool_calls"]
    assert call["function"]["arguments"] == cut
    [call] = lines(ask(client, tools=[TOOL]))[0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == cut


def test_log_probabilities_come_with_their_line(client: TestClient) -> None:
    lengths = [len(line.get("logprobs", ())) for line in lines(ask(client, logprobs=True))]
    assert lengths == [1, 1, 0]
    assert "logprobs" not in whole(client, top_logprobs=2)


def test_an_impossible_token_has_a_number(client: TestClient, chat: FakeChat) -> None:
    token = TokenLogprob(72, float("-inf"))
    chat.script = [Delta("H", (72,), (token,), FinishReason.STOP, USAGE)]
    assert whole(client, logprobs=True)["logprobs"][0]["logprob"] == -9999.0


# Generating.


def test_a_prompt_is_a_conversation_with_a_system_message(
    client: TestClient, chat: FakeChat
) -> None:
    reply = whole(client, "generate", prompt="Hi", system="Be brief.")
    assert reply["response"] == "Hello"
    assert chat.rendered[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert chat.submitted[0].turn is not None
    assert [line["response"] for line in lines(ask(client, "generate"))] == ["Hel", "lo", ""]


def test_the_context_of_an_answer_begins_the_next_prompt(
    client: TestClient, chat: FakeChat
) -> None:
    context = whole(client, "generate", prompt="Hi")["context"]
    assert context == [*b"Hi", 72, 108]
    assert lines(ask(client, "generate"))[-1]["context"] == context
    again = whole(client, "generate", prompt="you", context=context)
    assert chat.submitted[-1].prompt == [*context, *b"you"]
    assert again["context"] == [*context, *b"you", 72, 108]


def test_a_raw_prompt_is_continued_as_it_is(client: TestClient, chat: FakeChat) -> None:
    reply = whole(client, "generate", prompt="x = ", raw=True)
    assert chat.rendered == []
    assert chat.submitted[0].prompt == [*b"x = "]
    assert chat.submitted[0].turn is None
    assert "context" not in reply


@pytest.mark.parametrize("fields", [{"system": "s"}, {"context": [1]}])
def test_a_raw_prompt_has_nothing_beside_it(client: TestClient, fields: dict[str, Any]) -> None:
    said = refused(ask(client, "generate", raw=True, **fields), 400)
    assert said == "raw: raw mode does not support template, system, or context."


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_a_template_of_the_request_is_refused_unless_it_is_empty(
    client: TestClient, path: str
) -> None:
    assert refused(ask(client, path, template="{{ .Prompt }}"), 400).startswith("template: ")
    assert whole(client, path, template="")["done"]


def test_a_suffix_is_refused_in_ollamas_words(client: TestClient, chat: FakeChat) -> None:
    chat.can_fill_in = False
    said = refused(ask(client, "generate", suffix="}"), 400)
    assert said.startswith('"fake" does not support insert')
    assert whole(client, "generate", suffix="")["done"]


@pytest.mark.parametrize(("path", "key"), [("chat", "message"), ("generate", "response")])
@pytest.mark.parametrize("keep_alive", [None, "5m", 0])
def test_without_a_prompt_a_model_is_loaded_or_it_says_why_it_stays(
    client: TestClient, chat: FakeChat, path: str, key: str, keep_alive: object
) -> None:
    reply = client.post(f"/api/{path}", json={"model": "fake", "keep_alive": keep_alive})
    body = reply.json()
    assert (body["done"], body["done_reason"]) == (True, "load")
    assert body[key] in ("", {"role": "assistant", "content": ""})
    said = "keep_alive: fake stays loaded by the server's options"
    assert warning(reply) == (said if keep_alive == 0 else "")
    assert body.get("warning") == (said if keep_alive == 0 else None)
    assert chat.submitted == []


# Options.


def submitted(client: TestClient, chat: FakeChat, **fields: Any) -> Any:
    whole(client, **fields)
    return chat.submitted[-1]


def test_options_are_parameters_of_sampling(client: TestClient, chat: FakeChat) -> None:
    options = {
        "num_predict": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 40.0,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["a", "b"],
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
    }
    assert submitted(client, chat, options=options).params == SamplingParams(
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=3,
        stop=("a", "b"),
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
    )


def test_what_is_left_out_or_null_is_the_models(client: TestClient, chat: FakeChat) -> None:
    chat.default_params = SamplingParams(temperature=0.6, top_k=20, max_tokens=9)
    for options in (None, {}, {"temperature": None, "num_predict": None, "stop": None}):
        assert submitted(client, chat, options=options).params == chat.default_params


@pytest.mark.parametrize("limit", [-1, -2, 0])
def test_a_limit_below_one_is_none(client: TestClient, chat: FakeChat, limit: int) -> None:
    chat.default_params = SamplingParams(max_tokens=9)
    assert submitted(client, chat, options={"num_predict": limit}).params.max_tokens == 2**31 - 1


def test_a_seed_below_zero_is_none_and_a_stop_may_be_one_text(
    client: TestClient, chat: FakeChat
) -> None:
    params = submitted(client, chat, options={"seed": -1, "stop": "x"}).params
    assert params.seed is None
    assert params.stop == ("x",)


def test_a_bad_option_is_refused_by_its_name(client: TestClient) -> None:
    for options, name in [
        ({"temperature": "hot"}, "options.temperature"),
        ({"temperature": -1}, "options.temperature"),
        ({"top_p": 2}, "options.top_p"),
        ({"num_predict": "many"}, "options.num_predict"),
        ({"repeat_penalty": 1000}, "options.repeat_penalty"),
        ({"stop": [1]}, "options.stop"),
        ([], "options"),
        (3, "options"),
    ]:
        if options == []:
            assert whole(client, options=options)["done"], options  # as nothing
        else:
            assert refused(ask(client, options=options), 400).startswith(f"{name}: "), options


def test_options_that_change_nothing_are_named(client: TestClient) -> None:
    reply = ask(client, options={"mirostat": 1, "num_gpu": 9, "frobnicate": 1})
    assert warning(reply) == (
        "ignored unknown fields: options.frobnicate, options.mirostat, options.num_gpu"
    )


def test_a_context_that_is_larger_than_ours_is_warned_of(client: TestClient) -> None:
    assert warning(ask(client, options={"num_ctx": 1_000})) == ""
    said = warning(ask(client, options={"num_ctx": 1_001}))
    assert said == "options.num_ctx: the context here is 1000 tokens"


def test_extensions_are_options(client: TestClient, chat: FakeChat) -> None:
    options = {"cache_salt": "s", "skip_prefix_cache": True, "priority": "background"}
    asked = submitted(client, chat, options=options)
    assert (asked.cache_salt, asked.skip_prefix_cache, asked.priority) == ("s", True, 10)


@pytest.mark.parametrize(
    ("value", "structure"),
    [
        ("json", Structure(StructureKind.JSON_OBJECT, field="format")),
        ({"type": "object"}, Structure(StructureKind.JSON_SCHEMA, '{"type": "object"}', "format")),
        ("", None),
        (None, None),
    ],
)
def test_the_format_is_json_or_a_schema(
    client: TestClient, chat: FakeChat, value: object, structure: Structure | None
) -> None:
    assert submitted(client, chat, format=value).params.structure == structure


@pytest.mark.parametrize(
    ("think", "variables", "budget"),
    [
        (None, {}, None),
        (True, {"enable_thinking": True}, None),
        (False, {"enable_thinking": False}, 0),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}, None),
        ("max", {"enable_thinking": True, "reasoning_effort": "max"}, None),
        ("xhigh", {"enable_thinking": True, "reasoning_effort": "xhigh"}, None),
        ("minimal", {"enable_thinking": False, "reasoning_effort": "minimal"}, 0),
        ("none", {"enable_thinking": False}, 0),
    ],
)
def test_think_sets_the_templates_variables(
    client: TestClient, chat: FakeChat, think: object, variables: dict[str, Any], budget: object
) -> None:
    chat.can_think = True
    asked = submitted(client, chat, think=think)
    assert chat.rendered[-1].kwargs == {"add_generation_prompt": True, **variables}
    assert asked.turn.thinking_budget == budget


def test_a_bad_field_is_refused_by_its_name(client: TestClient) -> None:
    for fields, name in [
        ({"format": "xml"}, "format"),
        ({"format": 3}, "format"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"keep_alive": True}, "keep_alive"),
        ({"stream": "no"}, "stream"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
    ]:
        assert refused(ask(client, **fields), 400).startswith(f"{name}: "), fields


def test_a_keep_alive_is_seconds_or_a_duration(client: TestClient) -> None:
    for keep_alive in [0, -1, 300, 1.5, "0", "-1m", "5m", "1h30m", "300ms", "1.5h"]:
        reply = ask(client, keep_alive=keep_alive)
        assert reply.status_code == 200, keep_alive
        assert warning(reply) == "", keep_alive


# What the model cannot do.


def test_a_model_that_does_not_think_answers_with_a_warning(client: TestClient) -> None:
    for think in (True, "high"):
        reply = ask(client, think=think, stream=False)
        assert reply.json()["done"]
        assert 'think: "fake" does not think' in warning(reply)
    for think in (False, "none", "minimal"):
        assert warning(ask(client, think=think)) == ""


def test_a_model_without_tools_says_so_in_ollamas_words(client: TestClient, chat: FakeChat) -> None:
    chat.can_call = False
    assert refused(ask(client, tools=[TOOL]), 400) == '"fake" does not support tools'
    assert whole(client, tools=[])["done"]


def test_an_image_in_the_newest_message_is_refused_and_an_earlier_one_left_out(
    client: TestClient, chat: FakeChat
) -> None:
    image = {"role": "user", "content": "What?", "images": [PIXEL]}
    said = "images[0]: image parts are not supported: this model reads text only"
    assert refused(ask(client, messages=[USER, image]), 400) == f"messages[1].{said}"
    assert refused(ask(client, "generate", images=[PIXEL]), 400) == said
    assert refused(ask(client, "generate", images=[PIXEL], raw=True), 400) == said
    earlier = ask(client, messages=[image, {"role": "assistant", "content": "A dot."}, USER])
    assert warning(earlier) == "left out: image"
    first = chat.rendered[-1].messages[0]
    assert first["content"] == "[image left out: this model reads text only]\n\nWhat?"


# Conversations of programs.


def test_open_webuis_history_keeps_its_calls_and_thoughts(
    client: TestClient, chat: FakeChat
) -> None:
    reply = client.post("/api/chat", json=OPEN_WEBUI)
    assert warning(reply) == (
        "ignored unknown fields: options.num_gpu; options.num_ctx: the context here is 1000 tokens; "
        "left out: image"
    )
    assert lines(reply)[-1]["done"]
    rendered = chat.rendered[0].messages
    assert rendered[2]["reasoning_content"] == "I read it."
    assert rendered[2]["tool_calls"][0]["id"] == rendered[3]["tool_call_id"] == "call_abc"
    assert rendered[3]["name"] == "read"
    assert chat.submitted[0].params.stop == ()


def test_continues_result_belongs_to_the_call_before_it(client: TestClient, chat: FakeChat) -> None:
    reply = client.post("/api/chat", json=CONTINUE_CHAT)
    assert warning(reply) == "ignored unknown fields: options.use_mmap"
    rendered = chat.rendered[0].messages
    assert rendered[2]["tool_calls"][0]["id"] == rendered[3]["tool_call_id"] == "call_0"
    assert json.loads(rendered[2]["tool_calls"][0]["function"]["arguments"]) == {"path": "a.py"}


def test_continue_completes_raw_text(client: TestClient, chat: FakeChat) -> None:
    pieces = lines(client.post("/api/generate", json=CONTINUE_COMPLETION))
    assert "".join(piece["response"] for piece in pieces) == "Hello"
    assert chat.submitted[0].prompt == [*CONTINUE_COMPLETION["prompt"].encode()]
    assert chat.submitted[0].params.max_tokens == 64


def test_zeds_results_belong_to_the_calls_of_their_names(
    client: TestClient, chat: FakeChat
) -> None:
    reply = client.post("/api/chat", json=ZED)
    assert warning(reply) == ""
    assert lines(reply)[-1]["done"]
    _, _, answer, listing, text = chat.rendered[0].messages
    assert [call["id"] for call in answer["tool_calls"]] == ["call_0", "call_1"]
    assert (listing["tool_call_id"], text["tool_call_id"]) == ("call_1", "call_0")
    assert chat.rendered[0].tools == [TOOL, {**TOOL, "function": without_text()}]


def without_text() -> dict[str, Any]:
    return {name: value for name, value in TOOL["function"].items() if name != "description"}


def test_a_final_call_is_not_continued(client: TestClient, chat: FakeChat) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    whole(client, messages=[USER, call])
    assert "continue_final_message" not in chat.rendered[0].kwargs


# Models.


def test_the_model_has_its_names_with_and_without_a_tag(client: TestClient) -> None:
    for name in ["fake", "fake:latest", "FAKE", "org/fake", "default", "default:latest"]:
        assert whole(client, model=name)["model"] == name, name
        assert client.post("/api/show", json={"name": name}).status_code == 200, name


def test_another_model_is_not_found_in_ollamas_words(client: TestClient) -> None:
    for path in ["chat", "generate", "embed", "embeddings", "show", "pull"]:
        said = refused(ask(client, path, model="llama3.2"), 404)
        assert said.startswith("model 'llama3.2' not found: this server has 'fake', 'default'"), (
            path
        )
        assert "mlxserve pull" in said, path
        for name in ("", None):
            assert refused(ask(client, path, model=name), 400) == "model is required", path


def test_the_models_names_are_listed_with_a_tag(client: TestClient) -> None:
    first, second = client.get("/api/tags").json()["models"]
    assert (first["name"], first["model"]) == ("fake:latest", "fake:latest")
    assert second["name"] == "default:latest"
    assert first["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "1.72B",
        "quantization_level": "int4",
    }
    assert first["size"] == 970_000_000
    assert len(first["digest"]) == 64
    assert first["capabilities"] == ["completion", "insert", "tools"]


def test_the_loaded_model_never_expires_and_has_the_memory_that_is_planned(
    client: TestClient,
) -> None:
    """Weights, a step and the cache, and not the size of its files."""
    model = client.get("/api/ps").json()["models"][0]
    assert (model["name"], model["size"], model["size_vram"]) == ("fake:latest", 1000, 1000)
    assert model["context_length"] == 1_000
    assert datetime.fromisoformat(model["expires_at"]).year > 2300


def test_show_tells_the_context_and_the_abilities(client: TestClient, chat: FakeChat) -> None:
    chat.can_think = True
    chat.default_params = SamplingParams(temperature=0.6)
    shown = client.post("/api/show", json=CONTINUE_SHOW).json()
    assert shown["capabilities"] == ["completion", "insert", "tools", "thinking"]
    assert shown["model_info"] == {
        "general.architecture": "llama",
        "general.basename": "fake",
        "general.parameter_count": 1_720_000_000,
        "llama.context_length": 1_000,
        "llama.embedding_length": 2_048,
    }
    parameters = dict(line.split() for line in shown["parameters"].splitlines())
    assert (parameters["num_ctx"], parameters["temperature"]) == ("1000", "0.6")
    assert shown["template"] == "{{ messages }}"


def test_pulling_the_served_model_succeeds(client: TestClient) -> None:
    for fields in ({}, {"stream": True}, {"stream": None}):
        reply = client.post("/api/pull", json={"name": "fake", "insecure": False, **fields})
        assert reply.headers["content-type"] == "application/x-ndjson"
        # `codex --oss` reads lines, and does not see one that does not end.
        assert reply.text == '{"status":"pulling manifest"}\n{"status":"success"}\n'
        assert warning(reply) == ""
    reply = client.post("/api/pull", json={"name": "fake", "stream": False})
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == {"status": "success"}


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_a_model_that_is_loaded_is_told_by_a_line(client: TestClient, path: str) -> None:
    reply = client.post(f"/api/{path}", json={"model": "fake"})
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    assert reply.json()["done_reason"] == "load"
    reply = client.post(f"/api/{path}", json={"model": "fake", "stream": False})
    assert reply.headers["content-type"] == "application/json"


def test_the_version_is_ollamas(client: TestClient) -> None:
    assert client.get("/api/version").json()["version"] == OLLAMA_VERSION
    assert client.head("/api/version").status_code == 200
    assert client.head("/api/tags").status_code == 200


def test_programs_are_told_that_it_is_running_and_browsers_get_the_page(client: TestClient) -> None:
    reply = client.get("/")
    assert reply.text == RUNNING == "Ollama is running"
    assert reply.headers["vary"] == "Accept"
    assert client.head("/").status_code == 200
    assert "<title>" in client.get("/", headers={"accept": "text/html,*/*"}).text


# Vectors.


def test_texts_become_vectors(client: TestClient, chat: FakeChat) -> None:
    reply = client.post("/api/embed", json=CONTINUE_EMBED).json()
    assert reply["embeddings"] == [[1.0, 0.5, -0.5], [2.0, 0.5, -0.5]]
    assert reply["prompt_eval_count"] == 2
    assert reply["total_duration"] >= reply["load_duration"] >= 0
    [short] = ask(client, "embed", input="ab", dimensions=2).json()["embeddings"]
    assert short == [3.0, 0.5]
    assert len(ask(client, "embed", input="ab", dimensions=0).json()["embeddings"][0]) == 3
    assert [each.token_ids for each in chat.embedded[:2]] == [[97], [98]]


@pytest.mark.parametrize("value", [None, "", []])
def test_no_text_has_no_vector(client: TestClient, value: object) -> None:
    assert ask(client, "embed", input=value).json()["embeddings"] == []


def test_the_older_route_has_one_vector(client: TestClient) -> None:
    assert ask(client, "embeddings", prompt="ab").json() == {"embedding": [1.0, 0.5, -0.5]}
    assert ask(client, "embeddings", prompt="").json() == {"embedding": []}


def test_a_long_text_is_cut_unless_that_is_refused(client: TestClient, chat: FakeChat) -> None:
    reply = ask(client, "embed", input=["x" * 1_001, "y"])
    assert warning(reply) == "input: cut to 1000 tokens"
    assert [len(each.token_ids) for each in chat.embedded] == [1_000, 1]
    assert reply.json()["prompt_eval_count"] == 1_001
    refused(ask(client, "embed", input="x" * 1_001, truncate=False), 400)
    assert len(chat.embedded) == 2


def test_what_is_no_text_is_refused(client: TestClient) -> None:
    for value in [7, {"a": 1}, [{"a": 1}], [[]], True]:
        assert refused(ask(client, "embed", input=value), 400).startswith("input: "), value


# The way of every request.


def test_json_is_read_under_the_type_that_curl_sends(client: TestClient) -> None:
    body = json.dumps({"model": "fake", "prompt": "Hi", "stream": False})
    for kind in ("application/x-www-form-urlencoded", "application/json; charset=utf-8", None):
        headers = {} if kind is None else {"content-type": kind}
        reply = client.post("/api/generate", content=body, headers=headers)
        assert reply.json()["response"] == "Hello", kind
    other = client.post("/api/generate", content=body, headers={"content-type": "text/plain"})
    refused(other, 415)
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert client.post("/v1/completions", content=body, headers=form).status_code == 415


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (PromptTooLong.for_answer(2_000, 1_000), 400, "maximum context length is 1000 tokens"),
        (QueueFull("The queue is full."), 503, "The queue is full."),
        (EngineStopped("It has stopped."), 503, "It has stopped."),
    ],
)
def test_errors_of_generating_have_ollamas_shape(
    client: TestClient, chat: FakeChat, error: Any, status: int, said: str
) -> None:
    chat.submit_error = error
    assert said in refused(ask(client, "generate"), status)


def test_what_is_not_a_request_has_ollamas_shape_as_well(client: TestClient) -> None:
    headers = {"content-type": "application/json"}
    refused(client.post("/api/chat", content="{", headers=headers), 400)
    refused(client.post("/api/chat", content="", headers=headers), 400)
    assert refused(client.get("/api/chat"), 405).startswith("GET /api/chat is not allowed")


@pytest.mark.parametrize(
    "path", ["create", "copy", "push", "blobs/sha256:00", "blobs/sha256:00/../../x"]
)
def test_no_route_writes_a_model(client: TestClient, path: str) -> None:
    said = refused(client.post(f"/api/{path}", json={"model": "fake", "from": "other"}), 404)
    assert said.startswith("There is no POST /api/")


@pytest.mark.parametrize("path", ["show", "pull", "generate", "chat", "embed"])
@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "https://example.org/x", "a\0b", "a\nb = 1", "-m", "/etc", "a" * 600],
)
def test_a_name_is_never_a_path_an_address_or_an_option(
    client: TestClient, path: str, name: str
) -> None:
    reply = client.post(f"/api/{path}", json={"model": name, "messages": [USER], "prompt": "a"})
    assert reply.status_code in (400, 404), reply.text
    assert "Traceback" not in reply.text


def test_keys_and_pages_are_checked_as_on_every_route(chat: FakeChat) -> None:
    access = AccessPolicy(api_keys=["a-key"], origins=["https://chat.example"])
    client = TestClient(
        create_app(chat, access=access),  # type: ignore[arg-type]
        base_url="http://127.0.0.1:8000",
    )
    refused(client.get("/api/tags"), 401)
    refused(client.get("/api/tags", headers={"origin": "https://evil.example"}), 403)
    key = {"authorization": "Bearer a-key"}
    page = client.get("/api/tags", headers={**key, "origin": "https://chat.example"})
    assert page.headers["access-control-allow-origin"] == "https://chat.example"
    asked = client.post("/api/chat", json={"model": "fake", "messages": [USER]}, headers=key)
    assert asked.status_code == 200
    assert chat.submitted[0].client == chat.submitted[0].cache_salt.removesuffix("/") != ""
    preflight = client.options(
        "/api/chat",
        headers={
            "origin": "https://chat.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type,user-agent",
        },
    )
    assert "user-agent" in preflight.headers["access-control-allow-headers"]


def test_a_server_that_stops_refuses_in_ollamas_shape(chat: FakeChat) -> None:
    drain = Drain()
    app = create_app(chat, drain=drain)  # type: ignore[arg-type]
    client = TestClient(app, base_url="http://127.0.0.1:8000")
    drain.start()
    refused(client.post("/api/chat", json={"model": "fake", "messages": [USER]}), 503)

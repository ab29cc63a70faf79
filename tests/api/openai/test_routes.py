import json
import logging
import math
from typing import Any

import pytest

from mlxserve.core.errors import (
    EngineStopped,
    InvalidParameter,
    InvalidRequest,
    MlxServeError,
    OutOfMemory,
    PrefixQuotaExceeded,
    QueueFull,
)
from mlxserve.request import BACKGROUND, FinishReason, TokenLogprob
from mlxserve.text.deltas import Delta, Usage

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


def events(text: str) -> list[Any]:
    """The data of each event, decoded; comments are left out."""
    assert text.endswith("\n\n")
    lines = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def without(chunk: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in chunk.items() if name not in names}


# Whole replies.


def test_a_chat_completion_has_openais_format(client):
    reply = client.post(CHAT, json=HELLO)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body.pop("id") == f"chatcmpl-{reply.headers['x-request-id']}"
    assert body.pop("created") > 1_700_000_000
    assert body.pop("system_fingerprint").startswith("mlxserve-")
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
            "cache": None,
        },
    }


def test_a_completion_has_openais_format(client):
    reply = client.post(COMPLETIONS, json={"prompt": "Hi"})
    body = reply.json()
    assert body.pop("id") == f"cmpl-{reply.headers['x-request-id']}"
    assert without(body, "created", "system_fingerprint", "usage") == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
    }


def test_each_prompt_of_a_list_is_a_choice_and_usage_is_the_sum(client, chat):
    body = client.post(COMPLETIONS, json={"prompt": ["abcd", "ef", "g"]}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 7
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 + 1 + 0
    assert [asked.prompt for asked in chat.submitted] == [[97, 98, 99, 100], [101, 102], [103]]


def test_token_ids_are_submitted_unchanged(client, chat):
    client.post(COMPLETIONS, json={"prompt": [[5, 6], [7]]})
    assert [asked.prompt for asked in chat.submitted] == [[5, 6], [7]]


def test_chat_logprobs_have_openais_format(client, chat):
    content = client.post(CHAT, json={**HELLO, "logprobs": True, "top_logprobs": 2}).json()
    assert content["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "H",
                "bytes": [72],
                "logprob": -0.5,
                "top_logprobs": [
                    {"token": "H", "bytes": [72], "logprob": -0.5},
                    {"token": "J", "bytes": [74], "logprob": -1.5},
                ],
            },
            {"token": "l", "bytes": [108], "logprob": -0.25, "top_logprobs": []},
        ],
        "refusal": None,
    }
    assert chat.submitted[0].params.logprobs == 2


def test_an_echoed_prompt_comes_before_its_answer(client, chat):
    asked = {"prompt": ["ab", "c"], "n": 2, "echo": True}
    texts = [choice["text"] for choice in client.post(COMPLETIONS, json=asked).json()["choices"]]
    assert [text[: len(text) - len("Hello")] for text in texts] == ["ab", "ab", "c", "c"]
    streamed = dict.fromkeys(range(4), "")
    for chunk in events(client.post(COMPLETIONS, json={**asked, "stream": True}).text)[:-1]:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == texts


def test_an_echoed_prompts_tokens_are_scored_but_the_first(client):
    asked = {"prompt": "ab", "echo": True, "logprobs": 1}
    choice = client.post(COMPLETIONS, json=asked).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:2] == ["a", "b"]
    assert logprobs["token_logprobs"][:2] == [None, -1.0]
    assert logprobs["top_logprobs"][:2] == [None, {"b": -1.0}]
    assert logprobs["text_offset"][:3] == [0, 1, 2]
    assert len({len(values) for values in logprobs.values()}) == 1
    first = events(client.post(COMPLETIONS, json={**asked, "stream": True}).text)[0]["choices"][0]
    assert (first["text"], first["logprobs"]["token_logprobs"]) == ("ab", [None, -1.0])


def test_a_prompt_is_not_scored_after_a_named_prefix(client):
    asked = {"prompt": "ab", "echo": True, "logprobs": 1, "prefix_name": "p"}
    error = client.post(COMPLETIONS, json=asked).json()["error"]
    assert error["param"] == "echo"


def test_completion_logprobs_have_openais_format(client):
    body = client.post(COMPLETIONS, json={"prompt": "x", "logprobs": 2}).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["H", "l"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"H": -0.5, "J": -1.5}, {}],
        "text_offset": [0, 1],
    }


def test_an_impossible_token_has_a_finite_logprob(client, chat):
    chat.script = [
        Delta(
            "H",
            (72,),
            (TokenLogprob(72, 0.0, ((255, -math.inf),)),),
            FinishReason.LENGTH,
            Usage(1, 1, 0),
        )
    ]
    content = client.post(CHAT, json={**HELLO, "logprobs": True, "top_logprobs": 1}).json()
    token = content["choices"][0]["logprobs"]["content"][0]
    assert token["top_logprobs"] == [{"token": "\ufffd", "bytes": None, "logprob": -9999.0}]


# Streams.


def test_a_chat_stream_has_openais_order(client):
    asked = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    reply = client.post(CHAT, json=asked)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, last, done = events(reply.text)
    assert done == "[DONE]"
    for chunk in (*chunks, last):
        assert chunk["id"] == f"chatcmpl-{reply.headers['x-request-id']}"
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["model"] == "fake"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [choice for chunk in chunks for choice in chunk["choices"]] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        },
        {"index": 0, "delta": {"content": "Hel"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "lo"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"},
    ]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "cache": None,
    }


def test_an_answer_that_was_ended_for_repeating_itself_says_so(client, chat):
    chat.script = [Delta("a a a", (1,), (), FinishReason.REPETITION, Usage(2, 1, 0))]
    asked = {"stop_on_repetition": True}
    for path, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "x"})):
        [choice] = client.post(path, json={**body, **asked}).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")
        *_, last, _ = events(client.post(path, json={**body, **asked, "stream": True}).text)
        [choice] = last["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")
    assert all(one.params.stop_on_repetition for one in chat.submitted)


def test_a_stream_without_include_usage_does_not_mention_usage(client):
    *chunks, _ = events(client.post(CHAT, json={**HELLO, "stream": True}).text)
    assert chunks
    assert not any("usage" in chunk for chunk in chunks)


def test_a_completion_stream_has_openais_order(client):
    asked = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(client.post(COMPLETIONS, json=asked).text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in (*chunks, last)} == {"text_completion"}
    assert [choice for chunk in chunks for choice in chunk["choices"]] == [
        {"index": 0, "text": "Hel", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "lo", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"},
    ]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 3


def test_a_stream_of_several_prompts_has_an_index_for_each(client):
    asked = {"prompt": ["a", "b"], "stream": True, "logprobs": 0}
    *chunks, done = events(client.post(COMPLETIONS, json=asked).text)
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "Hello"
        assert [choice["finish_reason"] for choice in mine] == [None, None, "stop"]
        offsets = [choice["logprobs"]["text_offset"] for choice in mine if choice["logprobs"]]
        assert offsets == [[0], [1]]


def test_n_choices_count_their_prompt_once_and_have_different_seeds(client, chat):
    body = client.post(CHAT, json={**HELLO, "n": 3, "seed": 2**64 - 1}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 6
    assert [asked.params.seed for asked in chat.submitted] == [2**64 - 1, 0, 1]
    client.post(CHAT, json={**HELLO, "n": 2})
    assert [asked.params.seed for asked in chat.submitted[3:]] == [None, None]


def test_n_choices_of_several_prompts_are_numbered_prompt_by_prompt(client, chat):
    asked = {"prompt": ["abcd", "ef"], "n": 2}
    body = client.post(COMPLETIONS, json=asked).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [len(asked.prompt) for asked in chat.submitted] == [4, 4, 2, 2]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


def test_each_choice_of_a_stream_has_a_role_and_an_end(client):
    *chunks, _ = events(client.post(CHAT, json={**HELLO, "n": 2, "stream": True}).text)
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello"
        assert mine[-1]["finish_reason"] == "stop"


def test_when_one_of_many_is_refused_none_is_left_running(client, chat):
    reply = client.post(COMPLETIONS, json={"prompt": ["a", "x" * 2_000, "b"], "n": 2})
    assert reply.status_code == 400
    assert chat.answers == []


def test_text_that_is_held_back_makes_no_chunk(client, chat):
    usage = Usage(1, 2, 0)
    chat.script = [Delta("", (1,)), Delta("x", (2,), (), FinishReason.STOP, usage)]
    *chunks, _ = events(client.post(CHAT, json={**HELLO, "stream": True}).text)
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert contents == ["", "x", None]


def test_a_stream_has_no_unusual_line_breaks(client, chat):
    text = "a\u2028b\u2029c\x85d\r\ne\x0bf\x0cg\x1ch\ni"
    chat.script = [Delta(text, (1,), (), FinishReason.STOP, Usage(1, 1, 0))]
    stream = client.post(CHAT, json={**HELLO, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert chunks[1]["choices"][0]["delta"]["content"] == text
    assert len(chunks) == 3


def test_a_stopped_engine_ends_the_stream_with_an_error_and_no_done(client, chat):
    chat.script = [Delta("Hel", (72,)), EngineStopped("The engine has stopped.")]
    *chunks, last = events(client.post(CHAT, json={**HELLO, "stream": True}).text)
    assert chunks[1]["choices"][0]["delta"] == {"content": "Hel"}
    assert last == {
        "error": {
            "message": "The engine has stopped.",
            "type": "server_error",
            "param": None,
            "code": "engine_stopped",
        }
    }


# What is asked of the engine.


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**HELLO, "continue_final_message": None}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {**HELLO, "max_tokens": 5}),
    ],
)
def test_null_leaves_a_field_at_its_default(client, chat, path, body):
    assert client.post(path, json={**body, "priority": None}).status_code == 200
    assert chat.submitted[0].priority == 0


def test_background_is_a_priority_of_completions(client, chat):
    body = {"prompt": "Hello"}
    assert client.post(COMPLETIONS, json={**body, "priority": "background"}).status_code == 200
    assert chat.submitted[0].priority == BACKGROUND
    reply = client.post(COMPLETIONS, json={**body, "priority": "urgent"})
    assert reply.status_code == 400
    assert "priority" in reply.json()["error"]["message"]


def test_salt_priority_and_template_settings_are_passed_on(client, chat):
    asked = {
        **HELLO,
        "cache_salt": "team-a",
        "priority": -3,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert client.post(CHAT, json=asked).status_code == 200
    assert chat.submitted[0].cache_salt == "team-a"
    assert chat.submitted[0].priority == -3
    assert chat.rendered[0].kwargs["enable_thinking"] is False


@pytest.mark.parametrize("name", ["fake", "default", None])
def test_the_model_is_known_by_its_name_its_aliases_and_no_name(client, name):
    assert client.post(CHAT, json={**HELLO, "model": name}).json()["model"] == "fake"


@pytest.mark.parametrize("name", ["", "gpt-4", "../../etc/passwd", "x" * 4_096, "f\u0430ke"])
def test_another_model_is_a_404_that_names_the_known_ones_if_names_are_strict(
    strict_client, chat, name
):
    reply = strict_client.post(CHAT, json={**HELLO, "model": name})
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"
    assert "'fake', 'default'" in reply.json()["error"]["message"]
    assert len(reply.content) < 1_000
    assert chat.rendered == []


def test_another_model_is_answered_with_a_warning(client) -> None:
    for name in ["", "gpt-4", "../../etc/passwd", "x" * 4_096, "f\u0430ke"]:
        for stream in [False, True]:
            reply = client.post(CHAT, json={**HELLO, "model": name, "stream": stream})
            assert reply.status_code == 200, (name, stream)
            assert "is not served here; fake is" in reply.headers["x-mlxserve-warning"], (
                name,
                stream,
            )
            assert len(reply.headers["x-mlxserve-warning"]) < 700, (name, stream)
            assert client.get(f"/v1/models/{name or 'x'}").status_code in (404, 403, 400), (
                name,
                stream,
            )


@pytest.mark.parametrize("name", ["FAKE", "fake:latest", "mlx-community/Fake", "Default"])
def test_case_organisation_and_latest_do_not_matter(client, name):
    reply = client.post(CHAT, json={**HELLO, "model": name})
    assert reply.status_code == 200
    assert "x-mlxserve-warning" not in reply.headers
    assert client.get(f"/v1/models/{name}").json()["id"] == "fake"


def test_models_are_listed_with_their_context(client):
    card = {
        "id": "fake",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "mlxserve",
        "aliases": ["default"],
        "context_length": 1_000,
        "max_model_len": 1_000,
        "capabilities": ["completion", "embedding", "insert", "tools"],
        "loaded": True,
    }
    assert client.get("/v1/models").json() == {"object": "list", "data": [card]}
    assert client.get("/v1/models/fake").json() == card
    assert client.get("/v1/models/org/other").json()["error"]["code"] == "model_not_found"


def test_a_model_lists_its_capabilities(client, chat):
    chat.can_call, chat.can_think = False, True
    card = client.get("/v1/models/fake").json()
    assert card["capabilities"] == ["completion", "embedding", "insert", "thinking"]


# Errors.


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (InvalidParameter("logit_bias", "too big"), 400, "logit_bias", "invalid_value"),
        (InvalidRequest("no"), 400, "messages", None),
        (PrefixQuotaExceeded("no"), 409, None, "prefix_quota_exceeded"),
        (QueueFull("no"), 503, None, "queue_full"),
        (EngineStopped("no"), 503, None, "engine_stopped"),
        (OutOfMemory("no"), 503, None, "out_of_memory"),
        (MlxServeError("no"), 500, None, "engine_error"),
    ],
)
def test_each_error_of_the_engine_has_openais_code(client, chat, error, status, param, code):
    chat.submit_error = error
    reply = client.post(CHAT, json=HELLO)
    assert reply.status_code == status
    assert reply.json()["error"]["param"] == param
    assert reply.json()["error"]["code"] == code
    assert reply.json()["error"]["message"] == str(error)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2_000}]}, "messages"),
        (COMPLETIONS, {"prompt": "x" * 2_000}, "prompt"),
        (COMPLETIONS, {"prompt": ["short", "x" * 2_000]}, "prompt"),
    ],
)
def test_a_prompt_beyond_the_context_is_refused_whole(client, chat, path, body, param):
    reply = client.post(path, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert reply.json()["error"]["param"] == param
    assert all(answer.is_closed for answer in chat.answers)


def test_an_empty_prompt_is_refused(client):
    reply = client.post(COMPLETIONS, json={"prompt": ""})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt"


def test_unknown_fields_are_named_in_a_header_and_once_in_the_log(client, caplog):
    asked = {**HELLO, "top_kk": 5, "evil\r\nset-cookie: a=b": 1}
    with caplog.at_level(logging.WARNING):
        replies = [client.post(CHAT, json={**asked, "stream": s}) for s in (False, True)]
    for reply in replies:
        assert reply.status_code == 200
        assert "top_kk" in reply.headers["x-mlxserve-warning"]
        assert "\\r\\n" in reply.headers["x-mlxserve-warning"]
        assert "set-cookie" not in reply.headers
    assert sum("top_kk" in message for message in caplog.messages) == 1


def test_the_header_for_a_thousand_unknown_fields_is_short(client):
    asked = {**HELLO, **{f"field{i}" * 20: i for i in range(1_000)}}
    reply = client.post(CHAT, json=asked)
    assert reply.status_code == 200
    assert len(reply.headers["x-mlxserve-warning"]) < 800


def test_only_an_assistants_message_is_continued(client):
    refused = client.post(CHAT, json={**HELLO, "continue_final_message": True})
    assert refused.status_code == 400
    assert "must be the assistant's" in refused.json()["error"]["message"]

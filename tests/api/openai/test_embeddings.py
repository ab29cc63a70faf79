from __future__ import annotations

import base64
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import httpx2
import pytest
from starlette.testclient import TestClient

from mlxserve.api import vectors
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.server.retry_after import RetryAfter
from mlxserve.api.vectors import MAX_TOKENS
from mlxserve.core.errors import EngineStopped, InvalidParameter, MlxServeError
from mlxserve.request import ANONYMOUS, Pooling
from tests.api.fake_chat import FakeChat
from tests.api.serving import StartServer

PATH = "/v1/embeddings"
KEY = "good-good-good-good"


def post(client: TestClient, **fields: Any) -> httpx2.Response:
    return client.post(PATH, json={"model": "fake", "input": "Hi", **fields})


def test_embeddings_have_openais_format(client: TestClient) -> None:
    assert post(client, input=["Hi", "you"]).json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, 0.5, -0.5]},
            {"object": "embedding", "index": 1, "embedding": [2.0, 0.5, -0.5]},
        ],
        "model": "fake",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }


def test_base64_is_little_endian_floats(client: TestClient) -> None:
    item = post(client, encoding_format="base64").json()["data"][0]
    assert struct.unpack("<3f", base64.b64decode(item["embedding"])) == (1.0, 0.5, -0.5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ],
)
def test_the_input_may_be_one_or_several_texts_or_lists_of_tokens(
    client: TestClient, chat: FakeChat, value: object, expected: list[list[int]]
) -> None:
    assert post(client, input=value).status_code == 200
    assert [each.token_ids for each in chat.embedded] == expected


def test_the_mean_is_the_default_pooling_and_the_last_token_an_option(
    client: TestClient, chat: FakeChat
) -> None:
    post(client)
    post(client, pooling="last")
    assert [each.pooling for each in chat.embedded] == [Pooling.MEAN, Pooling.LAST]


def test_fewer_dimensions_may_be_requested(client: TestClient) -> None:
    assert len(post(client, dimensions=2).json()["data"][0]["embedding"]) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a"] * 1_025}, "input"),
        ({"input": "a" * 1_001}, "input"),
        ({"input": [[1] * 900] * (MAX_TOKENS // 900 + 1)}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 2**40}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
    ],
)
def test_a_bad_value_is_refused_before_anything_is_computed(
    client: TestClient, chat: FakeChat, fields: dict[str, Any], param: str
) -> None:
    reply = post(client, **fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert chat.embedded == []


def test_another_model_is_answered_with_a_warning_unless_names_are_strict(
    client: TestClient, strict_client: TestClient
) -> None:
    reply = post(client, model="other")
    assert "'other' is not served here" in reply.headers["x-mlxserve-warning"]
    refused = post(strict_client, model="other")
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidParameter("dimensions", "too many"), 400), (EngineStopped("It has ended."), 503)],
)
def test_each_error_of_the_engine_has_its_status(
    client: TestClient, chat: FakeChat, error: MlxServeError, status: int
) -> None:
    chat.submit_error = error
    assert post(client).status_code == status


def test_unknown_fields_are_named(client: TestClient) -> None:
    reply = post(client, user="u", truncate=True)
    assert reply.headers["x-mlxserve-warning"] == "ignored unknown fields: truncate"


def test_each_text_is_computed_in_the_turn_of_its_client(
    client: TestClient, chat: FakeChat
) -> None:
    post(client, input=["a", "b"])
    [name] = {each.client for each in chat.embedded}
    assert name.startswith(ANONYMOUS)


@pytest.mark.parametrize(
    ("limit", "status", "code"),
    [("MAX_WAITING", 503, "queue_full"), ("MAX_CLIENT_WAITING", 429, "too_many_requests")],
)
def test_a_full_queue_of_embeddings_says_when_to_retry(
    start_server: StartServer,
    chat: FakeChat,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    status: int,
    code: str,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(vectors, "RetryAfter", lambda: RetryAfter(lambda: clock[0]))
    monkeypatch.setattr(vectors, limit, 1)
    server = start_server(access=AccessPolicy(api_keys=(KEY,)))
    headers = {"authorization": f"Bearer {KEY}"}
    ask = partial(httpx.post, server.url + PATH, json={"input": "Hi"}, headers=headers, timeout=30)
    for _ in range(2):
        assert ask().status_code == 200
    clock[0] = 14.0
    chat.script = []  # embeddings are on hold
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask)
        assert chat.on_hold.wait(20)
        refused = ask()
        chat.release()
        assert waiting.result().status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    assert refused.headers["retry-after"] == "7"  # two have ended in fourteen seconds

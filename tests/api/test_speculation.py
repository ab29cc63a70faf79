"""`usage.speculation`: what drafts did for an answer, in every dialect, and nothing where they are off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlxserve.api.app import create_app
from mlxserve.build import build_text_model
from mlxserve.core.config import EngineConfig
from mlxserve.hub.embedded import MODEL_NAME

SENTENCES = "The quick brown fox jumps over the lazy dog. The farmer has nine cows and two goats. "
COPYING = f"{SENTENCES * 3}The quick"  # a text that repeats and stops in mid-sentence
COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL_NAME, "prompt": COPYING, "max_tokens": 60, "temperature": 0}
MESSAGES = [{"role": "user", "content": COPYING}]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    config = EngineConfig().with_options(
        num_pages=200, speculative_tokens=8, disable_log_stats=True
    )
    chat = build_text_model(config)
    with TestClient(create_app(chat), base_url="http://127.0.0.1:8000") as client:
        yield client
    chat.close()


def post(client: TestClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["usage"])


def test_an_answer_that_copies_says_how_much_was_drafted(client: TestClient) -> None:
    usage = post(client, COMPLETIONS, {**BODY, "ignore_eos": True})
    speculation = usage["speculation"]
    assert 0 < speculation["accepted_tokens"] <= speculation["drafted_tokens"]
    assert speculation["accepted_tokens"] < usage["completion_tokens"] == 60


def test_a_stream_says_the_same_at_its_end(client: TestClient) -> None:
    body = {**BODY, "ignore_eos": True}
    expected = post(client, COMPLETIONS, body)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = client.post(COMPLETIONS, json=streamed).text.split("\n\n")
    data = [event.removeprefix("data: ") for event in events if event.startswith("data: {")]
    assert json.loads(data[-1])["usage"]["speculation"] == expected["speculation"]


def test_answers_to_one_request_are_added_up(client: TestClient) -> None:
    body = {**BODY, "ignore_eos": True}
    one, two = post(client, COMPLETIONS, body), post(client, COMPLETIONS, {**body, "n": 2})
    assert two["completion_tokens"] == 2 * one["completion_tokens"]
    assert two["speculation"]["accepted_tokens"] > one["speculation"]["accepted_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 8}),
        ("/v1/responses", {"input": COPYING, "max_output_tokens": 16}),
    ],
)
def test_every_dialect_has_it(client: TestClient, path: str, body: dict[str, Any]) -> None:
    speculation = post(client, path, {"model": MODEL_NAME, "temperature": 0, **body})["speculation"]
    assert speculation.keys() == {"drafted_tokens", "accepted_tokens"}


def test_a_server_without_drafts_has_none(real_chat: Any) -> None:
    with TestClient(create_app(real_chat), base_url="http://127.0.0.1:8000") as client:
        usage = post(client, COMPLETIONS, {"prompt": "hello", "max_tokens": 4})
    assert "speculation" not in usage

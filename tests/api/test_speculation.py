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
    by_position = speculation["accepted_by_position"]
    assert sum(by_position) == speculation["accepted_tokens"]
    assert by_position == sorted(by_position, reverse=True)
    assert by_position[-1] > 0


def test_the_same_is_counted_under_the_names_of_vllm(client: TestClient) -> None:
    post(client, COMPLETIONS, {**BODY, "ignore_eos": True})
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines())
    label = f'{{model_name="{MODEL_NAME}"}}'
    names = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
    drafts, drafted, accepted = (
        float(lines[f"mlxserve:spec_decode_{name}_total{label}"]) for name in names
    )
    assert 0 < drafts <= drafted
    assert 0 < accepted <= drafted
    positions = [
        float(value)
        for name, value in lines.items()
        if name.startswith("mlxserve:spec_decode_num_accepted_tokens_per_pos_total{")
    ]
    assert sum(positions) == accepted
    assert max(positions) <= drafts


def test_the_statistics_say_why_nothing_is_drafted(client: TestClient) -> None:
    post(client, COMPLETIONS, {**BODY, "ignore_eos": True})
    shown = client.get("/api/v1/kv/stats").json()["speculation"]
    assert shown["accepted_tokens"] > 0
    assert shown["reason"] is None


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
    by_position = two["speculation"]["accepted_by_position"]
    assert sum(by_position) == two["speculation"]["accepted_tokens"]


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
    assert speculation.keys() == {"drafted_tokens", "accepted_tokens", "accepted_by_position"}


def test_a_server_without_drafts_has_none(real_chat: Any) -> None:
    with TestClient(create_app(real_chat), base_url="http://127.0.0.1:8000") as client:
        usage = post(client, COMPLETIONS, {"prompt": "hello", "max_tokens": 4})
    assert "speculation" not in usage

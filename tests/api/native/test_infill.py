"""Filling in the middle: `/infill`, and `suffix` of completions and of Ollama's generate."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import FakeChat

# As llama.vscode sends it.
BODY: dict[str, Any] = {
    "input_prefix": "def f():\n",
    "input_suffix": "\nf()",
    "input_extra": [{"filename": "a.py", "text": "x = 1"}],
    "prompt": "    ret",
    "n_predict": 16,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
}
PROMPTS = {
    "/infill": BODY,
    "/v1/completions": {"prompt": "a", "suffix": "b"},
    "/api/generate": {"model": "fake", "prompt": "a", "suffix": "b", "stream": False},
}


def test_the_middle_is_filled_in_as_llama_vscode_reads_it(
    client: TestClient, chat: FakeChat
) -> None:
    reply = client.post("/infill", json=BODY).json()
    [sent] = chat.submitted
    assert bytes(sent.prompt).decode() == "[a.py]x = 1<def f():\n    ret|\nf()>"
    assert (sent.params.max_tokens, sent.params.top_k, sent.params.stop_token_ids) == (16, 40, (0,))
    assert (reply["content"], reply["stop"], reply["stop_type"]) == ("Hello", True, "eos")
    assert reply["generation_settings"]["n_ctx"] == 1_000
    assert reply["tokens_evaluated"] == len(sent.prompt)
    assert reply["timings"]["predicted_n"] == reply["tokens_predicted"] == 2


def test_a_stream_ends_with_the_counts(client: TestClient) -> None:
    text = client.post("/infill", json={**BODY, "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(event["content"] for event in events) == "Hello"
    assert [event["stop"] for event in events] == [False, False, True]


def test_a_request_without_tokens_warms_the_cache(client: TestClient, chat: FakeChat) -> None:
    reply = client.post("/infill", json={**BODY, "n_predict": 0}).json()
    assert (reply["content"], chat.submitted[0].params.max_tokens) == ("", 1)


def test_the_end_of_a_middle_is_told(client: TestClient, chat: FakeChat) -> None:
    usage = Usage(1, 1, 0)
    for reason, stop, told in [
        (FinishReason.LENGTH, None, "limit"),
        (FinishReason.STOP, ";", "word"),
        (FinishReason.STOP, None, "eos"),
    ]:
        chat.script = [Delta("x", (72,), (), reason, usage, stop=stop)]
        assert client.post("/infill", json=BODY).json()["stop_type"] == told


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_a_suffix_is_after_the_middle(client: TestClient, chat: FakeChat, path: str) -> None:
    assert client.post(path, json=PROMPTS[path]).status_code == 200
    [sent] = chat.submitted
    assert (bytes(sent.prompt), sent.params.stop_token_ids) == (b"<a|b>", (0,))
    chat.submitted.clear()
    assert client.post(path, json={**PROMPTS[path], "prompt": ""}).status_code == 200
    assert bytes(chat.submitted[0].prompt) == b"<|b>"
    assert "insert" in client.get("/v1/models/fake").json()["capabilities"]


@pytest.mark.parametrize("path", PROMPTS)
def test_a_model_without_tokens_for_it_says_so(
    client: TestClient, chat: FakeChat, path: str
) -> None:
    chat.can_fill_in = False
    reply = client.post(path, json=PROMPTS[path])
    assert reply.status_code == 400
    assert "fill in the middle" in reply.text or "does not support insert" in reply.text
    assert chat.submitted == []


def test_a_suffix_needs_a_text_before_it(client: TestClient) -> None:
    reply = client.post("/v1/completions", json={"prompt": [1, 2], "suffix": "b"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "suffix")

"""An answer that speaks of a model's markers reaches the client of every API whole, also in a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlxserve.api.app import create_app
from tests.api.scripted_engine import ScriptedEngine

USER = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}}
FUNCTION = {"name": "look", "parameters": SCHEMA}
CODE = "```python\nSTART = '<think>'\nprint(START)\n```\nThat is all."
# What the model writes: (its thinking, the text of the answer).
ANSWERS = [
    ("", CODE),
    ("I print it.", CODE),
    ("I print it.", "The tag is `</think>`; after it the answer begins."),
    ("", "It writes `<tool_call>` first, and `</tool_call>` last."),
    ("", "It writes <tool_call>"),
    ("", "```json\n<tool_call>\n{\n```\nis how a call begins."),
]


@pytest.fixture(scope="module")
def scripted(scripted_chat: Any) -> Iterator[tuple[TestClient, ScriptedEngine]]:
    chat, engine = scripted_chat
    with TestClient(create_app(chat), base_url="http://127.0.0.1:8000") as client:
        yield client, engine


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, or its lines."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def joined(pieces: Iterable[dict[str, Any]], thinking: str, text: str) -> tuple[str, str]:
    """The thinking and the text of pieces, each under its name."""
    found = list(pieces)
    thought, said = ("".join(p.get(name) or "" for p in found) for name in (thinking, text))
    return thought, said


def chat(client: TestClient) -> Iterator[tuple[str, str]]:
    """(thinking, text) of a whole answer and of a stream."""
    path = "/v1/chat/completions"
    asked = {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]}
    choice = client.post(path, json=asked).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    yield joined([choice["message"]], "reasoning_content", "content")
    events = events_of(client.post(path, json={**asked, "stream": True}).text)
    pieces = [choice["delta"] for event in events for choice in event["choices"]]
    yield joined(pieces, "reasoning_content", "content")


def messages(client: TestClient) -> Iterator[tuple[str, str]]:
    asked: dict[str, Any] = {"messages": USER, "max_tokens": 1_000}
    asked["tools"] = [{"name": "look", "input_schema": SCHEMA}]
    asked["thinking"] = {"type": "adaptive"}
    blocks = client.post("/v1/messages", json=asked).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"][-len(blocks) :]
    yield joined(blocks, "thinking", "text")
    events = events_of(client.post("/v1/messages", json={**asked, "stream": True}).text)
    yield joined([event["delta"] for event in events if "delta" in event], "thinking", "text")


def responses(client: TestClient) -> Iterator[tuple[str, str]]:
    asked = {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]}
    output = client.post("/v1/responses", json=asked).json()["output"]
    items = [{item["type"]: item["content"][0]["text"]} for item in output]
    yield joined(items, "reasoning", "message")
    events = events_of(client.post("/v1/responses", json={**asked, "stream": True}).text)
    deltas = [{event["type"]: event["delta"]} for event in events if "delta" in event]
    yield joined(deltas, "response.reasoning_text.delta", "response.output_text.delta")


def ollama(client: TestClient) -> Iterator[tuple[str, str]]:
    asked: dict[str, Any] = {"model": "scripted", "messages": USER}
    asked["tools"] = [{"type": "function", "function": FUNCTION}]
    reply = client.post("/api/chat", json={**asked, "stream": False}).json()
    yield joined([reply["message"]], "thinking", "content")
    lines = events_of(client.post("/api/chat", json=asked).text)
    yield joined([line["message"] for line in lines], "thinking", "content")


@pytest.mark.parametrize("api", [chat, messages, responses, ollama])
@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_a_marker_in_an_answer_is_text(
    scripted: tuple[TestClient, ScriptedEngine],
    api: Callable[[TestClient], Iterator[tuple[str, str]]],
    answer: tuple[str, str],
) -> None:
    client, engine = scripted
    thought, text = answer
    engine.says = f"<think>\n{thought}\n</think>\n\n{text}" if thought else text
    assert list(api(client)) == [answer, answer]

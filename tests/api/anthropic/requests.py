"""Requests to Anthropic's routes, and their replies taken apart."""

from __future__ import annotations

import json
from typing import Any

import httpx2
from starlette.testclient import TestClient

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
HELLO: dict[str, Any] = {"model": "fake", "max_tokens": 10, "messages": [USER]}


def post(
    client: TestClient, path: str = MESSAGES, headers: dict[str, str] | None = None, **fields: Any
) -> httpx2.Response:
    body = {**HELLO, **fields}
    if path == COUNT:
        body.pop("max_tokens")
    return client.post(path, json=body, headers=headers or {})


def events_of(reply: httpx2.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    events = []
    for frame in reply.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def error_of(reply: httpx2.Response, status: int, kind: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    return body["error"]

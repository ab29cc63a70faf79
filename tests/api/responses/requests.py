"""Requests to `/v1/responses`, and their replies taken apart."""

from __future__ import annotations

import json
from typing import Any

from starlette.testclient import TestClient

from tests.api.fake_chat import FakeChat

PATH = "/v1/responses"
HELLO = {"input": "Hi"}


def events(text: str) -> list[dict[str, Any]]:
    """The data of each event; its name must be its type, and the numbers must rise by one."""
    blocks = text.removesuffix("\n\n").split("\n\n")
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
    return found


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    reply = client.post(PATH, json=fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def said(chat: FakeChat) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in chat.rendered[-1].messages]

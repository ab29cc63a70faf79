"""No field is silently dropped: each works, is refused by name, is harmless, or is warned about."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from mlxserve.api.app import create_app
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.request_body import INERT
from mlxserve.api.errors import speaks_ollama
from tests.api.fake_chat import FakeChat

USER = {"role": "user", "content": "x"}
SMALLEST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/infill": {"input_prefix": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/api/chat": {"model": "fake", "messages": [USER]},
    "/api/generate": {"model": "fake", "prompt": "x"},
    "/api/embed": {"model": "fake", "input": "x"},
    "/api/embeddings": {"model": "fake", "prompt": "x"},
    "/api/show": {"model": "fake"},
    "/api/pull": {"model": "fake"},
    "/v1/prefixes/{name}": {"prompt": "x"},
    "/api/v1/cache/resize": {"num_pages": 64},
    "/api/v1/models/load": {"model": "fake"},
    "/api/v1/models/unload": {"model": "fake"},
    "/api/v1/render": {"texts": ["x"]},
    "/api/v1/documents": {"name": "x", "data": "eA=="},
    "/api/v1/cache/forget": {"conversations": [[USER]]},
}
# Those of chats need a chat, and those of tools a server of tools: test_chats.py and test_tools.py in tests/api/native.
# Those of downloads and saved prompts are for the server's own user: tests/api/test_downloads.py, test_saved_prompts.py.
_ELSEWHERE = (
    *("/api/v1/chats", "/api/v1/tools", "/api/v1/downloads", "/api/v1/models/use"),
    "/api/v1/prompts",
)
ROUTES = {
    route.path: route
    for route in create_app(FakeChat()).routes
    if isinstance(route, BodyRoute) and not route.path.startswith(_ELSEWHERE)
}
NOT_YET = [
    (path, name, harmless)
    for path, route in ROUTES.items()
    for name, harmless in route.body.NOT_YET.items()
]
OTHERS = ({"something": "else"}, ["else"], "else", 7)


def send(client: TestClient, path: str, **fields: Any) -> httpx2.Response:
    [method] = ROUTES[path].methods or ()
    url = path.replace("{name}", "p")
    return client.request(method, url, json={**SMALLEST[path], **fields})


def test_every_route_with_a_body_has_a_smallest_body() -> None:
    assert SMALLEST.keys() == ROUTES.keys()


def test_the_smallest_body_needs_no_warning(client: TestClient) -> None:
    for path in SMALLEST:
        reply = send(client, path)
        assert reply.status_code in (200, 201), reply.text
        assert "x-mlxserve-warning" not in reply.headers, path


@pytest.mark.parametrize(("path", "name", "harmless"), NOT_YET)
def test_unsupported_fields_are_refused_by_name_unless_they_ask_for_nothing(
    client: TestClient, chat: FakeChat, path: str, name: str, harmless: tuple[object, ...]
) -> None:
    for value in harmless:
        reply = send(client, path, **{name: value})
        assert reply.status_code == 200, reply.text
        assert "x-mlxserve-warning" not in reply.headers
    chat.submitted.clear()
    for value in OTHERS:
        reply = send(client, path, **{name: value})
        assert reply.status_code == 400, (value, reply.text)
        error = reply.json()["error"]
        message = error if speaks_ollama(path) else error["message"]
        assert message.startswith(f"{name}: ")
    assert chat.submitted == []


def test_identifying_fields_are_accepted_without_a_warning(client: TestClient) -> None:
    for path in SMALLEST:
        for name in INERT:
            reply = send(client, path, **{name: {"a": "b"} if name == "metadata" else "a"})
            assert reply.status_code in (200, 201), (name, reply.text)
            assert "x-mlxserve-warning" not in reply.headers, name


def test_an_unknown_field_is_named(client: TestClient) -> None:
    for path in SMALLEST:
        reply = send(client, path, frobnicate=1)
        assert reply.status_code in (200, 201), path
        assert reply.headers["x-mlxserve-warning"] == "ignored unknown fields: frobnicate", path

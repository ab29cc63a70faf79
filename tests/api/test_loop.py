"""The event loop does nothing that takes long: all routes are walked with large requests and replies.

What is not constant time is `Work`, which the door does elsewhere in its client's turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from mlxserve.api import model_routes
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.api.errors import MAX_ENCODED_IN_LOOP, is_large, json_response
from mlxserve.api.native.tokenization import Tokenization
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import FakeChat
from tests.api.loop_meter import MAX_ENCODED, MAX_LINES, LoopMeter
from tests.api.smallest_bodies import ENDLESS, SmallestBodies, filled

KEY = "an-admin-key-of-the-tests"
# These send events until the server or the client ends, where there is a chat or a download.
FOLLOWED = (*ENDLESS, "/api/v1/chats/{id}/events", "/api/v1/downloads")
LARGE = 100_000  # characters
# Routes that read what is known, in constant time or by the number of models.
WITHOUT_WORK = {
    *(("GET", "/health"), ("GET", "/ready"), ("GET", "/version"), ("GET", "/api/version")),
    *(("GET", "/api/tags"), ("GET", "/api/ps"), ("GET", "/api/v1/models")),
    *(("GET", "/api/v1/requests"), ("GET", "/api/v1/kv/stats"), ("POST", "/api/v1/cache/reset")),
    *(("GET", "/v1/prefixes"), ("GET", "/v1/prefixes/{name}"), ("DELETE", "/v1/prefixes/{name}")),
    *(("GET", "/v1/responses/{id}"), ("DELETE", "/v1/responses/{id}")),
    *(("POST", "/v1/responses/{id}/cancel"), ("GET", "/v1/responses/{id}/input_items")),
    ("DELETE", "/api/v1/chats/{id}/answers/{message}"),  # of an answer that has ended
    ("GET", "/api/v1/downloads"),  # waits for a process of its own
}


@pytest.fixture(autouse=True)
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "MLXSERVE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))


@contextmanager
def serving() -> Iterator[TestClient]:
    chat = FakeChat(max_model_len=4 * LARGE)
    usage = Usage(1, LARGE, 0)
    chat.script = [
        Delta("x" * (LARGE // 10), (1,)),
        *[Delta("x" * (LARGE // 10), (1,), (), None) for _ in range(8)],
        Delta("x" * (LARGE // 10), (1,), (), FinishReason.STOP, usage),
    ]
    chat.embed = many_numbers  # type: ignore[method-assign]
    chat.release()
    app = create_app(chat, access=AccessPolicy(admin_keys=[KEY]))  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {KEY}"}
    with TestClient(app, base_url="http://127.0.0.1:8000", headers=headers) as client:
        yield client


async def many_numbers(texts: Any, **_options: Any) -> list[list[float]]:
    return [[0.123456789] * LARGE for _ in texts]


@pytest.fixture
def client() -> Iterator[TestClient]:
    with serving() as client:
        yield client


@pytest.fixture
def meter(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> LoopMeter:
    return LoopMeter(client, monkeypatch)


def requests_of(client: TestClient) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """(method, path, large body) of each route."""
    document = client.get("/openapi.json").json()
    bodies = SmallestBodies(document, "fake")
    names = bodies.names()
    for path, operations in document["paths"].items():
        for method in map(str.upper, operations):
            name = names.get((method, path))
            yield method, path, None if name is None else large_body(bodies, name)


# The field of a body in which a large text may stand, where it is not the prompt's.
TEXTS = {
    "AnswerRequest": "text",
    "CallRequest": "arguments",
    "ChatChange": "system",
    "MessageChange": "text",
    "NewChatRequest": "system",
    "NewMessageRequest": "text",
    "PrefixRequest": "prompt",
    "TokenizeRequest": "prompt",
}


def large_body(bodies: SmallestBodies, name: str) -> dict[str, Any]:
    text = "a b " * (LARGE // 4)
    if name == "RenderRequest":
        return {"texts": ["*a* `b` $c$\n\n" * 500] * 4}
    if name == "DetokenizeRequest":
        return {"tokens": [97] * LARGE}
    if name in TEXTS:
        return {**bodies.body(name), TEXTS[name]: text}
    for field in ("messages", "prompt", "input", "documents", "input_prefix"):
        if bodies.has_field(name, field):
            return bodies.with_text(name, field, text)
    return bodies.body(name)


def prepare(client: TestClient) -> None:
    """A chat, a stored response and a prefix, all of them large, where the paths of the walk look."""
    text = "a b " * (LARGE // 4)
    assert client.post("/api/v1/chats", json={"title": "x", "system": text}).json()["id"] == 1
    for _ in range(3):
        question = {"role": "user", "text": text}
        client.post("/api/v1/chats/1/messages", json=question).raise_for_status()
    # An answer, whose text the walk changes.
    client.post("/api/v1/chats/1/messages", json={"role": "assistant"}).raise_for_status()
    client.put("/v1/prefixes/1", json={"prompt": text}).raise_for_status()


def send(client: TestClient, method: str, path: str, body: dict[str, Any] | None) -> int:
    path = filled(path).replace("messages/1", "messages/4").replace("models/1", "models/fake")
    return client.request(method, path, json=body).status_code


def test_no_route_does_much_in_the_loop_and_all_work_is_at_the_door(
    client: TestClient, meter: LoopMeter
) -> None:
    prepare(client)
    # What deletes comes last, and what has a body is sent as a stream as well.
    walked = sorted(requests_of(client), key=lambda each: each[0] == "DELETE")
    assert len(walked) > 60
    without_work = set()
    for method, path, body in walked:
        if path in FOLLOWED:
            continue
        for more in ({}, {"stream": True})[: 1 + (body is not None and "/v1/" in path)]:
            with meter.measuring():
                status = send(client, method, path, body if body is None else {**body, **more})
            assert status < 500, (method, path, status)
            meter.check(f"{method} {path} {more}")
            assert all(client for client, _ in meter.works), path
            if not meter.works:
                without_work.add((method, path))
    assert without_work <= WITHOUT_WORK


def test_a_stored_response_is_read_and_listed_beside_the_loop(
    client: TestClient, meter: LoopMeter
) -> None:
    text = "a b " * (LARGE // 4)
    tools = [{"type": "function", "name": f"tool{n}", "description": text} for n in range(3)]
    body = {"input": text, "instructions": text, "tools": tools}
    for stream in (False, True):
        with meter.measuring():
            reply = client.post("/v1/responses", json={**body, "stream": stream})
        reply.raise_for_status()
        meter.check(f"a response with stream={stream}")
    stored = client.post("/v1/responses", json=body).json()["id"]
    for path in (f"/v1/responses/{stored}", f"/v1/responses/{stored}/input_items"):
        with meter.measuring():
            client.get(path).raise_for_status()
        meter.check(path)
        assert meter.works, path


def test_a_value_is_large_if_its_json_is(client: TestClient) -> None:
    many = MAX_ENCODED_IN_LOOP // 32 + 1
    for value in (
        "x" * MAX_ENCODED_IN_LOOP,
        [1] * many,
        {"x" * MAX_ENCODED_IN_LOOP: 1},
        [[[0] * many]],
    ):
        assert is_large(value)
        assert is_large({"a": [value]})
    for value in ("", [], {}, None, 1.5, True, ["x" * 1_000] * 50, {"a": {"b": ["c"]}}):
        assert not is_large(value)


# ---- routes that the walk must find


class Careless(Tokenization):
    """With routes that work in the loop."""

    def routes(self) -> list[Route]:
        return [*super().routes(), Route("/counts", self.counts), Route("/encodes", self.encodes)]

    async def counts(self, _request: Request) -> Response:
        """Runs many lines."""
        total = 0
        for number in range(MAX_LINES):
            total += number
        return json_response({"total": total})

    async def encodes(self, _request: Request) -> Response:
        """Sends a text that it has encoded."""
        from mlxserve.api import errors

        return Response(errors.encode_json("x" * MAX_ENCODED))


@pytest.mark.parametrize("path", ["/counts", "/encodes"])
def test_the_walk_finds_a_route_that_works_in_the_loop(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_routes, "Tokenization", Careless)
    with serving() as client:
        meter = LoopMeter(client, monkeypatch)
        with meter.measuring():
            assert client.get(path).status_code == 200
        with pytest.raises(AssertionError, match="in the loop"):
            meter.check(path)

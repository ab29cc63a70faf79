"""No request outlives its reply, whatever it is: not in a table, and not as garbage.

A body has up to 32 MiB. What is in a cycle of references stays until a collection, and one of all
objects comes after 70,000 of them have been made.
"""

from __future__ import annotations

import gc
import json
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from starlette.types import Scope

from mlxserve.api.access import gate
from mlxserve.api.bodies.body_route import BodyRoute
from tests.api.conftest import Serve
from tests.api.smallest_bodies import ENDLESS, filled
from tests.api.test_body_routes import MOST_CHARACTERS, STRANGE, UNKNOWN, Server
from tests.api.test_body_routes import _own_files as _own_files
from tests.api.test_body_routes import server as server
from tests.waiting import wait_until

SECONDS = 5.0


class Mark:
    """Lives as long as the request in whose scope it is."""


class Released:
    """The requests that were let in, by their marks."""

    def __init__(self) -> None:
        self._marks: list[weakref.ref[Mark]] = []

    def enter(self, scope: Scope) -> None:
        mark = scope["test.mark"] = Mark()
        self._marks.append(weakref.ref(mark))

    def wait(self, what: object) -> None:
        wait_until(lambda: self._marks, SECONDS, f"{what} was not let in")

    def check(self, what: object) -> None:
        self.wait(what)
        wait_until(lambda: not any(mark() for mark in self._marks), SECONDS, f"{what} is kept")
        self._marks.clear()


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[Released]:
    """Without garbage collection: references alone decide."""
    released, tasks_of = Released(), gate.tasks_of

    def entered(scope: Scope) -> AbstractContextManager[None]:
        released.enter(scope)
        return tasks_of(scope)

    monkeypatch.setattr(gate, "tasks_of", entered)
    gc.collect()
    gc.disable()
    try:
        yield released
    finally:
        gc.enable()


Body = Callable[[Server, BodyRoute], Any]
BODIES: dict[str, Body] = {
    "the smallest": lambda server, route: server.smallest(route),
    "a stream": lambda server, route: {**server.smallest(route), "stream": True},
    "an unknown field": lambda server, route: {**server.smallest(route), UNKNOWN: [1]},
    "another model": lambda server, route: {**server.smallest(route), "model": STRANGE},
    "a wrong type": lambda server, route: {**server.smallest(route), "model": 5, "title": 5},
    "no field": lambda server, route: {},
    "no object": lambda server, route: [],
    "a long text": lambda server, route: server.bodies.with_text(
        route.body.__name__, "prompt", "x" * (MOST_CHARACTERS + 1)
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_request_with_a_body_is_released(server: Server, released: Released, name: str) -> None:
    for route in server.routes.values():
        reply = server.client.request(
            route.method, filled(route.path), json=BODIES[name](server, route)
        )
        reply.close()
        released.check((route.method, route.path, reply.status_code))


def test_a_request_without_a_body_is_released(server: Server, released: Released) -> None:
    document = server.client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            if path in ENDLESS or (method.upper(), path) in server.routes:
                continue
            reply = server.client.request(method.upper(), filled(path))
            released.check((method, path, reply.status_code))


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
REQUESTS: dict[str, dict[str, Any]] = {
    "an answer": CHAT,
    "a stream": {**CHAT, "stream": True},
    "two answers": {**CHAT, "n": 2, "logprobs": True},
    "tools": {**CHAT, "tools": [TOOL], "stream": True},
    "a schema": {**CHAT, "response_format": {"type": "json_object"}},
    "a prompt that is too long": {"messages": [{"role": "user", "content": "x y " * 9_000}]},
    "a picture": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        ]
    },
    "a grammar that is none": {**CHAT, "structured_outputs": {"grammar": "x"}},
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_a_request_to_a_model_is_released(
    serve_real: Serve, released: Released, name: str, leaves: bool
) -> None:
    body = json.dumps(REQUESTS[name]).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serve_real() as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=SECONDS) as peer:
            peer.sendall(head + body)
            while not leaves and peer.recv(65_536):
                pass
            released.wait(name)
        released.check(name)

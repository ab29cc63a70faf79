"""What holds the event loop is measured, named by its route, and charged to its client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from mlxserve.api import model_routes
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.api.errors import json_response
from mlxserve.api.native.tokenization import Tokenization
from mlxserve.api.server.loop_watch import CONNECTIONS, LoopWatch, tasks_of
from mlxserve.helpers.fair_executor import FairExecutor
from tests.api.fake_chat import FakeChat
from tests.waiting import wait_until

SCOPE = {"type": "http", "method": "GET", "path": "/chats/7", "headers": []}


async def nothing(_request: Request) -> Response:
    return Response()


class Loop:
    """An event loop on a thread, with a watch whose clock gains a second with each look at it."""

    def __init__(self) -> None:
        self.charged: list[tuple[Any, float]] = []
        self.watch = LoopWatch(
            [Route("/health", nothing), Route("/chats/{id}", nothing)],
            lambda scope, seconds: self.charged.append((scope["path"], seconds)),
            tick=0.001,
            clock=map(float, count()).__next__,
        )

    def held_by(self, work: Callable[[Callable[[], None]], Any]) -> None:
        """Look while `work`, which gets a function that blocks, holds the loop."""
        is_held, may_go_on = threading.Event(), threading.Event()

        def block() -> None:
            is_held.set()
            assert may_go_on.wait(30)

        async def main() -> None:
            self.watch.attach()
            await work(block)

        loop = threading.Thread(target=asyncio.run, args=(main(),))
        loop.start()
        assert is_held.wait(30)
        looking = threading.Thread(target=self.watch.look)
        looking.start()
        wait_until(lambda: self.watch.blocked.seconds >= 3)
        may_go_on.set()
        looking.join(30)
        loop.join(30)
        self.watch.stop()


def test_a_route_that_holds_the_loop_is_named_and_its_client_charged() -> None:
    loop = Loop()

    async def work(block: Callable[[], None]) -> None:
        with tasks_of(SCOPE):
            block()

    loop.held_by(work)
    [(route, seconds)] = loop.watch.seconds_by_route.items()
    assert route == "GET /chats/{id}"
    assert {path for path, _ in loop.charged} == {"/chats/7"}
    assert sum(charged for _, charged in loop.charged) == seconds == loop.watch.blocked.seconds
    assert loop.watch.blocked.longest == seconds
    assert loop.watch.blocked.longest_route == route


def test_the_tasks_of_a_request_are_its_own_and_those_of_others_are_not() -> None:
    loop = Loop()

    async def inner(block: Callable[[], None]) -> None:
        block()

    async def work(block: Callable[[], None]) -> None:
        with tasks_of(SCOPE):
            await asyncio.create_task(inner(block))

    loop.held_by(work)
    assert list(loop.watch.seconds_by_route) == ["GET /chats/{id}"]
    other = Loop()
    other.held_by(inner)
    assert list(other.watch.seconds_by_route) == [CONNECTIONS]
    assert not other.charged


def test_a_path_that_no_route_has_is_one_label() -> None:
    loop = Loop()

    async def work(block: Callable[[], None]) -> None:
        with tasks_of({**SCOPE, "path": "/of/an/attacker"}):
            block()

    loop.held_by(work)
    assert list(loop.watch.seconds_by_route) == ["unknown"]


def test_a_loop_that_waits_is_not_held() -> None:
    async def main() -> None:
        watch = LoopWatch([], lambda *_: None, tick=30.0)
        watch.attach()
        assert await asyncio.to_thread(watch.look)
        assert watch.seconds_by_route == {}
        watch.stop()

    asyncio.run(main())


class Holding(Tokenization):
    """With a route that holds the loop until another thread has been told."""

    def routes(self) -> list[Route]:
        return [*super().routes(), Route("/hold/{id}", self.hold)]

    async def hold(self, _request: Request) -> Response:
        """Holds the loop."""
        assert CHARGED.wait(30)
        return json_response({})


CHARGED = threading.Event()


def test_metrics_and_health_tell_and_the_client_is_last(
    chat: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_routes, "Tokenization", Holding)
    charged: list[tuple[str, float]] = []

    def charge(_executor: FairExecutor, client: str, seconds: float) -> None:
        charged.append((client, seconds))
        CHARGED.set()

    monkeypatch.setattr(FairExecutor, "charge", charge)
    key = "a-key-of-the-tests"
    app = create_app(chat, access=AccessPolicy(admin_keys=[key]))  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {key}"}
    with TestClient(app, base_url="http://127.0.0.1:8000", headers=headers) as client:
        assert client.get("/hold/1").status_code == 200
        health = client.get("/health").json()["event_loop"]
        metrics = client.get("/metrics").text
    assert health["longest_route"] == "GET /hold/{id}"
    assert health["blocked_seconds"] >= health["longest_seconds"] > 0
    [family] = [
        each for each in text_string_to_metric_families(metrics) if "loop_blocked" in each.name
    ]
    assert family.samples[0].name == "mlxserve:loop_blocked_seconds_total"
    assert {"route": "GET /hold/{id}"} in [sample.labels for sample in family.samples]
    assert charged
    assert all(client and seconds > 0 for client, seconds in charged)

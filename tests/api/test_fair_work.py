"""Requests at the executor: whose turn it is, what is refused, and what ends when a client leaves."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from mlxserve.api import fair_work
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.helpers import fair_executor
from mlxserve.helpers.fair_executor import (
    MEDIUM_SECONDS,
    SHORT_SECONDS,
    UNCOUNTED_BODY,
    FairExecutor,
)
from mlxserve.helpers.work import Work
from mlxserve.request import FinishReason
from mlxserve.text.costs import CHARACTERS_PER_SECOND
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.server.process import HELLO
from tests.api.serving import StartServer
from tests.waiting import wait_until

TOKENIZE = "/tokenize"
LONG_TEXT = "x" * int(2 * MEDIUM_SECONDS * CHARACTERS_PER_SECOND)  # for a lane with one thread
KEYS = ("evil-evil-evil-evil", "good-good-good-good")


class Encoder:
    """Encodes texts once it may, and notes how they begin."""

    def __init__(self, chat: FakeChat) -> None:
        self.may_encode = threading.Event()
        self.begun: list[str] = []
        chat.encode = self.encode  # type: ignore[method-assign]

    def encode(self, text: str) -> list[int]:
        self.begun.append(text[0])
        assert self.may_encode.wait(60)
        return [1]


def ask(url: str, text: str, key: str | None = None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    reply = httpx.post(url + TOKENIZE, json={"prompt": text}, headers=headers, timeout=60)
    return reply.status_code


def test_a_key_with_many_requests_lets_another_ones_pass(
    start_server: StartServer, chat: FakeChat
) -> None:
    encoder = Encoder(chat)
    url = start_server(access=AccessPolicy(api_keys=KEYS)).url
    with ThreadPoolExecutor(8) as pool:
        evil = [pool.submit(ask, url, f"e{LONG_TEXT}", KEYS[0]) for _ in range(6)]
        wait_until(lambda: chat.executor.num_waiting == 5 and encoder.begun == ["e"])
        good = pool.submit(ask, url, f"g{LONG_TEXT}", KEYS[1])
        wait_until(lambda: chat.executor.num_waiting == 6)
        encoder.may_encode.set()
        assert {each.result() for each in (*evil, good)} == {200}
    assert "g" in encoder.begun[:3]


def test_a_client_that_leaves_takes_its_waiting_work_along(
    start_server: StartServer, chat: FakeChat
) -> None:
    encoder = Encoder(chat)
    server = start_server()
    body = json.dumps({"prompt": f"e{LONG_TEXT}"}).encode()
    peers = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(4)]
    head = f"POST {TOKENIZE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for peer in peers:
        peer.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    wait_until(lambda: chat.executor.num_waiting == 3 and encoder.begun == ["e"])
    for peer in peers:
        peer.close()
    wait_until(lambda: chat.executor.num_waiting == 0)
    encoder.may_encode.set()
    assert ask(server.url, "good") == 200
    assert encoder.begun == ["e", "g"]
    wait_until(lambda: chat.executor.bodies.num_taken == 0)


def test_a_key_with_too_much_waiting_gets_429_and_others_are_served(
    start_server: StartServer, chat: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_executor, "MAX_CLIENT_JOBS", 2)
    encoder = Encoder(chat)
    url = start_server(access=AccessPolicy(api_keys=KEYS)).url
    with ThreadPoolExecutor(8) as pool:
        evil = [pool.submit(ask, url, f"e{LONG_TEXT}", KEYS[0]) for _ in range(3)]
        wait_until(lambda: chat.executor.num_waiting == 2 and encoder.begun == ["e"])
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        reply = httpx.post(url + TOKENIZE, json={"prompt": "e"}, headers=headers, timeout=60)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "too_many_requests")
        assert int(reply.headers["retry-after"]) >= 1
        encoder.may_encode.set()
        assert ask(url, "good", KEYS[1]) == 200
        assert {each.result() for each in evil} == {200}


def test_too_much_waiting_of_all_gets_503(
    start_server: StartServer, chat: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_executor, "MAX_JOBS", 2)
    encoder = Encoder(chat)
    url = start_server().url
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, url, f"e{LONG_TEXT}") for _ in range(3)]
        wait_until(lambda: chat.executor.num_waiting == 2 and encoder.begun == ["e"])
        reply = httpx.post(url + TOKENIZE, json={"prompt": "x"}, timeout=60)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "queue_full")
        assert int(reply.headers["retry-after"]) >= 1
        encoder.may_encode.set()
        assert {each.result() for each in asked} == {200}


def declared(port: int, size: int) -> socket.socket:
    """A connection that has sent the head of a request with a body of this size."""
    peer = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST {TOKENIZE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    peer.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode() + b"{")
    return peer


def test_bodies_have_a_memory_together_and_small_ones_pass(
    start_server: StartServer, chat: FakeChat
) -> None:
    chat.executor = FairExecutor(body_memory=8 * UNCOUNTED_BODY)
    server = start_server()
    held = declared(server.port, 2 * UNCOUNTED_BODY)  # takes one, and 7 are left
    wait_until(lambda: chat.executor.bodies.num_taken == UNCOUNTED_BODY)
    refused = declared(server.port, 3 * UNCOUNTED_BODY)
    reply = refused.recv(1_000).decode()
    assert reply.startswith("HTTP/1.1 503")
    assert "retry-after: 1\r\n" in reply
    assert ask(server.url, "x" * (UNCOUNTED_BODY // 2)) == 200
    held.close()
    wait_until(lambda: chat.executor.bodies.num_taken == 0)
    assert ask(server.url, "x" * 2 * UNCOUNTED_BODY) == 200
    wait_until(lambda: chat.executor.bodies.num_taken == 0)
    refused.close()


def test_a_body_without_a_length_takes_memory_as_it_arrives(
    start_server: StartServer, chat: FakeChat
) -> None:
    chat.executor = FairExecutor(body_memory=8 * UNCOUNTED_BODY)
    server = start_server()

    def pieces() -> Any:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"x" * UNCOUNTED_BODY
        yield b'"}'

    headers = {"content-type": "application/json"}
    try:
        reply = httpx.post(server.url + TOKENIZE, content=pieces(), headers=headers, timeout=60)
    except httpx.TransportError:  # it was refused while it was sent
        pass
    else:
        assert reply.status_code == 503
    wait_until(lambda: chat.executor.bodies.num_taken == 0)


def test_an_answer_that_has_begun_holds_no_memory_of_its_body(
    start_server: StartServer, chat: FakeChat
) -> None:
    usage = Usage(1, 1, 0)
    chat.script = [Delta("one", (1,)), HOLD, Delta("two", (2,), (), FinishReason.STOP, usage)]
    url = start_server().url
    body = {"messages": HELLO, "metadata": {"x": "x" * 2 * UNCOUNTED_BODY}, "stream": True}
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        next(lines)
        assert chat.executor.bodies.num_taken == 0
        chat.release()
        assert "data: [DONE]" in list(lines)


async def run_work(executor: FairExecutor, seconds: float, work: Callable[[], Any]) -> Any:
    """The result of a request's work at this executor, whose client stays."""

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "client": ("127.0.0.1", 1)}
    fair_work.enter(scope, executor)
    try:
        return await fair_work.run_fairly(Request(scope, receive), Work(seconds, work))
    finally:
        fair_work.leave(scope)


def test_short_work_that_continues_stays_in_one_job_and_longer_work_changes_its_lane() -> None:
    executor = FairExecutor()
    threads: list[str] = []

    def part(*seconds: float) -> Any:
        """Work that is followed by parts of these seconds."""
        threads.append(threading.current_thread().name.rpartition("_")[0])
        if not seconds:
            return "done"
        return Work(seconds[0], partial(part, *seconds[1:])).then(lambda text: f"({text})")

    cases = {
        (0.01, 0.01): ["short", "short", "short"],
        (0.01, 2 * SHORT_SECONDS): ["short", "short", "medium"],
        (2 * MEDIUM_SECONDS, 0.01): ["short", "long", "long"],
        (2 * SHORT_SECONDS, 0.9 * MEDIUM_SECONDS): ["short", "medium", "medium"],
    }
    for parts, lanes in cases.items():
        threads.clear()
        result = asyncio.run(run_work(executor, 0.001, partial(part, *parts)))
        assert result == "(" * len(parts) + "done" + ")" * len(parts)
        assert threads == [f"mlxserve-{lane}" for lane in lanes], parts
    executor.close()


def test_a_part_that_is_too_long_for_the_lane_waits_for_its_turn() -> None:
    executor = FairExecutor()
    order: list[str] = []
    may_go_on = threading.Event()

    def long(name: str) -> None:
        order.append(name)
        assert may_go_on.wait(60)

    def parsed(name: str) -> Work[None]:
        order.append(f"{name} parsed")
        return Work(2 * SHORT_SECONDS, partial(long, name))

    async def ask_both() -> None:
        asking = [
            asyncio.ensure_future(run_work(executor, 0.0, partial(parsed, name))) for name in "ab"
        ]
        await asyncio.to_thread(wait_until, lambda: executor.num_waiting == 1 and len(order) == 3)
        may_go_on.set()
        await asyncio.gather(*asking)

    asyncio.run(ask_both())
    assert sorted(order) == ["a", "a parsed", "b", "b parsed"]
    executor.close()


def test_a_result_is_made_of_work_that_continues_and_of_work_that_does_not() -> None:
    executor = FairExecutor()
    doubled = Work(0.0, lambda: Work(0.0, lambda: 2).then(lambda two: two + 1))
    assert asyncio.run(run_work(executor, 0.0, lambda: doubled.then(lambda three: 2 * three))) == 6
    executor.close()

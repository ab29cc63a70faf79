"""Many clients of a real engine: some leave, some do not read, some have other keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.chat.text_model import TextModel
from tests.api.serving import Running, Serve
from tests.waiting import wait_until

CHAT, MESSAGES, EMBEDDINGS = "/v1/chat/completions", "/v1/messages", "/v1/embeddings"
NUM_LEAVING = 200
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


@pytest.fixture(scope="module")
def server(serve_real: Callable[..., Any]) -> Iterator[Any]:
    with serve_real() as running:
        yield running


def request_bytes(path: str, body: dict[str, Any], key: str | None = None) -> bytes:
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head += [f"Content-Length: {len(data)}", *([f"Authorization: Bearer {key}"] if key else [])]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def long_answer(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"messages": messages, "max_tokens": 1_500, "ignore_eos": True, **fields}


def ask(server: Any, max_tokens: int) -> dict[str, Any]:
    body = long_answer(max_tokens=max_tokens)
    return httpx.post(server.url + CHAT, json=body, timeout=60).json()


def num_tasks(server: Any) -> int:
    return len(asyncio.all_tasks(server.server.servers[0].get_loop()))


def is_at_rest(chat: Any) -> bool:
    stats = asyncio.run(chat.engine.snapshot()).stats
    return not (stats.scheduler.num_running or stats.scheduler.num_waiting or stats.pool.num_used)


def leave(port: int, number: int) -> None:
    """Send a request and leave at a random moment: before, during or after its answer."""
    draw = random.Random(number)
    words = " ".join(str(draw.random()) for _ in range(draw.choice([1, 60])))
    message = {"role": "user", "content": words}
    path, body = draw.choice(
        [
            (CHAT, long_answer(messages=[message], stream=True)),
            (CHAT, long_answer(messages=[message])),
            (MESSAGES, {"messages": [message], "max_tokens": 1_500, "stream": True}),
            (EMBEDDINGS, {"input": [words] * 20}),
        ]
    )
    data = request_bytes(path, body)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
        if draw.random() < 0.5:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if draw.random() < 0.2:
            peer.sendall(data[: draw.randrange(1, len(data))])
            return
        peer.sendall(data)
        if body.get("stream"):
            for _ in range(draw.choice([0, 0, 1, 2, 5])):
                peer.recv(1_000)


@pytest.mark.slow
def test_a_client_that_leaves_at_any_moment_leaves_nothing_running(
    server: Running, real_chat: TextModel
) -> None:
    before = num_tasks(server)
    with ThreadPoolExecutor(40) as clients:
        list(clients.map(lambda number: leave(server.port, number), range(NUM_LEAVING)))
    wait_until(lambda: is_at_rest(real_chat), 1.0)
    wait_until(lambda: num_tasks(server) <= before, 1.0)
    asyncio.run(real_chat.engine.check())
    assert ask(server, 2)["usage"]["completion_tokens"] == 2


def test_a_slow_reader_does_not_slow_others(server: Running) -> None:
    """Other clients do not wait for one that does not read; it later gets its whole answer."""
    wordy = {"logprobs": True, "top_logprobs": 20, "max_tokens": 250}
    stalled = request_bytes(CHAT, long_answer(stream=True, **wordy))
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        slow.settimeout(60)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(stalled)
        with ThreadPoolExecutor(4) as others:
            replies = list(others.map(lambda _: ask(server, 50), range(4)))
        assert [reply["usage"]["completion_tokens"] for reply in replies] == [50] * 4
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_000_000)
        received = b""
        while b"data: [DONE]" not in received[-200:]:
            piece = slow.recv(1_000_000)
            assert piece, "the slow reader was cut off"
            received += piece
    assert received.count(b'"content":') >= 250


def test_two_keys_share_no_page(serve_real: Serve, real_chat: TextModel) -> None:
    """The same prompt at the same time under two keys is computed twice, on separate pages."""
    alice, bob = "a" * 32, "b" * 32
    messages = [{"role": "user", "content": "The same words again and again. " * 20}]
    body = long_answer(messages=messages, stream=True)
    with (
        serve_real(access=AccessPolicy(api_keys=[alice, bob])) as server,
        contextlib.ExitStack() as open_,
    ):
        for key in (alice, bob, alice, bob):
            peer = open_.enter_context(socket.create_connection(("127.0.0.1", server.port), 60))
            peer.sendall(request_bytes(CHAT, body, key))
            peer.recv(100_000)
            while b"content" not in (piece := peer.recv(100_000)):
                assert piece, "the answer was cut off"
        views = asyncio.run(real_chat.engine.snapshot()).requests
        pages: dict[str, set[int]] = {}
        cached: dict[str, list[int]] = {}
        for view in views:
            pages.setdefault(view.client, set()).update(view.page_table)
            cached.setdefault(view.client, []).append(view.num_cached)
    assert len(views) == 4
    (of_one, of_other), counts = pages.values(), list(cached.values())
    assert not of_one & of_other
    for first, second in counts:
        assert first == 0  # nothing of the other key's
        assert second > 100  # all of its own
    wait_until(lambda: is_at_rest(real_chat))


def test_no_thread_outlives_a_server(serve_real: Serve) -> None:
    before = set(threading.enumerate())
    with serve_real() as running:
        assert httpx.get(running.url + "/health", timeout=60).status_code == 200
        assert httpx.get(running.url + "/api/v1/chats", timeout=60).status_code == 200
    assert not running.thread.is_alive()

    def others() -> set[str]:
        threads = set(threading.enumerate()) - before
        return {thread.name for thread in threads if "asyncio" not in thread.name}

    wait_until(lambda: not others(), complaint="a thread of the server goes on")

"""Attacks on the work before the engine, and what another client asks for beside each.

An attack is a number of requests on connections of their own, sent at once by threads that wait for the
replies.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.api.server.process import CHAT, HELLO, Process

EMBEDDINGS = "/v1/embeddings"
_SECONDS = 300.0  # for any reply
_numbers = itertools.count()


@dataclass(slots=True)
class Attack:
    """Requests under way."""

    num_sent: int
    statuses: list[int] = field(default_factory=list)  # of the replies so far


@contextmanager
def tiny_messages(server: Process, count: int, num_messages: int) -> Iterator[Attack]:
    """Requests of many messages that take a second each to read and render, and are refused."""
    body = {"messages": [{"role": "user", "content": "hi"}] * num_messages, "max_tokens": 1}
    with _posted(server, [body] * count) as attack:
        yield attack


@contextmanager
def schema_bombs(server: Process, count: int) -> Iterator[Attack]:
    """Sources that take longer to compile than they may, each another one."""
    bodies = [
        {
            "messages": HELLO,
            "max_tokens": 1,
            "structured_outputs": {"regex": f"(a{{1000}}){{{2000 + next(_numbers)}}}"},
        }
        for _ in range(count)
    ]
    with _posted(server, bodies) as attack:
        yield attack


@contextmanager
def unfinished_bodies(server: Process, count: int, size: int) -> Iterator[Attack]:
    """All but the last byte of each body."""
    attack = Attack(count)
    with ExitStack() as stack:
        sending = [
            threading.Thread(target=_send_unfinished, args=(server, size, stack, attack))
            for _ in range(count)
        ]
        for thread in sending:
            thread.start()
        for thread in sending:
            thread.join(_SECONDS)
        yield attack


def _send_unfinished(server: Process, size: int, stack: ExitStack, attack: Attack) -> None:
    peer = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with suppress(OSError):  # the server refuses it, or does not read it
        peer.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode() + b'{"x": "')
        piece = b"x" * (1 << 20)
        for sent in range(7, size - 1, len(piece)):
            peer.sendall(piece[: size - 1 - sent])
        return
    with suppress(OSError):
        attack.statuses.append(int(peer.recv(100).split()[1]))


@contextmanager
def many_embeddings(server: Process, count: int, num_texts: int) -> Iterator[Attack]:
    """Requests of many short texts, which the engine computes one by one."""
    body = {"input": ["some words of a text"] * num_texts}
    with _posted(server, [body] * count, EMBEDDINGS) as attack:
        yield attack


@contextmanager
def _posted(server: Process, bodies: list[dict[str, Any]], path: str = CHAT) -> Iterator[Attack]:
    """Posted at once; all have been sent inside. Waits for the replies afterwards."""
    attack = Attack(len(bodies))

    def send(body: dict[str, Any]) -> None:
        with suppress(OSError):
            attack.statuses.append(server.request("POST", path, body, seconds=_SECONDS)[0])

    threads = [threading.Thread(target=send, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    yield attack
    for thread in threads:
        thread.join(_SECONDS)


def _new_schema() -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"field{next(_numbers)}": {"type": "integer"}}}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


# What another client asks for: path and body.
PROBES: Mapping[str, Callable[[], tuple[str, dict[str, Any] | None]]] = {
    "chat": lambda: (CHAT, {"messages": HELLO, "max_tokens": 1}),
    "schema": lambda: (
        CHAT,
        {"messages": HELLO, "max_tokens": 8, "response_format": _new_schema()},
    ),
    "embedding": lambda: (EMBEDDINGS, {"input": "some words"}),
    "tokenize": lambda: ("/tokenize", {"prompt": "some words"}),
    "metrics": lambda: ("/metrics", None),
}


def ask_beside(server: Process) -> dict[str, float]:
    """Each probe, all at once: the seconds until its reply, which must be a success."""
    took: dict[str, float] = {}

    def ask(name: str) -> None:
        path, body = PROBES[name]()
        began = time.monotonic()
        method = "GET" if body is None else "POST"
        status, text = server.request(method, path, body, seconds=_SECONDS)
        assert status == 200, (name, status, text)
        took[name] = time.monotonic() - began

    threads = [threading.Thread(target=ask, args=(name,)) for name in PROBES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert took.keys() == PROBES.keys(), f"only {took} were answered"
    return took

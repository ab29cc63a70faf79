"""Steps of the fake server's scripts: what it sends, and where it waits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Send:
    data: bytes


@dataclass(frozen=True)
class Refuse:
    status: int
    body: bytes


@dataclass(frozen=True)
class HangUp:
    """Closes the connection in the middle of an answer."""


hang_up = HangUp()


@dataclass
class Gate:
    """The server stops here until the test opens it, or the client goes away."""

    _open: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def open(self) -> None:
        self._open.set()

    def wait(self, is_gone: Callable[[], bool]) -> None:
        self.reached.set()
        while not self._open.wait(0.02):
            if is_gone():
                raise ConnectionAbortedError


Step = Send | Refuse | HangUp | Gate


def chunk(delta: Mapping[str, Any] | None = None, reason: str | None = None, **more: Any) -> Send:
    choices = [{"index": 0, "delta": delta or {}, "finish_reason": reason}]
    return event({"object": "chat.completion.chunk", "choices": choices, **more})


def event(content: Any) -> Send:
    return Send(b"data: " + json.dumps(content).encode() + b"\n\n")


def say(*pieces: str) -> list[Step]:
    return [chunk({"content": piece}) for piece in pieces]


def think(*pieces: str) -> list[Step]:
    return [chunk({"reasoning_content": piece}) for piece in pieces]


def usage(prompt: int, completion: int, cached: int, **cache: Any) -> list[Step]:
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if cache:
        counts["cache"] = cache
    return [event({"choices": [], "usage": counts})]


def page_event(kind: str, **data: Any) -> Send:
    """An event of the page map."""
    content = {"requests": [], "gone": [], **data}
    return Send(f"event: {kind}\ndata: {json.dumps(content)}\n\n".encode())


def engine_stats(*, running: int = 0, waiting: int = 0) -> dict[str, Any]:
    """A reply of `/api/v1/kv/stats`."""
    return {
        "page_size": 32,
        "kv_cache_dtype": "float32",
        "bytes": {"kv_cache": 1 << 30, "active": 3 << 30, "peak": 5 << 30},
        "prefix_cache": {"hit_rate": 0.84},
        "recurrent_states": {"slots": 0, "snapshots": 0, "restored": 0, "evicted": 0},
        "disk_cache": {"bytes": 0, "limit": 0},
        "tokens_per_second": {"prefill": 1200.4, "generation": 42.25},
        "requests": {"running": running, "waiting": waiting},
        "num_preemptions": 3,
    }


def request_card(name: str, state: str, **more: Any) -> dict[str, Any]:
    """An entry of `/api/v1/requests`."""
    card = {"id": name, "state": state, "position": None, "num_computed": 0, "num_to_compute": 0}
    return card | more


def refuse(status: int, message: str) -> list[Step]:
    return [Refuse(status, json.dumps({"error": {"message": message}}).encode())]


def call(name: str, arguments: str = "{}", index: int = 0) -> list[Step]:
    """A call of a tool, its arguments in two pieces."""
    half = len(arguments) // 2
    first = {"name": name, "arguments": arguments[:half]}
    return [
        chunk({"tool_calls": [{"index": index, "id": f"id-{index}", "function": first}]}),
        chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments[half:]}}]}),
    ]

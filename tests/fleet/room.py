"""A room of servers behind a real router: `vllm-router` (PyPI), which listens to their KV events.

python -m tests.fleet.room --policy kv_aware --store redis://127.0.0.1:6379
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxserve.bench.servers import Contender, our_server, run_child
from mlxserve.system.machine import free_ports

MODEL = str(Path(__file__).parents[2] / "mlxserve/mini/model")
PAGE = 16
_TRIES = 200
_BIN = str(Path(sys.executable).parent)
ROUTER = shutil.which("vllm-router") or shutil.which("vllm-router", path=_BIN)


def need_router() -> str:
    """Return the router's program; without it the test is skipped."""
    if ROUTER is None:
        pytest.skip("not run: it needs vllm-router (PyPI)")
    return ROUTER


@dataclass
class Room:
    """A router's address, and the servers behind it."""

    url: str
    servers: list[Contender]


@contextlib.contextmanager
def a_room(count: int, policy: str, *options: str) -> Iterator[Room]:
    """Run servers with KV events, and the router in front of them. `options` are the servers'."""
    with contextlib.ExitStack() as stack:
        servers, sources = [], []
        for number in range(count):
            events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
            own = ["--kv-events", events, "--kv-events-replay", replay]
            own += ["--page-size", str(PAGE), *options]
            server = stack.enter_context(our_server(f"server {number}", MODEL, own))
            servers.append(server)
            sources += ["--kv-event-source", f"{server.url}={events}"]
            sources += ["--kv-event-replay-source", f"{server.url}={replay}"]
        command = [need_router(), "--policy", policy]
        command += ["--prometheus-port", str(free_ports(1)[0])]
        command += ["--worker-urls", *(server.url for server in servers)]
        if policy == "kv_aware":
            command += [
                "--kv-event-model",
                servers[0].model,
                "--kv-event-block-size",
                str(PAGE),
                *sources,
            ]
        router = stack.enter_context(run_child("router", command, "/health", {}))
        yield Room(router.url, servers)


@dataclass
class Turns:
    """What a run of conversations found."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answers: dict[tuple[int, int], str] = field(default_factory=dict)  # by conversation and turn

    @property
    def share(self) -> float:
        """Tokens found in a cache, of all tokens of prompts."""
        return self.cached_tokens / self.prompt_tokens


def requests_of(server: Contender) -> int:
    """Return how many requests a server has answered."""
    text = httpx.get(f"{server.url}/metrics").text
    names = ("mlxserve:request_success_total", "vllm:request_success_total")
    rows = [line for line in text.splitlines() if line.startswith(names)]
    return sum(int(float(line.split()[-1])) for line in rows)


async def converse(
    room: Room,
    num_chats: int = 8,
    num_turns: int = 8,
    at_once: int = 4,
    answered: Callable[[int], None] = lambda _: None,
) -> Turns:
    """Hold conversations through the router, `at_once` at a time; what fails is asked again.

    answered: called with the number of answers after each
    """
    found, turns = Turns(), asyncio.Semaphore(at_once)

    async def chat(client: httpx.AsyncClient, number: int) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"You are assistant number {number} of a room. " * 6}
        ]
        for turn in range(num_turns):
            words = f"Question {turn} of conversation {number}: what is {number} + {turn}? " * 3
            messages.append({"role": "user", "content": words})
            body = {
                "model": room.servers[0].model,
                "messages": messages,
                "max_tokens": 24,
                "temperature": 0,
            }
            async with turns:
                answer = await _answer(client, f"{room.url}/v1/chat/completions", body)
            text = answer["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": text})
            found.answers[number, turn] = text
            usage = answer["usage"]
            found.prompt_tokens += usage["prompt_tokens"]
            found.cached_tokens += usage["cache"]["num_tokens"]
            answered(len(found.answers))

    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(chat(client, number) for number in range(num_chats)))
    return found


async def _answer(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask until there is an answer, while a router finds out that a server is gone."""
    replies: list[dict[str, Any]] = []

    async def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            reply = await client.post(url, json=body)
            if reply.status_code == httpx.codes.OK:
                replies.append(reply.json())

    for _ in range(_TRIES):
        await ask()
        if replies:
            return replies[0]
    raise AssertionError(f"no answer after {_TRIES} requests")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="kv_aware")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--store")
    given = parser.parse_args()
    options = [] if given.store is None else ["--page-store", given.store]
    with a_room(given.servers, given.policy, *options) as room:
        found = asyncio.run(converse(room))
        print(f"{given.policy}: {found.share:.3f} of {found.prompt_tokens} tokens found")
        for server in room.servers:
            print(server.url, requests_of(server))


if __name__ == "__main__":
    main()

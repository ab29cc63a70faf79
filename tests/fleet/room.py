"""A room of servers behind a real router: `vllm-router` (PyPI), which listens to their KV events.

python -m tests.fleet.room --policy kv_aware --sessions --store redis://127.0.0.1:6379
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxserve.bench.servers import Contender, our_server, run_child
from mlxserve.system.machine import free_ports

MODEL = str(Path(__file__).parents[2] / "mlxserve/mini/model")
PAGE = 16
_TRIES = 200
# What keeps a conversation at its server; clients name it in the header.
SESSIONS = ("--kv-aware-session-affinity-ttl-secs", "3600")
SESSION_HEADER = "X-Session-ID"
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
def a_room(
    count: int, policy: str, *options: str, router_options: Sequence[str] = ()
) -> Iterator[Room]:
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
        command = [need_router(), "--policy", policy, *router_options]
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
    text = httpx.get(f"{server.url}/metrics", timeout=120).text
    names = ("mlxserve:request_success_total", "vllm:request_success_total")
    rows = [line for line in text.splitlines() if line.startswith(names)]
    return sum(int(float(line.split()[-1])) for line in rows)


async def converse(
    room: Room,
    num_chats: int = 8,
    num_turns: int = 8,
    at_once: int = 4,
    answered: Callable[[int], None] = lambda _: None,
    *,
    names_sessions: bool = False,
    streams: bool = False,
) -> Turns:
    """Hold conversations through the router, `at_once` at a time; what fails is asked again.

    answered: called with the number of answers after each
    names_sessions: whether each request names its conversation, as coding agents do
    streams: whether answers are streamed
    """
    found, turns = Turns(), asyncio.Semaphore(at_once)

    async def chat(client: httpx.AsyncClient, number: int) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"You are assistant number {number} of a room. " * 6}
        ]
        for turn in range(num_turns):
            words = f"Question {turn} of conversation {number}: what is {number} + {turn}? " * 3
            messages.append({"role": "user", "content": words})
            body: dict[str, Any] = {
                "model": room.servers[0].model,
                "messages": messages,
                "max_tokens": 24,
                "temperature": 0,
            }
            headers = {SESSION_HEADER: f"conversation-{number}"} if names_sessions else {}
            async with turns:
                ask = _streamed if streams else _answered
                url = f"{room.url}/v1/chat/completions"
                text, usage = await _answer(partial(ask, client, url, body, headers))
            messages.append({"role": "assistant", "content": text})
            found.answers[number, turn] = text
            found.prompt_tokens += usage["prompt_tokens"]
            found.cached_tokens += usage["cache"]["num_tokens"]
            answered(len(found.answers))

    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(chat(client, number) for number in range(num_chats)))
    return found


Answer = tuple[str, dict[str, Any]]  # text and usage


async def _answer(ask: Callable[[], Awaitable[Answer | None]]) -> Answer:
    """Ask until there is an answer, while a router finds out that a server is gone."""
    for _ in range(_TRIES):
        with contextlib.suppress(httpx.TransportError):
            if (answer := await ask()) is not None:
                return answer
    raise AssertionError(f"no answer after {_TRIES} requests")


async def _answered(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str]
) -> Answer | None:
    reply = await client.post(url, json=body, headers=headers)
    if reply.status_code != httpx.codes.OK:
        return None
    found = reply.json()
    return found["choices"][0]["message"]["content"], found["usage"]


async def _streamed(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str]
) -> Answer | None:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    parts: list[str] = []
    usage: dict[str, Any] | None = None
    async with client.stream("POST", url, json=body, headers=headers) as reply:
        if reply.status_code != httpx.codes.OK:
            return None
        async for line in reply.aiter_lines():
            data = line.removeprefix("data: ")
            if data in (line, "[DONE]"):
                continue
            chunk = json.loads(data)
            parts += [choice["delta"].get("content") or "" for choice in chunk.get("choices", ())]
            usage = chunk.get("usage") or usage
    return None if usage is None else ("".join(parts), usage)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="kv_aware")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--store")
    parser.add_argument("--sessions", action="store_true", help="keep conversations at a server")
    parser.add_argument("--stream", action="store_true", help="stream the answers")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--router", nargs=argparse.REMAINDER, default=[], help="its options")
    given = parser.parse_args()
    options = [] if given.store is None else ["--page-store", given.store]
    router_options = [*given.router, *(SESSIONS if given.sessions else ())]
    with a_room(given.servers, given.policy, *options, router_options=router_options) as room:
        found = asyncio.run(
            converse(
                room,
                at_once=given.at_once,
                names_sessions=given.sessions,
                streams=given.stream,
            )
        )
        print(f"{given.policy}: {found.share:.3f} of {found.prompt_tokens} tokens found")
        for server in room.servers:
            print(server.url, requests_of(server))


if __name__ == "__main__":
    main()

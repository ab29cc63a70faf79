"""What a request costs the real `vllm-router`, by policy and number of servers.

    client ──▶ vllm-router, a process of its own ──▶ servers that answer at once, in a thread of this process

The servers compute nothing and publish no pages, so that a hundred of them need no machine. They have no
`/v1/chat/completions/render`, as mlxserve has none, and count what they are asked. What counts is the router's CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx
import psutil
import zmq

from mlxserve.bench.report import Figure, Report
from mlxserve.bench.servers import Contender, run_child
from mlxserve.system.machine import free_ports
from tests.fleet.room import SESSION_HEADER, SESSIONS, need_router

_PAGE = 32
_TOKENS = 2048  # of each prompt
_WORDS = "You are an assistant who answers in a few words, about pages and servers. " * 100
_AT_ONCE = 4
_CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy of the router, with what the requests need for it."""

    label: str
    options: tuple[str, ...]
    has_events: bool = False
    names_sessions: bool = False


POLICIES = (
    Policy("kv_aware", ("--policy", "kv_aware"), has_events=True),
    Policy(
        "kv_aware, sessions",
        ("--policy", "kv_aware", *SESSIONS),
        has_events=True,
        names_sessions=True,
    ),
    Policy("cache_aware", ("--policy", "cache_aware")),
    Policy("round_robin", ("--policy", "round_robin")),
)


class CheapServers:
    """Servers of one thread that answer every request of a router at once."""

    def __init__(self, count: int) -> None:
        self.ports = free_ports(count)
        self.asked: Counter[str] = Counter()  # requests by path, of all servers
        self._replies = {
            path: json.dumps(body).encode()
            for path, body in {
                "/health": {},
                "/v1/models": {"object": "list", "data": [{"id": "any", "object": "model"}]},
                "/tokenize": {
                    "tokens": list(range(_TOKENS)),
                    "count": _TOKENS,
                    "max_model_len": 2 * _TOKENS,
                },
                _CHAT: {
                    "id": "chatcmpl-1",
                    "object": "chat.completion",
                    "created": 1,
                    "model": "any",
                    "choices": [
                        {
                            "index": 0,
                            "message": {"role": "assistant", "content": "Yes."},
                            "finish_reason": "stop",
                        }
                    ],
                    "usage": {
                        "prompt_tokens": _TOKENS,
                        "completion_tokens": 2,
                        "total_tokens": _TOKENS + 2,
                    },
                },
            }.items()
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Answer until the end of the block."""
        loops: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
        loops = queue.SimpleQueue()
        thread = threading.Thread(target=lambda: asyncio.run(self._run(loops)), daemon=True)
        thread.start()
        loop, is_over = loops.get(timeout=60)
        try:
            yield
        finally:
            loop.call_soon_threadsafe(is_over.set)
            thread.join()

    async def _run(
        self, loops: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
    ) -> None:
        is_over = asyncio.Event()
        servers = [await asyncio.start_server(self._serve, "127.0.0.1", at) for at in self.ports]
        loops.put((asyncio.get_running_loop(), is_over))
        await is_over.wait()
        for server in servers:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.lower().split("\r\n")
                sizes = [line.split(":")[1] for line in lines if line.startswith("content-length:")]
                await reader.readexactly(int(sizes[0]) if sizes else 0)
                path = first.split(" ")[1]
                self.asked[path] += 1
                body = self._replies.get(path)
                status = "404 Not Found" if body is None else "200 OK"
                body = body or b"{}"
                writer.write(
                    f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
        writer.close()


@dataclass(frozen=True, slots=True)
class Cost:
    """What the requests of a run have cost: seconds of CPU, and requests at the servers, for each of them."""

    cpu_seconds: float
    num_asked: float


def router_cost(policy: Policy, num_servers: int, num_requests: int) -> Cost:
    """Send requests through a router, after as many that warm it up."""
    _allow_connections()
    with contextlib.ExitStack() as stack:
        servers = CheapServers(num_servers)
        stack.enter_context(servers.running())
        urls = [f"http://127.0.0.1:{port}" for port in servers.ports]
        command = [need_router(), *policy.options, "--worker-urls", *urls, "--log-level", "error"]
        command += ["--prometheus-port", str(free_ports(1)[0])]
        if policy.has_events:
            command += ["--kv-event-model", "any", "--kv-event-block-size", str(_PAGE)]
            for url, events in zip(
                urls, stack.enter_context(_publishers(num_servers)), strict=True
            ):
                command += ["--kv-event-source", f"{url}={events}"]
        router = stack.enter_context(run_child("router", command, "/health", {}))
        asyncio.run(_send(router.url, policy, num_requests))
        before, asked = _cpu_seconds(router), servers.asked.copy()
        asyncio.run(_send(router.url, policy, num_requests))
        seconds = _cpu_seconds(router) - before
        num_asked = (servers.asked - asked).total() - (servers.asked - asked)["/health"]
        return Cost(seconds / num_requests, num_asked / num_requests)


async def _send(url: str, policy: Policy, num_requests: int) -> None:
    turns = asyncio.Semaphore(_AT_ONCE)

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        # Sixteen conversations, which have begun in the requests that warm up.
        talk = number % 16
        headers = {SESSION_HEADER: f"conversation-{talk}"} if policy.names_sessions else {}
        messages = [{"role": "user", "content": f"Conversation {talk}. {_WORDS}"}]
        body = {"model": "any", "messages": messages, "max_tokens": 2}
        async with turns:
            reply = await client.post(url + _CHAT, json=body, headers=headers)
        reply.raise_for_status()

    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        await asyncio.gather(*(ask(client, number) for number in range(num_requests)))


@contextlib.contextmanager
def _publishers(count: int) -> Iterator[list[str]]:
    """Bind addresses at which a router finds the events of servers, of which there are none."""
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        context.max_sockets = max(1024, 2 * count)
        addresses = []
        for _ in range(count):
            socket = stack.enter_context(context.socket(zmq.PUB))
            addresses.append(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        yield addresses


def _cpu_seconds(program: Contender) -> float:
    """CPU time of a program's process and of those below it."""
    process = psutil.Process(program.process_id)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _allow_connections() -> None:
    """Let this process, and the router that it starts, open as many files as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bench_router(
    sizes: Sequence[int],
    *,
    num_requests: int,
    runs: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure every policy with each number of servers."""
    figures = []
    for size in sizes:
        for policy in POLICIES:
            costs = []
            for run in range(runs):
                progress(f"{policy.label}, {size} servers, run {run + 1}")
                costs.append(router_cost(policy, size, num_requests))
            milliseconds = tuple(1e3 * cost.cpu_seconds for cost in costs)
            asked = tuple(cost.num_asked for cost in costs)
            figures.append(
                Figure(f"CPU of a request, {size} servers", "ms", milliseconds, policy.label)
            )
            figures.append(Figure(f"requests for one, {size} servers", "", asked, policy.label))
    settings = {"requests": num_requests, "tokens": _TOKENS, "runs": runs}
    return Report("router", settings, tuple(figures))

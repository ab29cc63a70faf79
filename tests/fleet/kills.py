"""Kill servers, the router and the page store again and again, while conversations go on through them.

python -m tests.fleet.kills --times 200

Each answer is compared with the one of a server that nobody kills, and a stream that breaks off with its beginning. A
request that fails is sent again. Between two kills at least one answer comes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from mlxserve.system.machine import free_ports
from tests.fleet.redis_server import RedisServer
from tests.fleet.room import MODEL, PAGE, SESSION_HEADER, SESSIONS, need_router
from tests.waiting import until, wait_until

_TRIES = 500  # of one request
_PATIENCE = 600.0  # seconds, until a program is ready or an answer comes
_NUM_TALKS, _NUM_TURNS = 6, 6
# A router asks a server that came back after a second, not after a minute.
QUICK = (
    *("--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "1"),
    *("--health-success-threshold", "1"),
    *("--cb-timeout-duration-secs", "2"),
    *("--retry-max-backoff-ms", "500"),
)


class Victim(Protocol):
    """What is killed and started again."""

    name: str

    def kill(self) -> None: ...

    def start_again(self) -> None:
        """Start it, and wait until it is ready."""


class Program:
    """A program on a port of its own."""

    def __init__(self, name: str, command: list[str], ready: str, log: Path) -> None:
        """Start `command`, whose host and port are appended.

        ready: path that answers with 200 once it is ready
        """
        self.name = name
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self._ready, self._log = self.url + ready, log
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        try:
            wait_until(self._is_ready, _PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{self.name} does not start: {self._end_of_log()}") from error

    def start_again(self) -> None:
        self.start()
        self.wait()

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} has ended: {self._end_of_log()}"
        try:
            return httpx.get(self._ready, timeout=10).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """End it at once. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None


@dataclass
class KillableStore:
    """A store whose data is lost when it is killed."""

    server: RedisServer
    name: str = "store"

    def kill(self) -> None:
        self.server.stop()

    def start_again(self) -> None:
        self.server.start()


@dataclass
class KillRun:
    """What a run of kills has found."""

    kills: Counter[str] = field(default_factory=Counter)
    num_answers: int = 0
    num_again: int = 0  # requests that were sent again
    num_cut: int = 0  # streams that broke off after their first token
    cached_tokens: int = 0
    wrong: list[str] = field(default_factory=list)

    def text(self) -> str:
        kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills ({kinds}): {self.num_answers} answers, "
            f"{len(self.wrong)} of them wrong, {self.num_again} requests sent again, "
            f"{self.num_cut} streams broken off"
        )


def request_of(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"model": "any", "messages": messages, "max_tokens": 24, "temperature": 0}


def opening(number: int) -> list[dict[str, str]]:
    words = f"You are assistant number {number} of a room. " * 5
    return [{"role": "system", "content": words}]


def question(number: int, turn: int) -> dict[str, str]:
    words = f"Question {turn} of conversation {number}: what is {number} + {turn}? " * 3
    return {"role": "user", "content": words}


def expected_answers(url: str) -> dict[tuple[int, int], str]:
    """Return the answers of one server, by conversation and turn."""
    answers = {}
    with httpx.Client(timeout=_PATIENCE) as client:
        for number in range(_NUM_TALKS):
            messages = opening(number)
            for turn in range(_NUM_TURNS):
                messages.append(question(number, turn))
                body = request_of(messages)
                reply = client.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
                text = reply.json()["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": text})
                answers[number, turn] = text
    return answers


class Talks:
    """Conversations that begin anew when they are over, until `is_over`."""

    def __init__(self, url: str, expected: dict[tuple[int, int], str]) -> None:
        self.run = KillRun()
        self.is_over = False
        self._url = f"{url}/v1/chat/completions"
        self._expected = expected

    async def hold(self, client: httpx.AsyncClient, number: int) -> None:
        while not self.is_over:
            messages = opening(number)
            for turn in range(_NUM_TURNS):
                messages.append(question(number, turn))
                await self._answer(client, number, turn, messages)
                messages.append({"role": "assistant", "content": self._expected[number, turn]})
                if self.is_over:
                    return

    async def _answer(
        self, client: httpx.AsyncClient, number: int, turn: int, messages: list[dict[str, str]]
    ) -> None:
        body = request_of(messages)
        headers = {SESSION_HEADER: f"conversation-{number}"}
        ask = self._stream if (number + turn) % 2 else self._post
        expected, run = self._expected[number, turn], self.run
        for _ in range(_TRIES):
            text, is_whole = await ask(client, body, headers)
            if not (text == expected if is_whole else expected.startswith(text)):
                run.wrong.append(f"{number}, {turn}: {text!r} instead of {expected!r}")
                return
            if is_whole:
                run.num_answers += 1
                return
            run.num_again += 1
            run.num_cut += bool(text)
            if not text:
                # Nobody listens, or no server answers yet.
                await until(Moment(0.1), _PATIENCE)
        run.wrong.append(f"{number}, {turn}: no answer after {_TRIES} requests")

    async def _post(
        self, client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[str, bool]:
        """Return (text, whether it is whole)."""
        try:
            reply = await client.post(self._url, json=body, headers=headers)
        except httpx.TransportError:
            return "", False
        if reply.status_code != httpx.codes.OK:
            return "", False
        found = reply.json()
        self.run.cached_tokens += found["usage"]["cache"]["num_tokens"]
        return found["choices"][0]["message"]["content"], True

    async def _stream(
        self, client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[str, bool]:
        parts: list[str] = []
        sent = {**body, "stream": True}
        try:
            async with client.stream("POST", self._url, json=sent, headers=headers) as reply:
                if reply.status_code != httpx.codes.OK:
                    return "", False
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        return "".join(parts), True
                    if data == line or "error" in (chunk := json.loads(data)):
                        continue
                    parts += [c["delta"].get("content") or "" for c in chunk["choices"]]
        except httpx.TransportError:
            pass
        return "".join(parts), False


class Moment:
    """True once `seconds` have passed since it was made."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self) -> bool:
        return time.monotonic() >= self._end


async def kill_again_and_again(
    talks: Talks, victims: list[Victim], times: int, seed: int, progress: Callable[[str], None]
) -> None:
    """Kill one after another, each after one to four more answers."""
    draw, run = random.Random(seed), talks.run
    while run.kills.total() < times:
        goal = run.num_answers + draw.randint(1, 4)
        await until(lambda goal=goal: run.num_answers >= goal or run.wrong, _PATIENCE)  # type: ignore[misc]
        if run.wrong:
            return
        # The store as well in one of five kills, so that two are away together.
        chosen = draw.sample(victims, 2 if draw.random() < 0.2 else 1)
        for victim in chosen:
            victim.kill()
            run.kills[victim.name.split()[0]] += 1
        # A router that starts waits for servers: they come first.
        for victim in sorted(chosen, key=lambda victim: victim.name, reverse=True):
            await asyncio.to_thread(victim.start_again)
        progress(run.text())


async def _run(
    url: str,
    expected: dict[tuple[int, int], str],
    victims: list[Victim],
    times: int,
    seed: int,
    progress: Callable[[str], None],
) -> KillRun:
    talks = Talks(url, expected)
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=_PATIENCE, limits=limits) as client:
        tasks = [asyncio.create_task(talks.hold(client, n)) for n in range(_NUM_TALKS)]
        try:
            await kill_again_and_again(talks, victims, times, seed, progress)
        finally:
            talks.is_over = True
            await asyncio.gather(*tasks)
    return talks.run


def run_kills(
    times: int,
    folder: Path,
    *,
    num_servers: int = 3,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> KillRun:
    """Run servers with disk caches, a store and a router, and kill them `times` times."""
    with ExitStack() as stack:
        (folder / "store").mkdir()
        store = RedisServer(folder / "store")
        stack.callback(store.stop)
        servers, sources = [], []
        for number in range(num_servers):
            events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
            command = [sys.executable, "-m", "mlxserve", "serve", "--model", MODEL]
            command += ["--exit-with-parent", "--disable-log-stats", "--page-size", str(PAGE)]
            command += ["--disk-cache-size", "1", "--disk-cache-dir", str(folder / f"disk{number}")]
            command += ["--kv-events", events, "--kv-events-replay", replay]
            command += ["--page-store", store.url]
            log = folder / f"server{number}.log"
            server = Program(f"server {number}", command, "/ready", log)
            stack.callback(server.kill)
            servers.append(server)
            sources += ["--kv-event-source", f"{server.url}={events}"]
            sources += ["--kv-event-replay-source", f"{server.url}={replay}"]
        for server in servers:
            server.wait()
        model = httpx.get(f"{servers[0].url}/v1/models", timeout=_PATIENCE).json()["data"][0]["id"]
        command = [need_router(), "--policy", "kv_aware", *SESSIONS, *QUICK]
        command += ["--prometheus-port", str(free_ports(1)[0])]
        command += ["--worker-urls", *(server.url for server in servers)]
        command += ["--kv-event-model", model, "--kv-event-block-size", str(PAGE), *sources]
        expected = expected_answers(servers[0].url)
        router = Program("router", command, "/health", folder / "router.log")
        stack.callback(router.kill)
        router.wait()
        victims: list[Victim] = [*servers, router, KillableStore(store)]
        return asyncio.run(_run(router.url, expected, victims, times, seed, progress))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        run = run_kills(
            given.times,
            Path(folder),
            num_servers=given.servers,
            seed=given.seed,
            progress=progress,
        )
    print(run.text())
    print(*run.wrong, sep="\n")
    sys.exit(bool(run.wrong))


if __name__ == "__main__":
    main()

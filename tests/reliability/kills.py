"""Kill a server under load, again and again: is the next one's answer right, and is nothing left?

    python -m tests.reliability kills --times 200

Each server has a pool that is too small for its clients, so that it writes pages to disk, and a client that
needs the helper process of grammars. It is killed after a random number of events of its streams.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.api.server.process import COMPLETIONS, Process, served

NUM_CLIENTS = 6
_END_SECONDS = 10.0  # for clients and helper processes to notice the end of the server
_MAX_EVENTS = 120
_PROMPTS = tuple(
    " ".join(f"word{number * count}" for count in range(1, 40)) for number in range(1, 5)
)


@dataclass(frozen=True, slots=True)
class KillReport:
    """What followed the kills."""

    num_kills: int
    num_events: int  # read by clients before the kills
    num_cut: int  # streams that a kill cut
    wrong_answers: tuple[str, ...]  # of the servers after a kill
    leftovers: tuple[str, ...]  # processes and files of killed servers

    def __str__(self) -> str:
        lines = [
            f"{self.num_kills} kills, {self.num_cut} streams cut after {self.num_events} events in "
            f"all; {len(self.wrong_answers)} wrong answers, {len(self.leftovers)} leftovers"
        ]
        return "\n".join([*lines, *self.wrong_answers, *self.leftovers])


class _Client:
    """Reads one stream until it ends, on a thread of its own."""

    def __init__(
        self, server: Process, body: dict[str, Any], on_event: threading.Semaphore
    ) -> None:
        self.num_events = 0
        self._on_event = on_event
        data = json.dumps(body).encode()
        self._peer = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self._peer.sendall(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (COMPLETIONS.encode(), len(data), data)
        )
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with self._peer:
            try:
                while piece := self._peer.recv(65_536):
                    count = piece.count(b"data: ")
                    self.num_events += count
                    self._on_event.release(max(count, 1))
            except ConnectionResetError:
                return  # the kill


def kill_again_and_again(
    folder: Path,
    model: Path,
    times: int,
    seed: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> KillReport:
    """Start and kill a server `times` times in one folder, then start a last one.

    say: called with a line about each kill
    """
    draw = random.Random(seed)
    expected: list[str] | None = None
    num_events = num_cut = 0
    wrong: list[str] = []
    leftovers: list[str] = []
    flags = ("--model", str(model), "--num-pages", "60", "--page-size", "16")
    flags += ("--preemption-mode", "swap", "--max-num-seqs", "8")
    flags += ("--disk-cache-size", "1", "--disk-cache-dir", str(folder / "pages"))
    for kill in range(times + 1):
        with served(folder / "stderr", *flags) as server:
            found = [_answer(server, prompt) for prompt in _PROMPTS]
            expected = expected or found
            if found != expected:
                wrong.append(f"after kill {kill}: {found} instead of {expected}")
            if kill == times:
                break
            events = threading.Semaphore(0)
            clients = [_Client(server, _body(draw), events) for _ in range(NUM_CLIENTS)]
            for _ in range(draw.randrange(1, _MAX_EVENTS)):
                assert events.acquire(timeout=60), "the server has stopped answering"
            children = psutil.Process(server.popen.pid).children(recursive=True)
            server.popen.kill()
            server.popen.wait()
            leftovers += _still_there(children, clients, kill)
            say(f"kill {kill + 1}: {len(wrong)} wrong answers, {len(leftovers)} leftovers so far")
        num_events += sum(client.num_events for client in clients)
        num_cut += len(clients)
    assert expected is not None
    return KillReport(times, num_events, num_cut, tuple(wrong), tuple(leftovers))


def _answer(server: Process, prompt: str) -> str:
    status, text = server.request(
        "POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    )
    assert status == 200, text
    return str(json.loads(text)["choices"][0]["text"])


def _body(draw: random.Random) -> dict[str, Any]:
    words = " ".join(f"w{draw.randrange(500)}" for _ in range(draw.randrange(1, 60)))
    body: dict[str, Any] = {"prompt": words, "max_tokens": 300, "stream": True, "ignore_eos": True}
    if draw.random() < 0.2:
        body["structured_outputs"] = {"regex": "[a-z ]{200,}"}
        del body["ignore_eos"]
    return body


def _still_there(
    children: Sequence[psutil.Process], clients: Sequence[_Client], kill: int
) -> list[str]:
    """What a killed server left: processes, and clients that did not notice."""
    deadline = time.monotonic() + _END_SECONDS
    for client in clients:
        client.thread.join(max(0.0, deadline - time.monotonic()))
    found = [f"after kill {kill}: a client waits" for c in clients if c.thread.is_alive()]
    _, alive = psutil.wait_procs(children, timeout=max(0.0, deadline - time.monotonic()))
    return found + [f"after kill {kill}: {process}" for process in alive]

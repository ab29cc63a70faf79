"""Sends hostile values of every field to a server, and judges its work in seconds of a processor.

The server runs in this process over the embedded model, whose engine answers at once: what is measured
is the work before and after it. Nothing is judged by a clock on the wall, which a busy machine stretches.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.api.serving import Running, serving
from tests.api.smallest_bodies import filled
from tests.reliability.hostile_fields import Case, HostileFields

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

MAX_LOOP_SECONDS = 0.25  # of a processor, in which the event loop is not free
MAX_SECONDS = 2.0  # of a processor, for one request, with the helpers that it needs
_CONTEXT = 1_000
_TICK = 0.005  # seconds between two looks of the probe
_JSON = {"content-type": "application/json"}
# Starts in a process for the first request that needs it, whoever sends it.
_WARM_UP = (
    ("/api/v1/render", {"texts": ["```python\nx\n```"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 300_000}]}),
    ("/v1/completions", {"prompt": "x"}),  # starts the probe
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"regex": "a"}},
    ),
)


@dataclass
class Report:
    """What a run found.

    faults: a sentence for each case that failed
    loop, seconds: (the most seconds of a processor, the case that needed them)
    """

    num_cases: int = 0
    faults: list[str] = field(default_factory=list)
    loop: tuple[float, str] = (0.0, "")
    seconds: tuple[float, str] = (0.0, "")

    def add(self, case: Case, status: int, loop: float, seconds: float) -> None:
        self.num_cases += 1
        self.loop = max(self.loop, (loop, case.name))
        self.seconds = max(self.seconds, (seconds, case.name))
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.faults.append(f"{case.name}: {status}")
        if loop > MAX_LOOP_SECONDS:
            self.faults.append(f"{case.name}: {loop:.2f} s without the event loop")
        if seconds > MAX_SECONDS:
            self.faults.append(f"{case.name}: {seconds:.2f} s of a processor")

    def __str__(self) -> str:
        return "\n".join(
            [
                *self.faults,
                f"{self.num_cases} requests, {len(self.faults)} faults",
                f"longest without the event loop: {self.loop[0]:.3f} s, {self.loop[1]}",
                f"most of a processor: {self.seconds[0]:.3f} s, {self.seconds[1]}",
            ]
        )


def run_every_field(
    folder: Path, *, every: int = 1, first: int = 0, say: Callable[[str], None] = lambda _: None
) -> Report:
    """Send each `every`-th case, beginning with `first`, to a server of its own.

    folder: for what the server writes
    """
    report = Report()
    probe = LoopProbe()
    with _served(folder, probe) as server, closing(_Asking(server, probe)) as asking:
        document = asking.document()
        cases = list(HostileFields(document, "mlxserve-mini").cases())
        for number, case in enumerate(cases[first::every]):
            if number % 500 == 0:
                say(f"{number} of {len(cases[first::every])} requests")
            num_faults = len(report.faults)
            status, loop, seconds = asking.ask(case)
            if loop > MAX_LOOP_SECONDS or seconds > MAX_SECONDS:
                # Once more: what a value does recurs, and a collection of garbage does not.
                _, loop_again, seconds_again = asking.ask(case)
                loop, seconds = min(loop, loop_again), min(seconds, seconds_again)
            report.add(case, status, loop, seconds)
            for fault in report.faults[num_faults:]:
                say(fault)
    return report


class LoopProbe:
    """The longest time in which an event loop was not free, in seconds of its thread's processor."""

    def __init__(self) -> None:
        self.num_looks = 0
        self._longest = 0.0
        self._last: float | None = None

    def start(self) -> None:
        """Look from now on, in the running loop. Idempotent."""
        if self._last is None:
            self._last = time.thread_time()
            self._look()

    def take(self) -> float:
        """The longest time since the last call."""
        longest, self._longest = self._longest, 0.0
        return longest

    def _look(self) -> None:
        assert self._last is not None, "it was started"
        self.num_looks += 1
        now = time.thread_time()
        self._longest, self._last = max(self._longest, now - self._last), now
        asyncio.get_running_loop().call_later(_TICK, self._look)


@contextmanager
def _served(folder: Path, probe: LoopProbe) -> Iterator[Running]:
    """A server whose user has no files, and whose engine generates nothing."""
    names = ("HOME", "MLXSERVE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
    before = {name: os.environ.get(name) for name in names}
    os.environ |= dict.fromkeys(names, str(folder))
    try:
        chat = _model(probe)
        gc.freeze()  # as a server does once it has loaded its model
        try:
            with serving(chat, stop_engine=lambda: None) as server:
                yield server
        finally:
            gc.unfreeze()
            chat.close()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {} if value is None else {name: value}


def _model(probe: LoopProbe) -> TextModel:
    from mlxserve.build import build_text_model
    from mlxserve.core.config import EngineConfig
    from tests.api.scripted_engine import ScriptedEngine

    options = {"max_model_len": _CONTEXT, "num_pages": 256, "page_size": 16}
    chat = build_text_model(EngineConfig().with_options(disable_log_stats=True, **options))
    scripted = ScriptedEngine(chat.codec.tokenizer)
    scripted.says = "Yes."

    async def submit(requests: Sequence[Any]) -> Any:
        probe.start()
        return await scripted.submit(requests)

    chat.engine.submit = submit  # type: ignore[method-assign]
    return chat


class _Asking:
    """One connection to a server, and the processor time of its requests."""

    def __init__(self, server: Running, probe: LoopProbe) -> None:
        self._server = server
        self._probe = probe
        self._connection = self._connected()
        for path, body in _WARM_UP:
            self._send("POST", path, json.dumps(body).encode())

    def close(self) -> None:
        self._connection.close()

    def document(self) -> Any:
        self._connection.request("GET", "/openapi.json")
        return json.loads(self._connection.getresponse().read())

    def ask(self, case: Case) -> tuple[int, float, float]:
        """Return (status, seconds in which the loop was not free, seconds of all threads and helpers)."""
        self._probe.take()
        seconds = self._seconds()
        status = self._send(case.method, filled(case.path), case.body)
        seconds = self._seconds() - seconds
        self._send("GET", "/version", b"")  # before its reply, the probe has looked
        return status, self._probe.take(), seconds

    def _send(self, method: str, path: str, body: bytes) -> int:
        for _ in range(2):  # the server may have closed the connection after the last reply
            with suppress(OSError, http.client.HTTPException):
                self._connection.request(method, path, body, _JSON)
                reply = self._connection.getresponse()
                reply.read()
                return reply.status
            self._connection.close()
            self._connection = self._connected()
        raise AssertionError(f"{method} {path} gets no reply")

    def _connected(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=300)

    def _seconds(self) -> float:
        """Of this process without this thread, of helpers that run, and of those that have ended."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        running = 0.0
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                times = child.cpu_times()
                running += times.user + times.system
        own = time.process_time() - time.thread_time()
        return own + running + ended.ru_utime + ended.ru_stime

"""The functions of ours that a chat request enters before it is queued, by file.

    socket ── Connection.data_received ── ... ── Scheduler.add
              counted, on every thread

A server of the included model in this process gets plain, streamed chat requests on one connection,
warm. A coroutine is entered again at each await, so that a layer that only passes a request on counts
as often as what it waits for. Calls are counted, not timed: the figures are the same on every machine.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import and_
from types import FrameType

from mlxserve.api.server.connection import Connection
from mlxserve.bench.report import Figure, Report
from mlxserve.build import build_text_model
from mlxserve.core.config import EngineConfig
from mlxserve.scheduler.scheduler import Scheduler
from tests.api.serving import serving
from tests.perf.calls import Calls, by_file, functions, is_counted

_BODY = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 1,
    "temperature": 0,
}
_NUM_WARM, _NUM_TRACED = 4, 6


def bench_way_in(*, by_function: bool = False) -> Report:
    """Calls, distinct functions and files of the way in, and the calls by file or by function."""
    calls = way_in_calls()
    files = by_file(calls)
    figures = [
        Figure("calls", "", (float(calls.total()),)),
        Figure("distinct functions", "", (float(len(calls)),)),
        Figure("files", "", (float(len(files)),)),
    ]
    places = functions(calls) if by_function else files
    figures += [Figure(place, "calls", (float(count),)) for place, count in places.most_common()]
    return Report("way-in", {"messages": 1}, tuple(figures))


def way_in_calls(model: str = "mlxserve-mini") -> Calls:
    """Of one request. Each of several is counted, and what all of them enter is kept: other tasks of
    the server run now and then, and the event loop may go on while the engine's thread takes it."""
    config = EngineConfig().with_options(model=model, num_pages=64, disable_log_stats=True)
    with _counting() as tracer, serving(build_text_model(config)) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        for number in range(_NUM_WARM + _NUM_TRACED):
            if number >= _NUM_WARM:
                tracer.arm()
            client.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(_BODY),
                {"Content-Type": "application/json"},
            )
            reply = client.getresponse()
            assert reply.status == 200, reply.read()
            reply.read()
        client.close()
    return reduce(and_, tracer.ways)


class _Tracer:
    """Counts calls on all threads between the arrival of a request and its place in the queue.

    ways: of each request that was counted
    """

    _FIRST, _LAST = Connection.data_received.__code__, Scheduler.add.__code__

    def __init__(self) -> None:
        self.ways: list[Calls] = []
        self._is_armed = False
        self._calls: Calls | None = None

    def arm(self) -> None:
        """Count the next request."""
        self._is_armed = True

    def count(self, frame: FrameType, event: str, _arg: object) -> None:
        """Called by the interpreter for every event of every thread."""
        if event != "call" or not (self._is_armed or self._calls is not None):
            return
        if self._is_armed and frame.f_code is self._FIRST:
            self._is_armed, self._calls = False, Counter()
        calls = self._calls
        if calls is None or not is_counted(frame.f_code):
            return
        calls[frame.f_code] += 1
        if frame.f_code is self._LAST:
            self.ways.append(calls)
            self._calls = None


@contextmanager
def _counting() -> Iterator[_Tracer]:
    """Threads that are started meanwhile count."""
    tracer = _Tracer()
    before = threading.getprofile()
    threading.setprofile(tracer.count)
    try:
        yield tracer
    finally:
        threading.setprofile(before)

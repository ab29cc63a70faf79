"""LoopMeter: what the event loop does for a request, in numbers that no busy machine changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlxserve.api import errors, fair_work
from mlxserve.api.responses import reply as responses_reply
from mlxserve.api.server import sse
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.helpers.work import Work

# A line of Python takes 0.05 to 0.1 microseconds, so these are about 5 ms.
MAX_LINES = 50_000
MAX_ENCODED = 64 << 10  # bytes of JSON
# Where `encode_json` is known by its name.
_ENCODERS = (errors, fair_work, sse, responses_reply)


class LoopMeter:
    """Counts, in the thread of a client's event loop, and keeps what the door was given.

    lines: of Python that the loop has run
    encoded: bytes of the largest JSON that it has made at once
    works: (client, work) of each job
    """

    def __init__(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines = 0
        self.encoded = 0
        self.works: list[tuple[str, Work[Any]]] = []
        self._client = client
        self._thread = self._in_loop(threading.get_ident)
        self._record(monkeypatch)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count from zero within this block."""
        self.lines = self.encoded = 0
        self.works.clear()
        self._in_loop(lambda: sys.settrace(self._trace))
        try:
            yield
        finally:
            self._in_loop(lambda: sys.settrace(None))

    def check(self, route: str) -> None:
        assert self.lines <= MAX_LINES, f"{route}: {self.lines} lines in the loop"
        assert self.encoded <= MAX_ENCODED, f"{route}: {self.encoded} bytes encoded in the loop"

    def _in_loop(self, call: Callable[[], Any]) -> Any:
        assert self._client.portal is not None, "the client is entered"
        return self._client.portal.call(call)

    def _trace(self, _frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self.lines += 1
        return self._trace

    def _record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        encode, run = errors.encode_json, FairExecutor.run

        def encode_json(value: object) -> bytes:
            encoded = encode(value)
            if threading.get_ident() == self._thread:
                self.encoded = max(self.encoded, len(encoded))
            return encoded

        async def run_recorded(
            executor: FairExecutor, client: str, work: Work[Any], **options: Any
        ) -> Any:
            self.works.append((client, work))
            return await run(executor, client, work, **options)

        for module in _ENCODERS:
            monkeypatch.setattr(module, "encode_json", encode_json)
        monkeypatch.setattr(FairExecutor, "run", run_recorded)

"""Trace: a timeline of the server's parts, as a file for chrome://tracing or Perfetto.

`timed` wraps an object in one that records how long named methods took. None of this runs, and no
call is slower, unless a trace was requested.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from mlxserve.core.errors import InvalidConfig

T = TypeVar("T")
log = logging.getLogger("mlxserve.trace")


class Trace:
    """Appends complete events of the Trace Event Format to a file. Any thread may add one.

    A file that cannot be written any more ends the trace with one warning. A closed file is
    JSON. The closing bracket is optional in that format, so the file of a killed server can be
    read as well.
    """

    def __init__(self, path: str, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """Open the file. Raises InvalidConfig if it cannot be written."""
        try:
            self._file = Path(path).expanduser().open("w", encoding="utf-8", buffering=1 << 16)
        except OSError as error:
            raise InvalidConfig(f"trace: {path} cannot be written: {error.strerror}") from error
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._named: set[int] = set()
        self._file.write("[\n")

    def timed(
        self, target: T, methods: Mapping[str, str], made: Mapping[str, Mapping[str, str]] = {}
    ) -> T:
        """Wrap an object so that calls of `methods` (name -> name of the span) are recorded.

        made: the same for the objects that a method returns
        """
        return cast(T, _Timed(target, methods, made, self))

    def returning(
        self, method: Callable[..., Any], methods: Mapping[str, str]
    ) -> Callable[..., Any]:
        """Wrap a method so that calls of the named methods of its results are recorded."""

        @wraps(method)
        def making(*args: Any, **options: Any) -> Any:
            return self.timed(method(*args, **options), methods)

        return making

    def call(self, span: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method so that its calls are recorded."""

        @wraps(method)
        def measured(*args: Any, **options: Any) -> Any:
            started = self._clock()
            try:
                return method(*args, **options)
            finally:
                self._add(span, started, self._clock())

        return measured

    def close(self) -> None:
        """Write the end of the file. Idempotent; later spans are dropped."""
        with self._lock:
            if self._file.closed:
                return
            name = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "mlxserve"}}
            try:
                self._file.write(json.dumps(name) + "\n]\n")
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _add(self, span: str, started: int, ended: int) -> None:
        thread = threading.get_native_id()
        event = {
            "name": span,
            "ph": "X",
            "ts": started / 1e3,
            "dur": (ended - started) / 1e3,
            "pid": 0,
            "tid": thread,
        }
        with self._lock:
            if self._file.closed:
                return
            try:
                if thread not in self._named:
                    self._named.add(thread)
                    self._write(
                        {
                            "name": "thread_name",
                            "ph": "M",
                            "pid": 0,
                            "tid": thread,
                            "args": {"name": threading.current_thread().name},
                        }
                    )
                self._write(event)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Stop tracing: the traced code must not fail with its trace, as on a full disk."""
        with suppress(OSError):
            # Drops buffered events; the file is closed even if this fails.
            self._file.close()
        log.warning(
            "Tracing has stopped, because %s cannot be written: %s. Free disk space and start again "
            "to trace.",
            self._path,
            error.strerror or error,
        )

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")


class _Timed:
    """Delegates to another object, and times some methods."""

    def __init__(
        self,
        target: object,
        methods: Mapping[str, str],
        made: Mapping[str, Mapping[str, str]],
        trace: Trace,
    ) -> None:
        self._target = target
        for method, span in methods.items():
            setattr(self, method, trace.call(span, getattr(target, method)))
        for method, spans in made.items():
            setattr(self, method, trace.returning(getattr(target, method), spans))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

"""The child's side of a helper: `python -m mlxserve.helpers.child`, with the socket as its stdin.

Runs one job at a time until the socket ends. Before each job it arms a timer that ends the process
without running Python code, so that work in C or Rust ends even if the parent was killed.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Generator
from importlib import import_module
from typing import Any

import msgpack

from mlxserve.helpers.frames import LENGTH, MARGIN, MAX_TIMES, NO_MEMORY, Kind


def main() -> None:
    _prepare_signals()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = _Channel(_take_stdin())
    target, arguments, seconds, memory, niceness = channel.read()
    os.nice(niceness)
    _arm(seconds)
    try:
        worker = _make(target, arguments)
    except MemoryError:
        os._exit(NO_MEMORY)
    except Exception as error:  # noqa: BLE001  (reported to the parent, which raises it)
        channel.write(0, Kind.ERROR, _described(error))
        return
    _limit_memory(memory)
    channel.write(0, Kind.READY, None)
    _disarm()
    while True:
        _run(channel, worker, *channel.read())


def _prepare_signals() -> None:
    """Ignore signals for the group: only the parent ends its helpers.

    A Ctrl-C, or a service manager's SIGTERM, is for the parent.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The default action needs neither the GIL nor the interpreter's main loop.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def _take_stdin() -> socket.socket:
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return channel


def _make(target: str, arguments: tuple[Any, ...]) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)(*arguments)


def _limit_memory(memory: int) -> None:
    """Limit the address space to `memory` more bytes.

    macOS ignores this; the parent checks there.
    """
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = (
        size + memory if hard_limit == resource.RLIM_INFINITY else min(size + memory, hard_limit)
    )
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _arm(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, MAX_TIMES * seconds + MARGIN)


def _disarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _run(
    channel: _Channel,
    worker: Any,
    number: int,
    method: str,
    arguments: tuple[Any, ...],
    seconds: float,
) -> None:
    _arm(seconds)
    try:
        result = getattr(worker, method)(*arguments)
        if isinstance(result, Generator):
            result = _yielded(result, channel, number, seconds)
        channel.write(number, Kind.RESULT, result)
    except MemoryError:
        # There may be none for an answer either.
        os._exit(NO_MEMORY)
    except Exception as error:  # noqa: BLE001  (reported to the parent, which raises it)
        channel.write(number, Kind.ERROR, _described(error))
    _disarm()


def _yielded(
    values: Generator[Any, None, Any], channel: _Channel, number: int, seconds: float
) -> Any:
    """Send what a job yields, and return its result."""
    while True:
        try:
            value = next(values)
        except StopIteration as end:
            return end.value
        channel.write(number, Kind.VALUE, value)
        _arm(seconds)


def _described(error: Exception) -> list[str]:
    return [type(error).__name__, str(error)[:10_000]]


class _Channel:
    """Frames over a blocking socket. The process ends when the parent's side is closed."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._packer = msgpack.Packer(unicode_errors="surrogatepass")

    def read(self) -> Any:
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return pickle.loads(self._exactly(length))

    def _exactly(self, length: int) -> bytearray:
        content = bytearray(length)
        view = memoryview(content)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError:
                # The parent ended without having read all.
                count = 0
            if not count:
                # This ends the process even if a thread of the worker computes.
                os._exit(0)
            view = view[count:]
        return content

    def write(self, number: int, kind: Kind, value: Any) -> None:
        content = self._packer.pack([number, kind, value])
        try:
            self._socket.sendall(LENGTH.pack(len(content)) + content)
        except OSError:
            os._exit(0)


if __name__ == "__main__":
    main()

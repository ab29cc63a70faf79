"""forked: runs a job in a fork of a helper, which can be killed without restarting the helper.

For work that may take for ever, or all memory, and mostly takes milliseconds. The helper must have
one thread, and what it has loaded must work in a fork: Python and llguidance do, mlx and Metal do
not.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from mlxserve.helpers.errors import KillReason
from mlxserve.helpers.frames import MARGIN, NO_MEMORY

_LOOK_SECONDS = 0.05  # between two checks of the memory, if the system sets no limit
_MAX_FILES = 256
_WORDS = 10_000  # bytes of what the work returns


def forked(work: Callable[[], str], *, cpu_seconds: float, memory: int) -> tuple[str, str]:
    """Run work; return ("", its result), or (a KillReason, "") if it was killed.

    cpu_seconds: processor time that it may take. A clock ends it after ten times as long, as one
        that was paused, or that got no processor.
    memory: bytes that it may have beyond what this process has
    """
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        _run(work, writing, cpu_seconds)  # does not return
    os.close(writing)
    try:
        text, reason = _wait(process, reading, 10 * cpu_seconds + MARGIN, memory)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
    return (reason or _reason(os.waitstatus_to_exitcode(status), is_whole=bool(text))), text[1:]


def _run(work: Callable[[], str], writing: int, cpu_seconds: float) -> None:
    try:
        # Not the helper's socket: its parent would wait for this process too.
        os.closerange(3, writing)
        os.closerange(writing + 1, _MAX_FILES)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 10 * cpu_seconds + MARGIN)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        text = work()
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(writing, b"=" + text.encode("utf-8", "replace")[:_WORDS])
        os._exit(0)
    except MemoryError:
        os._exit(NO_MEMORY)
    finally:
        os._exit(1)


def _wait(process: int, reading: int, seconds: float, memory: int) -> tuple[str, str]:
    """Return (its output, a KillReason); either may be empty."""
    allowed = psutil.Process().memory_info().rss + memory
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ready, _, _ = select.select([reading], [], [], _LOOK_SECONDS)
        if ready:
            return os.read(reading, _WORDS + 1).decode("utf-8", "replace"), ""
        with suppress(psutil.Error):
            if psutil.Process(process).memory_info().rss > allowed:
                return "", KillReason.MEMORY
    return "", KillReason.PAUSED


def _reason(code: int, *, is_whole: bool) -> str:
    if is_whole:
        return ""
    if code == -signal.SIGPROF:
        return KillReason.TIME
    if code == -signal.SIGALRM:
        return KillReason.PAUSED
    if code in (NO_MEMORY, -signal.SIGABRT):  # Rust's allocator aborts
        return KillReason.MEMORY
    return KillReason.ENDED

"""Watchdog: ends the server's process if its engine has failed for good, or a step does not end.

A supervisor (launchd, systemd) then restarts it. Only the server has one: a library must not end
its user's process.

    engine failed     orderly shutdown, exit code ENGINE_FAILED
    step is stuck     /health reports it, all stacks are logged once; after `end_after` seconds the
                      process ends at once with exit code ENGINE_STUCK
    Python is stuck   a call holds the interpreter's lock, so that this thread cannot run either:
                      another process (outer_watchdog.py) has all stacks written to stderr, and
                      kills this one

Time in which the process was paused does not count: counting resumes where it was.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

from mlxserve.api.server import outer_watchdog

log = logging.getLogger("mlxserve.watchdog")

ENGINE_FAILED = 70  # exit codes; EX_SOFTWARE of sysexits.h
ENGINE_STUCK = 71
MAX_SILENCE = 30.0  # seconds; steps take a tenth of one, the longest on a slow machine a few
_TICK = 1.0  # seconds
_SHUTDOWN_SECONDS = 30.0  # in which the server of a failed engine has to shut down
GRACE = 15.0  # seconds that the other process waits longer than this thread


class Watched(Protocol):
    """The engine's part of the watchdog. AsyncEngine implements it."""

    def has_failed(self) -> bool:
        """True if the engine has ended by itself."""

    def seconds_since_beat(self) -> float:
        """Seconds since the engine ended a step or woke up without work, excluding pauses."""


class Watchdog:
    """Checks the engine once a second, on a thread of its own, between `start` and `stop`."""

    def __init__(
        self,
        engine: Watched,
        *,
        end_after: float,
        shut_down: Callable[[], None],
        end: Callable[[int], object] = os._exit,
        tick: float = _TICK,
    ) -> None:
        """Watch the engine once started.

        end_after: seconds after which an unfinished step ends the process; 0 for never
        shut_down: begins an orderly shutdown, from any thread
        """
        self.exit_code = 0  # exit code of the process, once the server has shut down
        self._engine = engine
        self._end_after = end_after
        self._shut_down = shut_down
        self._end = end
        self._tick = tick
        self._is_logged = False
        self._is_faulty = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlxserve-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> bool:
        """Check the engine once; False if there is nothing more to watch."""
        if self._engine.has_failed():
            log.error("The engine has failed; the server ends with exit code %d.", ENGINE_FAILED)
            self.exit_code = ENGINE_FAILED
            self._shut_down()
            return False
        silence = self._engine.seconds_since_beat()
        if silence <= MAX_SILENCE:
            self._is_logged = False
        elif not self._is_logged:
            self._is_logged = True
            log.error("A step of the engine has run for %.0f seconds. All stacks:", silence)
            for line in _stacks().splitlines():
                log.error("%s", line)
        if self._end_after and silence > self._end_after:
            log.critical(
                "A step of the engine has not ended for %.0f seconds (--watchdog-seconds); the "
                "process ends with exit code %d.",
                silence,
                ENGINE_STUCK,
            )
            self._end(ENGINE_STUCK)
            return False
        return True

    def _run(self) -> None:
        outer = _started(self._end_after + GRACE) if self._end_after else None
        try:
            while self._looks_on() and not self._stopping.wait(self._tick):
                if outer is not None:
                    _tell(outer)
            if self.exit_code and not self._stopping.wait(_SHUTDOWN_SECONDS):
                self._end(self.exit_code)
        finally:
            if outer is not None:
                outer.kill()
                outer.communicate()

    def _looks_on(self) -> bool:
        """Check the engine. An error of the check itself is logged once, and does not end the watch."""
        try:
            goes_on = self.look()
        except Exception:
            if not self._is_faulty:
                log.exception("The watchdog could not look at the engine; it tries again")
            self._is_faulty = True
            return True
        self._is_faulty = False
        return goes_on


def _started(seconds: float) -> subprocess.Popen[bytes] | None:
    """Start the outer watchdog; None, and a line in the log, if the system refuses it."""
    # There may be no stderr.
    with contextlib.suppress(AttributeError, OSError, io.UnsupportedOperation):
        faulthandler.register(outer_watchdog.WRITE_STACKS, file=sys.stderr)
    command = [sys.executable, "-I", "-S", outer_watchdog.__file__, str(os.getpid()), str(seconds)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        log.warning("Only a step that leaves Python's lock free is watched: %s", error)
        return None
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _tell(outer: subprocess.Popen[bytes]) -> None:
    """Tell the outer watchdog that Python runs."""
    assert outer.stdin is not None
    # The process has gone or is suspended.
    with contextlib.suppress(OSError):
        os.write(outer.stdin.fileno(), b".")


def _stacks() -> str:
    """Format the stacks of all threads, by name. faulthandler stops after the newest hundred."""
    frames = sys._current_frames()  # noqa: SLF001  (documented)
    return "\n".join(
        f"Thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.ident in frames
    )

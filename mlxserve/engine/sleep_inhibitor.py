"""SleepInhibitor: keeps a Mac awake while answers run.

An unattended Mac sleeps after minutes, in the middle of a long job. macOS's `caffeinate` holds an
assertion against that for as long as it runs; it also ends with this process.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence

log = logging.getLogger("mlxserve.engine")

_LINGERS = 30.0  # seconds after the last answer, so that short answers start no process each
_CAFFEINATE = (
    "/usr/bin/caffeinate",
    "-i",
    "-w",
    str(os.getpid()),
)  # -i: idle sleep; the screen may


def assertion() -> Sequence[str] | None:
    """The command that keeps this machine awake; None if none is needed."""
    return _CAFFEINATE if sys.platform == "darwin" else None


class SleepInhibitor:
    """Runs a command while answers run. Called by the engine's thread between steps."""

    def __init__(self, command: Sequence[str]) -> None:
        """command: keeps the machine awake for as long as it runs."""
        self._command: Sequence[str] | None = command  # None once it cannot be run
        self._process: subprocess.Popen[bytes] | None = None
        self._last_busy = 0.0

    def look(self, now: float, *, is_busy: bool) -> None:
        """Start or end the command. `now`: seconds; `is_busy`: answers are running."""
        if is_busy:
            self._last_busy = now
            if self._process is None and self._command is not None:
                self._begin(self._command)
        elif self._process is not None and now - self._last_busy >= _LINGERS:
            self.end()

    def _begin(self, command: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            log.warning("This machine may go to sleep while answers run: %s", error)
            self._command = None

    def end(self) -> None:
        """Let the machine sleep."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

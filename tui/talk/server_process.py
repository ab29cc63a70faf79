"""The server that the terminal starts: a child process that never outlives it.

Its output goes to a log file, so that nothing native code writes can reach the screen. Its stdin
is a pipe held open by this process: however this process dies, the pipe closes and the server,
started with `--exit-with-parent`, exits.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mlxserve.system.terminal_text import clean
from tui.home import Home
from tui.talk.errors import ChatError

_READY = re.compile(rb"^mlxserve is ready at (http://\S+)\s*$", re.MULTILINE)
_REQUEST = " uvicorn.access: "
_POLL_SECONDS = 0.05
STOP_SECONDS = 8.0
_LOG_TAIL = 16 * 1024


class ServerStopped(ChatError):
    """The server process exited on its own."""


class ServerProcess:
    """One `mlxserve serve` process of this terminal."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self.log = log

    @classmethod
    def for_model(cls, model: str | None, server_args: Sequence[str], home: Home) -> ServerProcess:
        """Prepare a server on a free port of 127.0.0.1.

        Raises OSError if its log is not writable.
        """
        command = [sys.executable, "-m", "mlxserve", "serve"]
        command += ["--host", "127.0.0.1", "--port", "0", "--exit-with-parent"]
        if model is not None:
            command += ["--model", model]
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return cls([*command, *server_args], home.new_log(f"server-{stamp}-{os.getpid()}.log"))

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process. Raises ChatError if the program cannot be run."""
        with self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                    # In its own session: Ctrl+C in the terminal must not reach it.
                    start_new_session=True,
                )
            except OSError as error:
                raise ChatError(
                    f"Cannot start the server: {error}. Check the installation with "
                    "`mlxserve doctor`, or attach to a running server with --url."
                ) from error

    async def address(self) -> str:
        """Return the address once the server listens. Raises ServerStopped if it exits first."""
        while True:
            # In this order, the last lines written before an exit are not missed.
            is_running = self.is_running
            if match := _READY.search(self.log.read_bytes()):
                return match.group(1).decode("ascii", "replace")
            if not is_running:
                raise self.why_it_stopped()
            await asyncio.sleep(_POLL_SECONDS)

    @property
    def was_stopped(self) -> bool:
        """True if it has ended because it was asked to, as `mlxserve stop` does."""
        return self._process is not None and self._process.poll() == 0

    @property
    def ending(self) -> str:
        """How the process ended, to follow "The server": `exited with code 1`."""
        code = self._process.poll() if self._process is not None else None
        if code is not None and code < 0:
            return f"was killed by signal {-code}"
        return f"exited with code {code}"

    def why_it_stopped(self) -> ServerStopped:
        """Return the error that says how it ended, and what to do."""
        if self.was_stopped:
            return ServerStopped(
                "The server was stopped and its memory is free. Press Ctrl+R to start it again."
            )
        lines = self.last_lines(4)
        output = f" Its last output:\n{lines}\n" if lines else " "
        return ServerStopped(
            f"The server {self.ending}.{output}"
            f"The full log is {self.log}; press Ctrl+R to restart it, or choose another model with "
            "/model."
        )

    def last_lines(self, count: int) -> str:
        """Return the end of the log, safe to show, without the logged requests."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _LOG_TAIL))
            text = clean(log.read().decode("utf-8", "replace"))
        lines = [line for line in text.splitlines() if line.strip() and _REQUEST not in line]
        return "\n".join(lines[-count:])

    def stop(self) -> None:
        """Stop the process and wait for its exit. Safe to call twice, and before `start`."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

"""A server of our own: started as a child process, watched until it listens, always ended.

Its output goes to a log file, so that nothing native code writes can reach the screen. Its
stdin is a pipe that we hold open: when this process dies, however it dies, the pipe closes and
the server, started with `--exit-with-parent`, ends. Knows nothing of HTTP beyond the address.
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

from tui.home import Home
from tui.sanitise import clean
from tui.talk.errors import ChatError

_READY = re.compile(rb"^mlxserve is ready at (http://\S+)\s*$", re.MULTILINE)
_REQUEST = " uvicorn.access: "
_POLL_SECONDS = 0.05
_STOP_SECONDS = 8.0
_LOG_TAIL = 16 * 1024


class ServerStopped(ChatError):
    """The child ended on its own."""


class ServerProcess:
    """One `mlxserve serve` that belongs to this terminal."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self.log = log

    @classmethod
    def for_model(cls, model: str | None, server_args: Sequence[str], home: Home) -> ServerProcess:
        """A server on a free port of this machine. Raises OSError if there is no place for its log."""
        command = [sys.executable, "-m", "mlxserve", "serve"]
        command += ["--host", "127.0.0.1", "--port", "0", "--exit-with-parent"]
        if model is not None:
            command += ["--model", model]
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return cls([*command, *server_args], home.new_log(f"server-{stamp}-{os.getpid()}.log"))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Raises ChatError when the program cannot be run at all."""
        with self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                    # Its own session: Ctrl+C in the terminal is for us to act on.
                    start_new_session=True,
                )
            except OSError as error:
                raise ChatError(
                    f"The server could not be started: {error}. Check the installation with "
                    "`mlxserve doctor`, or attach to a running server with --url."
                ) from error

    async def address(self) -> str:
        """The address once the server listens. Raises ServerStopped if it ends before."""
        while True:
            # Ask first and read then: what it wrote before its end is not missed.
            is_running = self.is_running
            if match := _READY.search(self.log.read_bytes()):
                return match.group(1).decode("ascii", "replace")
            if not is_running:
                raise self.why_it_stopped()
            await asyncio.sleep(_POLL_SECONDS)

    def why_it_stopped(self) -> ServerStopped:
        code = self._process.poll() if self._process is not None else None
        ending = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        lines = self.last_lines(4)
        said = f" It said last:\n{lines}\n" if lines else " "
        return ServerStopped(
            f"The server has ended {ending}.{said}"
            f"Its whole log is {self.log}; press Ctrl+R to start it again, or leave and choose "
            "another model with --model."
        )

    def last_lines(self, count: int) -> str:
        """The end of the log, safe to show, without the requests that were logged."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _LOG_TAIL))
            text = clean(log.read().decode("utf-8", "replace"))
        said = [line for line in text.splitlines() if line.strip() and _REQUEST not in line]
        return "\n".join(said[-count:])

    def stop(self) -> None:
        """End the child and wait for its end. Safe to call twice, and before `start`."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

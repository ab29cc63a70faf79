"""Runs commands in this process, and serves them a small recording server."""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from mlxserve import cli
from tests.cli.commands import CommandResult
from tests.cli.recording_server import RecordingServer


class TerminalInput(io.StringIO):
    """An interactive stdin, with nothing to read."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(
    logging_restored: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., CommandResult]]:
    """A function that runs a command in this process and undoes what it sets up.

    `stdin` is what is piped in; None is a terminal.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handled = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.delenv("MLXSERVE_API_KEY", raising=False)

    def run(*args: str, stdin: str | None = "") -> CommandResult:
        monkeypatch.setattr(sys, "stdin", TerminalInput() if stdin is None else io.StringIO(stdin))
        monkeypatch.setattr(sys, "argv", ["mlxserve", *args])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return CommandResult(int(caught.value.code or 0), *capsys.readouterr())

    yield run
    for number, handler in handled.items():
        signal.signal(number, handler)


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with RecordingServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()

"""Runs commands in this process, and serves them a small recording server."""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlxserve import cli
from tests.cli.commands import CommandResult, Run
from tests.cli.recording_server import RecordingServer


def _piped(stdin: str | bytes | None) -> io.TextIOBase:
    if isinstance(stdin, bytes):
        return io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8", errors="surrogateescape")
    return TerminalInput() if stdin is None else io.StringIO(stdin)


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

    def run(*args: str, stdin: str | bytes | None = "") -> CommandResult:
        monkeypatch.setattr(sys, "stdin", _piped(stdin))
        monkeypatch.setattr(sys, "argv", ["mlxserve", *args])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return CommandResult(int(caught.value.code or 0), *capsys.readouterr())

    yield run
    for number, handler in handled.items():
        signal.signal(number, handler)


@pytest.fixture
def offline(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run` without a network, with folders of models of its own."""
    for name, value in {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, name, True if value == "1" else value)
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_XET"):
        monkeypatch.setenv(name, "1")  # `pull` sets them for its process
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    return run


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with RecordingServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()

import asyncio
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tui.fake_server import FakeServer
from tui.home import Home
from tui.talk.connection import ConnectOptions, Connector, Report, ServerConnection
from tui.talk.errors import ChatError

LLAMA_SERVER = {"message": "Loading model", "type": "unavailable_error", "code": 503}


class Reports(list[tuple[str, float | None]]):
    """What was waited for; `then` follows each of them."""

    def __init__(self, then: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self._then = then

    def __call__(self, words: str, progress: float | None) -> None:
        self.append((words, progress))
        self._then(words)


def connect(
    options: ConnectOptions, home: Path, report: Report | None = None
) -> tuple[ServerConnection, Connector]:
    async def run() -> tuple[ServerConnection, Connector]:
        connector = Connector(options, Home(home))
        try:
            connection = await connector.connect(Reports() if report is None else report)
            await connection.client.close()
        finally:
            connector.stop_server()
        return connection, connector

    return asyncio.run(run())


def test_the_first_model_is_the_default(server: FakeServer, tmp_path: Path) -> None:
    connection, connector = connect(ConnectOptions(url=server.url), tmp_path)
    assert (connection.model, connection.models) == ("small", ["small", "large"])
    assert connector.server is None


def test_a_model_can_be_requested(server: FakeServer, tmp_path: Path) -> None:
    connection, _ = connect(ConnectOptions(url=server.url, model="large"), tmp_path)
    assert connection.model == "large"


def test_an_unknown_model_is_an_error(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(ChatError, match=r"no model 'huge'.*small, large"):
        connect(ConnectOptions(url=server.url, model="huge"), tmp_path)


def test_a_server_without_models_is_an_error(server: FakeServer, tmp_path: Path) -> None:
    server.models = []
    with pytest.raises(ChatError, match="has no model"):
        connect(ConnectOptions(url=server.url), tmp_path)


@pytest.mark.parametrize(
    ("loading", "progress"),
    [({"status": "loading", "progress": 0.5}, 0.5), ({"error": LLAMA_SERVER}, None)],
)
def test_loading_is_reported_until_the_server_is_ready(
    server: FakeServer, tmp_path: Path, loading: dict[str, Any], progress: float | None
) -> None:
    def is_ready(_: str) -> None:
        server.health = (200, {"status": "ok"})

    server.health = (503, loading)
    connection, _ = connect(ConnectOptions(url=server.url), tmp_path, reports := Reports(is_ready))
    assert [progress for _, progress in reports] == [progress]
    assert "Loading the model" in reports[0][0]
    assert connection.models == ["small", "large"]


def test_an_unreachable_server_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ChatError, match="No server answers"):
            connect(ConnectOptions(url=f"127.0.0.1:{unused.getsockname()[1]}"), tmp_path)


@pytest.fixture
def own_server(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """Replaces Python by a program that writes its arguments and reports the fake server as ready."""
    program = tmp_path / "python"
    arguments, go = tmp_path / "arguments", tmp_path / "go"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {arguments}\n'
        "echo 2026-01-02 03:04:05,678 INFO mlxserve.model: Loading weights\n"
        f"until [ -e {go} ]; do sleep 0.02; done\n"
        f"echo mlxserve is ready at {server.url}\nexec cat > /dev/null\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    return SimpleNamespace(program=program, arguments=arguments, go=go)


def test_a_server_is_started_if_none_is_given(own_server: SimpleNamespace, tmp_path: Path) -> None:
    def go_on(words: str) -> None:
        if "Loading weights" in words:
            own_server.go.touch()

    options = ConnectOptions(model="org/small-4bit")
    connection, connector = connect(options, tmp_path / "home", reports := Reports(go_on))
    assert connection.model == "small", "it lists the model under a name of its own"
    assert "--model org/small-4bit" in own_server.arguments.read_text()
    assert "Starting the server" in reports[0][0]
    assert any(words.endswith(" s · Loading weights") for words, _ in reports)
    assert connector.server is not None
    assert not connector.server.is_running


def test_a_server_that_cannot_start_is_an_error_with_its_last_output(
    own_server: SimpleNamespace, tmp_path: Path
) -> None:
    own_server.program.write_text("#!/bin/sh\necho out of memory >&2\nexit 1\n")
    with pytest.raises(ChatError, match="out of memory"):
        connect(ConnectOptions(), tmp_path / "home")


def test_a_folder_that_is_not_writable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ChatError, match="MLXSERVE_HOME"):
        connect(ConnectOptions(), tmp_path / "file")

import asyncio
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tui.home import Home
from tui.talk import server_process as server_module
from tui.talk.connection import ConnectOptions, Connector, ConnectProgress, ServerConnection
from tui.talk.errors import ChatError

if TYPE_CHECKING:
    from conftest import FakeServer


def connect(
    wanted: ConnectOptions, home: Path, reports: list[ConnectProgress] | None = None
) -> tuple[ServerConnection, Connector]:
    async def run() -> tuple[ServerConnection, Connector]:
        connector = Connector(wanted, Home(home))
        try:
            connection = await connector.connect((reports if reports is not None else []).append)
            await connection.client.close()
        finally:
            connector.stop_server()
        return connection, connector

    return asyncio.run(run())


def test_the_first_model_is_taken(server: "FakeServer", tmp_path: Path) -> None:
    connection, connector = connect(ConnectOptions(url=server.url), tmp_path)
    assert (connection.model, connection.models) == ("small", ["small", "large"])
    assert connector.server is None


def test_a_model_can_be_asked_for(server: "FakeServer", tmp_path: Path) -> None:
    connection, _ = connect(ConnectOptions(url=server.url, model="large"), tmp_path)
    assert connection.model == "large"


def test_a_model_the_server_has_not_is_an_error(server: "FakeServer", tmp_path: Path) -> None:
    with pytest.raises(ChatError, match=r"no model 'huge'.*small, large"):
        connect(ConnectOptions(url=server.url, model="huge"), tmp_path)


def test_a_server_without_models_is_an_error(server: "FakeServer", tmp_path: Path) -> None:
    server.models = []
    with pytest.raises(ChatError, match="has no model"):
        connect(ConnectOptions(url=server.url), tmp_path)


def test_loading_is_reported_until_it_is_done(server: "FakeServer", tmp_path: Path) -> None:
    server.health = (503, {"status": "loading", "progress": 0.5})

    class Reports(list[ConnectProgress]):
        def append(self, waiting: ConnectProgress) -> None:
            super().append(waiting)
            server.health = (200, {"status": "ok"})

    reports = Reports()
    connect(ConnectOptions(url=server.url), tmp_path, reports)
    assert [report.progress for report in reports] == [0.5]
    assert "Loading the model" in reports[0].words


def test_nobody_there_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ChatError, match="No server answers"):
            connect(ConnectOptions(url=f"127.0.0.1:{unused.getsockname()[1]}"), tmp_path)


@pytest.fixture
def own_server(
    server: "FakeServer", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """In place of Python: a program that says that the fake server is ready, and its arguments."""
    program = tmp_path / "python"
    said, go = tmp_path / "arguments", tmp_path / "go"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {said}\n'
        "echo 2026-01-02 03:04:05,678 INFO mlxserve.model: Loading weights\n"
        f"until [ -e {go} ]; do sleep 0.02; done\n"
        f"echo mlxserve is ready at {server.url}\nexec cat > /dev/null\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(server_module, "sys", SimpleNamespace(executable=str(program)))
    return SimpleNamespace(program=program, said=said, go=go)


def test_a_server_is_started_when_none_is_given(
    own_server: SimpleNamespace, tmp_path: Path
) -> None:
    class Reports(list[ConnectProgress]):
        def append(self, waiting: ConnectProgress) -> None:
            super().append(waiting)
            if "Loading weights" in waiting.words:
                own_server.go.touch()

    reports = Reports()
    connection, connector = connect(
        ConnectOptions(model="org/small-4bit"), tmp_path / "home", reports
    )
    assert connection.model == "small", "it lists what it was started with under its own name"
    assert "--model org/small-4bit" in own_server.said.read_text()
    assert "Starting the server" in reports[0].words
    assert any(report.words.endswith(" s · Loading weights") for report in reports)
    assert connector.server is not None
    assert not connector.server.is_running


def test_a_server_that_can_not_start_is_an_error_with_its_words(
    own_server: SimpleNamespace, tmp_path: Path
) -> None:
    own_server.program.write_text("#!/bin/sh\necho out of memory >&2\nexit 1\n")
    with pytest.raises(ChatError, match="out of memory"):
        connect(ConnectOptions(), tmp_path / "home")


def test_a_folder_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ChatError, match="MLXSERVE_HOME"):
        connect(ConnectOptions(), tmp_path / "file")


def test_sys_is_what_it_was() -> None:
    assert server_module.sys is sys

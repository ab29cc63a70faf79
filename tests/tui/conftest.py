"""Fixtures of the terminal's tests: a scripted server, and terminals."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mlxserve.history.store import Store
from tests.tui.fake_server import FakeServer
from tests.tui.terminals import PATIENCE, Open, Pane, Terminal, Window
from tui.app import ChatApp
from tui.home import Home
from tui.talk.client import ChatClient
from tui.talk.connection import ConnectOptions, Connector


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def patience() -> float:
    """Seconds until an expected event counts as missing."""
    return PATIENCE


@pytest.fixture
def client(server: FakeServer) -> ChatClient:
    return ChatClient(server.url)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # which /model writes to
    return Home(tmp_path / "home")


@pytest.fixture
def terminal(server: FakeServer, home: Home, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the chat, where a second press never comes too late: `async with terminal() as t`."""
    monkeypatch.setattr("tui.actions.second_press.SECONDS", 3600.0)

    @asynccontextmanager
    async def opened(
        connector: Connector | None = None,
        *,
        is_ready: bool = True,
        size: tuple[int, int] = (100, 30),
        **how: Any,
    ) -> AsyncGenerator[Terminal, None]:
        """With this connector, by default to the fake server; waits for it if it is to be ready."""
        connector = connector or Connector(ConnectOptions(url=server.url), home)
        app = ChatApp(connector, Store.open(home.chats), home, **how)
        try:
            async with app.run_test(size=size, notifications=True) as pilot:
                t = Terminal(app, pilot)
                if is_ready:
                    await t.until_ready()
                yield t
                await app.action_quit()
        finally:
            connector.stop_server()

    return opened


@pytest.fixture
def t(terminal: Open, request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Terminal]:
    """The chat, ready; in a window of `size` if the test has that."""
    has_size = "size" in request.fixturenames
    return terminal(size=request.getfixturevalue("size")) if has_size else terminal()


@pytest.fixture
def open_window(home: Home) -> Iterator[Callable[..., Window]]:
    windows: list[Window] = []

    def start(*command: str, patience: float = PATIENCE) -> Window:
        windows.append(Window([sys.executable, *command], home.folder, patience))
        return windows[-1]

    yield start
    for window in windows:
        window.close()


@pytest.fixture
def pane_of_size(home: Home, tmp_path: Path) -> Iterator[Callable[[tuple[int, int]], Pane]]:
    """A pane of (columns, rows)."""
    with ExitStack() as panes:

        def open_pane(size: tuple[int, int]) -> Pane:
            pane = Pane(home, tmp_path, size)
            panes.callback(pane.close)
            return pane

        yield open_pane


@pytest.fixture
def pane(pane_of_size: Callable[[tuple[int, int]], Pane]) -> Pane:
    return pane_of_size((100, 30))

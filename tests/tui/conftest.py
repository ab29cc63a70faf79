"""Fixtures of the terminal's tests: a scripted server, and terminals in which stories are played."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widget import Widget

from tests.tui.fake_server import FakeServer
from tests.tui.terminals import PATIENCE, Host, Hosted, Pane, Terminal, Window
from tui.app import ChatApp
from tui.chat.store import Store
from tui.home import Home
from tui.talk.client import ChatClient
from tui.talk.connection import ConnectOptions, Connector
from tui.talk.models import ModelCatalog


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
def in_client() -> Callable[[str, Callable[[ChatClient], Awaitable[Any]]], Any]:
    """Calls a function with a client of the server, in an event loop of its own."""

    def call(url: str, function: Callable[[ChatClient], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with ChatClient(url) as client:
                return await function(client)

        return asyncio.run(run())

    return call


Story = Callable[[Terminal], Awaitable[None]]


@pytest.fixture
def host() -> Callable[..., None]:
    """Runs a story with one widget or one dialog, without the rest of the chat."""

    def run(
        story: Callable[[Hosted], Awaitable[None]],
        content: Widget,
        *,
        size: tuple[int, int] = (100, 30),
    ) -> None:
        async def play() -> None:
            app = Host(content)
            async with app.run_test(size=size) as pilot:
                await story(Hosted(app, pilot))

        asyncio.run(play())

    return run


@pytest.fixture
def new_terminal() -> Callable[[ChatApp, Pilot[None]], Terminal]:
    return Terminal


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # which /model writes to
    return Home(tmp_path / "home")


@pytest.fixture
def play(home: Home, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a story in a terminal with this connector, where a second press never comes too late."""
    monkeypatch.setattr("tui.actions.second_press.SECONDS", 3600.0)

    def run(
        story: Story,
        connector: Connector,
        *,
        size: tuple[int, int] = (100, 30),
        theme_name: str = "mlxserve-dark",
        models: ModelCatalog | None = None,
    ) -> None:
        async def play() -> None:
            store = Store.open(home.chats)
            app = ChatApp(connector, store, home, theme_name=theme_name, models=models)
            async with app.run_test(size=size, notifications=True) as pilot:
                await story(Terminal(app, pilot))
                await app.action_quit()

        asyncio.run(play())

    return run


@pytest.fixture
def terminal(server: FakeServer, home: Home, play: Callable[..., None]) -> Callable[..., None]:
    """Runs a story in a terminal that is connected to the fake server."""

    def run(story: Story, *, is_ready: bool = True, **how: Any) -> None:
        async def when_ready(terminal: Terminal) -> None:
            if is_ready:
                await terminal.until_ready()
            await story(terminal)

        play(when_ready, Connector(ConnectOptions(url=server.url), home), **how)

    return run


@pytest.fixture
def t(terminal: Callable[..., None]) -> Callable[..., None]:
    """In a coroutine test: the chat, ready, as a `Terminal`; in a window of `size` if it has that."""
    return terminal


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine with a terminal `t` as its story."""
    story, given = pyfuncitem.obj, pyfuncitem.funcargs
    if "t" not in given or not inspect.iscoroutinefunction(story):
        return None
    arguments = {name: given[name] for name in inspect.signature(story).parameters if name != "t"}
    how = {"size": given["size"]} if "size" in given else {}
    given["t"](lambda terminal: story(t=terminal, **arguments), **how)
    return True


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

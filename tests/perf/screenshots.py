"""`python -m tests.perf screenshots FOLDER`: takes the screenshots of the documentation.

Starts a server with the bundled model and a small cache, chats with it while two other clients with
the same system prompt are being answered, and writes the screen as SVG.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from textual.pilot import Pilot
from textual.widgets import OptionList, Static

from mlxserve.history.messages import NewQuestion
from mlxserve.history.store import Store
from tests.waiting import until
from tui.app import ChatApp
from tui.home import Home
from tui.paint.theme import DARK, LIGHT
from tui.talk.connection import ConnectOptions, Connector

_TIMEOUT_SECONDS = 300.0  # loading a model on a busy machine takes a while
_NUM_PAGES = "600"
_SYSTEM = (
    "You are a helpful assistant. "
    + ("The train to Oslo left the valley in the morning. A quiet heron stood near the lake. ") * 15
)
_RULES = "A named prefix is computed once, and its pages stay. " * 24
_QUESTIONS = ("What is a page?", "Remember the code word plum-42.", "What is the code word?")
_OTHERS = ("What is mlxserve?", "What can you do?")


async def take() -> dict[str, str]:
    """The screenshots, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        connector = Connector(ConnectOptions(server_args=["--num-pages", _NUM_PAGES]), home)
        try:
            return {
                "engine.svg": await _shoot(connector, home, DARK.name, _with_the_engine),
                "models.svg": await _shoot(connector, home, LIGHT.name, _with_the_models),
            }
        finally:
            connector.stop_server()


async def _shoot(
    connector: Connector,
    home: Home,
    theme: str,
    story: Callable[[ChatApp, Pilot[object]], Awaitable[None]],
) -> str:
    """The screen at the end of the story, as SVG."""
    app = ChatApp(connector, Store.open(home.chats), home, theme_name=theme)
    picture: list[str] = []

    async def play(pilot: Pilot[object]) -> None:
        await until(lambda: "Ready" in app.window.status.words, _TIMEOUT_SECONDS)
        await story(app, pilot)
        picture.append(_without_fonts(app.export_screenshot(title="mlxserve chat")))
        await app.action_quit()

    await app.run_async(headless=True, size=(120, 40), auto_pilot=play)
    return picture[0]


async def _with_the_engine(app: ChatApp, pilot: Pilot[object]) -> None:
    """A chat whose prefix is shared with two running requests."""
    connection = app.link.connection
    assert connection is not None, "the status is Ready"
    async with httpx.AsyncClient(base_url=connection.client.url, trust_env=False) as http:
        await http.put("/v1/prefixes/rules", json={"prompt": _RULES}, timeout=60)
        await pilot.press("f4")
        app.browsing.set_system(_SYSTEM.strip())
        for question in _QUESTIONS[:-1]:
            await _ask(app, question)
        others = [asyncio.create_task(_talk(http, question)) for question in _OTHERS]
        await until(lambda: "shared 0" not in _panel(app) and "running 2" in _panel(app))
        await _ask(app, _QUESTIONS[-1])
        await pilot.pause(1.0)  # until the panel has polled again
        for other in others:
            other.cancel()


async def _with_the_models(app: ChatApp, pilot: Pilot[object]) -> None:
    await pilot.press("ctrl+o", "enter")
    await until(lambda: bool(app.window.transcript.views))
    await app.run_action("command('model')")
    await until(lambda: any("↓" in row for row in _rows(app)))  # those that can be downloaded


async def _ask(app: ChatApp, question: str) -> None:
    app.answering.send(NewQuestion(question))
    await until(lambda: not app.answering.is_busy and "Ready" in app.window.status.words)


async def _talk(http: httpx.AsyncClient, question: str) -> None:
    """Ask as another client, for a long answer."""
    messages = [
        {"role": "system", "content": _SYSTEM.strip()},
        {"role": "user", "content": question},
    ]
    body = {"messages": messages, "max_tokens": 3000, "ignore_eos": True}
    await http.post("/v1/chat/completions", json=body, timeout=_TIMEOUT_SECONDS)


def _without_fonts(svg: str) -> str:
    """Remove the web fonts: the picture uses the viewer's monospaced font and loads nothing."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def _panel(app: ChatApp) -> str:
    """The texts of the engine panel."""
    return "\n".join(str(text.content) for text in app.query("EnginePanel Static").results(Static))


def _rows(app: ChatApp) -> list[str]:
    """The rows of the list in the open dialog."""
    return [str(option.prompt) for rows in app.screen.query(OptionList) for option in rows.options]


def write_screenshots(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in asyncio.run(take()).items():
        (folder / name).write_text(picture, encoding="utf-8")

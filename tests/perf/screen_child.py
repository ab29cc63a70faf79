"""`python -m tests.perf.screen_child`: one measurement of the screen, in the terminal it is started in.

    idle SECONDS OUT                       the chat's share of a core while nothing happens
    stream TEXT ours|textual SECONDS OUT   stalls of the event loop while an answer streams, in the
                                           chat or in Textual's own Markdown widget

The result is written to OUT as JSON. `python -m tests.perf screen` starts this in terminals of its
own and shows the results in a table.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Markdown

from tui.app import ChatApp
from tui.chat.store import Store
from tui.home import Home
from tui.talk.client import ChatClient
from tui.talk.connection import ConnectOptions, Connector, ConnectProgress, ServerConnection
from tui.talk.models import ServedModel
from tui.talk.pieces import Finish, Piece, TextPiece

PIECES_PER_SECOND = 100
PIECE_SIZE = 4  # characters: a token's worth
TEXTS: Mapping[str, str] = {
    "prose": ("Some words of *ordinary* prose with `code`. " * 5 + "\n\n") * 60,
    "fence": "```python\n" + "    x = foo(bar, [1, 2, 3], 'abc')  # words\n" * 600,
    "list": "".join(f"- item **{n}** with some words and `code`\n" for n in range(200)),
    "long": ("Some words of *ordinary* prose with `code`. " * 5 + "\n\n") * 900,
}
_LOOK_SECONDS = 0.01  # between two samples of the loop's delay
_SETTLE_SECONDS = 2.0  # from the first frame to idle

Measurement = Mapping[str, Sequence[float]]


async def pieces_of(text: str, seconds: float) -> AsyncGenerator[str, None]:
    """All but the end of the text at once, then the end at the speed of a fast model."""
    rest = min(len(text), int(PIECES_PER_SECOND * seconds) * PIECE_SIZE)
    start = len(text) - rest
    yield text[:start]
    for at in range(start, len(text), PIECE_SIZE):
        yield text[at : at + PIECE_SIZE]
        await asyncio.sleep(1 / PIECES_PER_SECOND)


class ScriptedClient(ChatClient):
    """A client whose server answers with one text."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__("http://127.0.0.1:1")
        self._text = text
        self._seconds = seconds

    async def stream(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str,
        continues: bool = False,
        stops_loops: bool = False,
        fields: Mapping[str, float | int | str] | None = None,
    ) -> AsyncGenerator[Piece, None]:
        async with aclosing(pieces_of(self._text, self._seconds)) as pieces:
            async for piece in pieces:
                yield TextPiece(piece)
        yield Finish("stop")


class ScriptedConnector(Connector):
    """Connects at once."""

    def __init__(self, client: ChatClient, home: Home) -> None:
        super().__init__(ConnectOptions(url=client.url), home)
        self._client = client

    async def connect(self, report: Callable[[ConnectProgress], None]) -> ServerConnection:
        return ServerConnection(self._client, [ServedModel("scripted")], "scripted")


class TextualMarkdownApp(App[None]):
    """An answer in Textual's own Markdown widget."""

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Markdown()

    async def answer(self, text: str, seconds: float) -> None:
        self.query_one(VerticalScroll).anchor()
        stream = Markdown.get_stream(self.query_one(Markdown))
        async with aclosing(pieces_of(text, seconds)) as pieces:
            async for piece in pieces:
                await stream.write(piece)
        await stream.stop()


async def _in_chat(
    client: ChatClient, measure: Callable[[ChatApp], Awaitable[Measurement]]
) -> Measurement:
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        app = ChatApp(ScriptedConnector(client, home), Store.open(home.chats), home)
        running = asyncio.create_task(app.run_async())
        try:
            await _until(lambda: "Ready" in _status(app))
            return await measure(app)
        finally:
            await app.action_quit()
            await running


def _status(app: ChatApp) -> str:
    return app.window.status.words if app.is_running and app.window.is_mounted else ""


async def idle(seconds: float) -> Measurement:
    """Percent of one core, as one value."""

    async def measure(_: ChatApp) -> Measurement:
        await asyncio.sleep(_SETTLE_SECONDS)
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        share = (time.process_time() - cpu) / (time.monotonic() - began)
        return {"cpu_percent": [100 * share]}

    return await _in_chat(ScriptedClient("", 0), measure)


async def stream_ours(text: str, seconds: float) -> Measurement:
    """Seconds by which each sample was late while the answer streamed (`stalls`), and the CPU time of
    this process in them (`busy`).
    """

    async def measure(app: ChatApp) -> Measurement:
        app.answering.send("go")
        await _until(lambda: app.answering.is_answering)
        return await _stalls(lambda: app.answering.is_answering, seconds)

    return await _in_chat(ScriptedClient(text, seconds), measure)


async def stream_textual(text: str, seconds: float) -> Measurement:
    """The same in Textual's own widget."""
    app = TextualMarkdownApp()
    running = asyncio.create_task(app.run_async())
    await _until(lambda: app.is_running and bool(app.query(Markdown)))
    answering = app.run_worker(app.answer(text, seconds), exit_on_error=False)
    found = await _stalls(lambda: not answering.is_finished, seconds)
    answering.cancel()
    if answering.error is not None and not isinstance(answering.error, asyncio.CancelledError):
        raise answering.error
    app.exit()
    await running
    return found


async def _until(is_so: Callable[[], bool]) -> None:
    while True:
        if is_so():
            return
        await asyncio.sleep(_LOOK_SECONDS)


async def _stalls(is_going: Callable[[], bool], seconds: float) -> Measurement:
    """Sample until the answer ends, at most three times `seconds`."""
    stalls, busy, deadline = list[float](), list[float](), time.monotonic() + 3 * seconds
    while is_going() and time.monotonic() < deadline:
        began, worked = time.perf_counter(), time.process_time()
        await asyncio.sleep(_LOOK_SECONDS)
        stalls.append(time.perf_counter() - began - _LOOK_SECONDS)
        busy.append(time.process_time() - worked)
    return {"stalls": stalls, "busy": busy}


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["idle", seconds, out]:
            found = asyncio.run(idle(float(seconds)))
        case ["stream", text, "ours", seconds, out] if text in TEXTS:
            found = asyncio.run(stream_ours(TEXTS[text], float(seconds)))
        case ["stream", text, "textual", seconds, out] if text in TEXTS:
            found = asyncio.run(stream_textual(TEXTS[text], float(seconds)))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    Path(out).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m tests.perf.screen_child`: one measurement of the screen, in the terminal it is started in.

    idle ours|panel SECONDS OUT                  the chat's share of a core while nothing happens, without
                                                 and with the engine panel: first while the cursor
                                                 blinks, then after it has stopped
    stream TEXT ours|panel|textual SECONDS OUT   stalls of the event loop while an answer streams, in
                                                 the chat or in Textual's own Markdown widget

The result is written to OUT as JSON. `python -m tests.perf screen` starts this in terminals of its
own and shows the results in a table.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Markdown, Static

from mlxserve.history.messages import NewQuestion
from mlxserve.history.store import Store
from tui.app import ChatApp
from tui.home import Home
from tui.talk.client import ChatClient
from tui.talk.connection import ConnectOptions, Connector, Report, ServerConnection
from tui.talk.engine_client import EngineClient
from tui.talk.pieces import Finish, Piece, TextPiece
from tui.talk.served_model import ServedModel
from tui.widgets.composer import BLINK_SECONDS

PIECES_PER_SECOND = 100
PIECE_SIZE = 4  # characters: a token's worth
TEXTS: Mapping[str, str] = {
    "prose": ("Some words of *ordinary* prose with `code`. " * 5 + "\n\n") * 60,
    "fence": "```python\n" + "    x = foo(bar, [1, 2, 3], 'abc')  # words\n" * 600,
    "list": "".join(f"- item **{n}** with some words and `code`\n" for n in range(200)),
    "long": ("Some words of *ordinary* prose with `code`. " * 5 + "\n\n") * 900,
}
_LOOK_SECONDS = 0.01  # between two samples of the loop's delay
_WARM_UP_SECONDS = 2.0  # from the first frame to idle
NUM_PAGES = 4096
_DELTAS_PER_SECOND = 5  # of the page map: 160 tokens of 32 in a page
_URL = "http://127.0.0.1:1"

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
        super().__init__(_URL)
        self._text = text
        self._seconds = seconds

    async def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        model: str,
        continues: bool = False,
        stops_loops: bool = False,
        fields: Mapping[str, float | int | str] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> AsyncGenerator[Piece, None]:
        async with aclosing(pieces_of(self._text, self._seconds)) as pieces:
            async for piece in pieces:
                yield TextPiece(piece)
        yield Finish("stop")


async def _map_events(deltas_per_second: int) -> AsyncGenerator[bytes, None]:
    """The whole map, then a page more of one request at a time."""
    told = [{"id": "a", "from": 0, "pages": [[0, 1]]}]
    data = {"page_size": 32, "num_pages": NUM_PAGES, "pages": f"a1f{NUM_PAGES - 1}"}
    yield _event("snapshot", {"seq": 0, **data, "requests": told, "gone": []})
    for page in range(1, NUM_PAGES):
        await asyncio.sleep(1 / deltas_per_second if deltas_per_second else 3600)
        told = [{"id": "a", "from": page, "pages": [[page, 1]]}]
        delta = {"seq": page, "pages": [[page, "a1"]], "requests": told, "gone": []}
        yield _event("delta", delta)


def _event(name: str, data: Mapping[str, object]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def scripted_engine(deltas_per_second: int) -> EngineClient:
    """The client of a server whose routes are answered here, by the bytes that a server sends."""
    stats = {
        "page_size": 32,
        "kv_cache_dtype": "bfloat16",
        "bytes": {"kv_cache": 1 << 30, "active": 3 << 30, "peak": 5 << 30},
        "prefix_cache": {"hit_rate": 0.8},
        "recurrent_states": {"slots": 0, "snapshots": 0},
        "disk_cache": {"bytes": 1 << 30, "limit": 1 << 32},
        "requests": {"running": 1 if deltas_per_second else 0, "waiting": 0},
        "num_preemptions": 0,
    }
    counts = {"position": None, "num_computed": 900, "num_to_compute": 900}
    card = {"id": "a", "state": "decoding", **counts}
    polls = itertools.count()

    def reply(request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/api/v1/kv/map":
                return httpx.Response(200, content=_map_events(deltas_per_second))
            case "/api/v1/requests":
                return httpx.Response(200, json={"data": [card]})
            case "/api/v1/kv/stats":
                # While nothing happens the rates stay; else they move, and the sparklines with them.
                rate = next(polls) % 7 if deltas_per_second else 0
                rates = {"prefill": 100.0 * rate, "generation": 10.0 * rate}
                return httpx.Response(200, json={**stats, "tokens_per_second": rates})
        return httpx.Response(404)

    http = httpx.AsyncClient(transport=httpx.MockTransport(reply), base_url=_URL)
    return EngineClient(http, _URL)


class ScriptedConnector(Connector):
    """Connects at once."""

    def __init__(self, client: ChatClient, home: Home) -> None:
        super().__init__(ConnectOptions(url=client.url), home)
        self._client = client

    async def connect(self, report: Report) -> ServerConnection:
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


async def _show_panel(app: ChatApp) -> None:
    app.call_later(app.action_command, "engine")
    await _until(
        lambda: any("KV cache" in str(one.content) for one in app.query("#now").results(Static))
    )


async def idle(seconds: float, *, has_panel: bool) -> Measurement:
    """Percent of one core: `blinking` for at most as long as the cursor blinks after a key, then `still`."""
    client = ScriptedClient("", 0)
    if has_panel:
        client.engine = scripted_engine(0)

    async def measure(app: ChatApp) -> Measurement:
        if has_panel:
            await _show_panel(app)
        composer = app.window.composer
        await asyncio.sleep(_WARM_UP_SECONDS)
        blinking = await _cpu_percent(min(seconds, BLINK_SECONDS - 2 * _WARM_UP_SECONDS))
        if not composer.cursor_blink:
            raise RuntimeError("The cursor stopped blinking while that was measured.")
        await _until(lambda: not composer.cursor_blink)
        return {"blinking": [blinking], "still": [await _cpu_percent(seconds)]}

    return await _in_chat(client, measure)


async def _cpu_percent(seconds: float) -> float:
    began, cpu = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    return 100 * (time.process_time() - cpu) / (time.monotonic() - began)


async def stream_ours(text: str, seconds: float, *, has_panel: bool) -> Measurement:
    """Seconds by which each sample was late while the answer streamed (`stalls`), and the CPU time of
    this process in them (`busy`).
    """
    client = ScriptedClient(text, seconds)
    if has_panel:
        client.engine = scripted_engine(_DELTAS_PER_SECOND)

    async def measure(app: ChatApp) -> Measurement:
        if has_panel:
            await _show_panel(app)
        app.answering.send(NewQuestion("go"))
        await _until(lambda: app.answering.is_answering)
        return await _stalls(lambda: app.answering.is_answering, seconds)

    return await _in_chat(client, measure)


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
        case ["idle", "ours" | "panel" as kind, seconds, out]:
            found = asyncio.run(idle(float(seconds), has_panel=kind == "panel"))
        case ["stream", text, "ours" | "panel" as kind, seconds, out] if text in TEXTS:
            streaming = stream_ours(TEXTS[text], float(seconds), has_panel=kind == "panel")
            found = asyncio.run(streaming)
        case ["stream", text, "textual", seconds, out] if text in TEXTS:
            found = asyncio.run(stream_textual(TEXTS[text], float(seconds)))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    Path(out).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A picture of every state, in both sizes and both themes, compared with the accepted one.

The pictures are Textual's own SVG, compressed, in `pictures/`. After an intended change,

    ACCEPT_PICTURES=FOLDER python -m pytest tests/tui/test_pictures.py -n 0 -m "slow or not slow"

accepts the new pictures, and writes the changed ones as plain SVG into FOLDER. Look at each of them.
"""

import asyncio
import difflib
import gzip
import itertools
import os
import re
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from textual.command import CommandInput
from textual.widgets import Input, OptionList

from mlxserve.history.messages import AnswerStats
from mlxserve.history.store import Store
from mlxserve.hub.model_choices import Downloaded, Model, ModelCatalog, ModelOrigin
from tests.images.files import file_of as image_file
from tests.tui import scripts
from tests.tui.chats_on_disk import write_chat
from tests.tui.fake_server import FakeServer
from tests.tui.terminals import Open, Terminal
from tui.chat.live_answer import AnswerPhase, LiveAnswer
from tui.home import Home
from tui.paint.theme import DARK, LIGHT
from tui.talk.connection import ConnectOptions, Connector, Report
from tui.talk.errors import ChatError
from tui.widgets.dialogs import HelpDialog

NUM_STILL = 3  # equal pictures in a row
LOOK_SECONDS = 2.0  # for the accepted picture, before another one is accepted
PICTURES = Path(__file__).parent / "pictures"
ACCEPTED = os.environ.get("ACCEPT_PICTURES")
MARKDOWN = """# Paged attention

A *page* holds **32 tokens**; see [the paper](https://a.example/paper) and `page_table`.

1. match what is there
2. compute the rest
   - in chunks

```python
def pages(tokens: int) -> int:
    return -(-tokens // 32)  # round up
```

| state | pages |
|-------|------:|
| free  | 1,024 |
| ~~old~~ used | 7 |

> Nothing is computed twice.

---
- [x] done
- [ ] open"""
SIZES = ((80, 24), (120, 40))
THEMES = (DARK.name, LIGHT.name)
IN_THE_SLOW_SUITE = tuple(zip(SIZES, THEMES, strict=True))  # the others are in the long one
STATES = {
    *("not-connected", "loading", "ready"),
    *("prefilling", "thinking", "writing", "stopped", "thinking-open", "tool-call", "failed"),
    *("versions-and-hostile-text", "editing", "commands", "files", "message-chosen", "found"),
    *("notice", "help", "chats", "chats-searched", "palette"),
    *("models", "model-downloading", "model-paused", "engine-missing", "engine", "engine-strip"),
    "image",
}
HOSTILE = "\x1b]52;c;x\x07[red]x[/] \u202eabc\u202c \x9b2J done"
FOUND = [
    Model("mini", ModelOrigin.BUNDLED, 10_000_000, True, 90_000, 4096),
    Model("org/here-4B-4bit", ModelOrigin.DOWNLOADED, 2_260_000_000, False, 4000, 40_960),
    Model("org/there-8B-4bit", ModelOrigin.SUGGESTED, 4_610_000_000, True, 60_000, 40_960),
    Model("org/huge-70B-4bit", ModelOrigin.SUGGESTED, 39_700_000_000, False, 0, 131_072),
]


class Machine(ModelCatalog):
    """Lists four models; a download never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.disk_free = 210_000_000_000

    async def find(self) -> list[Model]:
        return FOUND

    async def download(self, name: str) -> AsyncGenerator[Downloaded, None]:
        yield Downloaded(2_000_000_000, 4_610_000_000)
        await asyncio.Event().wait()


class Album:
    """The pictures of one window."""

    def __init__(self, t: Terminal, size: tuple[int, int], theme: str) -> None:
        self._t = t
        self._size, self._theme = size, theme
        self.taken: set[str] = set()

    async def take(self, state: str, *words: str) -> None:
        """Compare the picture of this state, once it shows these texts."""
        for text in words:
            await self._t.until_shown(text)
        for field in self._t.app.screen.query(Input):
            field.cursor_blink = False
        for field in self._t.app.screen.query(CommandInput):
            field.cursor_blink = False
        self.taken.add(state)
        file = file_of(state, self._size, self._theme)
        expected = gzip.decompress(file.read_bytes()).decode() if file.exists() else ""
        if ACCEPTED:
            with suppress(TimeoutError):  # a cursor that blinks is no change
                async with asyncio.timeout(LOOK_SECONDS):
                    while not self._is(expected):
                        await self._t.pilot.pause()
                    return
            self._accept(file, expected, await self._still())
            return
        assert expected, f"{file.name} is missing: see the top of this file"
        try:
            await self._t.until(lambda: self._is(expected))
        except TimeoutError:
            was, now = (text.replace("><", ">\n<").splitlines() for text in (expected, self._now()))
            lines = difflib.unified_diff(was, now, n=0)
            raise AssertionError(f"{file.name} differs:\n" + "\n".join(lines)[:20000]) from None

    def _is(self, expected: str) -> bool:
        if self._now() == expected:
            return True
        self._redraw()
        return False

    def _redraw(self) -> None:
        """A dialog keeps its drawing of the screen below it, which may have changed since: a notice
        that was about to go stayed in pictures of the help.
        """
        self._t.app.screen.refresh()

    async def _still(self) -> str:
        """The picture, once it stays the same over several redraws."""
        picture, num_same = "", 0
        while num_same < NUM_STILL:
            self._redraw()
            await self._t.pilot.pause()
            num_same = num_same + 1 if self._now() == picture else 0
            picture = self._now()
        return picture

    def _now(self) -> str:
        svg = self._t.app.export_screenshot(title="")
        svg = re.sub(r"terminal-\d+-", "t-", svg)  # a new number for every process
        svg = re.sub(r"127\.0\.0\.1:\d{5}", "127.0.0.1:12345", svg)
        return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)

    def _accept(self, file: Path, expected: str, now: str) -> None:
        if now != expected:
            PICTURES.mkdir(exist_ok=True)
            file.write_bytes(gzip.compress(now.encode(), mtime=0))
            plain = Path(str(ACCEPTED)) / file.stem
            plain.parent.mkdir(parents=True, exist_ok=True)
            plain.write_text(now)


def file_of(state: str, size: tuple[int, int], theme: str) -> Path:
    return PICTURES / f"{state}-{size[0]}x{size[1]}-{theme.removeprefix('mlxserve-')}.svg.gz"


@pytest.fixture
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the screen independent of the time and the speed of the machine."""
    stats = AnswerStats(
        prompt_tokens=19_020,
        cached_tokens=18_432,
        differs_at=18_440,
        miss="new_text",
        completion_tokens=212,
        first_token_seconds=0.42,
        decode_seconds=5.0,
    )
    until_then = AnswerStats()
    measured = property(lambda self: until_then if self.phase is AnswerPhase.WAITING else stats)
    monkeypatch.setattr(LiveAnswer, "stats", measured)
    monkeypatch.setattr(LiveAnswer, "seconds", 2.4)
    monkeypatch.setattr("mlxserve.history.store.time.time", lambda: 1_790_000_000.0)
    monkeypatch.setattr("tui.talk.connection.time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr("tui.widgets.message.SPINNER", "⠹")
    monkeypatch.setattr("tui.engine.panel.HISTORY", 1)  # the sparklines grow with time
    # The test removes messages: one that expired by itself was missing in its picture.
    monkeypatch.setattr("tui.widgets.status.MIN_SECONDS", 3600.0)
    # Below a dialog the cursor stays as it was when that opened: half a second after a key it was hidden.
    monkeypatch.setattr("tui.widgets.composer.BLINK_SECONDS", 0.05)
    monkeypatch.setattr("tui.app.SECONDS", 3600.0)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def earlier_chats(home: Home) -> None:
    for title in ("The lighthouse of Eddystone", "Why pages are 32 tokens"):
        write_chat(home, title, title, f"{title}: stone by stone.")
    with closing(Store.open(home.chats)) as store:
        store.place(store.chats()[0].id, folder="Engine", is_pinned=True)


class OwnServer(Connector):
    """Stands for a server started here, so that the model can be changed."""

    def __init__(self, server: FakeServer, home: Home) -> None:
        super().__init__(ConnectOptions(), home)
        self._url = server.url
        self.is_running = False

    async def address(self, report: Report) -> str:
        if not self.is_running:
            raise ChatError("The server exited with code 1. The full log is server.log.")
        return self._url


async def chat_states(t: Terminal, album: Album, server: FakeServer) -> None:
    """A running answer, and the ways it can end."""
    asked, thought, written = scripts.Gate(), scripts.Gate(), scripts.Gate()
    server.script(
        scripts.say(""),
        asked,
        scripts.think("First the ", "*pages*."),
        thought,
        scripts.say(MARKDOWN),
        written,
    )
    card = scripts.request_card(
        "request-1", "prefilling", num_computed=12_288, num_to_compute=19_020
    )
    server.engine["/api/v1/requests"] = {"data": [card]}
    await t.ask("How does paged attention work?")
    await album.take("prefilling", "12,288 of 19,020")
    asked.open()
    await album.take("thinking", "▸ Thinking")
    thought.open()
    await t.until_shown("open")
    await t.ask("And what is a slot?")
    await album.take("writing", "queued: And what is a slot?", "Esc stops")
    await t.press("escape")
    await album.take("stopped", "stopped", "/continue resumes")
    t.composer.load_text("")
    await t.ask("/thinking")

    def shows_the_start() -> bool:
        t.app.window.transcript.scroll_home(animate=False)
        return "│ First the pages" in t.screen

    await t.until(shows_the_start)  # not before it is open, which scrolls to what was opened
    await album.take("thinking-open")
    await t.ask("/thinking")

    server.script(
        scripts.say("I look it up."),
        scripts.chunk(
            {"tool_calls": [{"index": 0, "function": {"name": "search", "arguments": "{}"}}]}
        ),
    )
    await t.ask("Search for it.")
    await t.until_ready()
    await album.take("tool-call", "search({})")

    server.script(scripts.say("half of"), scripts.hang_up, reason=None)
    await t.ask("Will this break?")
    await album.take("failed", "before the answer was complete", "Failed")
    server.script(scripts.say(HOSTILE))
    await t.press("ctrl+r")
    await t.until_ready()
    await album.take("versions-and-hostile-text", "version 2 of 2", "␛]52;c;x␇[red]x[/]")


async def writing_states(t: Terminal, album: Album) -> None:
    """The composer, and what opens above it."""
    await t.press("escape", "escape")
    await album.take("editing", "Editing", "cancels the edit")
    await t.press("escape")
    await t.type("/e")
    await album.take("commands", "/export [json] [FILE]", "/engine")
    await t.press("escape")
    t.composer.load_text("")
    await t.type("why @s")
    await album.take("files", "src/")
    await t.press("escape")
    t.composer.load_text("")
    await t.press("shift+tab")
    await album.take("message-chosen", "E edit")
    await t.press("escape")
    await t.ask("/find pages")
    await album.take("found", "/find pages")
    await t.press("escape")
    await t.press("ctrl+c")
    await album.take("notice", "Press Ctrl+C again to quit.")
    t.app.window.status.end_message()


async def dialog_states(t: Terminal, album: Album) -> None:
    await t.open(HelpDialog, "f1")
    await album.take("help", "Keys and commands")
    await t.press("escape")
    await t.press("ctrl+o")
    await album.take("chats", "The lighthouse of Eddystone")
    await t.type("stone")
    await t.until(lambda: t.app.screen.query_one(OptionList).option_count == 3)
    await album.take("chats-searched", "stone by stone")
    await t.press("escape")
    await t.press("ctrl+p")
    await album.take("palette", "/attach")
    await t.press("escape")
    await t.until_shown("Enter sends")


async def model_states(t: Terminal, album: Album) -> None:
    await t.ask("/model")
    await album.take("models", "too large", "short chats")
    await t.press("down", "down", "enter")
    await album.take("model-downloading", "43%")
    await t.press("escape")
    await album.take("model-paused", "43% paused")
    await t.press("escape")


async def engine_states(t: Terminal, album: Album, server: FakeServer) -> None:
    is_narrow = t.app.size.width < 110
    await t.press("f4")
    if is_narrow:
        await album.take("engine-strip", "running 1 · waiting 2", "▲")
        await t.press("f4")
    await album.take("engine", "1,024 pages of 32 tokens", "differs at token 18,440")
    if not is_narrow:
        album.taken.add("engine-strip")  # there is none
    await t.press("escape" if is_narrow else "f4")
    await t.until_shown("Ready")


def write_lake() -> None:
    """lake.png"""
    sky, water = np.indices((40, 64))
    lake = np.stack([4 * water, 6 * sky, 255 - 4 * sky], axis=-1).astype(np.uint8)
    Path("lake.png").write_bytes(image_file(Image.fromarray(lake)))


async def image_state(t: Terminal, album: Album, server: FakeServer) -> None:
    """A question with a picture, which the screen shows in half blocks."""
    write_lake()
    server.script(scripts.say("A lake in the morning."))
    await t.ask("/attach lake.png")
    await t.until(lambda: t.composer.text == "@lake.png ")
    await t.type("what is it?")
    await t.press("enter")
    await t.until_ready()
    await album.take("image", "[lake.png]", "▀▀▀", "A lake in the morning.")


@pytest.mark.parametrize(
    ("size", "theme"),
    [
        pytest.param(
            size,
            theme,
            marks=pytest.mark.slow if (size, theme) in IN_THE_SLOW_SUITE else pytest.mark.long,
            id=f"{size[0]}x{size[1]}-{theme}",
        )
        for size in SIZES
        for theme in THEMES
    ],
)
@pytest.mark.usefixtures("standing_clock")
async def test_every_state_looks_as_accepted(
    terminal: Open,
    server: FakeServer,
    home: Home,
    size: tuple[int, int],
    theme: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "setup.py").write_text("")
    monkeypatch.chdir(tmp_path)
    earlier_chats(home)
    server.models = ["mini"]
    server.health = (503, {"status": "loading", "progress": 0.6})
    connector = OwnServer(server, home)

    async with terminal(
        connector, is_ready=False, size=size, theme_name=theme, models=Machine()
    ) as t:
        album = Album(t, size, theme)
        t.composer.cursor_blink = False
        await album.take("not-connected", "Not connected", "exited with code 1")
        connector.is_running = True
        await t.press("ctrl+r")
        await album.take("loading", "60%")
        server.health = (200, {"status": "ok"})
        await t.until_ready()
        await album.take("ready", "Ready", "Ask something")
        await chat_states(t, album, server)
        await writing_states(t, album)
        await dialog_states(t, album)
        await model_states(t, album)
        await t.press("f4")
        await album.take("engine-missing", "does not report its")
        await t.press(*(["f4", "f4"] if size[0] < 110 else ["f4"]))
        server.engine["/api/v1/kv/stats"] = scripts.engine_stats(running=1, waiting=2)
        name = t.app.answering.request_id
        own = [{"id": name, "from": 0, "pages": [[40, 24], [400, 90]]}]
        pages = "p40s24f200c136a90c60f474"
        snapshot = scripts.page_event(
            "snapshot", seq=0, page_size=32, num_pages=1024, pages=pages, requests=own
        )
        server.map = [snapshot, scripts.Gate()]
        await t.ask("/model mini")
        await engine_states(t, album, server)
        await image_state(t, album, server)
        assert album.taken == STATES


def test_there_is_one_accepted_picture_per_state_size_and_theme() -> None:
    narrow = SIZES[0]
    expected = {
        file_of(*of)
        for of in itertools.product(STATES, SIZES, THEMES)
        if of[0] != "engine-strip" or of[1] == narrow
    }
    assert set(PICTURES.iterdir()) == expected

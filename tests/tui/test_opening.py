"""The opening frame, and the state of the terminal until the app runs."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from rich.color import Color, ColorSystem
from rich.style import Style

from tui.chat.store import Store
from tui.colours import COLOURS, DEFAULT
from tui.home import Home
from tui.opening import first_frame, picture, rows
from tui.paint.theme import DARK, LIGHT
from tui.talk.connection import ConnectOptions, Connector, ConnectProgress, ServerConnection

if TYPE_CHECKING:
    from conftest import FakeServer, Terminal, Window

SIZES = ((80, 24), (120, 40), (64, 18), (100, 30), (90, 20), (201, 53))
LEFT = "\x1b[0m\x1b[?1049l\x1b[?25h"  # leaves the alternate screen, shows the cursor
# `mlxserve chat` whose import of Textual never ends.
ENDLESS = """
import sys, time
class Endless:
    def find_spec(self, name, *_):
        if name == "textual":
            print("importing", flush=True)
            while True:
                time.sleep(0.01)  # a signal just before a wait without end is not handled
sys.meta_path.insert(0, Endless())
from mlxserve.cli import main
main()
"""

Cell = tuple[str, str | None, str, bool]  # character, colour, background, bold


class NeverConnects(Connector):
    async def connect(self, report: Callable[[ConnectProgress], None]) -> ServerConnection:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


def cell(character: str, style: Style | None) -> Cell:
    assert style is not None
    assert style.bgcolor is not None
    front = None if character == " " or style.color is None else style.color.name
    return character, front, style.bgcolor.name, bool(style.bold) and character != " "


def drawn_by_the_app(t: "Terminal") -> list[list[Cell]]:
    return [[cell(c, s.style) for s in strip for c in s.text] for strip in t.strips]


def drawn_by_the_frame(width: int, height: int, theme: str) -> list[list[Cell]]:
    """The cells of the frame, by a terminal that knows its two kinds of escape sequences."""
    empty: Cell = (" ", None, "", False)
    screen = [[empty] * width for _ in range(height)]
    y = x = 0
    style = Style()
    for place, look, character in re.findall(
        r"\x1b\[(\d+;\d+)H|\x1b\[0;([\d;]+)m|(.)", picture(width, height, theme, True)
    ):
        if place:
            y, x = (int(number) - 1 for number in place.split(";"))
        elif look:
            style = style_of(look)
        else:
            screen[y][x] = cell(character, style)
            x += 1
    return screen


def style_of(look: str) -> Style:
    found = re.fullmatch(r"(1;)?38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)", look)
    assert found is not None, look
    front, back = found.groups()[1:4], found.groups()[4:]
    return Style(
        bold=found[1] is not None,
        color=Color.parse("#" + "".join(f"{int(part):02x}" for part in front)),
        bgcolor=Color.parse("#" + "".join(f"{int(part):02x}" for part in back)),
    )


def test_the_opening_frame_equals_the_app_s_first_picture(
    home: Home, play: Callable[..., None]
) -> None:
    async def story(t: "Terminal") -> None:
        t.composer.cursor_blink = False
        for theme in (DARK.name, LIGHT.name):
            for size in SIZES:
                await t.pilot.resize_terminal(*size)
                await t.until_shown("Starting")
                await t.until(partial(same, t, size, theme))
            await t.press("f2")

    def same(t: "Terminal", size: tuple[int, int], theme: str) -> bool:
        return drawn_by_the_app(t) == drawn_by_the_frame(*size, theme)

    play(story, NeverConnects(ConnectOptions(url="http://127.0.0.1:1"), home))


def test_with_256_colours_the_frame_uses_those_of_rich() -> None:
    for theme, colours in COLOURS.items():
        drawn = picture(80, 24, theme, False)
        numbers = {int(number) for number in re.findall(r"[34]8;5;(\d+)", drawn)}
        taken = (colours[name] for name in ("background", "foreground", "quiet", "primary"))
        of_rich = {Color.parse(c).downgrade(ColorSystem.EIGHT_BIT).number for c in taken}
        assert numbers == of_rich
        assert "38;2;" not in drawn


def test_in_a_small_window_the_frame_is_empty() -> None:
    assert rows(63, 24) == rows(80, 17) == {}
    assert picture(20, 5, DEFAULT, True).count(" ") == 100


def test_the_frame_needs_no_slow_import() -> None:
    script = (
        "import sys, mlxserve.cli, tui.opening\n"
        "slow = {'typer', 'rich', 'textual', 'pydantic', 'asyncio', 'dataclasses', 'subprocess'}\n"
        "print(sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_keys_typed_before_the_app_runs_reach_it(
    open_window: Callable[..., "Window"], server: "FakeServer", home: Home
) -> None:
    store = Store.open(home.chats)
    store.set_setting("theme", LIGHT.name)
    store.close()
    window = open_window("-m", "mlxserve", "chat", "--url", server.url)
    window.press("typed ")
    window.wait_for_bytes("sk anything")  # the A is under the cursor
    assert "48;5;231m" in window.written or "48;2;250;250;247" in window.written, "the light theme"
    assert not window.echoes
    window.press("ahead\r")
    window.wait_for("Yes.")
    assert server.requests[0]["messages"][0]["content"].endswith("ahead")
    assert window.all_written.count("\x1b[?1049h") == 1, "the alternate screen is entered once"
    window.press("\x11")
    assert window.end() == 0
    assert window.modes == window.modes_before
    assert LEFT[-14:] in window.written


@pytest.mark.parametrize("end", ["ctrl+c", "SIGTERM", "SIGHUP"])
def test_a_signal_before_the_app_runs_restores_the_terminal(
    open_window: Callable[..., "Window"], end: str
) -> None:
    window = open_window("-c", ENDLESS, "chat", "--url", "http://127.0.0.1:9")
    window.wait_for("importing")
    assert not window.echoes
    number = {"ctrl+c": 2, "SIGTERM": 15, "SIGHUP": 1}[end]
    if end == "ctrl+c":
        window.press("\x1a\x1c\x03")  # Ctrl+Z and Ctrl+\ do nothing, then Ctrl+C
    else:
        window.process.send_signal(number)
    assert window.end() == 128 + number
    assert window.written.endswith(LEFT)
    assert window.modes == window.modes_before


@pytest.mark.parametrize(
    ("flags", "words", "code"),
    [
        (("--nonsense",), "No such option: --nonsense", 2),
        (("--page-size", "7"), "error: page_size must be one of", 1),
    ],
)
def test_an_invalid_flag_is_reported_on_the_normal_screen(
    open_window: Callable[..., "Window"], flags: tuple[str, ...], words: str, code: int
) -> None:
    window = open_window("-m", "mlxserve", "chat", *flags)
    assert window.end() == code
    said = window.written
    assert words in said[said.index(LEFT) :]
    assert "\x1b[?1049h" not in said[said.index(LEFT) :]
    assert window.modes == window.modes_before


def test_a_terminal_with_few_colours_has_no_opening_frame(
    monkeypatch: pytest.MonkeyPatch, scripts: SimpleNamespace
) -> None:
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(encoding="utf-8"))
    monkeypatch.delenv("COLORTERM", raising=False)
    for name, value in (("TERM", "linux"), ("TERM", "dumb"), ("NO_COLOR", "1")):
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv(name, value)
        assert first_frame(["chat"]) is None, (name, value)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR")
    assert first_frame(["chat", "--help"]) is None

"""A newcomer's first five minutes in tmux, with the installed command, real servers and the bundled model.

In a small dark and a large light window: ask for code, fill the context, mistype a model and change it,
copy with the mouse, lose the server, come back to the chat, open the page at `/`. After every step the
whole screen is read: each word on it has a readable contrast to its background.
"""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from mlxserve.history.messages import Role, State
from mlxserve.history.store import Store
from mlxserve.hub.embedded import model_path
from tests.tui.contrast import Colour, contrast
from tests.tui.terminals import Pane
from tui.home import Home

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]

SGR = re.compile(r"\x1b\[([0-9;:]*)m")
MIN_CONTRAST = 1.7  # of a word and its background; rules and borders may be fainter
_DRAGS, _DRAG_SECONDS = 8, 15.0
WORD = re.compile(r"[^\W_]{3,}")


def painted(screen: str) -> Iterator[tuple[str, Colour, Colour]]:
    """(text, its colour, the colour behind it) of each piece of a screen that has both, in true colour."""
    text_colour = back_colour = None
    parts = SGR.split(screen)
    for text, codes in zip(parts[::2], ["0", *parts[1::2]], strict=True):
        numbers = [int(number or 0) for number in re.split("[;:]", codes)]
        while numbers:
            match numbers:
                case [38, 2, r, g, b, *numbers]:
                    text_colour = r, g, b
                case [48, 2, r, g, b, *numbers]:
                    back_colour = r, g, b
                case [7, *numbers]:
                    text_colour, back_colour = back_colour, text_colour
                case [0, *numbers]:
                    text_colour = back_colour = None
                case [39, *numbers]:
                    text_colour = None
                case [49, *numbers]:
                    back_colour = None
                case [_, *numbers]:
                    pass
        if text_colour is not None and back_colour is not None:
            yield text, text_colour, back_colour


def look(pane: Pane) -> None:
    """Every word on the screen can be seen."""
    pieces = [piece for piece in painted(pane.colours) if WORD.search(piece[0])]
    assert pieces, pane.screen
    faint = [piece for piece in pieces if contrast(*piece[1:]) < MIN_CONTRAST]
    assert not faint, pane.screen


def look_when_ready(pane: Pane) -> None:
    pane.until_ready()
    look(pane)


def look_when_answered(pane: Pane, home: Home, count: int) -> None:
    """Once the newest chat has `count` whole answers."""
    pane.until(lambda _: num_answers(home) == count)
    look_when_ready(pane)


def num_answers(home: Home) -> int:
    with closing(Store.open(home.chats)) as store:
        path = [message for chat in store.chats()[:1] for message in store.path(chat.leaf_id)]
    return sum(m.role is Role.ASSISTANT and m.state is State.DONE for m in path)


def do(pane: Pane, text: str, is_so: Callable[[str], bool]) -> str:
    """Type a line, wait for what it has to lead to, and look at the screen."""
    pane.ask(text)
    screen = pane.until(is_so)
    look(pane)
    return screen


def shows(*words: str) -> Callable[[str], bool]:
    return lambda screen: all(each in screen for each in words)


def drag_over(pane: Pane, words: str, until: str) -> None:
    """Drag the mouse over words, and again where they are now if a screen that still moved was hit elsewhere."""
    for _ in range(_DRAGS):
        lines = enumerate(pane.screen.splitlines(), 1)
        row, first = next((n, line.index(words) + 1) for n, line in lines if words in line)
        last = first + len(words)
        for code, column, end in ((0, first, "M"), (32, last, "M"), (0, last, "m")):
            pane.type(f"\x1b[<{code};{column};{row}{end}")
        with suppress(AssertionError):
            pane.until_shown(until, seconds=_DRAG_SECONDS)
            return
    raise AssertionError(pane.screen)


@pytest.mark.parametrize(
    ("size", "theme"),
    [
        pytest.param((80, 24), "mlxserve-dark", id="80x24-dark"),
        pytest.param((120, 40), "mlxserve-light", id="120x40-light"),
    ],
)
def test_the_first_five_minutes(
    pane_of_size: Callable[..., Pane], home: Home, tmp_path: Path, size: tuple[int, int], theme: str
) -> None:
    second = tmp_path / "second-model"
    shutil.copytree(model_path(), second)
    with closing(Store.open(home.chats)) as store:
        store.set_setting("theme", theme)
    pane = pane_of_size(size)

    pane.open("--max-model-len", "512")
    look_when_ready(pane)
    pane.ask("Write a Python function that reverses a list.")
    look_when_answered(pane, home, 1)

    asked = 1
    while "chat is full" not in pane.screen:
        asked += 1
        pane.ask("The train to Oslo left the valley. " * 12)
        pane.until(lambda screen, n=asked: "chat is full" in screen or num_answers(home) == n)
    look(pane)
    pane.press("Enter")  # without the oldest messages
    look_when_answered(pane, home, asked)

    do(pane, "/model not-a-modle", shows("not-a-modle"))
    do(pane, f"/model {second}", shows("second-model", "Ready"))
    pane.ask("hello again")
    look_when_answered(pane, home, asked + 1)

    pane.set("set-clipboard", "on")
    drag_over(pane, "hello again", until="E edit")  # what was clicked has the focus
    pane.press("C-c")
    pane.until(lambda _: "hello again" in pane.clipboard)
    look(pane)
    for end in "Mm":  # a click on the composer
        pane.type(f"\x1b[<0;{size[0] // 2};{size[1] - 2}{end}")
    pane.until_shown("Enter sends")

    os.kill(pane.server, signal.SIGKILL)
    pane.ask("still there?")
    look_when_answered(pane, home, asked + 2)
    logs = sorted(home.logs.glob("*.log"), key=lambda log: log.stat().st_mtime)
    [*_, url] = re.findall(r"mlxserve is ready at (\S+)", logs[-1].read_text(encoding="utf-8"))
    # As a browser asks; what it shows: tests/api/page/test_browser.py.
    with urlopen(Request(url, headers={"accept": "text/html"})) as page:
        assert b"<title>mlxserve" in page.read()
    pane.press("C-q")
    assert pane.until_ended() == "0"

    pane.open("-c")
    look_when_ready(pane)
    assert "still there?" in pane.screen
    pane.press("C-q")
    assert pane.until_ended() == "0"

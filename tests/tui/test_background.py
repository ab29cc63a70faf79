"""Asking the terminal for its background: answers that come, that do not, and keys in between."""

from __future__ import annotations

import os
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tui.background import QUESTION, Background, is_light_background
from tui.colours import COLOURS, DARK, LIGHT

if TYPE_CHECKING:
    from conftest import FakeServer, Window

WHITE = b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\"
BLACK = b"\x1b]11;rgb:1e1e/1e1e/2e2e\x07"
ATTRIBUTES = b"\x1b[?62;22c"


def background_of(theme: str) -> str:
    """As the frame writes it."""
    colour = COLOURS[theme]["background"]
    return "48;2;" + ";".join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal: the one that answers, and the program's."""
    outside, inside = os.openpty()
    tty.setraw(inside)
    yield outside, inside
    os.close(outside)
    os.close(inside)


def ask(terminal: tuple[int, int], answer: bytes) -> tuple[list[bool], str]:
    """What was found, and what was typed."""
    outside, inside = terminal
    found: list[bool] = []
    background = Background(inside, lambda text: os.write(inside, text.encode()), found.append)
    asked = b""
    while len(asked) < len(QUESTION):
        asked += os.read(outside, 100)
    assert asked.decode() == QUESTION
    os.write(outside, answer)
    return found, background.wait()


@pytest.mark.parametrize(
    ("answer", "found", "typed"),
    [
        (WHITE + ATTRIBUTES, [True], ""),
        (BLACK + ATTRIBUTES, [False], ""),
        (ATTRIBUTES, [], ""),
        (b"he" + WHITE + b"llo" + ATTRIBUTES + b"\xc3\xa9\r", [True], "helloé\r"),
        (WHITE, [True], ""),  # after a wait for the other answer
        (b"hello", [], "hello"),
    ],
)
def test_answers_are_told_from_keys(
    terminal: tuple[int, int], answer: bytes, found: list[bool], typed: str
) -> None:
    assert ask(terminal, answer) == (found, typed)


def test_a_terminal_that_was_closed_is_no_failure(terminal: tuple[int, int]) -> None:
    read, write = os.pipe()
    os.close(write)
    found: list[bool] = []
    assert Background(read, lambda _: None, found.append).wait() == ""
    os.close(read)
    assert found == []


@pytest.mark.parametrize(
    ("colour", "is_light"),
    [
        (b"rgb:f/f/f", True),
        (b"rgb:fa/fa/f7", True),
        (b"rgba:ffff/ffff/ffff/8000", True),
        (b"rgb:0000/ffff/0000", True),  # green is bright
        (b"rgb:0000/0000/ffff", False),
        (b"rgb:1616/1818/1f1f", False),
        (b"#ffffff", None),
        (b"rgb:zz/zz/zz", None),
    ],
)
def test_brightness_decides(colour: bytes, is_light: bool | None) -> None:
    assert is_light_background(b"\x1b]11;" + colour + b"\x07") is is_light


@pytest.mark.parametrize(("answer", "theme"), [(WHITE, LIGHT), (BLACK, DARK), (b"", DARK)])
def test_the_chat_opens_in_the_theme_of_the_terminal(
    open_window: Callable[..., Window],
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes,
    theme: str,
) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("COLORFGBG", raising=False)
    window = open_window("-m", "mlxserve", "chat", "--url", server.url)
    window.wait_for_bytes("\x1b[c")
    window.press("ty" + (answer + ATTRIBUTES).decode() + "ped")
    window.wait_for("Ready")
    window.press("\r")
    window.wait_for("Yes.")
    assert server.requests[0]["messages"][0]["content"].endswith("typed")
    assert (background_of(LIGHT) in window.all_written) == (theme == LIGHT)
    assert "rgb:" not in window.all_written, "an answer was taken for keys"
    window.press("\x11")
    assert window.end() == 0


def test_a_terminal_that_is_named_or_was_chosen_is_not_asked(
    open_window: Callable[..., Window], server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("COLORFGBG", "0;15")
    window = open_window("-m", "mlxserve", "chat", "--url", server.url)
    window.wait_for("Ready")
    assert QUESTION not in window.all_written
    assert background_of(LIGHT) in window.all_written
    window.press("\x11")
    assert window.end() == 0

"""Asking the terminal for its background: answers that come, that do not, and keys in between."""

from __future__ import annotations

import os
import time
import tty
from collections.abc import Iterator

import pytest

from tests.tui.fake_server import FakeServer
from tests.tui.terminals import OpenWindow
from tui.background import QUESTION, is_light_background, is_light_by_name, read_answer

WHITE = b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\"
BLACK = b"\x1b]11;rgb:1e1e/1e1e/2e2e\x07"
ATTRIBUTES = b"\x1b[?62;22c"
LIGHT_THEME = "48;2;250;250;247"  # its background, as the app writes it


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal: the one that answers, and the program's."""
    outside, inside = os.openpty()
    tty.setraw(inside)
    yield outside, inside
    os.close(outside)
    os.close(inside)


def ask(terminal: tuple[int, int], answer: bytes) -> tuple[bool | None, str]:
    """What the terminal said, and what was typed."""
    outside, inside = terminal
    os.write(outside, answer)
    return read_answer(inside, time.monotonic())


@pytest.mark.parametrize(
    ("answer", "found", "typed"),
    [
        (WHITE + ATTRIBUTES, True, ""),
        (BLACK + ATTRIBUTES, False, ""),
        (ATTRIBUTES, None, ""),
        (b"he" + WHITE + b"llo" + ATTRIBUTES + b"\xc3\xa9\r", True, "helloé\r"),
        (WHITE, True, ""),  # after a wait for the other answer
        (b"hello", None, "hello"),
    ],
)
def test_answers_are_told_from_keys(
    terminal: tuple[int, int], answer: bytes, found: bool | None, typed: str
) -> None:
    assert ask(terminal, answer) == (found, typed)


def test_a_terminal_that_was_closed_says_nothing() -> None:
    read, write = os.pipe()
    os.close(write)
    assert read_answer(read, time.monotonic()) == (None, "")
    os.close(read)


def test_brightness_decides() -> None:
    for colour, is_light in [
        (b"rgb:f/f/f", True),
        (b"rgb:fa/fa/f7", True),
        (b"rgba:ffff/ffff/ffff/8000", True),
        (b"rgb:0000/ffff/0000", True),  # green is bright
        (b"rgb:0000/0000/ffff", False),
        (b"rgb:1616/1818/1f1f", False),
        (b"#ffffff", None),
        (b"rgb:zz/zz/zz", None),
    ]:
        assert is_light_background(b"\x1b]11;" + colour + b"\x07") is is_light, colour


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "is_light"), [(WHITE, True), (b"", False)])
def test_the_chat_opens_in_the_theme_of_the_terminal(
    open_window: OpenWindow,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes,
    is_light: bool,
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
    assert (LIGHT_THEME in window.all_written) == is_light
    assert "rgb:" not in window.all_written, "an answer was taken for keys"
    window.press("\x11")
    assert window.end() == 0


def test_a_terminal_whose_background_is_named_is_not_asked(
    open_window: OpenWindow, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("COLORFGBG", "0;15")
    window = open_window("-m", "mlxserve", "chat", "--url", server.url)
    window.wait_for("Ready")
    assert QUESTION not in window.all_written
    assert LIGHT_THEME in window.all_written
    window.press("\x11")
    assert window.end() == 0


@pytest.mark.parametrize(
    ("value", "is_light"),
    [
        ("0;7", True),
        ("0;default;9", True),
        ("0;15", True),
        ("15;0", False),
        ("7;8", False),
        ("0;99", False),
        ("0;default", None),
        ("0;", None),
        ("", None),
        ("light", None),
    ],
)
def test_the_second_number_of_colorfgbg_names_the_background(
    monkeypatch: pytest.MonkeyPatch, value: str, is_light: bool | None
) -> None:
    monkeypatch.setenv("COLORFGBG", value)
    assert is_light_by_name() is is_light


def test_without_colorfgbg_no_background_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLORFGBG", raising=False)
    assert is_light_by_name() is None

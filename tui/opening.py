"""The opening frame: the app's first picture, written as escape sequences in under 100 ms, while
Textual is still being imported (about a second).

    FirstFrame.open   alternate screen, no echo; typed keys wait in the terminal's buffer
    Background        asks for the terminal's colour; a light one gets the frame again in light colours
    ...               imports; if the program ends meanwhile, the terminal is restored
    hand_over         the app draws over the same screen, without flicker

Imports almost nothing, on purpose. tests/tui/test_opening.py checks that, and compares the frame
with the app's own first picture cell by cell.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
from colorsys import rgb_to_hls
from types import FrameType

from tui.background import Background
from tui.colours import COLOURS, DEFAULT, LIGHT, named_theme

ENTER = "\x1b[?1049h"  # the alternate screen, as Textual's driver writes it
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_LEAVE = "\x1b[0m\x1b[?1049l" + _SHOW_CURSOR
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_MAX_WIDTH = 100  # columns of the chat in a wide window, as in app.tcss
_MIN_SIZE = (64, 18)  # in a smaller window the app wraps lines: the frame stays empty
_GUTTER = 1  # the column of the scrollbar
WIDE = 90  # columns from which the whole hint fits
TITLE = "New chat"
PLACEHOLDER = "Ask anything"
HINT = "Enter sends · Shift+Enter or Ctrl+J new line · / commands · F1 keys"
SHORT_HINT = "Enter sends · / commands · F1 keys"
STARTING = "Starting"
WELCOME = "mlxserve"
INVITATION = ("Ask something, or type ", "/", " to list the commands.")
ASSURANCE = "F1 lists all keys. Your chats stay on this machine."

# Style name -> the colour of the text and of its background.
_STYLES = {
    "text": ("foreground", "background"),
    "quiet": ("quiet", "background"),
    "primary": ("primary", "background"),
    "cursor": ("background", "foreground"),
}

Run = tuple[str, str, bool]  # text, the name of its style, whether it is bold
Rows = dict[int, tuple[int, list[Run]]]  # row -> its first column, and its runs from there on


class FirstFrame:
    """Owns the terminal until the app does. `close` restores it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.modes = termios.tcgetattr(fd)  # from before the frame
        self.theme = DEFAULT
        self.typed = ""  # keys read while the terminal was asked for its background
        self._background: Background | None = None
        self._is_owner = False
        self._old_handlers = {number: signal.getsignal(number) for number in _SIGNALS}

    @classmethod
    def open(cls, theme: str | None, *, has_all_colours: bool) -> FirstFrame:
        """Take the terminal over and draw the frame.

        theme: None: that of the terminal's background, for which the terminal is asked
        """
        frame = cls(sys.__stdin__.fileno() if sys.__stdin__ is not None else 0)
        frame._take()
        frame._draw(theme or DEFAULT, ENTER + _HIDE_CURSOR, has_all_colours=has_all_colours)
        if theme is None:

            def found(is_light: bool) -> None:
                if is_light:
                    frame._draw(LIGHT, "", has_all_colours=has_all_colours)

            frame._background = Background(frame._fd, frame._write, found)
        return frame

    def settle(self) -> None:
        """Wait until `theme` is that of the terminal, and until this frame reads no more keys."""
        if self._background is not None:
            self.typed += self._background.wait()
            self._background = None

    def _draw(self, theme: str, before: str, *, has_all_colours: bool) -> None:
        self.theme = theme if theme in COLOURS else DEFAULT
        width, height = os.get_terminal_size(2)
        self._write(before + picture(width, height, self.theme, has_all_colours))

    def __enter__(self) -> FirstFrame:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hand_over(self) -> None:
        """The app owns the terminal from now on, and restores it itself."""
        self.settle()
        self._is_owner = False
        self.restore_signals()

    def restore_signals(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def close(self) -> None:
        """Restore the terminal. Does nothing after `hand_over`."""
        if not self._is_owner:
            return
        self.settle()
        self._is_owner = False
        self.restore_signals()
        try:
            self._write(_LEAVE)
            termios.tcsetattr(self._fd, termios.TCSANOW, self.modes)
        except (OSError, termios.error):
            return  # the window has been closed: there is nothing left to restore

    def _take(self) -> None:
        """Set the modes that Textual sets, except for Ctrl+C, which ends the process until the app runs.

        Without a flush: keys that were typed earlier reach the app as well.
        """
        self._is_owner = True
        for number in _SIGNALS:
            signal.signal(number, self._end)
        modes = termios.tcgetattr(self._fd)
        modes[0] &= ~(termios.IXON | termios.IXOFF | termios.ICRNL | termios.INLCR | termios.IGNCR)
        modes[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
        off = os.fpathconf(self._fd, "PC_VDISABLE")
        for key in (termios.VSUSP, termios.VQUIT):  # either would leave the alternate screen open
            modes[6][key] = bytes([off])
        modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._fd, termios.TCSANOW, modes)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        """Exit at once: a module being imported might catch an exception."""
        self.close()
        os._exit(128 + number)

    def _write(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(2, data) :]


def picture(width: int, height: int, theme: str, has_all_colours: bool) -> str:
    """The escape sequences that draw every cell of the window, so that no old colours remain."""
    colours = COLOURS[theme]

    def style(name: str, is_bold: bool = False) -> str:
        front, back = (colours[colour] for colour in _STYLES[name])
        return (
            f"\x1b[0;{'1;' if is_bold else ''}{_colour(3, front, has_all_colours)};"
            f"{_colour(4, back, has_all_colours)}m"
        )

    drawn = rows(width, height)
    lines = []
    for y in range(height):
        column, runs = drawn.get(y, (0, []))
        words = "".join(style(name, is_bold) + text for text, name, is_bold in runs)
        used = column + sum(len(text) for text, _, _ in runs)
        blank = style("text")
        lines.append(f"\x1b[{y + 1};1H{blank}{' ' * column}{words}{blank}{' ' * (width - used)}")
    return "".join(lines)


def rows(width: int, height: int) -> Rows:
    """The text of each row; empty for a window smaller than `_MIN_SIZE`."""
    if width < _MIN_SIZE[0] or height < _MIN_SIZE[1]:
        return {}
    inner = min(width - _GUTTER, _MAX_WIDTH)
    left = (width - _GUTTER - inner) // 2
    hint = f" {HINT if width >= WIDE else SHORT_HINT} "
    empty = inner - 4 - len(PLACEHOLDER)
    return {
        0: (left + 2, [(TITLE, "text", True)]),
        height - 12: (left + 2, [(WELCOME, "primary", True)]),
        height - 10: (
            left + 2,
            [(words, "text", words == "/") for words in INVITATION],
        ),
        height - 9: (left + 2, [(ASSURANCE, "quiet", False)]),
        height - 4: (left, [("╭" + "─" * (inner - 2) + "╮", "primary", False)]),
        height - 3: (
            left,
            [
                ("│ ", "primary", False),
                (PLACEHOLDER[0], "cursor", False),
                (PLACEHOLDER[1:] + " " * empty, "quiet", False),
                (" │", "primary", False),
            ],
        ),
        height - 2: (
            left,
            [
                ("╰" + "─" * (inner - 3 - len(hint)), "primary", False),
                (hint, "quiet", False),
                ("─╯", "primary", False),
            ],
        ),
        height - 1: (left + 2, [(STARTING, "quiet", False)]),
    }


def _colour(layer: int, name: str, has_all_colours: bool) -> str:
    """layer: 3 for the text, 4 for the background"""
    red, green, blue = (int(name[at : at + 2], 16) for at in (1, 3, 5))
    if has_all_colours:
        return f"{layer}8;2;{red};{green};{blue}"
    return f"{layer}8;5;{_of_256(red, green, blue)}"


def _of_256(red: int, green: int, blue: int) -> int:
    """The nearest of 256 colours, by the rule of Rich, which paints the rest of the terminal."""
    _, lightness, saturation = rgb_to_hls(red / 255, green / 255, blue / 255)
    if saturation < 0.15:
        grey = round(lightness * 25)
        return {0: 16, 25: 231}.get(grey, 231 + grey)
    red, green, blue = (round(c / 95 if c < 95 else 1 + (c - 95) / 40) for c in (red, green, blue))
    return 16 + 36 * red + 6 * green + blue


def first_frame(arguments: list[str]) -> FirstFrame | None:
    """Draw the frame for `chat` in a terminal whose colours are known; else None: the app draws first."""
    if arguments[:1] != ["chat"] or "--help" in arguments or not _is_plain_terminal():
        return None
    is_full = os.environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit")
    if not is_full and not os.environ.get("TERM", "").endswith("-256color"):
        return None
    return FirstFrame.open(_remembered_theme(), has_all_colours=is_full)


def _is_plain_terminal() -> bool:
    """Whether Textual would draw here with its default driver, in colours."""
    overrides = ("NO_COLOR", "TEXTUAL_COLOR_SYSTEM", "TEXTUAL_DRIVER", "COLUMNS", "LINES")
    return (
        all(os.isatty(fd) for fd in (0, 1, 2))
        and os.environ.get("TERM") != "dumb"
        and (sys.stderr.encoding or "").lower() == "utf-8"
        and not any(name in os.environ for name in overrides)
    )


def _remembered_theme() -> str | None:
    """The theme chosen last, else the one that the environment names.

    None if there is neither, or if reading it would have to wait for a lock.
    """
    import sqlite3  # 5 ms; the store takes 40

    folder = os.environ.get("MLXSERVE_HOME") or "~/.mlxserve"
    path = os.path.join(os.path.expanduser(folder), "chat.sqlite")
    if not os.path.exists(path):
        return named_theme()
    try:
        chats = sqlite3.connect(path, timeout=0)
        try:
            found = chats.execute("SELECT value FROM settings WHERE name = 'theme'").fetchone()
        finally:
            chats.close()
    except sqlite3.Error:
        return named_theme()  # the app reports what is wrong with the file
    return named_theme() if found is None else str(found[0])

"""The first frame: a title and "Starting", shown while Textual is imported (about a second)."""

from __future__ import annotations

import os
import re
import signal
import termios
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tui.background import QUESTION, is_light_by_name, read_answer

if TYPE_CHECKING:
    from textual.driver import Driver

TITLE, PLACEHOLDER, STARTING = "New chat", "Ask anything", "Starting"
# Columns of the chat, and from which window it is wide.
COLUMN, WIDE_COLUMN, WIDE = 100, 132, 180
# The alternate screen, as Textual's driver writes it.
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


class FirstFrame:
    """Owns the terminal until the app does. Keys typed meanwhile wait in the terminal's buffer."""

    def __init__(self) -> None:
        self.is_open = True
        self._modes, modes = termios.tcgetattr(0), termios.tcgetattr(0)
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._handlers = {number: signal.signal(number, self._end) for number in signals}
        modes[0] &= ~termios.ICRNL  # as Textual does; Ctrl+C works, Ctrl+Z and Ctrl+\ do not
        modes[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
        modes[6][termios.VSUSP] = modes[6][termios.VQUIT] = bytes([os.fpathconf(0, "PC_VDISABLE")])
        termios.tcsetattr(0, termios.TCSANOW, modes)
        width, height = os.get_terminal_size(2)
        column = WIDE_COLUMN if width >= WIDE else COLUMN  # the columns of app.tcss
        x, y = max(0, width - column - 1) // 2 + 3, max(1, height - 2)
        texts = ((1, f"\x1b[1m{TITLE}\x1b[0m"), (height, STARTING), (y, PLACEHOLDER), (y, ""))
        drawn = "".join(f"\x1b[{row};{x}H{text}" for row, text in texts)
        self._asked = time.monotonic() if is_light_by_name() is None else None
        os.write(2, (ENTER + drawn + (QUESTION if self._asked else "")).encode())

    def read_answer(self) -> tuple[bool | None, str]:
        """Return (light background if the terminal said so, keys typed before that)."""
        asked_at, self._asked = self._asked, None
        return (None, "") if asked_at is None else read_answer(0, asked_at)

    def release(self) -> None:
        """Hand the terminal and the signals over to the app."""
        self.is_open = False
        termios.tcsetattr(0, termios.TCSANOW, self._modes)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def close(self) -> None:
        """Restore the terminal. Does nothing after `release`."""
        # The window may have been closed.
        with suppress(OSError, termios.error):
            if self.is_open:
                self.read_answer()
                os.write(2, LEAVE.encode())
                self.release()

    def _end(self, number: int, _frame: object) -> None:
        self.close()
        os._exit(128 + number)  # at once: a module being imported might catch an exception


def driver_after(frame: FirstFrame, typed: str) -> type[Driver]:
    """Return Textual's driver, which draws over the frame and replays what was typed before."""
    from textual.drivers.linux_driver import LinuxDriver
    from textual.events import Key, Paste

    class DriverAfterFrame(LinuxDriver):
        def write(self, data: str) -> None:
            if data == ENTER and frame.is_open:
                frame.release()
                for text in re.findall(r"\r|[^\r]+", typed):
                    self.process_message(Key("enter", "\r") if text == "\r" else Paste(text))
            else:
                super().write(data)

    return DriverAfterFrame

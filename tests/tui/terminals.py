"""Terminals of tests: in memory, a pseudo-terminal, and tmux."""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from tests.waiting import wait_until
from tui.app import ChatApp
from tui.home import Home
from tui.paint.theme import DARK
from tui.widgets.composer import Composer
from tui.widgets.message import MessageView
from tui.widgets.status import StatusLine
from tui.widgets.transcript import Transcript

ESCAPES = re.compile(
    r"\x1b(\[[0-9;?<>=]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[PX^_].*?\x1b\\|.)"
)
# Makes it the controlling terminal, so that Ctrl+C and closing it send signals.
OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
PATIENCE = 60.0  # seconds until an expected event counts as missing


class Screenful:
    """An app in a terminal in memory, with the keys of a user."""

    def __init__(self, app: App[None], pilot: Pilot[None]) -> None:
        self._any_app = app
        self.pilot = pilot

    async def type(self, text: str) -> None:
        """Press the keys of a text; a line feed is Ctrl+J."""
        for character in text:
            await self.pilot.press({"\n": "ctrl+j", " ": "space"}.get(character, character))

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(PATIENCE):
            while not is_so():
                await self.pilot.pause()

    async def until_shown(self, text: str) -> None:
        try:
            await self.until(lambda: text in self.screen)
        except TimeoutError:
            raise AssertionError(f"{text!r} never appeared on\n{self.screen}") from None

    @property
    def strips(self) -> list[Strip]:
        """Every line of the screen. Textual has no public way to ask for them."""
        return self._any_app.screen._compositor.render_strips(self._any_app.size)

    @property
    def screen(self) -> str:
        """Every line of the screen, as text."""
        return "\n".join(strip.text.rstrip() for strip in self.strips)


class Terminal(Screenful):
    """The chat."""

    def __init__(self, app: ChatApp, pilot: Pilot[None]) -> None:
        super().__init__(app, pilot)
        self.app = app

    async def ask(self, text: str) -> None:
        self.composer.write(text)
        await self.pilot.press("enter")

    async def until_ready(self) -> None:
        await self.until(lambda: "Ready" in self.status)

    async def open(self, dialog: type[Screen[Any]], key: str) -> None:
        """Press a key, and wait for the dialog that it opens."""
        await self.press(key)
        await self.until(lambda: isinstance(self.app.screen, dialog))

    async def until_answered(self, text: str = "Yes.") -> None:
        """Wait for the end of the last answer, which is this."""
        await self.until(lambda: "Ready" in self.status and self.messages[-1:] == [text])

    async def talk(self, *questions: str) -> None:
        """Ask one after the other, each once the one before is answered by "Yes."."""
        for question in questions:
            num_messages = len(self.messages) + 2
            await self.ask(question)
            await self.until(lambda num=num_messages: len(self.messages) == num)
            await self.until_answered()

    @property
    def composer(self) -> Composer:
        return self.app.screen_stack[0].query_one(Composer)

    @property
    def status(self) -> str:
        return self.app.screen_stack[0].query_one(StatusLine).words

    @property
    def views(self) -> list[MessageView]:
        return self.app.screen_stack[0].query_one(Transcript).views

    @property
    def messages(self) -> list[str]:
        return [view.message.text for view in self.views]


class Window:
    """A program in a pseudo-terminal, and its output."""

    def __init__(
        self, command: list[str], home: Path, patience: float, size: tuple[int, int] = (100, 30)
    ) -> None:
        self._patience = patience
        self._terminal, inside = os.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.modes_before = self.modes  # the program
        outer = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        environment = {**outer, "MLXSERVE_HOME": str(home), "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *command],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=environment,
            start_new_session=True,
        )
        os.close(inside)
        self._written = self.all_written = ""
        self._is_open = True

    @property
    def modes(self) -> list[Any]:
        """The terminal's modes."""
        return termios.tcgetattr(self._terminal)

    @property
    def echoes(self) -> bool:
        return bool(self.modes[3] & termios.ECHO)

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def wait_for(self, words: str) -> None:
        """Wait for this text in the output, and drop the output up to it."""
        deadline = time.monotonic() + self._patience
        while words not in (text := ESCAPES.sub("", self._written)):
            assert time.monotonic() < deadline, (
                f"{words!r} is missing; the last output is {text[-900:]!r}"
            )
            self._read()
        self._written = text[text.index(words) + len(words) :]

    def wait_for_bytes(self, data: str) -> None:
        """Wait for this in the output, including escape sequences."""
        deadline = time.monotonic() + self._patience
        while data not in self._written:
            assert time.monotonic() < deadline, f"{data!r} is missing in {self._written!r}"
            self._read()

    @property
    def written(self) -> str:
        """The output since the text of the last `wait_for`."""
        while self._is_open and select.select([self._terminal], [], [], 0)[0]:
            if not self._read():
                break
        return self._written

    def end(self) -> int:
        """Wait for the exit code."""
        deadline = time.monotonic() + self._patience
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "the program did not exit"
            self._read()
        return self.process.returncode

    def hang_up(self) -> None:
        """Close the terminal, as closing a window does."""
        os.close(self._terminal)
        self._is_open = False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self._is_open:
            os.close(self._terminal)

    def _read(self) -> bool:
        """False when the program has exited."""
        if select.select([self._terminal], [], [], 0.1)[0]:
            try:
                new = os.read(self._terminal, 65_536).decode("utf-8", "replace")
            except OSError:  # on Linux
                self.process.wait(self._patience)
                return False
            self._written += new
            self.all_written += new
        return True


class Pane:
    """`mlxserve chat` in a tmux pane."""

    _END = "#{pane_dead_status}#{pane_dead_signal}"
    _COMMAND = Path(sys.executable).parent / "mlxserve"
    _PATIENCE = 120.0  # seconds; loading a model on a busy machine takes a while

    def __init__(self, home: Home, folder: Path, size: tuple[int, int] = (100, 30)) -> None:
        self._tmux = ("tmux", "-S", str(folder / "tmux"), "-f", "/dev/null")
        width, height = map(str, size)
        self._run("new-session", "-d", "-x", width, "-y", height, "-e", f"MLXSERVE_HOME={home.folder}",
                  "-e", "COLORTERM=truecolor", "sleep 1000")  # fmt: skip
        self.set("remain-on-exit", "on")

    def open(self, *arguments: str) -> None:
        """Start `mlxserve chat` on an empty screen."""
        self.run(f"exec {self._COMMAND} chat {' '.join(arguments)}")

    def run(self, command: str) -> None:
        self._run("respawn-pane", "-k", command)

    def set(self, option: str, value: str) -> None:
        self._run("set-option", "-g", option, value)

    def log(self, path: Path) -> None:
        """Copy all further output into this file."""
        self._run("pipe-pane", f"cat > {path}")

    def shown(self, variables: str) -> str:
        """A format as expanded by tmux."""
        return self._run("display-message", "-p", variables)

    @property
    def clipboard(self) -> str:
        return self._run("list-buffers", "-F", "#{buffer_sample}")

    def close(self) -> None:
        self._run("kill-server")

    @property
    def screen(self) -> str:
        return self._run("capture-pane", "-p")

    @property
    def colours(self) -> str:
        """The screen, with the escape sequences of its colours."""
        return self._run("capture-pane", "-p", "-e", "-N")

    @property
    def pid(self) -> int:
        return int(self.shown("#{pane_pid}"))

    @property
    def server(self) -> int:
        """The process id of the command's server."""
        return int(subprocess.check_output(["pgrep", "-P", str(self.pid)], text=True).split()[0])

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        """Press keys, as named by tmux."""
        self._run("send-keys", *keys)

    def ask(self, text: str) -> None:
        self.type(text)
        self.press("Enter")

    def until(self, is_so: Callable[[str], bool], seconds: float = _PATIENCE) -> str:
        """Wait for a condition on the screen, and return the screen."""
        screen = ""

        def look() -> bool:
            nonlocal screen
            screen = self.screen
            return is_so(screen)

        try:
            wait_until(look, seconds)
        except AssertionError:
            raise AssertionError(screen) from None
        return screen

    def until_shown(self, words: str, seconds: float = _PATIENCE) -> str:
        return self.until(lambda screen: words in screen, seconds)

    def until_ready(self) -> str:
        return self.until(lambda screen: "Ready" in screen.rpartition("\n")[2])

    def until_ended(self) -> str:
        """Wait for the exit code, or the signal that ended the program.

        tmux calls a pane dead when its terminal closes, and knows the status after SIGCHLD. It
        sometimes misses that signal (3.3a, Linux 6.18: the child is a zombie and no SIGCHLD is
        pending), so it is sent again.
        """
        deadline = time.monotonic() + self._PATIENCE
        while not (end := self.shown(self._END)):
            assert time.monotonic() < deadline, self.screen
            os.kill(int(self.shown("#{pid}")), signal.SIGCHLD)
        return end

    def _run(self, *arguments: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        return subprocess.run(
            [*self._tmux, *arguments], check=True, capture_output=True, text=True, env=environment
        ).stdout.rstrip("\n")


class Host(App[None]):
    """The smallest app with the chat's style sheet: one widget or one dialog in it."""

    CSS_PATH = inspect.getfile(ChatApp).replace(".py", ".tcss")

    def __init__(self, content: Widget) -> None:
        super().__init__()
        self.register_theme(DARK)
        self.theme = DARK.name
        self._content = content
        self.results: list[Any] = []  # of a dialog that has been closed

    def on_mount(self) -> None:
        if isinstance(self._content, Screen):
            self.push_screen(self._content, self.results.append)
        else:
            self.mount(self._content)


class Hosted(Screenful):
    """A host's screen."""

    def __init__(self, app: Host, pilot: Pilot[None]) -> None:
        super().__init__(app, pilot)
        self.app = app


@asynccontextmanager
async def hosted(
    content: Widget, *, size: tuple[int, int] = (100, 30)
) -> AsyncGenerator[Hosted, None]:
    """One widget or one dialog, without the rest of the chat."""
    app = Host(content)
    async with app.run_test(size=size) as pilot:
        yield Hosted(app, pilot)


Open = Callable[..., AbstractAsyncContextManager[Terminal]]  # the fixture `terminal`
OpenWindow = Callable[..., Window]  # the fixture `open_window`

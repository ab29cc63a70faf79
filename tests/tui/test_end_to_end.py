"""The program itself, in a terminal of its own."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import httpx
import pytest

from tui.messages import Message, State
from tui.store import Store

if TYPE_CHECKING:
    from conftest import FakeServer

ESCAPES = re.compile(
    r"\x1b(\[[0-9;?<>=]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[PX^_].*?\x1b\\|.)"
)
CTRL_C, CTRL_Q, ENTER, ESCAPE = "\x03", "\x11", "\r", "\x1b"


class Window:
    """A program in a pseudo-terminal, and what it has written there."""

    def __init__(self, command: list[str], home: Path, patience: float) -> None:
        self._patience = patience
        self._terminal, inside = os.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        environment = {**os.environ, "MLXSERVE_HOME": str(home), "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, env=environment
        )
        os.close(inside)
        self._written = ""
        self._is_open = True

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def wait_for(self, words: str) -> None:
        """Until it writes these words; what came before them is forgotten."""
        deadline = time.monotonic() + self._patience
        while words not in (text := ESCAPES.sub("", self._written)):
            assert time.monotonic() < deadline, (
                f"{words!r} never came; the last was {text[-900:]!r}"
            )
            self._read()
        self._written = text[text.index(words) + len(words) :]

    def end(self) -> int:
        """Its exit code."""
        deadline = time.monotonic() + self._patience
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it never ended"
            self._read()
        return self.process.returncode

    def press_until_the_end(self, keys: str) -> int:
        """Its exit code; a key that comes while a dialog closes is lost, so it is pressed again."""
        deadline = time.monotonic() + self._patience
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it never ended"
            self.press(keys)
            self._read()
        return self.process.returncode

    def hang_up(self) -> None:
        """What closing a window does: the terminal is gone, and a signal says so."""
        os.close(self._terminal)
        self._is_open = False
        self.process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self._is_open:
            os.close(self._terminal)

    def _read(self) -> None:
        if select.select([self._terminal], [], [], 0.1)[0]:
            try:
                self._written += os.read(self._terminal, 65_536).decode("utf-8", "replace")
            except OSError:  # Linux says so when the program has gone
                self.process.wait(self._patience)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def open_window(home: Path, patience: float) -> Iterator[Callable[..., Window]]:
    windows: list[Window] = []

    def start(*command: str, patience: float = patience) -> Window:
        windows.append(Window([sys.executable, *command], home, patience))
        return windows[-1]

    yield start
    for window in windows:
        window.close()


def attached(url: str) -> tuple[str, str]:
    return "-c", f"from tui.app import main; raise SystemExit(main(url={url!r}, model=None))"


def last_message(home: Path) -> Message:
    store = Store.open(home / "chat.sqlite")
    message = store.path(store.chats()[0].leaf_id)[-1]
    store.close()
    return message


def wait_until(is_so: Callable[[], bool], patience: float) -> None:
    deadline = time.monotonic() + patience
    while not is_so():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def test_a_conversation_in_a_terminal(
    open_window: Callable[..., Window], server: "FakeServer", scripts: SimpleNamespace, home: Path
) -> None:
    server.script(scripts.say("It is **blue**."))
    window = open_window(*attached(server.url))
    window.wait_for("Ready")
    window.press("why?" + ENTER)
    window.wait_for("It is blue.")
    window.wait_for("Ready")
    window.press(CTRL_Q)
    assert window.end() == 0
    assert last_message(home).text == "It is **blue**."


def test_killing_it_loses_at_most_the_last_second(
    open_window: Callable[..., Window],
    server: "FakeServer",
    scripts: SimpleNamespace,
    home: Path,
    patience: float,
) -> None:
    server.script(scripts.say("half of it"), scripts.Gate())
    window = open_window(*attached(server.url))
    window.wait_for("Ready")
    window.press("why?" + ENTER)
    window.wait_for("half of it")
    wait_until(lambda: last_message(home).text == "half of it", patience)
    window.process.send_signal(signal.SIGKILL)
    window.end()
    message = last_message(home)
    assert (message.text, message.state) == ("half of it", State.WRITING)
    assert server.disconnects.acquire(timeout=patience)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order(
    open_window: Callable[..., Window],
    server: "FakeServer",
    scripts: SimpleNamespace,
    home: Path,
    number: signal.Signals,
) -> None:
    server.script(scripts.say("half of it"), scripts.Gate())
    window = open_window(*attached(server.url))
    window.wait_for("Ready")
    window.press("why?" + ENTER)
    window.wait_for("half of it")
    window.process.send_signal(number)
    assert window.end() == 0
    assert (last_message(home).text, last_message(home).state) == ("half of it", State.STOPPED)


def test_closing_the_window_ends_it_and_keeps_what_has_come(
    open_window: Callable[..., Window],
    server: "FakeServer",
    scripts: SimpleNamespace,
    home: Path,
    patience: float,
) -> None:
    server.script(scripts.say("half of it"), scripts.Gate())
    window = open_window(*attached(server.url))
    window.wait_for("Ready")
    window.press("why?" + ENTER)
    window.wait_for("half of it")
    window.hang_up()
    window.process.wait(patience)
    assert (last_message(home).text, last_message(home).state) == ("half of it", State.STOPPED)


def test_ctrl_c_twice_ends_it(open_window: Callable[..., Window], server: "FakeServer") -> None:
    window = open_window(*attached(server.url))
    window.wait_for("Ready")
    window.press(CTRL_C)
    window.wait_for("again to leave")
    window.press(CTRL_C)
    assert window.end() == 0


def test_two_terminals_share_their_chats(
    open_window: Callable[..., Window], server: "FakeServer", home: Path
) -> None:
    windows = [open_window(*attached(server.url)) for _ in range(2)]
    for window in windows:
        window.wait_for("Ready")
    for number, window in enumerate(windows):
        window.press(f"number {number}" + ENTER)
    for window in windows:
        window.wait_for("Yes.")
        window.wait_for("Ready")
        window.press(CTRL_Q)
        assert window.end() == 0
    store = Store.open(home / "chat.sqlite")
    assert sorted(chat.title for chat in store.chats()) == ["number 0", "number 1"]
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["quit", "killed"])
def test_the_installed_command_starts_its_server_and_ends_it(
    open_window: Callable[..., Window], home: Path, ending: str
) -> None:
    window = open_window("-m", "mlxserve", "chat", patience=180.0)
    window.wait_for("Ready")
    (log,) = (home / "logs").iterdir()
    found = re.search(r"^mlxserve is ready at (\S+)$", log.read_text(), re.MULTILINE)
    assert found is not None
    assert httpx.get(found[1] + "/health", trust_env=False).status_code == 200
    window.press("Say hello." + ENTER)
    window.wait_for("first token")
    if ending == "quit":
        window.press(CTRL_Q)
        assert window.end() == 0
    else:
        window.process.send_signal(signal.SIGKILL)
        window.end()

    def is_gone() -> bool:
        try:
            httpx.get(found[1] + "/health", trust_env=False)
        except httpx.TransportError:
            return True
        return False

    wait_until(is_gone, 60.0)
    assert last_message(home).chat_id == 1


@pytest.mark.slow
def test_a_day_in_the_terminal(
    open_window: Callable[..., Window], home: Path, tmp_path: Path
) -> None:
    """Ask, stop, go on, edit, branch, look at the engine, search, export, leave; nothing scripted."""
    window = open_window("-m", "mlxserve", "chat", patience=60.0)
    window.wait_for("Ready")
    window.press("Remember the code word plum-42." + ENTER)
    window.wait_for("first token")
    window.press("/system Count." + ENTER)
    window.wait_for("with a system prompt")
    window.press("What can you do?" + ENTER)
    window.wait_for("I can do")
    window.press(ESCAPE)
    window.wait_for("first token")
    stopped = last_message(home)
    if stopped.state is State.STOPPED:
        window.press("/continue" + ENTER)
        wait_until(lambda: last_message(home).state is State.DONE, 60)
        assert last_message(home).text.startswith(stopped.text)
        assert last_message(home).id == stopped.id
    window.press("/edit" + ENTER)
    window.wait_for("Editing")
    window.press(" And what not?" + ENTER)
    window.wait_for("version 2 of 2")
    window.press("\x1bOS")  # F4: at 100 columns, a screen of its own
    window.wait_for("pages of 32 tokens")
    window.press(ESCAPE)
    window.wait_for("Ask anything")
    window.press(f"/export {tmp_path}/chat.md" + ENTER)
    wait_until((tmp_path / "chat.md").exists, 60)
    assert "plum-42" in (tmp_path / "chat.md").read_text()
    window.press("\x0f")  # Ctrl+O
    window.wait_for("Find words in all chats")
    window.press("plum")
    window.wait_for("plum-42")
    window.press(ENTER)
    assert window.press_until_the_end(CTRL_Q) == 0

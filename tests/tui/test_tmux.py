"""The installed command in tmux, with the real server and the model that comes along."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tui.home import Home
from tui.messages import Message, State
from tui.store import Store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]
COMMAND = Path(sys.executable).parent / "mlxserve"
PATIENCE = 120.0  # seconds; a model is loaded on a machine that does other things as well


class Pane:
    """A terminal, what is on it, and the program in it."""

    _END = "#{pane_dead_status}#{pane_dead_signal}"

    def __init__(self, home: Home, folder: Path) -> None:
        self._tmux = ("tmux", "-S", str(folder / "tmux"), "-f", "/dev/null")
        command = f"exec {COMMAND} chat"
        self._run("new-session", "-d", "-x", "100", "-y", "30", "-e", f"MLXSERVE_HOME={home.folder}",
                  "-e", "COLORTERM=truecolor", "sleep 1000")  # fmt: skip
        self._run("set-option", "-g", "remain-on-exit", "on")
        self._command = command

    def open(self) -> None:
        """Start the command, with an empty screen."""
        self._run("respawn-pane", "-k", self._command)

    def close(self) -> None:
        self._run("kill-server")

    @property
    def screen(self) -> str:
        return self._run("capture-pane", "-p")

    @property
    def pid(self) -> int:
        return int(self._run("display-message", "-p", "#{pane_pid}"))

    @property
    def server(self) -> int:
        """The process that the command has started."""
        return int(subprocess.check_output(["pgrep", "-P", str(self.pid)], text=True).split()[0])

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        """Keys as tmux names them."""
        self._run("send-keys", *keys)

    def ask(self, text: str) -> None:
        self.type(text)
        self.press("Enter")

    def until(self, is_so: Callable[[str], bool]) -> str:
        """The screen, once it is so."""
        deadline = time.monotonic() + PATIENCE
        while not is_so(screen := self.screen):
            assert time.monotonic() < deadline, screen
        return screen

    def until_shown(self, words: str) -> str:
        return self.until(lambda screen: words in screen)

    def until_ready(self) -> str:
        return self.until(lambda screen: "Ready" in screen.rpartition("\n")[2])

    def until_ended(self) -> str:
        """Its exit code, or the signal that ended it.

        tmux calls a pane dead when its terminal closes, which is before it has the status.
        """
        deadline = time.monotonic() + PATIENCE
        while not (end := self._run("display-message", "-p", self._END)):
            assert time.monotonic() < deadline, self.screen
        return end

    def _run(self, *arguments: str) -> str:
        return subprocess.run(
            [*self._tmux, *arguments], check=True, capture_output=True, text=True
        ).stdout.rstrip("\n")


class Brake:
    """Lets a process run a small part of the time, so that an answer takes seconds."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Brake":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            os.kill(self._pid, signal.SIGSTOP)
            self._is_over.wait(0.35)
            os.kill(self._pid, signal.SIGCONT)
            self._is_over.wait(0.03)


@pytest.fixture
def pane(home: Home, tmp_path: Path) -> Iterator[Pane]:
    pane = Pane(home, tmp_path)
    yield pane
    pane.close()


def last_message(home: Home) -> Message:
    store = Store.open(home.chats)
    message = store.path(store.chats()[0].leaf_id)[-1]
    store.close()
    return message


def is_writing(screen: str) -> bool:
    return "Writing · Esc stops" in screen


def test_a_day_in_the_terminal(pane: Pane, home: Home, tmp_path: Path) -> None:
    pane.open()
    pane.until_ready()
    pane.ask("Remember the code word plum-42.")
    pane.until_shown("first token")
    pane.until_ready()

    with Brake(pane.server):
        pane.ask("What can you do?")
        pane.until(is_writing)
        pane.press("Escape")
        pane.until_shown("Stopped")
    stopped = last_message(home)
    assert stopped.state is State.STOPPED
    pane.ask("/continue")
    pane.until_ready()
    continued = last_message(home)
    assert (continued.id, continued.state) == (stopped.id, State.DONE)
    assert continued.text.startswith(stopped.text)

    pane.ask("/edit")
    pane.until_shown("Editing")
    pane.ask(" And what not?")
    pane.until_shown("version 2 of 2")
    pane.until_ready()
    pane.press("M-Left")
    pane.until_shown("version 1 of 2")
    pane.press("F4")
    pane.until_shown("pages of 32 tokens")
    assert "reused" in pane.screen
    pane.press("Escape")
    pane.until_shown("Ask anything")

    pane.press("C-n")
    pane.until_shown("New chat")
    pane.ask("What is a page?")
    pane.until_shown("first token")
    pane.until_ready()
    pane.press("C-o")
    pane.until_shown("Find words in all chats")
    pane.type("lum-4")
    pane.until_shown("Remember the code word plum…")  # its title, cut for the words found beside it
    pane.press("Enter")
    pane.until(
        lambda screen: "E edit" in screen and "plum-42" in screen
    )  # what was found has focus

    pane.press("Escape")
    pane.until_shown("Enter sends")
    pane.ask(f"/export {tmp_path}/chat.md")
    pane.until(lambda _: (tmp_path / "chat.md").exists())
    assert "plum-42" in (tmp_path / "chat.md").read_text(encoding="utf-8")
    server = pane.server
    pane.press("C-q")
    assert pane.until_ended() == "0"
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_killed_in_the_middle_of_an_answer_it_has_lost_at_most_a_second(
    pane: Pane, home: Home
) -> None:
    pane.open()
    pane.until_ready()
    seen: list[tuple[float, int]] = []  # when, and how many words of the answer were on the screen

    def words(screen: str) -> int:
        return len(answer(screen))

    def answer(screen: str) -> list[str]:
        return screen.partition("What can you do?\n")[2].partition("╭")[0].split()[1:]

    with Brake(pane.server):
        pane.ask("What can you do?")
        began = time.monotonic()
        pane.until(is_writing)
        while time.monotonic() < began + 60 and (len(seen) < 2 or seen[-1][0] < seen[0][0] + 3):
            screen = pane.screen
            assert is_writing(screen), "the answer was to take longer than this"
            seen.append((time.monotonic(), words(screen)))
        os.kill(pane.pid, signal.SIGKILL)
        killed = time.monotonic()
    assert pane.until_ended() == "9"
    kept = last_message(home)
    assert kept.state is State.WRITING
    shown_a_second_before = max((n for at, n in seen if at < killed - 1.3), default=0)
    assert shown_a_second_before > 0
    assert len(kept.text.split()) >= shown_a_second_before

    pane.open()
    pane.until_ready()
    pane.press("C-o")
    pane.until_shown("Find words in all chats")
    pane.press("Enter")
    pane.until(lambda screen: kept.text.split()[0] in screen and "Find words" not in screen)
    pane.press("C-q")
    assert pane.until_ended() == "0"

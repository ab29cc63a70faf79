"""The installed command in tmux, with the real server and the bundled model."""

import os
import re
import shutil
import signal
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from mlxserve.history.messages import State
from tests.tui.chats_on_disk import branch
from tests.tui.terminals import Pane
from tui.home import Home

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


WHOLE_PANEL = ("F4", "F4")  # in a window of this width, a strip comes first


class Brake:
    """Stops a process most of the time, so that an answer takes seconds.

    Where a time slice lasts longer, on a busy machine, the pause after it is longer as well.
    """

    def __init__(self, pid: int, slice_seconds: float = 0.01) -> None:
        self._pid = pid
        self._slice_seconds = slice_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Brake":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        ran = 0.0
        while not self._is_over.is_set():
            os.kill(self._pid, signal.SIGSTOP)
            self._is_over.wait(max(0.35, 12 * ran))
            began = time.monotonic()
            os.kill(self._pid, signal.SIGCONT)
            self._is_over.wait(self._slice_seconds)
            ran = time.monotonic() - began


def is_writing(screen: str) -> bool:
    return "Writing · Esc stops" in screen


@pytest.mark.long
def test_a_real_model_answers_in_the_terminal(pane: Pane, smollm2: Path) -> None:
    pane.open("-m", str(smollm2))
    pane.until_ready()
    # Without it llama.cpp's is taken, with which it may answer in French.
    pane.ask("/set temperature 0")
    pane.until_shown("temperature 0")
    pane.ask("What is the capital of France?")
    pane.until_shown("Paris")
    pane.until_ready()


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
    stopped = branch(home)[-1]
    assert stopped.state is State.STOPPED
    pane.ask("/continue")
    pane.until_ready()
    continued = branch(home)[-1]
    assert (continued.id, continued.state) == (stopped.id, State.DONE)
    assert continued.text.startswith(stopped.text)

    pane.ask("/edit")
    pane.until_shown("Editing")
    pane.ask(" And what not?")
    pane.until_shown("version 2 of 2")
    pane.until_ready()
    pane.press("M-Left")
    pane.until_shown("version 1 of 2")
    pane.press(*WHOLE_PANEL)
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
    pane.until_shown("Search all chats")
    pane.type("lum-4")
    pane.until_shown("Remember the code…")  # its title, shortened for the excerpt
    pane.press("Enter")
    pane.until(
        lambda screen: "E edit" in screen and "plum-42" in screen
    )  # the message found has the focus

    pane.press("Escape")
    pane.until_shown("Enter sends")
    pane.ask(f"/export {tmp_path}/chat.md")
    chat = tmp_path / "chat.md"
    pane.until(lambda _: chat.exists() and "plum-42" in chat.read_text(encoding="utf-8"))
    server = pane.server
    pane.press("C-q")
    assert pane.until_ended() == "0"
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


@pytest.mark.long  # by the clock: an answer that is shown for two seconds, and saved every second
def test_a_kill_during_an_answer_loses_at_most_a_second(pane: Pane, home: Home) -> None:
    pane.open()
    pane.until_ready()
    seen: list[tuple[float, int]] = []  # time, and words of the answer on the screen

    def words(screen: str) -> int:
        return len(answer(screen))

    def answer(screen: str) -> list[str]:
        return screen.partition("What can you do?\n")[2].partition("╭")[0].split()[1:]

    def shown_before(moment: float) -> int:
        return max((count for at, count in seen if at < moment), default=0)

    with Brake(pane.server, 0.005):
        pane.ask("What can you do?")
        began = time.monotonic()
        pane.until(is_writing)
        while time.monotonic() < began + 60 and not shown_before(time.monotonic() - 2):
            screen = pane.screen
            assert is_writing(screen), "the answer ended too early"
            seen.append((time.monotonic(), words(screen)))
        os.kill(pane.pid, signal.SIGKILL)
        killed = time.monotonic()
    assert pane.until_ended() == "9"
    kept = branch(home)[-1]
    assert kept.state is State.WRITING
    # Saved every second; a busy machine may take most of another one to look at the screen and to save.
    assert shown_before(killed - 1.9) > 0
    assert len(kept.text.split()) >= shown_before(killed - 1.9)

    pane.open()
    pane.until_ready()
    pane.press("C-o")
    pane.until_shown("Search all chats")
    pane.press("Enter")
    pane.until(lambda screen: kept.text.split()[0] in screen and "Search all" not in screen)
    pane.press("C-q")
    assert pane.until_ended() == "0"


def number_in(pattern: str, screen: str) -> int:
    found = re.search(pattern, screen)
    return 0 if found is None else int(found[1].replace(",", ""))


@pytest.mark.long
def test_the_panel_shows_shared_and_reused_pages(pane: Pane, home: Home, tmp_path: Path) -> None:
    rules = "The train to Oslo left the valley in the morning. " * 12
    (tmp_path / "other").mkdir()
    with closing(type(pane)(home, tmp_path / "other")) as other:
        pane.open()
        pane.until_ready()
        (log,) = home.logs.glob("*.log")
        (url,) = re.findall(r"mlxserve is ready at (\S+)", log.read_text(encoding="utf-8"))
        other.open("--url", url)
        other.until_ready()
        for each in (pane, other):
            each.ask(f"/system {rules}")
            each.until_shown("with a system prom")
        pane.ask("What is a page?")
        pane.until_shown("first token")
        pane.until_ready()
        pane.press(*WHOLE_PANEL)
        pane.until_shown("pages of 32 tokens")
        assert number_in(r"shared ([\d,]+)", pane.screen) == 0
        pane.press("Escape")
        pane.until_shown("Ask anything")

        with Brake(pane.server):  # time for two answers at once
            for each in (other, pane):
                each.ask("What can you do?")
                each.until(is_writing)
            pane.press(*WHOLE_PANEL)
            pane.until(lambda screen: number_in(r"shared ([\d,]+)", screen) > 0)
            assert number_in(r"this chat ([\d,]+)", pane.screen) > 0
        pane.press("Escape")
        pane.until_ready()

        pane.ask("/edit")
        pane.until_shown("Editing")
        # Several pages, and so long that a page map, four a second, shows them while it runs.
        pane.ask(" " + "And what can you not do at all? " * 60)
        pane.until_shown("version 2 of 2")
        pane.until_ready()
        pane.press(*WHOLE_PANEL)
        screen = pane.until_shown("differs at token")
        reused, prompt, differs = (
            number_in(pattern, screen)
            for pattern in (
                r"reused ([\d,]+) of",
                r"of ([\d,]+) tokens",
                r"differs at token ([\d,]+): new text",
            )
        )
        assert 0 < reused <= differs < prompt
        assert differs - reused < 32, "all full pages up to there"
        assert number_in(r"this chat ([\d,]+)", screen) > 0
        other.press("C-q")
        assert other.until_ended() == "0"
        pane.press("C-q")
        assert pane.until_ended() == "0"

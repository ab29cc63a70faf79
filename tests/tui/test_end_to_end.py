"""The program in a pseudo-terminal."""

import re
import signal
from contextlib import closing

import httpx
import pytest

from mlxserve.history.messages import State
from mlxserve.history.store import Store
from tests.tui import scripts
from tests.tui.chats_on_disk import branch
from tests.tui.fake_server import FakeServer
from tests.tui.terminals import OpenWindow, Window
from tests.waiting import wait_until
from tui.home import Home

CTRL_C, CTRL_Q, ENTER = "\x03", "\x11", "\r"


def attached(url: str) -> tuple[str, str]:
    return "-c", f"from tui.launch import main; raise SystemExit(main(url={url!r}, model=None))"


@pytest.fixture
def window(open_window: OpenWindow, server: FakeServer) -> Window:
    """A chat that is ready."""
    window = open_window(*attached(server.url))
    window.wait_for("Ready")
    return window


@pytest.fixture
def writing(window: Window, server: FakeServer) -> Window:
    """A chat in the middle of an answer."""
    server.script(scripts.say("half of it"), scripts.Gate())
    window.press("why?" + ENTER)
    window.wait_for("half of it")
    return window


def test_a_conversation_in_a_terminal(window: Window, server: FakeServer, home: Home) -> None:
    server.script(scripts.say("It is **blue**."))
    window.press("why?" + ENTER)
    window.wait_for("It is blue.")
    window.wait_for("Ready")
    window.press(CTRL_Q)
    assert window.end() == 0
    assert branch(home)[-1].text == "It is **blue**."


def test_killing_it_loses_at_most_the_last_second(
    writing: Window, server: FakeServer, home: Home, patience: float
) -> None:
    wait_until(lambda: branch(home)[-1].text == "half of it", patience)
    writing.process.send_signal(signal.SIGKILL)
    writing.end()
    message = branch(home)[-1]
    assert (message.text, message.state) == ("half of it", State.WRITING)
    assert server.disconnects.acquire(timeout=patience)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_keeps_the_text_so_far(
    writing: Window, home: Home, number: signal.Signals
) -> None:
    writing.process.send_signal(number)
    assert writing.end() == 0
    assert (branch(home)[-1].text, branch(home)[-1].state) == ("half of it", State.STOPPED)


def test_closing_the_window_ends_it_and_keeps_the_text_so_far(
    writing: Window, home: Home, patience: float
) -> None:
    writing.hang_up()
    writing.process.wait(patience)
    assert (branch(home)[-1].text, branch(home)[-1].state) == ("half of it", State.STOPPED)


def test_ctrl_c_twice_ends_it(window: Window) -> None:
    window.press(CTRL_C)
    window.wait_for("again to quit")
    window.press(CTRL_C)
    assert window.end() == 0


@pytest.mark.slow
def test_two_terminals_share_their_chats(
    open_window: OpenWindow, server: FakeServer, home: Home
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
    with closing(Store.open(home.chats)) as store:
        assert sorted(chat.title for chat in store.chats()) == ["number 0", "number 1"]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["quit", "killed"])
def test_the_installed_command_starts_and_stops_its_server(
    open_window: OpenWindow, home: Home, ending: str
) -> None:
    window = open_window("-m", "mlxserve", "chat", patience=180.0)
    window.wait_for("Ready")
    (log,) = home.logs.glob("*.log")
    found = re.search(r"^mlxserve is ready at (\S+)$", log.read_text(), re.MULTILINE)
    assert found is not None
    assert httpx.get(found[1] + "/health", trust_env=False, timeout=60).status_code == 200
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
            httpx.get(found[1] + "/health", trust_env=False, timeout=60)
        except httpx.TransportError:
            return True
        return False

    wait_until(is_gone, 60.0)
    assert branch(home)[-1].chat_id == 1

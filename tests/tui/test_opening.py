"""The first frame, and the state of the terminal until the app runs."""

import asyncio
import re
import subprocess
import sys

import pytest

from mlxserve.history.store import Store
from tests.tui.fake_server import FakeServer
from tests.tui.terminals import Open, OpenWindow
from tests.waiting import wait_until
from tui.home import Home
from tui.opening import ENTER, LEAVE, PLACEHOLDER, STARTING, TITLE
from tui.paint.theme import LIGHT
from tui.talk.connection import ConnectOptions, Connector, Report, ServerConnection

LIGHT_BACKGROUND = "48;2;250;250;247"
CHAT = ("-m", "mlxserve", "chat", "--url")
# `mlxserve chat` whose import of Textual never ends.
ENDLESS = """
import sys, time
class Endless:
    def find_spec(self, name, *_):
        if name == "textual":
            print("importing", flush=True)
            while True:
                time.sleep(0.01)  # a signal just before a wait without end is not handled
sys.meta_path.insert(0, Endless())
from mlxserve.cli import main
main()
"""


class NeverConnects(Connector):
    async def connect(self, report: Report) -> ServerConnection:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


async def test_the_app_draws_the_words_of_the_frame_in_the_same_places(
    open_window: OpenWindow, terminal: Open, home: Home
) -> None:
    window = open_window("-c", ENDLESS, "chat")
    window.wait_for_bytes("importing")
    placed = re.findall(r"\x1b\[(\d+);(\d+)H(?:\x1b\[1m)?(\w[ \w]*)", window.all_written)
    assert [words for *_, words in placed] == [TITLE, STARTING, PLACEHOLDER]

    async with terminal(
        NeverConnects(ConnectOptions(url="http://127.0.0.1:1"), home), is_ready=False
    ) as t:
        await t.until_shown(STARTING)
        lines = t.screen.split("\n")
        for y, x, words in placed:
            assert lines[int(y) - 1][int(x) - 1 :].startswith(words)


def test_the_frame_needs_no_slow_import() -> None:
    script = (
        "import sys, mlxserve.cli, tui.opening\n"
        "slow = {'typer', 'rich', 'textual', 'pydantic', 'asyncio', 'dataclasses', 'subprocess'}\n"
        "print(sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_keys_typed_before_the_app_runs_reach_it(
    open_window: OpenWindow, server: FakeServer, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")
    store = Store.open(home.chats)
    store.set_setting("theme", LIGHT.name)
    store.close()
    window = open_window(*CHAT, server.url)
    window.press("typed ")
    window.wait_for_bytes(PLACEHOLDER)
    assert not window.echoes
    window.press("ahead\rand more\r")

    def num_requests() -> int:
        assert window.written is not None, "reading its output keeps it from blocking"
        return len(server.requests)

    wait_until(lambda: num_requests() == 2)
    asked = [request["messages"][-1]["content"] for request in server.requests]
    assert asked == ["typed ahead", "and more"]
    assert LIGHT_BACKGROUND in window.all_written, "the remembered theme"
    assert window.all_written.count(ENTER) == 1, "the alternate screen is entered once"
    window.press("\x11")
    assert window.end() == 0
    assert window.modes == window.modes_before
    assert LEAVE in window.written


@pytest.mark.parametrize("end", ["ctrl+c", "SIGTERM", "SIGHUP"])
def test_a_signal_before_the_app_runs_restores_the_terminal(
    open_window: OpenWindow, end: str
) -> None:
    window = open_window("-c", ENDLESS, "chat", "--url", "http://127.0.0.1:9")
    window.wait_for("importing")
    assert not window.echoes
    number = {"ctrl+c": 2, "SIGTERM": 15, "SIGHUP": 1}[end]
    if end == "ctrl+c":
        window.press("\x1a\x1c\x03")  # Ctrl+Z and Ctrl+\ do nothing, then Ctrl+C
    else:
        window.process.send_signal(number)
    assert window.end() == 128 + number
    assert window.written.endswith(LEAVE)
    assert window.modes == window.modes_before


@pytest.mark.parametrize(
    ("flags", "words", "code"),
    [
        (("--nonsense",), "No such option: --nonsense", 2),
        (("--page-size", "7"), "error: --page-size must be one of", 1),
    ],
)
def test_an_invalid_flag_is_reported_on_the_normal_screen(
    open_window: OpenWindow, flags: tuple[str, ...], words: str, code: int
) -> None:
    window = open_window("-m", "mlxserve", "chat", *flags)
    assert window.end() == code
    said = window.written
    assert words in said[said.index(LEAVE) :]
    assert ENTER not in said[said.index(LEAVE) :]
    assert window.modes == window.modes_before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (("serve", "--help"), {}),
        (("chat", "--help"), {}),
        (("chat", "-h"), {}),
        (("chat", "--nonsense"), {"TERM": "dumb"}),
        (("chat", "--nonsense"), {"TEXTUAL_DRIVER": "no.such:Driver"}),
    ],
)
def test_only_the_chat_in_a_usual_terminal_has_a_first_frame(
    open_window: OpenWindow, arguments: tuple[str, ...], variables: dict[str, str]
) -> None:
    assigned = [f"{name}={value}" for name, value in variables.items()]
    window = open_window(
        "-c",
        "import os, sys; os.execvp('env', ['env', *sys.argv[1:]])",
        *assigned,
        sys.executable,
        "-m",
        "mlxserve",
        *arguments,
    )
    window.end()
    assert ENTER not in window.all_written

"""A scripted OpenAI-compatible server: a real HTTP server on a free local port.

server.script(say("Hel", "lo"), usage(12, 2, cached=8))      the next answer
server.script(say("one"), gate, say("two"))                  waits until `gate.open()`
server.script(refuse(429, "too many requests are waiting"))
server.script(say("half of"), HANG_UP)
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from tests.waiting import wait_until
from tui.app import ChatApp
from tui.chat.store import Store
from tui.home import Home
from tui.paint.theme import DARK
from tui.talk.client import ChatClient
from tui.talk.connection import ConnectOptions, Connector
from tui.talk.models import ModelCatalog
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
PATIENCE = 20.0  # seconds until an expected event counts as missing


@dataclass(frozen=True)
class Send:
    data: bytes


@dataclass(frozen=True)
class Refuse:
    status: int
    body: bytes


@dataclass(frozen=True)
class HangUp:
    """Closes the connection in the middle of an answer."""


@dataclass
class Gate:
    """The server stops here until the test opens it, or the client goes away."""

    _open: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def open(self) -> None:
        self._open.set()

    def wait(self, is_gone: Callable[[], bool]) -> None:
        self.reached.set()
        while not self._open.wait(0.02):
            if is_gone():
                raise ConnectionAbortedError


Step = Send | Refuse | HangUp | Gate


def chunk(delta: Mapping[str, Any] | None = None, reason: str | None = None, **more: Any) -> Send:
    choices = [{"index": 0, "delta": delta or {}, "finish_reason": reason}]
    return event({"object": "chat.completion.chunk", "choices": choices, **more})


def event(content: Any) -> Send:
    return Send(b"data: " + json.dumps(content).encode() + b"\n\n")


def say(*pieces: str) -> list[Step]:
    return [chunk({"content": piece}) for piece in pieces]


def think(*pieces: str) -> list[Step]:
    return [chunk({"reasoning_content": piece}) for piece in pieces]


def usage(prompt: int, completion: int, cached: int, **cache: Any) -> list[Step]:
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if cache:
        counts["cache"] = cache
    return [event({"choices": [], "usage": counts})]


def page_event(kind: str, **data: Any) -> Send:
    """An event of the page map."""
    content = {"requests": [], "gone": [], **data}
    return Send(f"event: {kind}\ndata: {json.dumps(content)}\n\n".encode())


def engine_stats(*, running: int = 0, waiting: int = 0) -> dict[str, Any]:
    """A reply of `/api/v1/kv/stats`."""
    return {
        "page_size": 32,
        "kv_cache_dtype": "float32",
        "bytes": {"kv_cache": 1 << 30, "active": 3 << 30, "peak": 5 << 30},
        "prefix_cache": {"hit_rate": 0.84},
        "recurrent_states": {"slots": 0, "snapshots": 0, "restored": 0, "evicted": 0},
        "disk_cache": {"bytes": 0, "limit": 0},
        "tokens_per_second": {"prefill": 1200.4, "generation": 42.25},
        "requests": {"running": running, "waiting": waiting},
        "num_preemptions": 3,
    }


def request_card(name: str, state: str, **more: Any) -> dict[str, Any]:
    """An entry of `/api/v1/requests`."""
    card = {"id": name, "state": state, "position": None, "num_computed": 0, "num_to_compute": 0}
    return card | more


def refuse(status: int, message: str) -> list[Step]:
    return [Refuse(status, json.dumps({"error": {"message": message}}).encode())]


class FakeServer:
    """Answers chat requests with its scripts, in order; then with "Yes."."""

    def __init__(self) -> None:
        self.models = ["small", "large"]
        self.model_fields: dict[str, Any] = {}  # of every model's card, beside its id
        self.health: tuple[int, dict[str, Any]] = (200, {"status": "ok"})
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.disconnects = threading.Semaphore(0)
        self.engine: dict[
            str, Any
        ] = {}  # replies of mlxserve's own routes, by path; without an entry: 404
        self.map: list[Step] = []  # the page map's events
        self.is_ending = False
        self._scripts: list[list[Step]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = False
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def script(self, *parts: list[Step] | Step, reason: str | None = "stop") -> None:
        steps: list[Step] = []
        for part in parts:
            steps += part if isinstance(part, list) else [part]
        if reason is not None:
            steps.append(chunk(reason=reason))
        self._scripts.append(steps)

    def clear_scripts(self) -> None:
        self._scripts.clear()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.is_ending = True
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def next_script(self) -> list[Step]:
        return self._scripts.pop(0) if self._scripts else [*say("Yes."), chunk(reason="stop")]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Log nothing."""

            def do_GET(self) -> None:
                if self.path == "/health":
                    self._reply(*fake.health)
                elif self.path == "/v1/models":
                    cards = [{"id": model, **fake.model_fields} for model in fake.models]
                    self._reply(200, {"data": cards})
                elif self.path in fake.engine:
                    self._reply(200, fake.engine[self.path])
                elif self.path == "/api/v1/kv/map" and fake.map:
                    self._play_until_gone(fake.map)
                else:
                    self._reply(404, {"error": {"message": "no such address"}})

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                fake.requests.append(json.loads(self.rfile.read(length)))
                fake.headers.append({k.lower(): v for k, v in self.headers.items()})
                steps = fake.next_script()
                if steps and isinstance(steps[0], Refuse):
                    self._reply_bytes(steps[0].status, steps[0].body)
                    self.close_connection = True
                else:
                    self._play_until_gone(steps)

            def _play_until_gone(self, steps: list[Step]) -> None:
                try:
                    self._play(steps)
                except (BrokenPipeError, ConnectionResetError, ConnectionAbortedError):
                    fake.disconnects.release()
                self.close_connection = True

            def _play(self, steps: list[Step]) -> None:
                self.send_response(200)
                self.send_header("x-request-id", f"request-{len(fake.requests)}")
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for step in steps:
                    match step:
                        case Send(data):
                            self.wfile.write(data)
                            self.wfile.flush()
                        case Gate():
                            step.wait(self._is_gone)
                        case HangUp():
                            return
                        case Refuse():
                            raise AssertionError("only the first step may be a refusal")
                self.wfile.write(b"data: [DONE]\n\n")

            def _is_gone(self) -> bool:
                if fake.is_ending:  # a failed test leaves its gates closed
                    return True
                readable, _, _ = select.select([self.connection], [], [], 0)
                return bool(readable) and not self.connection.recv(1)

            def _reply(self, status: int, content: Any) -> None:
                self._reply_bytes(status, json.dumps(content).encode())

            def _reply_bytes(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def scripts() -> SimpleNamespace:
    """The steps of scripts."""
    return SimpleNamespace(
        Gate=Gate,
        Send=Send,
        chunk=chunk,
        event=event,
        engine_stats=engine_stats,
        hang_up=HangUp(),
        page_event=page_event,
        refuse=refuse,
        request_card=request_card,
        say=say,
        think=think,
        usage=usage,
    )


@pytest.fixture
def patience() -> float:
    """Seconds until an expected event counts as missing."""
    return PATIENCE


@pytest.fixture
def in_client() -> Callable[[str, Callable[[ChatClient], Awaitable[Any]]], Any]:
    """Calls a function with a client of the server, in an event loop of its own."""

    def call(url: str, function: Callable[[ChatClient], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with ChatClient(url) as client:
                return await function(client)

        return asyncio.run(run())

    return call


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

    def until(self, is_so: Callable[[str], bool]) -> str:
        """Wait for a condition on the screen, and return the screen."""
        screen = ""

        def look() -> bool:
            nonlocal screen
            screen = self.screen
            return is_so(screen)

        try:
            wait_until(look, self._PATIENCE)
        except AssertionError:
            raise AssertionError(screen) from None
        return screen

    def until_shown(self, words: str) -> str:
        return self.until(lambda screen: words in screen)

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


Story = Callable[[Terminal], Awaitable[None]]


@pytest.fixture
def host() -> Callable[..., None]:
    """Runs a story with one widget or one dialog, without the rest of the chat."""

    def run(
        story: Callable[[Hosted], Awaitable[None]],
        content: Widget,
        *,
        size: tuple[int, int] = (100, 30),
    ) -> None:
        async def play() -> None:
            app = Host(content)
            async with app.run_test(size=size) as pilot:
                await story(Hosted(app, pilot))

        asyncio.run(play())

    return run


@pytest.fixture
def new_terminal() -> Callable[[ChatApp, Pilot[None]], Terminal]:
    return Terminal


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def play(home: Home) -> Callable[..., None]:
    """Runs a story in a terminal with this connector."""

    def run(
        story: Story,
        connector: Connector,
        *,
        size: tuple[int, int] = (100, 30),
        theme_name: str = "mlxserve-dark",
        models: ModelCatalog | None = None,
    ) -> None:
        async def play() -> None:
            store = Store.open(home.chats)
            app = ChatApp(connector, store, home, theme_name=theme_name, models=models)
            async with app.run_test(size=size, notifications=True) as pilot:
                await story(Terminal(app, pilot))
                await app.action_quit()

        asyncio.run(play())

    return run


@pytest.fixture
def terminal(server: FakeServer, home: Home, play: Callable[..., None]) -> Callable[..., None]:
    """Runs a story in a terminal that is connected to the fake server."""

    def run(story: Story, *, is_ready: bool = True, **how: Any) -> None:
        async def when_ready(terminal: Terminal) -> None:
            if is_ready:
                await terminal.until_ready()
            await story(terminal)

        play(when_ready, Connector(ConnectOptions(url=server.url), home), **how)

    return run


@pytest.fixture
def t(terminal: Callable[..., None]) -> Callable[..., None]:
    """In a coroutine test: the chat, ready, as a `Terminal`; in a window of `size` if it has that."""
    return terminal


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine with a terminal `t` as its story."""
    story, given = pyfuncitem.obj, pyfuncitem.funcargs
    if "t" not in given or not inspect.iscoroutinefunction(story):
        return None
    arguments = {name: given[name] for name in inspect.signature(story).parameters if name != "t"}
    how = {"size": given["size"]} if "size" in given else {}
    given["t"](lambda terminal: story(t=terminal, **arguments), **how)
    return True


@pytest.fixture
def open_window(home: Home) -> Iterator[Callable[..., Window]]:
    windows: list[Window] = []

    def start(*command: str, patience: float = PATIENCE) -> Window:
        windows.append(Window([sys.executable, *command], home.folder, patience))
        return windows[-1]

    yield start
    for window in windows:
        window.close()


@pytest.fixture
def pane_of_size(home: Home, tmp_path: Path) -> Iterator[Callable[[tuple[int, int]], Pane]]:
    """A pane of (columns, rows)."""
    with ExitStack() as panes:

        def open_pane(size: tuple[int, int]) -> Pane:
            pane = Pane(home, tmp_path, size)
            panes.callback(pane.close)
            return pane

        yield open_pane


@pytest.fixture
def pane(pane_of_size: Callable[[tuple[int, int]], Pane]) -> Pane:
    return pane_of_size((100, 30))

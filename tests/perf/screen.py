"""The terminal's costs: time to the first frame and until typing is visible, CPU while idle, and
stalls while an answer streams, each next to a baseline.

Everything runs in child processes in their own pseudo-terminals, as for a user; this module knows
only the command lines (`mlxserve chat`, `python -m tests.perf.screen_child`).
"""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from mlxserve.bench.report import Figure, Report, quantile

TEXTS = {
    "prose": "prose",
    "fence": "a 600-line fence",
    "list": "a 200-item list",
    "long": "200,000 characters",
}
# The smallest Textual program with an input line, without our code.
EMPTY_APP = [
    sys.executable,
    "-c",
    "from textual.app import App\n"
    "from textual.widgets import Input\n"
    "class Empty(App):\n"
    "    def compose(self): yield Input(placeholder='Ask anything')\n"
    "Empty().run()\n",
]
_ROOT = Path(__file__).parents[2]  # where `tests` can be imported
_ROWS, _COLUMNS = 40, 120
# Placeholder of the empty input line, without the letter under the cursor: the first frame is drawn.
_PLACEHOLDER = "sk anything"
_KEY = "¤"  # not part of any escape sequence: once it is drawn, typing is visible
_PATIENCE = 120.0  # seconds


def bench_screen(*, runs: int, seconds: float, texts: Sequence[str]) -> Report:
    """Interleaved runs: in each round ours, then the baseline."""
    figures = _start_figures(runs)
    for kind, label in (("ours", "idle"), ("panel", "idle, with the engine panel")):
        found = [result_of("idle", kind, str(seconds)) for _ in range(runs)]
        for key, when in (("blinking", "while the cursor blinks"), ("still", "after that")):
            shares = tuple(result[key][0] for result in found)
            figures.append(Figure(f"{label}, {when}, of one core", "%", shares))
    for text in texts:
        figures += _stall_figures(text, runs, seconds)
    settings = {"seconds a run": seconds, "window": f"{_COLUMNS}x{_ROWS}", "pieces a second": 100}
    return Report("screen", settings, tuple(figures))


def _start_figures(runs: int) -> list[Figure]:
    """The first frame is drawn before the app is ready for typing."""
    starts = {"mlxserve chat": _chat(), "an empty Textual app": EMPTY_APP}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    alone = []
    for _ in range(runs):
        alone.append(python_alone())
        for name, command in starts.items():
            found[name].append(time_start(command))
    figures = [
        Figure(f"{what}, {name}", "ms", _in_milliseconds([times[at] for times in found[name]]))
        for at, what in enumerate(("first frame", "typing is visible"))
        for name in starts
    ]
    return [*figures, Figure("Python alone, start to end", "ms", _in_milliseconds(alone))]


def _stall_figures(text: str, runs: int, seconds: float) -> list[Figure]:
    """`work` is the CPU time of the process within a stall: all of it on an idle machine."""
    found: dict[str, list[dict[str, list[float]]]] = {"ours": [], "panel": [], "textual": []}
    for _ in range(runs):
        for whose, results in found.items():
            results.append(result_of("stream", text, whose, str(seconds)))
    figures = []
    labels = (TEXTS[text], "  with the engine panel", "  Textual's Markdown")
    for whose, label in zip(found, labels, strict=True):
        for what, key, measure in (
            ("stall p95", "stalls", _p95),
            ("longest", "stalls", max),
            ("work p95", "busy", _p95),
        ):
            values = [measure(result[key]) for result in found[whose]]
            figures.append(Figure(f"{label}: {what}", "ms", _in_milliseconds(values)))
    return figures


def _p95(values: Sequence[float]) -> float:
    return quantile(values, 0.95)


def _in_milliseconds(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(1000 * value for value in seconds)


def _measure(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.perf.screen_child", *arguments]


def _chat() -> list[str]:
    # No server listens there; the first frame is drawn before that is known.
    return [sys.executable, "-m", "mlxserve", "chat", "--url", "http://127.0.0.1:9"]


def python_alone() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - began


def time_start(command: Sequence[str]) -> tuple[float, float]:
    """Seconds from starting a program to its first frame, and until a key typed then is visible."""
    with tempfile.TemporaryDirectory() as home, Terminal(command, home) as terminal:
        picture = terminal.seconds_until(_PLACEHOLDER)
        terminal.press(_KEY)
        return picture, terminal.seconds_until(_KEY)


def result_of(*arguments: str) -> dict[str, list[float]]:
    """Run a measurement in a terminal; the result it wrote."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "out.json"
        with Terminal(_measure(*arguments, str(out)), home) as terminal:
            terminal.wait()
        found: dict[str, list[float]] = json.loads(out.read_text())
        return found


class Terminal:
    """A program in a pseudo-terminal. `with` kills it."""

    def __init__(self, command: Sequence[str], home: str) -> None:
        self._command = " ".join(command)
        self._ours, inside = os.openpty()
        ioctl(inside, TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        environment = {**os.environ, "MLXSERVE_HOME": home, "TERM": "xterm-256color"}
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, env=environment, cwd=_ROOT
        )
        os.close(inside)
        self._tail = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def seconds_until(self, words: str) -> float:
        """Seconds from its start until it has written `words`. Raises RuntimeError if it never does."""
        wanted, seen = words.encode(), self._tail
        while wanted not in seen:
            if not self._read():
                raise RuntimeError(f"{self._command} showed nothing: {self._tail!r}")
            seen = seen[-len(wanted) :] + self._tail
        return time.perf_counter() - self._began

    def wait(self) -> None:
        """Read and discard its output until it exits."""
        while self._read():
            pass
        if self._process.wait(_PATIENCE) != 0:
            raise RuntimeError(f"{self._command} failed: {self._tail!r}")

    def _read(self) -> bool:
        """Read some output; False if the program has exited or is silent for too long."""
        if not select.select([self._ours], [], [], _PATIENCE)[0]:
            return False
        try:
            self._tail = os.read(self._ours, 65_536)
        except OSError:  # on Linux: the program has exited
            return False
        return bool(self._tail)

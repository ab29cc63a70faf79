"""What the terminal costs: its first picture, until what is typed is seen, a core's time while
idle, and how long it is held up while an answer comes, each beside a baseline.

Everything runs in child processes, in pseudo-terminals of their own, as it does for a reader; this
module knows of the terminal only its command lines (`mlxserve chat`, `python -m tests.perf.screen_child`).
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

from mlxserve.bench.report import Figure, Report

TEXTS = {
    "prose": "prose",
    "fence": "a 600-line fence",
    "list": "a 200-item list",
    "long": "200,000 characters",
}
# The smallest program in Textual that has a line to write in: nothing of ours is in it.
_EMPTY = [
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
# What an empty line to write in says, but for the letter under the cursor: the picture is there.
_PLACEHOLDER = "sk anything"
_KEY = "¤"  # in no escape sequence: once it is written, what is typed is seen
_PATIENCE = 120.0  # seconds


def bench_screen(*, runs: int, seconds: float, texts: Sequence[str]) -> Report:
    """Interleaved runs, ours and the baseline one after the other in each round."""
    figures = _start_figures(runs)
    figures.append(Figure("idle, of one core", "%", tuple(_idle(seconds) for _ in range(runs))))
    for text in texts:
        figures += _stall_figures(text, runs, seconds)
    settings = {"seconds a run": seconds, "window": f"{_COLUMNS}x{_ROWS}", "pieces a second": 100}
    return Report("screen", settings, tuple(figures))


def _start_figures(runs: int) -> list[Figure]:
    """The first picture stands before the app does: it is not yet ready for typing."""
    starts = {"mlxserve chat": _chat(), "an empty Textual app": _EMPTY}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    alone = []
    for _ in range(runs):
        alone.append(_python_alone())
        for name, command in starts.items():
            found[name].append(_start(command))
    figures = [
        Figure(f"{what}, {name}", "ms", _in_milliseconds([times[at] for times in found[name]]))
        for at, what in enumerate(("first frame", "typing is seen"))
        for name in starts
    ]
    return [*figures, Figure("Python alone, start to end", "ms", _in_milliseconds(alone))]


def _stall_figures(text: str, runs: int, seconds: float) -> list[Figure]:
    """`work` is the CPU time of the process in a stall: all of it, where nothing else runs."""
    found: dict[str, list[dict[str, list[float]]]] = {"ours": [], "textual": []}
    for _ in range(runs):
        for whose, results in found.items():
            results.append(_result("stream", text, whose, str(seconds)))
    figures = []
    for whose, label in (("ours", TEXTS[text]), ("textual", "  Textual's Markdown")):
        for what, key, measure in (
            ("stall p95", "stalls", _p95),
            ("longest", "stalls", max),
            ("work p95", "busy", _p95),
        ):
            values = [measure(result[key]) for result in found[whose]]
            figures.append(Figure(f"{label}: {what}", "ms", _in_milliseconds(values)))
    return figures


def _p95(values: Sequence[float]) -> float:
    return percentile(values, 0.95)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so much of them is not above."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _in_milliseconds(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(1000 * value for value in seconds)


def _measure(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.perf.screen_child", *arguments]


def _chat() -> list[str]:
    # Nobody listens there; the first picture is drawn before that is known.
    return [sys.executable, "-m", "mlxserve", "chat", "--url", "http://127.0.0.1:9"]


def _python_alone() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - began


def _start(command: Sequence[str]) -> tuple[float, float]:
    """Seconds from starting a program to its picture, and until a key typed at once is in it."""
    with tempfile.TemporaryDirectory() as home, Terminal(command, home) as terminal:
        picture = terminal.seconds_until(_PLACEHOLDER)
        terminal.press(_KEY)
        return picture, terminal.seconds_until(_KEY)


def _idle(seconds: float) -> float:
    return _result("idle", str(seconds))["cpu_percent"][0]


def _result(*arguments: str) -> dict[str, list[float]]:
    """What a measurement wrote."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "out.json"
        with Terminal(_measure(*arguments, str(out)), home) as terminal:
            terminal.wait()
        found: dict[str, list[float]] = json.loads(out.read_text())
        return found


class Terminal:
    """A program in a pseudo-terminal; it is ended at the end."""

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
        """From its start until it has written these words. Raises RuntimeError if it never does."""
        looked_for, seen = words.encode(), self._tail
        while looked_for not in seen:
            if not self._read():
                raise RuntimeError(f"{self._command} showed nothing: {self._tail!r}")
            seen = seen[-len(looked_for) :] + self._tail
        return time.perf_counter() - self._began

    def wait(self) -> None:
        """Until it has ended by itself; what it draws is read and forgotten."""
        while self._read():
            pass
        if self._process.wait(_PATIENCE) != 0:
            raise RuntimeError(f"{self._command} failed: {self._tail!r}")

    def _read(self) -> bool:
        """Some of what it wrote; False when it has ended, or does nothing for too long."""
        if not select.select([self._ours], [], [], _PATIENCE)[0]:
            return False
        try:
            self._tail = os.read(self._ours, 65_536)
        except OSError:  # what Linux says when the program has gone
            return False
        return bool(self._tail)

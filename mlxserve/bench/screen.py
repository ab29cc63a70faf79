"""What the terminal costs: its first picture, a core's time while idle, and how long it is held up
while an answer comes, each beside a baseline.

Everything runs in child processes, in pseudo-terminals of their own, as it does for a reader; this
module knows of the terminal only its command lines (`mlxserve chat`, `python -m tui.measure`).
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
_ROWS, _COLUMNS = 40, 120
_PLACEHOLDER = b"Ask anything"  # what an empty line to write in says: the picture is there
_PATIENCE = 120.0  # seconds


def bench_screen(*, runs: int, seconds: float, texts: Sequence[str]) -> Report:
    """Interleaved runs, ours and the baseline one after the other in each round."""
    paints: dict[str, list[float]] = {"chat": [], "empty": [], "python": []}
    for _ in range(runs):
        paints["python"].append(_python_alone())
        for name, command in (("empty", _EMPTY), ("chat", _chat())):
            paints[name].append(_first_paint(command))
    figures = [
        Figure("first paint, mlxserve chat", "ms", _in_milliseconds(paints["chat"])),
        Figure("first paint, an empty Textual app", "ms", _in_milliseconds(paints["empty"])),
        Figure("Python alone, start to end", "ms", _in_milliseconds(paints["python"])),
        Figure("idle, of one core", "%", tuple(_idle(seconds) for _ in range(runs))),
    ]
    for text in texts:
        figures += _stall_figures(text, runs, seconds)
    settings = {"seconds a run": seconds, "window": f"{_COLUMNS}x{_ROWS}", "pieces a second": 100}
    return Report("screen", settings, tuple(figures))


def _stall_figures(text: str, runs: int, seconds: float) -> list[Figure]:
    found: dict[str, list[list[float]]] = {"ours": [], "textual": []}
    for _ in range(runs):
        for whose, stalls in found.items():
            stalls.append(_result("stream", text, whose, str(seconds))["stalls"])
    figures = []
    for whose, label in (("ours", TEXTS[text]), ("textual", "  Textual's Markdown")):
        p95, longest = ([measure(stalls) for stalls in found[whose]] for measure in (_p95, max))
        figures.append(Figure(f"{label}: stall p95", "ms", _in_milliseconds(p95)))
        figures.append(Figure(f"{label}: longest", "ms", _in_milliseconds(longest)))
    return figures


def _p95(values: Sequence[float]) -> float:
    return percentile(values, 0.95)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so much of them is not above."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _in_milliseconds(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(1000 * value for value in seconds)


def _measure(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tui.measure", *arguments]


def _chat() -> list[str]:
    # Nobody listens there; the first picture is drawn before that is known.
    return [sys.executable, "-m", "mlxserve", "chat", "--url", "http://127.0.0.1:9"]


def _python_alone() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - began


def _first_paint(command: Sequence[str]) -> float:
    """Seconds from starting a program to its picture."""
    with tempfile.TemporaryDirectory() as home, Terminal(command, home) as terminal:
        return terminal.seconds_until(_PLACEHOLDER)


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
            command, stdin=inside, stdout=inside, stderr=inside, env=environment
        )
        os.close(inside)
        self._tail = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def seconds_until(self, words: bytes) -> float:
        """From its start until it has written these words. Raises RuntimeError if it never does."""
        seen = b""
        while words not in seen:
            if not self._read():
                raise RuntimeError(f"{self._command} showed nothing: {self._tail!r}")
            seen = seen[-len(words) :] + self._tail
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

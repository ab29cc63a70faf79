"""Tests wait for an event or look again until a deadline; none counts on time that passes."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import until, wait_until

TESTS = Path(__file__).parent
# What takes time there is what is tested or measured, or the one place that looks again.
MEANT = {
    "waiting.py": "looks again, until a deadline",
    "api/chats/test_wire.py": "the pace of a model, by a clock that does not wait",
    "helpers/workers.py": "jobs that take long",
    "doctor/test_model_speeds.py": "an engine whose steps take 20 ms",
    "ranks/slow_rank.py": "the steps of a rank that is slow",
    "reliability/hostile.py": "the pauses of a client",
    "perf/cleaner.py": "a disk that is slow",
    "perf/screen_child.py": "the pace of a measured stream",
    "perf/soak.py": "the pace of measured clients",
}


def sleeps(path: Path) -> Iterator[int]:
    """Lines of calls that sleep; `asyncio.sleep(0)` only lets other tasks run."""
    text = path.read_text("utf-8")
    for node in ast.walk(ast.parse(text)) if "sleep" in text else ():
        if not isinstance(node, ast.Call) or ast.unparse(node) == "asyncio.sleep(0)":
            continue
        if ast.unparse(node.func) in {"time.sleep", "asyncio.sleep"}:
            yield node.lineno


def test_only_what_is_meant_to_take_time_sleeps() -> None:
    paths = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}
    found = {name: list(sleeps(path)) for name, path in paths.items() if name not in MEANT}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_what_does_not_happen_fails_with_the_complaint() -> None:
    with pytest.raises(AssertionError, match="no bell rings"):
        wait_until(lambda: False, 0.0, "no bell rings")


def test_it_looks_again_until_it_is_so() -> None:
    looks = iter([False, False, True])
    wait_until(lambda: next(looks))
    looks = iter([False, False, True])
    asyncio.run(until(lambda: next(looks)))
    assert list(looks) == []

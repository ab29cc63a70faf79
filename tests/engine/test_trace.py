"""A trace shows what was done when, on which thread, and changes nothing of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxserve.core.errors import InvalidConfig
from mlxserve.engine.trace import Trace


class Worker:
    """Takes a nanosecond for each of the things it does."""

    def __init__(self, time: list[int]) -> None:
        self.time = time
        self.done = 0

    def work(self, amount: int, *, fails: bool = False) -> int:
        self.time[0] += amount
        self.done += 1
        if fails:
            raise ValueError("no")
        return -amount

    def hire(self) -> Worker:
        return Worker(self.time)

    def rest(self) -> None:
        self.time[0] += 1


@pytest.fixture
def time() -> list[int]:
    return [5_000]


@pytest.fixture
def trace(tmp_path: Path, time: list[int]) -> Trace:
    return Trace(str(tmp_path / "trace.json"), lambda: time[0])


def events(tmp_path: Path) -> list[dict[str, Any]]:
    """All but the one that ends the file, which is the process's name."""
    *found, process = json.loads((tmp_path / "trace.json").read_text())
    assert process["args"] == {"name": "mlxserve"}
    return list(found)


def test_calls_of_the_named_methods_become_spans(
    trace: Trace, time: list[int], tmp_path: Path
) -> None:
    worker = Worker(time)
    timed = trace.timed(worker, {"work": "hard work"})
    assert timed.work(2_000) == -2_000
    timed.rest()
    with pytest.raises(ValueError, match="no"):
        timed.work(500, fails=True)
    assert timed.done == worker.done == 2
    trace.close()
    name, first, second = events(tmp_path)
    assert name["args"] == {"name": threading.current_thread().name}
    assert (first["name"], first["ph"], first["ts"], first["dur"]) == ("hard work", "X", 5.0, 2.0)
    assert (second["ts"], second["dur"]) == (7.001, 0.5)


def test_what_a_method_makes_can_be_timed(trace: Trace, time: list[int], tmp_path: Path) -> None:
    timed = trace.timed(Worker(time), {}, {"hire": {"work": "another's work"}})
    timed.hire().work(3_000)
    timed.work(9_000)
    trace.close()
    assert [event["name"] for event in events(tmp_path)] == ["thread_name", "another's work"]


def test_each_thread_has_its_row_and_its_name(
    trace: Trace, time: list[int], tmp_path: Path
) -> None:
    timed = trace.timed(Worker(time), {"work": "work"})
    thread = threading.Thread(target=timed.work, args=(1,), name="other")
    thread.start()
    thread.join()
    timed.work(1)
    trace.close()
    found = events(tmp_path)
    assert [event["ph"] for event in found] == ["M", "X", "M", "X"]
    assert found[0]["args"]["name"] == "other"
    assert len({event["tid"] for event in found}) == 2


def test_what_comes_after_the_end_is_lost_and_does_no_harm(
    trace: Trace, time: list[int], tmp_path: Path
) -> None:
    timed = trace.timed(Worker(time), {"work": "work"})
    trace.close()
    trace.close()
    assert timed.work(1) == -1
    assert events(tmp_path) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"missing/trace\.json cannot be written: No such file"):
        Trace(str(tmp_path / "missing" / "trace.json"))

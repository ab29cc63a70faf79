"""Plans are measured beside what they claim to be beside, and cost what they claim, counted in bytecodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.perf.plan_costs import PAGE_SIZE, PlanCosts

MAX_OF_WINDOWS = 1.2  # times the cost of a plan without windows


class _Bytecodes:
    """Counts the bytecodes that this thread executes. Unlike times, they are the same in each run."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, run: Callable[[], object]) -> int:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            run()
        finally:
            sys.settrace(before)
        return self.count

    def _enter(self, frame: FrameType, _event: str, _arg: Any) -> Callable[..., Any]:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._count

    def _count(self, _frame: FrameType, event: str, _arg: Any) -> Callable[..., Any]:
        self.count += event == "opcode"
        return self._count


def _bytecodes(run: Callable[[], float]) -> int:
    run()  # what is done once
    return _Bytecodes().of(run)


SIZES = {
    "beside_kept_pages": (100, 1_000),
    "beside_a_chat_that_expires": (100, 1_000),
    "beside_prefixes": (10, 100),
    "beside_prefixes_of_windows": (10, 100),
    "beside_clients": (20, 400),
    "beside_clients_without_memory": (20, 60),
    "adding_a_prefix": (10, 100),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_plan_does_not_walk_what_is_beside_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.perf.plan_costs.STEPS", 8)
    make: Callable[[int], Callable[[], float]] = getattr(PlanCosts(rounds=1), name)
    few, many = (_bytecodes(make(number)) for number in SIZES[name])
    assert many < 1.01 * few, f"{few} and {many} bytecodes beside {SIZES[name]}"


def test_a_plan_with_windows_costs_little_more_than_one_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.perf.plan_costs.STEPS", PAGE_SIZE)  # each opens a page
    full, windows = (
        _bytecodes(PlanCosts(rounds=1).of_steps(16, has_windows=has_windows))
        for has_windows in (False, True)
    )
    assert windows < MAX_OF_WINDOWS * full, f"{windows} bytecodes instead of {full}"


@pytest.mark.parametrize("name", SIZES)
def test_each_has_a_time_for_every_run_with_and_without_what_is_beside(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.perf.plan_costs.STEPS", 8)
    for number in (0, 100):
        run: Callable[[], float] = getattr(PlanCosts(rounds=1), name)(number)
        assert all(run() > 0 for _ in range(2))


@pytest.mark.parametrize("is_full", [False, True])
def test_windows_are_compared_with_full_pages(
    monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    monkeypatch.setattr("tests.perf.plan_costs.RUNNING", (2,))
    full, windows, ratio = PlanCosts(rounds=1).windows_beside_full_pages(is_full=is_full)
    assert ratio.median == windows.median / full.median

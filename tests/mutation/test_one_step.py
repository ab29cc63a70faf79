"""docs/one-step.md and the scheduler hold each other: a mistake in either makes their plans differ."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import count

import pytest

from mlxserve.scheduler import preemption
from mlxserve.scheduler.admission import Admission
from mlxserve.scheduler.planner import StepPlanner
from mlxserve.scheduler.prefix_followers import PrefixFollowers
from tests.mutation.bug import Bug
from tests.scheduler import test_one_step
from tests.scheduler.test_one_step import Pages, Req
from tests.scheduler.test_one_step import test_the_page_plans_what_the_scheduler_plans as compare

pytestmark = pytest.mark.mutation

MAX_CALLS = 1_000_000  # thirty runs make some 60,000

FOUND: dict[str, Bug] = {
    "compute prompts by admission": Bug(
        StepPlanner, "plan", "sorted(step.prompts, key=order)", "step.prompts", compare
    ),
    "leave a prompt less than a page beside decodes": Bug(
        StepPlanner,
        "plan",
        "max(prefill_budget, self._pool.page_size)",
        "prefill_budget",
        compare,
    ),
    "count parked requests as eligible": Bug(
        StepPlanner,
        "_context",
        "self._roster.waiting.num_queued",
        "self._roster.num_waiting",
        compare,
    ),
    "preempt the oldest of the cheapest": Bug(
        preemption, "choose_victim", "-r.arrival)", "r.arrival)", compare
    ),
    "preempt the oldest of those that were preempted often": Bug(
        preemption, "choose_victim", "return max(able", "return min(able", compare
    ),
    "read no step before a plan that may preempt": Bug(
        preemption.Preemption, "might_preempt", "needed > num_free", "False", compare
    ),
    "overtake once too often": Bug(
        Admission,
        "_may_overtake",
        "other.num_overtaken < self._config.max_overtakes",
        "other.num_overtaken <= self._config.max_overtakes",
        compare,
    ),
    "look past one request less": Bug(
        Admission, "_may_overtake", "len(passed) <= MAX_PASSED", "len(passed) < MAX_PASSED", compare
    ),
    "look at the whole queue": Bug(
        Admission, "choose", "num_looks == MAX_CANDIDATES", "False", compare
    ),
    "wait again for many pages only": Bug(
        PrefixFollowers,
        "awaited",
        "1 if request in self._woken else self._min_shared_pages",
        "self._min_shared_pages",
        compare,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_page_finds_the_bug(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError, LookupError))


def without_each_statement(code: str) -> Iterator[tuple[int, str]]:
    """(line, the code with `pass` in place of the statement there)."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) and not is_docstring(node):
            lines = code.splitlines()
            lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + "pass"]
            yield node.lineno, "\n".join(lines)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that asks for pages for ever has failed."""
    grow, calls = Pages.grow, count()

    def bounded(self: Pages, r: Req, end: int) -> bool:
        assert next(calls) < MAX_CALLS, "no end"
        return grow(self, r, end)

    monkeypatch.setattr(Pages, "grow", bounded)


def test_every_statement_of_the_page_is_needed() -> None:
    code, unneeded = test_one_step.code_of_the_page(), []
    lines = code.splitlines()
    for number, changed in without_each_statement(code):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_one_step, "code_of_the_page", lambda changed=changed: changed)
            bound(patch)
            try:
                compare()
            except (AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError):
                continue
        unneeded.append(lines[number - 1].strip())
    assert unneeded == []

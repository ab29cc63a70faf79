"""Plans are measured beside what they claim to be beside."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.perf.plan_costs import PlanCosts


@pytest.mark.parametrize(
    "name",
    [
        "beside_kept_pages",
        "beside_a_chat_that_expires",
        "beside_prefixes",
        "beside_prefixes_of_windows",
        "beside_clients",
        "beside_clients_without_memory",
        "adding_a_prefix",
    ],
)
def test_each_has_a_time_for_every_run_with_and_without_what_is_beside(name: str) -> None:
    costs = PlanCosts(rounds=1)
    for number in (0, 100):
        run: Callable[[], float] = getattr(costs, name)(number)
        assert all(run() > 0 for _ in range(2))


@pytest.mark.parametrize("is_full", [False, True])
def test_windows_are_compared_with_full_pages(
    monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    monkeypatch.setattr("tests.perf.plan_costs.RUNNING", (2,))
    full, windows, ratio = PlanCosts(rounds=1).windows_beside_full_pages(is_full=is_full)
    assert ratio.median == windows.median / full.median

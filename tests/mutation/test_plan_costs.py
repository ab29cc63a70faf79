"""Costs of a plan: each rule without which a plan walks what it need not look at, or pays for windows twice."""

from __future__ import annotations

import pytest

from mlxserve.cache.eviction import EvictionOrder
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.scheduler.pins import Pins
from mlxserve.scheduler.planner import StepPlanner
from mlxserve.scheduler.waiting import WaitingQueue
from tests.mutation.bug import Bug
from tests.perf import test_plan_costs

pytestmark = pytest.mark.mutation

WALKS = test_plan_costs.test_a_plan_does_not_walk_what_is_beside_it
WINDOWS = test_plan_costs.test_a_plan_with_windows_costs_little_more_than_one_without

FOUND = {
    "look at every kept page in each step": Bug(
        EvictionOrder,
        "expire",
        "if not self._expiries or self._expiries[0][0] > now:",
        "if not any(until <= now for until in self._kept_until.values()):",
        WALKS,
        {"name": "beside_kept_pages"},
    ),
    "look at every kept page when one expires": Bug(
        EvictionOrder,
        "expire",
        "self.stop_keeping(expired)",
        "self.stop_keeping([page for page in self._kept_until if page in expired])",
        WALKS,
        {"name": "beside_a_chat_that_expires"},
    ),
    "look at every named prefix with each page": Bug(
        WindowPages,
        "publish",
        "self.pool.page_size, self._num_keepers",
        "self.pool.page_size, {hash_ for kept in self._kept.values() for hash_ in kept}",
        WALKS,
        {"name": "beside_prefixes_of_windows"},
    ),
    "look at every client that waits": Bug(
        WaitingQueue,
        "best_class",
        "self._classes[0] if",
        "min(place[0] for place in self._buckets) if",
        WALKS,
        {"name": "beside_clients"},
    ),
    "look at every client that waits for memory": Bug(
        WaitingQueue,
        "_in_order_of_heads",
        "risen = sorted(self._heads)",
        "risen = sorted({level for level, heads in self._heads.items() for _ in heads})",
        WALKS,
        {"name": "beside_clients_without_memory"},
    ),
    "look at every named prefix to add one": Bug(
        Pins,
        "_pages_of",
        "self._own.get(client, Counter()).keys()",
        "{hash_ for chain in self._pinned.values() for hash_ in chain}",
        WALKS,
        {"name": "adding_a_prefix"},
    ),
    "make each chunk of a window twice": Bug(
        StepPlanner,
        "_launch",
        "_decoded(others, has_windows=self._has_windows)",
        "[self._of_windows(chunk) for chunk in _decoded(others, has_windows=False)]",
        WINDOWS,
    ),
    "look for pages to pass in each step": Bug(
        WindowPages,
        "plan",
        "return chunks",
        "[self.pass_by(chunk.request, chunk.start) for chunk in chunks]; return chunks",
        WINDOWS,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_count_of_bytecodes_finds_the_bug(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError,))

"""Urgency: a waiting request for which running answers of lower classes are preempted.

It has waited for `preempt_for_priority_ms`, and lacks a place or pages that they would free. It is
the first to be admitted then. A preempted answer is spared until it has twice as many tokens: it is
preempted about log2(length / MIN_GAIN) times, so it ends however many urgent requests come.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from mlxserve.core.config import SchedulerConfig
from mlxserve.request import LiveRequest
from mlxserve.scheduler.admission import MAX_CANDIDATES, Admission
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.preemption import Preemption, recompute_cost
from mlxserve.scheduler.roster import Roster

MIN_GAIN = 64  # tokens of an answer between two preemptions


class Urgency:
    """Finds the urgent request, and preempts answers for it."""

    def __init__(
        self,
        config: SchedulerConfig,
        tables: PageTables,
        roster: Roster,
        admission: Admission,
        preemption: Preemption,
    ) -> None:
        self._patience = config.preempt_for_priority_ms / 1000
        self._tables = tables
        self._roster = roster
        self._admission = admission
        self._preemption = preemption

    def wants_read(self, now: int) -> bool:
        """Return True if plan number `now` would preempt: the unread step uses pages to be freed."""
        request = self._find_urgent(now) if self._tables.num_unread else None
        return request is not None and self._in_its_way(request) != []

    def preempt_for(self, now: int) -> LiveRequest | None:
        """Preempt answers for the urgent request in plan number `now`, and return it to be admitted first.

        None if nothing was preempted. No step may be unread.
        """
        assert not self._tables.num_unread, "an unread step uses pages"
        request = self._find_urgent(now)
        answers = self._in_its_way(request) if request is not None else []
        for answer in answers:
            answer.spared_until = len(answer.token_ids) + max(MIN_GAIN, answer.num_outputs)
            self._preemption.preempt_for(answer)
        return request if answers else None

    def _find_urgent(self, now: int) -> LiveRequest | None:
        """Return the first request in the queue that has waited too long while a lower class runs."""
        waiting, running = self._roster.waiting, self._roster.running.values()
        if not self._patience or not running:
            return None
        lowest = max(request.asked.priority for request in running)
        if waiting.best_class() >= lowest:
            return None
        for request in islice(waiting.in_order(now), MAX_CANDIDATES):
            has_waited = self._tables.now - request.arrived >= self._patience
            if has_waited and request.asked.priority < lowest and request.can_sample():
                return request
        return None

    def _in_its_way(self, request: LiveRequest) -> list[LiveRequest]:
        """Return the answers to preempt: of the lowest class first, of these the cheapest to recompute.

        Empty if the request can start without that, or not even then.
        """
        cached = self._tables.cache.match(request)
        num_places = 1 + len(self._roster.running) - self._admission.max_running
        num_pages = self._admission.num_lacking(request, cached)
        lacking = self._admission.lacking(request, cached)  # units of each other kind
        answers: list[LiveRequest] = []
        able = [other for other in self._roster.running.values() if _yields(other, request)]
        for answer in sorted(able, key=self._order):
            if max(num_places, num_pages, *lacking.values()) <= 0:
                break
            answers.append(answer)
            num_places -= 1
            num_pages -= self._num_freed(answer, cached)
            lacking = {end: count - end.room.num_own(answer) for end, count in lacking.items()}
        return answers if max(num_places, num_pages, *lacking.values()) <= 0 else []

    def _order(self, answer: LiveRequest) -> tuple[int, int, int]:
        return (
            -answer.asked.priority,
            recompute_cost(answer, self._tables.pool),
            -answer.arrival,
        )

    def _num_freed(self, answer: LiveRequest, cached: Collection[int]) -> int:
        """Return the pages that preempting the answer frees for a request that finds the `cached` ones.

        They are the pages that the answer alone holds, and those reserved for it.
        """
        own = sum(map(self._tables.pool.is_exclusive, answer.page_table))
        own -= sum(map(self._tables.pool.is_exclusive, set(cached).intersection(answer.page_table)))
        return own + self._admission.reserved_for(answer)


def _yields(answer: LiveRequest, request: LiveRequest) -> bool:
    is_lower = answer.asked.priority > request.asked.priority
    return is_lower and len(answer.token_ids) >= answer.spared_until

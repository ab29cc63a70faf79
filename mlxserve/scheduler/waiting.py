"""WaitingQueue: requests without pages, in the order in which they are admitted.

class       lower priority number first; waiting lifts a request, at most to the best waiting class
resumed     preempted requests go before those that never ran
client      the one that has used the fewest tokens
arrival     the earlier one
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import takewhile
from typing import TypeAlias

from mlxserve.request import LiveRequest
from mlxserve.scheduler.fairness import FairShare

_Bucket: TypeAlias = list[LiveRequest]  # of one class, client and history, by arrival
_Key: TypeAlias = tuple[int, bool, int, int]


class WaitingQueue:
    """Kept in buckets, within which only arrival counts, and merged lazily."""

    def __init__(self, fair_share: FairShare, ageing_steps: int) -> None:
        """`ageing_steps`: steps after which a waiting request rises by one class. Not seconds: while
        the engine makes no steps, no request is passed over."""
        self._fair_share = fair_share
        self._ageing_steps = ageing_steps
        self._buckets: dict[tuple[int, bool, str], _Bucket] = {}
        self.num_queued = 0

    def __len__(self) -> int:
        return self.num_queued

    def __iter__(self) -> Iterator[LiveRequest]:
        """All requests, in no particular order."""
        for bucket in self._buckets.values():
            yield from bucket

    def add(self, request: LiveRequest) -> None:
        insort(self._buckets.setdefault(_place(request), []), request, key=_arrival)
        self.num_queued += 1

    def remove(self, request: LiveRequest) -> None:
        bucket = self._buckets[_place(request)]
        index = bisect_left(bucket, request.arrival, key=_arrival)
        assert bucket[index] is request
        del bucket[index]
        if not bucket:
            del self._buckets[_place(request)]
        self.num_queued -= 1

    def in_order(self, now: int) -> Iterator[LiveRequest]:
        """Requests in the order of admission in step `now`.

        Between two of them only the one yielded last may be removed, and its client charged: this
        counts for the client's next request.
        """
        best = self.best_class()
        heap: list[tuple[_Key, _Bucket, int]] = [
            (self._key(bucket[0], best, now), bucket, 0) for bucket in self._buckets.values()
        ]
        heapq.heapify(heap)
        while heap:
            _, bucket, index = heapq.heappop(heap)
            request = bucket[index]
            yield request
            index += index < len(bucket) and bucket[index] is request
            if index < len(bucket):
                heapq.heappush(heap, (self._key(bucket[index], best, now), bucket, index))

    def before(self, request: LiveRequest, now: int) -> Iterator[LiveRequest]:
        """Those that go before `request`, which is not in the queue, in order."""
        best = self.best_class()
        place = self._key(request, best, now)
        return takewhile(lambda other: self._key(other, best, now) < place, self.in_order(now))

    def best_class(self) -> int:
        """Of the requests in the queue; 0 without any."""
        return min((priority for priority, _, _ in self._buckets), default=0)

    def _key(self, request: LiveRequest, best: int, now: int) -> _Key:
        risen = (now - request.queued_at) // self._ageing_steps
        return (
            max(best, request.asked.priority - risen),
            not request.has_run,
            self._fair_share.tokens_of(request.asked.client),
            request.arrival,
        )


def order(request: LiveRequest) -> tuple[int, int]:
    """Sort key of running requests: lower goes first, and no two are equal."""
    return request.asked.priority, request.arrival


def _place(request: LiveRequest) -> tuple[int, bool, str]:
    return request.asked.priority, request.has_run, request.asked.client


def _arrival(request: LiveRequest) -> int:
    return request.arrival

"""WaitingQueue: requests without pages, in the order in which they are admitted.

class       lower priority number first; waiting lifts a request, at most to the best waiting class
resumed     preempted requests go before those that never ran
client      the one that has used the fewest tokens
arrival     the earlier one
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import heappop, heappush, merge
from itertools import takewhile
from typing import TypeAlias

from mlxserve.request import LiveRequest
from mlxserve.scheduler.fairness import FairShare

_Bucket: TypeAlias = list[LiveRequest]  # of one class, client and history, by arrival
_Place: TypeAlias = tuple[int, bool, str]  # of a bucket: class, whether it was preempted, client
_Head: TypeAlias = tuple[bool, int, int, _Place]  # of a bucket: not preempted, tokens, arrival
_Key: TypeAlias = tuple[int, bool, int, int]


class WaitingQueue:
    """A priority queue in buckets: only arrival counts within one, and their first requests are sorted.

    Iteration takes time proportional to the requests that it yields, not to the clients that wait: each bucket
    is filed under the class that its first request has risen to. A client's tokens only grow, so a bucket can
    only be filed too early, and is filed again when iteration reaches it.
    """

    def __init__(self, fair_share: FairShare, ageing_steps: int) -> None:
        """Begin empty; a waiting request rises by one class every `ageing_steps` steps.

        Not seconds: while the engine makes no steps, no request is passed over.
        """
        self._fair_share = fair_share
        self._ageing_steps = ageing_steps
        self._now = 0  # step number of the last iteration
        self._buckets: dict[_Place, _Bucket] = {}
        self._classes: list[int] = []  # of the buckets, sorted
        self._heads: dict[int, list[_Head]] = {}  # by risen class, sorted
        self._filed: dict[_Place, tuple[int, _Head]] = {}
        self._rises: list[tuple[int, _Place]] = []  # heap of steps in which first requests rise
        self._rises_at: dict[_Place, int] = {}  # other entries of the heap are stale
        self.num_queued = 0

    def __len__(self) -> int:
        return self.num_queued

    def __iter__(self) -> Iterator[LiveRequest]:
        """Yield all requests, in no particular order."""
        for bucket in self._buckets.values():
            yield from bucket

    def add(self, request: LiveRequest) -> None:
        place = _place(request)
        bucket = self._buckets.get(place)
        if bucket is None:
            bucket = self._buckets[place] = []
            insort(self._classes, request.asked.priority)
        insort(bucket, request, key=_arrival)
        if bucket[0] is request:
            self._file(place)
        self.num_queued += 1

    def remove(self, request: LiveRequest) -> None:
        place = _place(request)
        bucket = self._buckets[place]
        index = bisect_left(bucket, request.arrival, key=_arrival)
        assert bucket[index] is request
        del bucket[index]
        if not bucket:
            del self._buckets[place]
            del self._classes[bisect_left(self._classes, request.asked.priority)]
            self._unfile(place)
            del self._rises_at[place]
        elif index == 0:
            self._file(place)
        self.num_queued -= 1

    def in_order(self, now: int) -> Iterator[LiveRequest]:
        """Yield the requests in the order of admission in step `now`, which must not decrease.

        During iteration only the request yielded last may be removed, and its client charged, which counts
        for the client's next request.
        """
        self._rise(now)
        best = self.best_class()
        looked_at: set[_Place] = set()
        heads = self._in_order_of_heads(best, looked_at)
        head = next(heads, None)
        heap: list[tuple[_Key, _Bucket, int]] = []  # of the buckets that were looked at
        while heap or head is not None:
            if head is not None and (not heap or head[0] < heap[0][0]):
                _, place = head
                looked_at.add(place)
                bucket, index = self._buckets[place], 0
                head = None
            else:
                _, bucket, index = heappop(heap)
            request = bucket[index]
            yield request
            index += index < len(bucket) and bucket[index] is request
            if index < len(bucket):
                heappush(heap, (self._key(bucket[index], best), bucket, index))
            if head is None:
                head = next(heads, None)

    def before(self, request: LiveRequest, now: int) -> Iterator[LiveRequest]:
        """Yield the requests that go before `request`, which is not in the queue, in order."""
        self._rise(now)
        best = self.best_class()
        place = self._key(request, best)
        return takewhile(lambda other: self._key(other, best) < place, self.in_order(now))

    def best_class(self) -> int:
        """Return the lowest priority number in the queue; 0 if it is empty."""
        return self._classes[0] if self._classes else 0

    # ---- buckets by their first requests

    def _in_order_of_heads(
        self, best: int, looked_at: set[_Place]
    ) -> Iterator[tuple[_Key, _Place]]:
        """Yield the buckets by their first requests, without those that were `looked_at`."""
        risen = sorted(self._heads)
        num_best = bisect_right(risen, best)
        groups = [(best, risen[:num_best]), *((each, [each]) for each in risen[num_best:])]
        for class_, levels in groups:
            for not_run, tokens, arrival, place in merge(
                *(self._heads_of(level, looked_at) for level in levels)
            ):
                yield (class_, not_run, tokens, arrival), place

    def _heads_of(self, level: int, looked_at: set[_Place]) -> Iterator[_Head]:
        """Yield the first requests of one risen class, looked up each time: the last may be removed."""
        last: _Head | None = None
        while heads := self._heads.get(level):
            index = 0 if last is None else bisect_right(heads, last)
            if index == len(heads):
                return
            head = heads[index]
            place = head[-1]
            if place in looked_at:
                last = head
            elif head[1] != self._fair_share.tokens_of(place[-1]):
                self._file(place)
            else:
                last = head
                yield head

    def _file(self, place: _Place) -> None:
        """File a bucket, or file it anew, by its first request."""
        self._unfile(place)
        request = self._buckets[place][0]
        level = request.asked.priority - self._num_risen(request)
        head = (not place[1], self._fair_share.tokens_of(place[-1]), request.arrival, place)
        insort(self._heads.setdefault(level, []), head)
        self._filed[place] = level, head
        rises_at = request.queued_at + (self._num_risen(request) + 1) * self._ageing_steps
        if self._rises_at.get(place) != rises_at:
            self._rises_at[place] = rises_at
            heappush(self._rises, (rises_at, place))

    def _unfile(self, place: _Place) -> None:
        if place in self._filed:
            level, head = self._filed.pop(place)
            heads = self._heads[level]
            del heads[bisect_left(heads, head)]
            if not heads:
                del self._heads[level]

    def _rise(self, now: int) -> None:
        """Advance to step `now`, and file the buckets anew whose first requests have risen."""
        self._now = max(self._now, now)
        while self._rises and self._rises[0][0] <= self._now:
            rises_at, place = heappop(self._rises)
            if self._rises_at.get(place) == rises_at:
                self._file(place)

    def _num_risen(self, request: LiveRequest) -> int:
        return (self._now - request.queued_at) // self._ageing_steps

    def _key(self, request: LiveRequest, best: int) -> _Key:
        return (
            max(best, request.asked.priority - self._num_risen(request)),
            not request.has_run,
            self._fair_share.tokens_of(request.asked.client),
            request.arrival,
        )


def order(request: LiveRequest) -> tuple[int, int]:
    """Return the sort key of running requests: lower goes first, and no two are equal."""
    return request.asked.priority, request.arrival


def _place(request: LiveRequest) -> _Place:
    return request.asked.priority, request.has_run, request.asked.client


def _arrival(request: LiveRequest) -> int:
    return request.arrival

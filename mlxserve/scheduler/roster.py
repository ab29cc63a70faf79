"""Roster: which requests wait, are parked, run, or have ended. Only here does a request's state change.

    arrive ──▶ waiting ── admit ──▶ running ── end ──▶ finished
                 ▲  │                  │ ▲
                 │  └─ park ▶ followers  └───── start_fork ── forks
                 └──── requeue ────────┘

Knows no pages: those of a request that is requeued or ends are released by the caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from mlxserve.core.config import SchedulerConfig
from mlxserve.core.stats import SchedulerStats
from mlxserve.request import FinishReason, Guide, LiveRequest, Request, RequestState
from mlxserve.scheduler.audit import check_waiting
from mlxserve.scheduler.fairness import FairShare
from mlxserve.scheduler.forks import Forks
from mlxserve.scheduler.prefix_followers import PrefixFollowers
from mlxserve.scheduler.waiting import WaitingQueue


class Roster:
    """The queues are there for others to read; every method that changes one leaves all consistent."""

    def __init__(self, config: SchedulerConfig, stats: SchedulerStats) -> None:
        self._config = config
        self.fair_share = FairShare()
        self.followers = PrefixFollowers(config.prefix_follow_pages, stats)
        self.forks = Forks()
        self.waiting = WaitingQueue(self.fair_share, config.ageing_steps)
        self.running: dict[str, LiveRequest] = {}  # in the order of admission
        self.prefixes: dict[str, Request] = {}  # named ones that were computed, by request id
        self._live: dict[str, LiveRequest] = {}  # waiting, parked or running

    @property
    def live(self) -> Collection[LiveRequest]:
        return self._live.values()

    @property
    def ids(self) -> set[str]:
        """Of the requests that wait or run."""
        return set(self._live)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and those that are parked beside it."""
        return len(self.waiting) + len(self.followers) + len(self.forks)

    def find(self, request_id: str | None) -> LiveRequest | None:
        """The live request with this id."""
        return self._live.get(request_id) if request_id is not None else None

    # ---- from one queue to another

    def arrive(self, request: LiveRequest) -> None:
        """The request waits; a fork whose `leader` is set beside the queue."""
        self._live[request.id] = request
        self.fair_share.arrive(request.asked.client)
        if request.leader is not None:
            self.forks.park(request)
        else:
            self.waiting.add(request)

    def admit(self, request: LiveRequest) -> None:
        """From the queue to the running requests."""
        self.waiting.remove(request)
        self.start_fork(request)

    def start_fork(self, fork: LiveRequest) -> None:
        """The request runs without having been queued."""
        self.running[fork.id] = fork
        fork.state = RequestState.RUNNING

    def park(self, request: LiveRequest, hash_: bytes) -> None:
        """The request waits beside the queue until the page of this hash is published."""
        self.waiting.remove(request)
        self.followers.park(request, hash_)

    def pages_published(self, hashes: Iterable[bytes]) -> None:
        """The pages of these hashes can be found: those that waited for them are queued again."""
        self.queue(self.followers.pages_published(hashes))

    def queue(self, requests: Iterable[LiveRequest]) -> None:
        """Requests that were parked take their places in the queue."""
        for request in requests:
            self.waiting.add(request)

    def requeue(self, request: LiveRequest) -> None:
        """From running to waiting."""
        assert request.num_in_flight == 0, "an unread step uses its pages"
        request.state = RequestState.WAITING
        self.queue(self.followers.leave(request))
        del self.running[request.id]
        self.waiting.add(request)

    def end(self, request: LiveRequest, reason: FinishReason) -> None:
        """The request neither waits nor runs any more."""
        del self._live[request.id]
        self.fair_share.leave(request.asked.client)
        if request in self.forks:
            self.forks.remove(request)
        elif request.state is RequestState.RUNNING:
            del self.running[request.id]
        elif request not in self.followers:
            self.waiting.remove(request)
        if (new_leader := self.forks.replace(request)) is not None:
            self.waiting.add(new_leader)
        self.queue(self.followers.leave(request))
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.commits_until = 0  # what an unread step sampled for it is dropped

    def look_again(self) -> None:
        """Plan and commit every running request anew: its limits may have changed."""
        for request in self.running.values():
            request.decodes_until = request.commits_until = 0

    # ---- look inside

    def awaited_guide(self) -> Guide | None:
        """A guide whose next mask is not known yet."""
        guides = (request.asked.guide for request in self._live.values())
        return next((one for one in guides if one is not None and not one.is_ready), None)

    def requests(self, now: int) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """(running by admission, waiting with the next to be admitted first in step number `now`).

        Last those that wait for what another request computes: they have no place in the queue.
        """
        waiting = [*self.waiting.in_order(now), *self.followers, *self.forks]
        return list(self.running.values()), waiting

    def check(self) -> None:
        """Audit. Raises AssertionError."""
        live, running = list(self._live.values()), list(self.running.values())
        assert len(live) == self.num_waiting + len(running), "a request is in limbo"
        assert len(running) <= self._config.max_num_seqs, "too many requests are running"
        self.fair_share.check(Counter(request.asked.client for request in live))
        self.followers.check(running, list(self.waiting))
        self.forks.check()
        parked: Sequence[LiveRequest] = [*self.followers, *self.forks]
        check_waiting([*self.waiting, *parked], self._config.max_overtakes)

"""Roster: which requests wait, are parked, run, or have ended. The only module that changes their state.

    arrive ──▶ waiting ── admit ──▶ running ── end ──▶ finished
                 ▲  │                  │ ▲
                 │  └─ park ▶ followers  └───── start_fork ── forks
                 └──── requeue ────────┘

Knows no pages: the caller releases those of a request that is requeued or ends.
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
    """The queues of requests, which others may read; every method leaves them consistent."""

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
        """Ids of the requests that wait or run."""
        return set(self._live)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue or parked beside it."""
        return len(self.waiting) + len(self.followers) + len(self.forks)

    def find(self, request_id: str | None) -> LiveRequest | None:
        """Return the live request with this id, if there is one."""
        return self._live.get(request_id) if request_id is not None else None

    # ---- from one queue to another

    def arrive(self, request: LiveRequest) -> None:
        """Queue a new request, or park it beside the queue if it is a fork with a `leader`."""
        self._live[request.id] = request
        self.fair_share.arrive(request.asked.client)
        if request.leader is not None:
            self.forks.park(request)
        else:
            self.waiting.add(request)

    def admit(self, request: LiveRequest) -> None:
        """Move a request from the queue to the running requests."""
        self.waiting.remove(request)
        self.start_fork(request)

    def start_fork(self, fork: LiveRequest) -> None:
        """Run a request that is not in the queue."""
        self.running[fork.id] = fork
        fork.state = RequestState.RUNNING

    def park(self, request: LiveRequest, hash_: bytes) -> None:
        """Park a request beside the queue until the page with this hash is published."""
        self.waiting.remove(request)
        self.followers.park(request, hash_)

    def pages_published(self, hashes: Iterable[bytes]) -> None:
        """Queue the followers that waited for the pages with these hashes."""
        self.queue(self.followers.pages_published(hashes))

    def queue(self, requests: Iterable[LiveRequest]) -> None:
        """Queue requests that were parked."""
        for request in requests:
            self.waiting.add(request)

    def requeue(self, request: LiveRequest) -> None:
        """Move a running request back to the queue."""
        assert request.num_in_flight == 0, "an unread step uses its pages"
        request.state = RequestState.WAITING
        self.queue(self.followers.leave(request))
        del self.running[request.id]
        self.waiting.add(request)

    def end(self, request: LiveRequest, reason: FinishReason) -> None:
        """Remove a request that has finished, and queue those that waited for it."""
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

    def recheck_running(self) -> None:
        """Make the next plan and commit check every running request: its limits may have changed."""
        for request in self.running.values():
            request.decodes_until = request.commits_until = 0

    # ---- queries

    def awaited_guide(self) -> Guide | None:
        """Return a guide that has not computed its next mask yet; None if all have."""
        guides = (request.asked.guide for request in self._live.values())
        return next((guide for guide in guides if guide is not None and not guide.is_ready), None)

    def requests(self, now: int) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """Return the running requests by admission, and the waiting ones in the order of step `now`.

        Parked requests come last, because they have no place in the queue.
        """
        waiting = [*self.waiting.in_order(now), *self.followers, *self.forks]
        return list(self.running.values()), waiting

    def check(self) -> None:
        """Audit the invariants. Raises AssertionError."""
        live, running = list(self._live.values()), list(self.running.values())
        assert len(live) == self.num_waiting + len(running), "a request is in limbo"
        assert len(running) <= self._config.max_num_seqs, "too many requests are running"
        self.fair_share.check(Counter(request.asked.client for request in live))
        self.followers.check(running, list(self.waiting))
        self.forks.check()
        parked: Sequence[LiveRequest] = [*self.followers, *self.forks]
        check_waiting([*self.waiting, *parked], self._config.max_overtakes)

"""Scheduler: plans the tokens of each step, and commits their results to requests.

    roster       who waits, is parked, runs, has ended
    planner      decodes, prompts, admission, drafts: the chunks of a step
    commit       what a step sampled: tokens, cached pages, forks, ends
    preemption   which request loses its pages if there are too few
    page tables  the pages that requests hold; `moves`: copies, reads and writes of pages

Plain Python without arrays, clock or randomness: the plan is a function of the calls made so far.

One step may be unread while the next one is planned:

    schedule ─ launch n ─┬─ schedule ─ launch n+1 ─┬─ ...
                         └─ (n unread)             └─ read n ─ update(n) ─ ...

A request whose sampled token is still unread continues with a lazy chunk. Pages are released only
when their holder has no unread step left, and only a plan made with no step unread preempts.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence

from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.kind import EndKind
from mlxserve.cache.pages import PagePool
from mlxserve.cache.pool_memory import PoolMemory
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.errors import (
    InvalidParameter,
    InvalidRequest,
    PagesPromised,
    QueueFull,
)
from mlxserve.core.forward_work import WorkBudget
from mlxserve.core.stats import SchedulerStats
from mlxserve.request import (
    Chunk,
    FinishReason,
    LiveRequest,
    Output,
    Request,
    RequestState,
    Resized,
    Sampled,
)
from mlxserve.scheduler.balance import Balance
from mlxserve.scheduler.capacity import refuse_large_images
from mlxserve.scheduler.commit import Commit
from mlxserve.scheduler.disk_pages import Disk
from mlxserve.scheduler.drafts import Drafts, LookupDrafts
from mlxserve.scheduler.limit import LimitRules
from mlxserve.scheduler.moves import Moves
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.planner import StepPlanner
from mlxserve.scheduler.preemption import Preemption
from mlxserve.scheduler.roster import Roster

logger = logging.getLogger("mlxserve.scheduler")

_NO_PREFIXES: Mapping[str, Request] = {}


class Scheduler:
    """Schedules requests: `add` them, then call `schedule` and `update` in turns.

    `abort` may be called at any time between these calls.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        disk: Disk | None = None,
        drafts: Drafts | None = None,
        ends: Sequence[EndKind] = (),
        memory: PoolMemory | None = None,
    ) -> None:
        """Begin without requests.

        disk: second level of the prefix cache, or None
        drafts: source of drafts, by default prompt lookup if `speculative_tokens` is set
        ends: kinds of units beside the pages of `pool`
        memory: the memory that the pages of all kinds share; None if each has its own
        """
        self.config = config
        self._disk = disk
        # What the kinds share beside the pages of the pool, which may become more or fewer.
        self._beside = memory and memory.with_more(FullPages.name, -pool.num_pages)
        self.rules = LimitRules.from_config(config, pool.page_size)
        self.drafts: Drafts | None = None  # to read; only the planner and the commit change it
        if drafts or config.speculative_tokens:
            self.drafts = drafts or LookupDrafts(config.speculative_tokens or 0)
        self.num_steps = 0  # planned, empty ones included
        self._stats = SchedulerStats()
        self._num_arrivals = 0
        self._max_running = config.max_num_seqs  # lowered by `limit_running`
        self._begin(pool, ends)

    def _begin(
        self,
        pool: PagePool,
        ends: Sequence[EndKind],
        prefixes: Mapping[str, Request] = _NO_PREFIXES,
    ) -> None:
        """Create all parts anew, without requests; `prefixes` are named ones to compute again."""
        config, stats = self.config, self._stats
        if self.drafts is not None:
            self.drafts.clear()
        self.pool = pool  # to read; only the page tables change it
        self.page_tables = tables = PageTables(config, pool, stats, self._disk, ends)
        roster = Roster(config, stats)
        roster.prefixes.update(prefixes)  # at once: what fails from now on is followed by `restart`
        self.roster = roster
        self.moves = Moves(tables, roster, stats)
        self.preemption = preemption = Preemption(config, tables, roster, stats)
        self.planner = StepPlanner(
            config, self.rules, tables, roster, preemption, self.drafts, stats
        )
        self.planner.admission.max_running = self._max_running
        if self._beside is not None:
            memory = self._beside.with_more(FullPages.name, pool.num_pages)
            admission = self.planner.admission
            self.planner.balance = Balance(memory, tables, roster, admission)
            self.moves.balance = self.planner.balance
        self.commit = Commit(tables, roster, self.planner.admission, self.drafts, stats)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, apart from pins: at most what the whole pool holds."""
        return self.page_tables.capacity.max_model_len

    @property
    def has_work(self) -> bool:
        """True if there is something to plan, or a step to read."""
        return bool(self.roster.live) or self.page_tables.num_unread > 0

    # ---- requests come and go

    def add(self, asked: Request, now: float = 0.0) -> LiveRequest:
        """Queue a request, and return its progress, which is read-only.

        A fork must be added after its leader without a step in between. `now` is the time of
        `PageTables.expire`.

        Raises PromptTooLong, QueueFull, InvalidParameter, and for a prefix PrefixQuotaExceeded and
        PagesPromised.
        """
        request = self._request(asked)
        request.arrived = now
        self._refuse(request)
        if asked.pins:
            self._promise_pins(request)
        leader = self.roster.find(asked.fork_of)
        # With other kinds, a fork continues from the prompt's last page boundary instead.
        shares_pages = not self.page_tables.ends
        if leader is not None and not leader.num_outputs and shares_pages:
            assert request.token_ids == leader.token_ids, f"{request.id} has another prompt"
            assert asked.cache_salt == leader.asked.cache_salt, f"{request.id} has another salt"
            request.leader = leader
        self._queue(request)
        if asked.guide is not None:
            if self.drafts is not None:
                asked.guide.foresee(self.drafts.max_tokens)
            asked.guide.ask()
        return request

    def _request(self, asked: Request) -> LiveRequest:
        request = LiveRequest(
            asked,
            arrival=self._num_arrivals,
            queued_at=self.num_steps,
            length_limit=self.page_tables.capacity.length_limit(asked),
        )
        self.page_tables.cache.share_hashes(request)
        capacity = self.page_tables.capacity.of(request)
        request.promised_length = min(request.length_limit, capacity)
        return request

    def _refuse(self, request: LiveRequest) -> None:
        """Raises PromptTooLong, QueueFull and InvalidParameter as `add` does."""
        if self.roster.find(request.id) is not None:
            raise InvalidParameter("request_id", f"{request.id!r} is in use; choose another")
        if not request.num_prompt:
            raise InvalidParameter("prompt", "must have at least one token")
        self.page_tables.capacity.refuse_too_long(request)
        if request.asked.blocks:
            refuse_large_images(request.asked, self.config, self.page_tables.ends)
        num_waiting = self.roster.num_waiting
        if num_waiting >= self.config.max_num_waiting:
            raise QueueFull(
                f"the queue is full: {num_waiting} waiting, and no more may "
                f"(max_num_waiting={self.config.max_num_waiting}); try again later"
            )

    def _promise_pins(self, request: LiveRequest) -> None:
        if not self.config.enable_prefix_caching:
            raise InvalidRequest(
                "named prefixes are kept in the prefix cache: turn enable_prefix_caching on"
            )
        self.page_tables.promise_pins(request)
        try:
            self.page_tables.capacity.refuse_cut(self.roster.live)
        except PagesPromised:
            self.page_tables.pins.cancel(request)
            raise
        self.roster.recheck_running()  # the others may not get as long as before

    def _queue(self, request: LiveRequest) -> None:
        self._num_arrivals = max(self._num_arrivals, request.arrival + 1)
        self.roster.arrive(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Output]:
        """End a request now. Its pages are free once no unread step uses them.

        Returns an output without tokens, or an empty list if no live request has this id.
        """
        request = self.roster.find(request_id)
        if request is None:
            return []
        # A named prefix that is being computed again is given up: its claim goes with the request.
        self.roster.prefixes.pop(request_id, None)
        self.commit.end(request, reason)
        return [self.commit.output(request, None, reason, request.num_outputs)]

    # ---- steps

    def must_read(self) -> bool:
        """Return True if the unread step has to be read before the next plan."""
        if self.preemption.might_preempt():
            return True
        balance = self.planner.balance
        if balance is not None and balance.is_wanted(self.num_steps + 1):
            return True
        if self.roster.waiting.num_queued and self.planner.urgency.wants_read(self.num_steps + 1):
            return True
        return self.drafts is not None and self.planner.wants_read(self.drafts)

    def schedule(
        self, prefill_budget: int | None = None, work: WorkBudget | None = None
    ) -> list[Chunk]:
        """Plan a step: decodes, then running prompts, then new ones as far as budget and pages go.

        Counts the chunks as computed. An empty plan is not a step, and not to be updated.
        `prefill_budget`: beside decodes, prompts get at most this many tokens, but at least a page;
        prompts that may not be split are not held back by it. `work` bounds the whole step in the
        same way, also where nothing decodes.
        """
        self.num_steps += 1
        assert self.page_tables.num_unread <= 1, "two steps are unread; call update() for the first"
        return self.planner.plan(self.num_steps, prefill_budget, work)

    def update(self, chunks: Sequence[Chunk], sampled: Sequence[Sampled | None]) -> list[Output]:
        """Commit the results of the oldest unread step; those of chunks that do not sample are None."""
        return self.commit.update(chunks, sampled, self.num_steps) if chunks else []

    # ---- protection from eviction, and the size of the pool

    def unpin(self, request_id: str) -> None:
        """Unpin the pages of a named prefix; no-op if there are none."""
        if self.roster.prefixes.pop(request_id, None) is not None:
            self.abort(request_id)  # no-op unless `restart` has it computed again
        self.page_tables.unpin(request_id)

    def keep_pages(self, asked: Request, until: float) -> None:
        """Protect a request's cached pages from eviction until a time in seconds.

        For a conversation that is about to continue.
        """
        if self.config.enable_prefix_caching:
            self.page_tables.keep_pages(self.page_tables.cache.known_hashes(asked), until)

    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Evict every cached page except those of named prefixes.

        Returns False without any change while requests hold pages. `force` requeues these requests first;
        no step may be unread then.
        """
        if force:
            assert not self.page_tables.num_unread, "an unread step uses pages"
            for request in reversed(list(self.roster.running.values())):
                self.preemption.requeue(request)
        return self.page_tables.reset()

    def forget_prompts(
        self, prompts: Sequence[Sequence[int]], kept: Sequence[Sequence[int]], salt: bytes
    ) -> set[bytes]:
        """Evict the cached pages of these prompts and of all that continues them.

        Pages that a `kept` prompt has as well stay, and those that `PageTables.forget` leaves. Returns the hashes
        that may be deleted from disk as well.
        """
        hashes_of = self.page_tables.cache.hashes_of
        shared = {hash_ for prompt in kept for hash_ in hashes_of(prompt, salt)}
        doomed = {hash_: None for prompt in prompts for hash_ in hashes_of(prompt, salt)}
        return self.page_tables.forget([hash_ for hash_ in doomed if hash_ not in shared])

    def resize(self, num_pages: int) -> Resized:
        """Change the number of pages. No step may be unread.

        A smaller pool begins empty: running requests are queued and continue from their known tokens,
        named prefixes are computed again. Raises InvalidParameter, PrefixQuotaExceeded and
        PagesPromised as `Capacity.refuse_resize` does, before anything changes.
        """
        assert not self.page_tables.num_unread, "an unread step uses pages"
        prefixes, ids = self.roster.prefixes, self.roster.ids
        pinned = [LiveRequest(asked) for name, asked in prefixes.items() if name not in ids]
        self.page_tables.capacity.refuse_resize(num_pages, self.roster.live, pinned)
        num_preempted = num_forgotten = 0
        if num_pages >= self.pool.num_pages:
            self.page_tables.grow_pool(num_pages)
            if self._beside is not None and self.planner.balance is not None:
                self.planner.balance.memory = self._beside.with_more(FullPages.name, num_pages)
        else:
            num_preempted = self.preemption.preempt_to(0)
            num_forgotten = self.pool.num_cached
            self._begin_again(self.pool.renewed(num_pages))
        return Resized(num_pages, self.max_model_len, num_preempted, num_forgotten)

    def limit_running(self, limit: int | None) -> None:
        """Admit requests only while fewer than `limit` run; None for `max_num_seqs`."""
        highest = self.config.max_num_seqs
        self._max_running = self.planner.admission.max_running = min(highest, limit or highest)

    # ---- after a failure

    def restart(self, lost: Container[str] = ()) -> None:
        """Restart with an empty pool, after any method or the device has failed.

        Only the known tokens of waiting requests are trusted. These requests keep waiting, but for those in
        `lost`; requests that held pages are dropped. Named prefixes are computed again, unless their own
        computation failed.
        """
        for request in self.roster.live:
            request.num_lost = 0
        self._begin_again(self.pool.renewed(), lost)

    def _begin_again(self, pool: PagePool, lost: Container[str] = ()) -> None:
        """Create all parts anew, with the waiting requests and the named prefixes."""
        waiting = [
            request
            for request in self.roster.live
            if request.state is RequestState.WAITING and request.id not in lost
        ]
        prefixes, lives = self.roster.prefixes, self.roster.ids
        self._begin(pool, [end.renewed(pool) for end in self.page_tables.ends], prefixes)
        for request in waiting:
            self._wait_again(request)
        for name, asked in prefixes.items():
            if name not in lives:
                self._wait_again(self._request(asked))
                if self.page_tables.capacity.is_cut(self.roster.live):
                    self.abort(name)
            if self.roster.find(name) is None:
                self.roster.prefixes.pop(name, None)
        if len(self.roster.prefixes) < len(prefixes):
            logger.error(
                "%d named prefixes are not kept in the cache any more: requests that use them "
                "compute them. Add them again.",
                len(prefixes) - len(self.roster.prefixes),
            )

    def _wait_again(self, request: LiveRequest) -> None:
        """Queue a request that holds nothing, without the checks of `add`: it keeps its promises."""
        request.page_hashes[:] = request.asked.page_hashes
        cache = self.page_tables.cache
        cache.share_hashes(request)
        request.leader = request.loading = None
        request.num_computed = 0
        if request.asked.pins:
            self.page_tables.pins.claim(request, cache.chain(request))
        self._queue(request)

    # ---- queries

    def requests(self) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """Return the running requests by admission, and the waiting ones with the next one first."""
        return self.roster.requests(self.num_steps)

    def stats(self) -> SchedulerStats:
        """Return a copy of the counters as of now."""
        self._stats.num_running = len(self.roster.running)
        self._stats.num_waiting = self.roster.num_waiting
        return self._stats.copy()

    def check(self) -> None:
        """Audit requests and pool. Raises AssertionError."""
        assert self.commit.under_way is None, "a token may be known and not reported"
        live = list(self.roster.live)
        self.page_tables.check(list(self.roster.running.values()))
        self.page_tables.pins.check(live, self.roster.prefixes)
        self.roster.check()
        if self.planner.balance is not None:
            self.planner.balance.check()
        for request in live:
            has_room = len(request.token_ids) < self.page_tables.capacity.of(request)
            assert has_room, f"{request.id} has no room to grow"

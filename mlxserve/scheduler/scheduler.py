"""Scheduler: which tokens of which requests go into the next step, and what came of the last one.

Owns every `LiveRequest` from `add` to its end, and decides which pages of the pool it holds. Plain
Python without arrays, clock or randomness: the plan is a function of the calls made so far.

One step may be unread while the next one is planned:

    schedule ─ launch n ─┬─ schedule ─ launch n+1 ─┬─ ...
                         └─ (n unread)             └─ read n ─ update(n) ─ ...

A request whose sampled token is still unread decodes on with a lazy chunk. Pages are released only
when no unread step of their holder is left, and only a plan made with nothing unread preempts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from weakref import WeakKeyDictionary

from mlxserve.cache.pages import PagePool
from mlxserve.config import BudgetMode, PageTail, SchedulerConfig
from mlxserve.errors import InvalidParameter, InvalidRequest, PromptTooLong, QueueFull
from mlxserve.request import (
    Chunk,
    FinishReason,
    LiveRequest,
    Output,
    Request,
    RequestState,
    Sampled,
    TokenLogprob,
    as_page_table,
)
from mlxserve.scheduler.admission import Admission, Admitted
from mlxserve.scheduler.alignment import can_align
from mlxserve.scheduler.audit import check_ending, check_running, check_waiting
from mlxserve.scheduler.capacity import Capacity
from mlxserve.scheduler.copies import Copies, PageCopy
from mlxserve.scheduler.fairness import FairShare
from mlxserve.scheduler.forks import Forks
from mlxserve.scheduler.limit import DECODE, LimitContext, LimitReason, limit
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.pins import Pins
from mlxserve.scheduler.prefix_cache import PrefixCache
from mlxserve.scheduler.prefix_followers import PrefixFollowers
from mlxserve.scheduler.resize import PoolResize, Resize
from mlxserve.scheduler.step import Step
from mlxserve.scheduler.swap import LOAD_PAGES, Load, Swap, Transfers
from mlxserve.scheduler.waiting import WaitingQueue, order
from mlxserve.stats import SchedulerStats


class Scheduler:
    """add, then schedule and update in turns; abort at any time between these calls."""

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        assert config.max_model_len is not None, "only a loaded model knows it"
        self.config = config
        self.pool = pool
        self._is_aligned = config.page_aligned_scheduling and can_align(config, pool.page_size)
        self._stats = SchedulerStats()
        self._fair_share = FairShare()
        self._waiting = WaitingQueue(self._fair_share, config.ageing_steps)
        self._ending: set[LiveRequest] = set()  # ended, but a step that uses their pages is unread
        self._live: dict[str, LiveRequest] = {}  # waiting or running
        # Of these, and of requests that ended, as long as their callers hold them.
        self._page_hashes: WeakKeyDictionary[Request, list[bytes]] = WeakKeyDictionary()
        self._followers = PrefixFollowers(config.prefix_follow_pages, self._stats)
        self._pins = Pins(pool, config.max_pinned_fraction)
        self._cache = PrefixCache(
            pool,
            self._followers,
            is_on=config.enable_prefix_caching,
            copies_tails=config.page_tail is PageTail.COPY,
        )
        self._swap = Swap(pool)
        self._forks = Forks()
        self._copies = Copies(pool, self._stats)
        self._capacity = Capacity(config.max_model_len, pool, self._cache, self._pins)
        self._page_tables = PageTables(
            config,
            pool,
            self._cache,
            self._capacity,
            self._followers,
            self._copies,
            self._swap,
            self._waiting,
            self._stats,
        )
        self._running = self._page_tables.running
        self._resize = Resize(
            pool,
            self._cache,
            self._capacity,
            self._pins,
            self._copies,
            self._page_tables,
            self._stats,
        )
        self._replaced: list[int] = []  # pages in nobody's table, but an unread step uses them
        self._num_unread = 0
        self._num_arrivals = 0
        self._num_steps = 0  # planned, empty ones included
        self._admission = Admission(
            config, pool, self._cache, self._followers, self._swap, self._stats
        )

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, as far as the pool goes; pins aside."""
        return self._capacity.most

    # ---- requests come and go

    def add(self, asked: Request) -> LiveRequest:
        """Queue a request; its progress, to be read only. A fork follows the request it is a fork of,
        without a step between them.

        Raises PromptTooLong, QueueFull, InvalidParameter, and for a prefix PrefixQuotaExceeded.
        """
        if asked.id in self._live:
            raise InvalidParameter("request_id", f"{asked.id!r} is in use; choose another")
        if not asked.token_ids:
            raise InvalidParameter("prompt", "must have at least one token")
        request = LiveRequest(asked, arrival=self._num_arrivals, queued_at=self._num_steps)
        self._capacity.measure(request)
        self._refuse_too_long(request)
        num_waiting = len(self._waiting) + len(self._forks)
        if num_waiting >= self.config.max_num_waiting:
            raise QueueFull(
                f"{num_waiting} requests are waiting, and no more may "
                f"(max_num_waiting={self.config.max_num_waiting}); try again later"
            )
        if asked.pins:
            self._promise_pins(request)
        self._capacity.measure(request)
        self._num_arrivals += 1
        self._live[request.id] = request
        self._page_hashes[asked] = request.page_hashes
        self._fair_share.arrive(asked.client)
        leader = self._live.get(asked.fork_of) if asked.fork_of is not None else None
        if leader is not None and not leader.num_outputs:
            assert request.token_ids == leader.token_ids, f"{request.id} has another prompt"
            assert asked.cache_salt == leader.asked.cache_salt, f"{request.id} has another salt"
            request.leader = leader
            self._forks.park(request)
        else:
            self._waiting.add(request)
        return request

    def _refuse_too_long(self, request: LiveRequest) -> None:
        num_tokens, capacity = len(request.token_ids), request.capacity
        if num_tokens < capacity:
            return
        if capacity == self.config.max_model_len:
            raise PromptTooLong.for_answer(num_tokens, capacity)
        limit_ = f"the cache's {self.pool.num_pages} pages hold"
        advice = "raise gpu_memory_utilization or num_pages"
        if self._pins.num_pages:
            limit_ = f"beside {self._pins.num_pages} pinned pages the cache holds"
            advice = "remove a named prefix"
        raise PromptTooLong.for_answer(num_tokens, capacity, limit=limit_, advice=advice)

    # ---- prefixes that stay

    def unpin(self, request_id: str) -> None:
        """The pages of a prefix may be evicted again; no-op if there are none."""
        self._pins.drop(request_id)
        self._capacity.measure_all(self._live.values())

    def _promise_pins(self, request: LiveRequest) -> None:
        if not self.config.enable_prefix_caching:
            raise InvalidRequest(
                "named prefixes are kept in the prefix cache: turn enable_prefix_caching on"
            )
        self._pins.reserve(request, self._cache.chain(request))
        self._capacity.measure_all(self._live.values())
        # One more for the token that a step may be computing, and one for the answer.
        if any(len(other.token_ids) + 2 > other.capacity for other in self._live.values()):
            self._pins.cancel(request)
            self._capacity.measure_all(self._live.values())
            raise QueueFull(
                "the pages for this prefix are needed by a request that is running or waiting; "
                "try again when it has ended"
            )

    def _pin(self, request: LiveRequest) -> None:
        self._cache.publish_tail(request)
        self._pins.pin(request)
        self._capacity.measure_all(self._live.values())

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Output]:
        """End a request now. Its pages are free once no unread step uses them.

        One bare end, or nothing if there is no such request (any more).
        """
        request = self._live.get(request_id)
        if request is None:
            return []
        self._end(request, reason)
        return [_output(request, ())]

    def abort_all(self) -> list[Output]:
        return [output for request_id in list(self._live) for output in self.abort(request_id)]

    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Forget every cached page but those of named prefixes.

        False, and nothing happened, while requests hold pages. `force` takes theirs first; they
        start again. No step may be unread then.
        """
        if force:
            assert not self._num_unread, "an unread step uses pages"
            for request in reversed(list(self._running.values())):
                self._page_tables.requeue(request)
        return self.pool.reset()

    def resize(self, num_pages: int) -> PoolResize:
        """Have so many pages, by preempting if it must. No step may be unread.

        Whoever has the arrays takes what is to be saved first, and then moves the pages. Raises
        InvalidParameter, PrefixQuotaExceeded where the named prefixes would be too many, QueueFull
        where a request would have no place to go on; nothing happened then.
        """
        assert not self._num_unread, "an unread step uses pages"
        assert not self._replaced, "a page is in nobody's table"
        return self._resize.resize(num_pages, self._live.values())

    def keep_pages(self, asked: Request, until: float) -> None:
        """Protect a request's cached pages from eviction: its conversation is about to continue."""
        if self.config.enable_prefix_caching:
            known = takewhile(self.pool.is_known, self._page_hashes.get(asked, ()))
            self.pool.keep_until([self.pool.page_of(hash_) for hash_ in known], until)

    def expire(self, now: float) -> None:
        """Let go of what was to be kept until now."""
        self.pool.expire(now)

    @property
    def has_work(self) -> bool:
        """Something to plan, or a step to read."""
        return bool(self._live) or self._num_unread > 0

    # ---- decide

    def might_preempt(self) -> bool:
        """Whether a plan made now might have to preempt: read the unread step first, then plan."""
        return self._page_tables.might_preempt()

    def schedule(self, prefill_budget: int | None = None) -> list[Chunk]:
        """Plan a step: decodes, then prompts under way, then new ones as far as budget and pages go.

        Counts the chunks as computed. An empty plan is no step, and not to be updated.
        `prefill_budget`: beside decodes, prompts get at most so many tokens, but a page at least;
        prompts that may not be split are not held back by it.
        """
        self._num_steps += 1
        assert self._num_unread <= 1, "two steps are unread; call update() for the first"
        step = Step(self._limit_context(), self.config.max_num_batched_tokens, not self._num_unread)
        prefills = self._plan_decodes(step)
        for client, count in Counter([request.asked.client for request in step.plan]).items():
            self._fair_share.charge(client, decode=count)
        if prefill_budget is not None and step.plan and self.config.enable_chunked_prefill:
            step.budget = min(step.budget, max(prefill_budget, self.pool.page_size))
        for request in sorted(prefills, key=order):
            self._plan_prefill(request, step)
        if not step.has_preempted:
            for admitted in self._admission.choose(
                self._waiting, self._running, step, self._num_steps
            ):
                self._start(admitted, step)
        assert step.budget >= 0, "the step is overdrawn"
        chunks = _launch(step)
        self._num_unread += bool(chunks)
        return chunks

    def _limit_context(self) -> LimitContext:
        return LimitContext(
            page_size=self.pool.page_size,
            max_model_len=self.max_model_len,
            step_budget=self.config.max_num_batched_tokens,
            num_eligible=len(self._live) - len(self._forks),
            long_prefill_token_threshold=self.config.long_prefill_token_threshold,
            is_chunked=self.config.enable_chunked_prefill,
            is_aligned=self._is_aligned,
            charges_pages=self.config.budget_mode is BudgetMode.ALIGNED,
        )

    def _plan_decodes(self, step: Step) -> list[LiveRequest]:
        """A token for everyone who decodes. Left over are those whose prompts are under way."""
        prefills: list[LiveRequest] = []
        for request in list(self._running.values()):
            # Most of them, most of the time: nothing else happens until their page is full.
            if request.num_computed < request.steady_until:
                step.plan[request] = DECODE
                step.budget -= 1
            elif request.num_computed < request.prefill_end:
                prefills.append(request)
            else:
                self._plan_decode(request, step)
        return prefills

    def _plan_decode(self, request: LiveRequest, step: Step) -> None:
        start = request.num_computed
        if start + 1 >= request.full_at:
            return  # the token that is still unread is certainly its last
        if request.state is not RequestState.RUNNING:
            return  # preempted just now
        if request.asked.guide is not None and _must_wait(request):
            return
        share = limit(start, start + 1, request.prefill_end, step.budget, step.ctx)
        if share.num_tokens and self._page_tables.grow(request, start + 1, step):
            step.take(request, share)
            if request.asked.guide is None:
                num_slots = len(request.page_table) * self.pool.page_size
                request.steady_until = min(num_slots, request.full_at - 1)

    def _plan_prefill(self, request: LiveRequest, step: Step) -> None:
        if request.state is not RequestState.RUNNING:
            return
        start = request.num_computed
        if request.loading:
            return
        # Without a free page it waits for the others; only if there are none does it preempt.
        if self._page_tables.room(request) == 0 and (
            step.plan or not self._page_tables.grow(request, start + 1, step)
        ):
            return
        if self._swap.num_tokens(request, start):
            if not request.num_in_flight:
                self._load(request, step)
            return
        budget = min(step.budget, self._page_tables.room(request))
        stop = self._swap.stop(request, start)
        share = limit(start, stop, request.prefill_end, budget, step.ctx)
        self._stats.align_deferrals += share.reason is LimitReason.ALIGNMENT
        if share.num_tokens and self._page_tables.grow(request, start + share.num_tokens, step):
            step.take(request, share)

    def take_copies(self) -> list[PageCopy]:
        """Pages to copy before the next step is planned, and before the planned one is launched:
        after that their sources may be written to."""
        return self._copies.take()

    # ---- samples of one prompt

    def _fork(self, leader: LiveRequest) -> None:
        """Its prompt has been computed: start those that waited for it, as far as possible."""
        for fork in self._forks.release(leader):
            fork.leader = None
            if self._can_fork(fork):
                self._start_fork(fork, leader)
            else:
                self._waiting.add(fork)

    def _can_fork(self, fork: LiveRequest) -> bool:
        if len(self._running) >= self.config.max_num_seqs or fork.num_prompt == 1:
            return False
        return self.pool.num_free > self._admission.num_reserved(self._running)

    def _start_fork(self, fork: LiveRequest, leader: LiveRequest) -> None:
        page_size = self.pool.page_size
        num_pages, num_in_tail = divmod(fork.num_prompt - 1, page_size)
        shared = leader.page_table[:num_pages]
        self.pool.share(shared)
        fork.page_hashes[:] = leader.page_hashes[: fork.num_prompt // page_size]
        fork.page_table = shared
        if num_in_tail:
            pages = self.pool.allocate(1)
            assert pages is not None, "there was a free page"
            fork.page_table = shared + as_page_table(pages)
            source = leader.page_table[num_pages]
            self.pool.share([source])
            self._copies.add(fork, source, pages[0])
        fork.state = RequestState.RUNNING
        self._running[fork.id] = fork
        self._capacity.measure(fork)
        fork.num_computed = fork.num_prompt - 1
        fork.prefill_end = fork.num_prompt
        fork.cache = self._cache.report_fork(num_pages)
        fork.num_cached = fork.cache.num_tokens
        self._fair_share.charge(fork.asked.client, prefill=1)
        self._stats.prefix_queries += fork.num_prompt
        self._stats.prefix_hits += fork.num_cached

    # ---- the disk

    def take_transfers(self) -> Transfers:
        """What has to be moved before the step that was planned is launched."""
        return self._swap.take_transfers()

    def accepts(self, load: Load) -> bool:
        """Whether the pages of a load still wait for it."""
        request = self._live.get(load.request_id)
        return request is not None and request.loading is load.run

    def finish_load(self, load: Load, num_pages: int) -> None:
        """The first `num_pages` of them hold now what was saved; the others are lost."""
        request = self._live[load.request_id]
        assert request.loading is load.run, "nobody waits for these pages"
        assert request.saved is not None, "pages of nothing were read"
        request.loading = None
        end = load.run.first + num_pages
        self._rebind(request, self._cache.publish_pages(request, load.run.first, end))
        if not self._num_unread:
            self._release_replaced()
        num_tokens = num_pages * self.pool.page_size
        request.num_computed += num_tokens
        self._stats.restored_tokens += num_tokens
        if num_pages < len(load.run.hashes):
            self._stats.recomputed_tokens += self._swap.num_tokens(request, request.num_computed)
            self._swap.drop(request)
        elif load.run.end == request.saved.end:
            self._swap.drop(request)

    def _load(self, request: LiveRequest, step: Step) -> None:
        """Have the next of its saved pages read, as far as free pages go."""
        assert request.saved is not None
        first = request.num_computed // self.pool.page_size
        room = len(request.page_table) - first + self.pool.num_free
        end = min(request.saved.end, first + min(LOAD_PAGES, room))
        grown = self._page_tables.grow(request, end * self.pool.page_size, step)
        assert grown, "there was room for them"
        self._swap.load(request, end)

    # ---- admission

    def _start(self, admitted: Admitted, step: Step) -> None:
        request, cached, tail, share = admitted
        # Before anything is allocated, which could evict them.
        self.pool.retain(cached)
        self.pool.retain([tail.page] if tail else [])
        self._waiting.remove(request)
        self._cache.forget(request)
        if self.config.enable_prefix_caching:
            self._followers.lead(request, request.page_hashes[len(cached) :])
        self._running[request.id] = request
        request.state = RequestState.RUNNING
        request.page_table = as_page_table(cached)
        self._capacity.measure(request)
        num_copied = tail.num_tokens if tail else 0
        request.num_computed = len(cached) * self.pool.page_size + num_copied
        self._count_hits(request)
        request.prefill_end = len(request.token_ids)
        if request.cache is None:
            request.cache = self._cache.report(request, len(cached), num_copied)
        if share is None:
            self._load(request, step)
            return
        grown = self._page_tables.grow(request, request.num_computed + share.num_tokens, step)
        assert grown, "admitted without the pages it needs"
        if tail:
            self._copies.add(request, tail.page, request.page_table[len(cached)])
        step.take(request, share)

    def _count_hits(self, request: LiveRequest) -> None:
        num_hits = request.num_computed
        if not request.has_run:
            request.num_cached = num_hits
            # What a preemption makes it compute again is not the client's doing.
            self._fair_share.charge(request.asked.client, prefill=len(request.token_ids) - num_hits)
            self._stats.prefix_queries += len(request.token_ids)
            self._stats.prefix_hits += num_hits
        else:
            self._stats.resumed_queries += len(request.token_ids)
            self._stats.resumed_hits += num_hits
            first = request.saved.first * self.pool.page_size if request.saved else 0
            num_read = self._swap.num_tokens(request, max(num_hits, first))
            self._stats.recomputed_tokens += max(0, request.num_lost - num_hits - num_read)

    # ---- commit

    def update(self, chunks: Sequence[Chunk], sampled: Sequence[Sampled | None]) -> list[Output]:
        """Take the results of the oldest unread step; `sampled` is None where a chunk does not."""
        if not chunks:
            return []
        assert self._num_unread > 0, "no step is unread"
        self._num_unread -= 1
        self._release_replaced()
        outputs: list[Output] = []
        page_size, finished = self.pool.page_size, RequestState.FINISHED
        for chunk, result in zip(chunks, sampled, strict=True):
            request, start, length, _, samples, _ = chunk
            request.num_in_flight -= 1
            # Most of them: one more token and no end, which one that is steady has not yet.
            if result is not None and request.prefill_end <= start < request.steady_until - length:
                token_id = result.token_id
                request.token_ids.append(token_id)
                if (start + length) % page_size < length:
                    self._rebind(request, self._cache.publish(chunk))
                if token_id in request.ends_on:
                    self._finish(request, FinishReason.STOP)
                outputs.append(_output(request, (token_id,), result.logprob))
                continue
            assert samples == (result is not None), f"{request.id}: sampled out of turn"
            is_finished = request.state is finished
            if result is not None and not is_finished:
                request.token_ids.append(result.token_id)
            if (start + length) % page_size < length:
                self._rebind(request, self._cache.publish(chunk))
            if is_finished:
                self._settle(request)
            elif result is not None:
                self._take(request, result)
                outputs.append(_output(request, (result.token_id,), result.logprob))
        if not self._num_unread:
            self._release_replaced()
        return outputs

    def _rebind(self, request: LiveRequest, duplicates: Sequence[int]) -> None:
        """Hold the pages that others published first instead of its own with the same content.

        An unread step may use its own ones, so these go when that step has been read. Whatever
        was launched by then holds the others.
        """
        if not duplicates:
            return
        self._stats.rebound_pages += len(duplicates)
        table = request.page_table[:]
        for index in duplicates:
            self._replaced.append(table[index])
            table[index] = self.pool.adopt(request.page_hashes[index])
        request.page_table = table

    def _release_replaced(self) -> None:
        self.pool.release(self._replaced)
        self._replaced.clear()

    def _take(self, request: LiveRequest, result: Sampled) -> None:
        """Its newest token was read: it goes on, or ends."""
        num_known = len(request.token_ids)
        if num_known == request.num_prompt + 1:
            self._fork(request)
        if result.token_id in request.ends_on:
            self._finish(request, FinishReason.STOP)
        elif num_known >= request.full_at:
            self._finish(request, FinishReason.LENGTH)

    def _finish(self, request: LiveRequest, reason: FinishReason) -> None:
        if request.asked.pins:
            self._pin(request)
        self._end(request, reason)

    def _end(self, request: LiveRequest, reason: FinishReason) -> None:
        del self._live[request.id]
        self._fair_share.leave(request.asked.client)
        if request in self._forks:
            self._forks.remove(request)
        elif request.state is RequestState.WAITING:
            self._waiting.remove(request)
            self._cache.forget(request)
        else:
            del self._running[request.id]
        if (heir := self._forks.succeed(request)) is not None:
            self._waiting.add(heir)
        self._followers.leave(request)
        self._swap.drop(request)
        request.loading = None
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.steady_until = 0
        if request.asked.pins:
            self._pins.cancel(request)
            self._capacity.measure_all(self._live.values())
        self._settle(request)

    def _settle(self, request: LiveRequest) -> None:
        """Release an ended request's pages, or wait for the unread step that uses them."""
        if request.num_in_flight:
            self._ending.add(request)
        else:
            self._ending.discard(request)
            self._page_tables.release(request)

    # ---- look inside

    def requests(self) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """(running by admission, waiting with the next to be admitted first)."""
        waiting = [*self._waiting.in_order(self._num_steps), *self._forks]
        return list(self._running.values()), waiting

    def stats(self) -> SchedulerStats:
        """A copy of the counters as of now."""
        self._stats.num_running = len(self._running)
        self._stats.num_waiting = len(self._waiting) + len(self._forks)
        return self._stats.copy()

    def check(self) -> None:
        """Audit requests and pool. Raises AssertionError."""
        holders = (*self._running.values(), *self._ending)
        tables = [holder.page_table for holder in holders]
        self.pool.check([*tables, *self._copies.held(), self._replaced])
        num_waiting = len(self._waiting) + len(self._forks)
        assert len(self._live) == num_waiting + len(self._running), "a request is in limbo"
        assert len(self._running) <= self.config.max_num_seqs, "too many requests are running"
        self._fair_share.check(Counter(request.asked.client for request in self._live.values()))
        self._pins.check(list(self._live.values()))
        self._followers.check(list(self._running.values()), list(self._waiting))
        self._forks.check()
        self._copies.check()
        check_waiting([*self._waiting, *self._forks], self.config.max_overtakes)
        check_running(self._running.values(), self.pool, self._num_unread)
        check_ending(self._ending, self.pool, self._num_unread)
        for request in self._live.values():
            assert len(request.token_ids) < request.capacity, f"{request.id} has no place to grow"
            assert request.capacity == self._capacity.of(request), f"{request.id}: capacity is off"


def _must_wait(request: LiveRequest) -> bool:
    """Whether what it may say next depends on a token that is still unread."""
    if request.asked.guide is None or request.num_computed < len(request.token_ids):
        return False
    guide = request.feed_guide()
    return guide is not None and guide.must_wait


def _launch(step: Step) -> list[Chunk]:
    chunks = []
    new = tuple.__new__  # Chunk's own takes twice as long
    for request, (num_tokens, _, _) in step.plan.items():
        start, num_known = request.num_computed, len(request.token_ids)
        request.num_computed = end = start + num_tokens
        request.num_in_flight += 1
        samples, is_lazy = end >= num_known, start == num_known
        fields = request, start, num_tokens, request.page_table, samples, is_lazy
        chunks.append(new(Chunk, fields))
    return chunks


def _output(
    request: LiveRequest, token_ids: tuple[int, ...], logprob: TokenLogprob | None = None
) -> Output:
    fields = (
        request.id,
        token_ids,
        request.finish_reason,
        request.num_prompt,
        request.num_cached,
        request.cache,
        (logprob,) if logprob else (),
    )
    return tuple.__new__(Output, fields)  # Output's own takes twice as long

"""Scheduler: which tokens of which requests go into the next step, and what the last one yielded.

Owns the progress of every request from `add` to its end, and plans; its page tables hold the pages.
Plain Python without arrays, clock or randomness: the plan is a function of the calls made so far.

One step may be unread while the next one is planned:

    schedule ─ launch n ─┬─ schedule ─ launch n+1 ─┬─ ...
                         └─ (n unread)             └─ read n ─ update(n) ─ ...

A request whose sampled token is still unread continues with a lazy chunk. Pages are released only
when their holder has no unread step left, and only a plan made with no step unread preempts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

from mlxserve.cache.pages import PagePool
from mlxserve.config import BudgetMode, PreemptionMode, SchedulerConfig
from mlxserve.errors import (
    InvalidParameter,
    InvalidRequest,
    MlxServeError,
    PagesPromised,
    PromptTooLong,
    QueueFull,
)
from mlxserve.forward_work import WorkBudget
from mlxserve.request import (
    Chunk,
    FinishReason,
    Guide,
    LiveRequest,
    Output,
    Request,
    RequestState,
    Sampled,
    SpeculationReport,
)
from mlxserve.scheduler.admission import Admission, Admitted
from mlxserve.scheduler.alignment import can_align
from mlxserve.scheduler.audit import check_waiting
from mlxserve.scheduler.copies import PageCopy
from mlxserve.scheduler.disk_pages import Disk, DiskPlan, Load, Save
from mlxserve.scheduler.drafts import MOST_DECODES, MOST_ROWS, Drafts
from mlxserve.scheduler.fairness import FairShare
from mlxserve.scheduler.forks import Forks
from mlxserve.scheduler.limit import DECODE, LimitContext, LimitReason, limit
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.preemption import choose_victim
from mlxserve.scheduler.prefix_followers import PrefixFollowers
from mlxserve.scheduler.repetition import repeats_itself
from mlxserve.scheduler.resize import PoolResize, check_resize
from mlxserve.scheduler.state_snapshots import StateSnapshots
from mlxserve.scheduler.step import Step
from mlxserve.scheduler.waiting import WaitingQueue, order
from mlxserve.stats import SchedulerStats, StateStats

logger = logging.getLogger("mlxserve.scheduler")

PREEMPTIONS_PER_WARNING = 50  # as in vLLM: an overload of minutes must not fill the log


class Scheduler:
    """add, then schedule and update in turns; abort at any time between these calls."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        num_state_slots: int | None = None,
        disk: Disk | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        """
        num_state_slots: recurrent states that fit into memory; None for a model without them
        disk: where pages are kept that leave memory; None to lose them
        drafts: what guesses tokens, by default for `speculative_tokens`. Not used with recurrent
            states, which do not go back to the last accepted token
        """
        self.config = config
        self._disk = disk
        self._num_state_slots = num_state_slots
        self.is_aligned = config.page_aligned_scheduling and can_align(config, pool.page_size)
        self._drafts: Drafts | None = None
        if num_state_slots is None and (drafts or config.speculative_tokens):
            self._drafts = drafts or Drafts(config.speculative_tokens)
        self.num_steps = 0  # planned, empty ones included
        self._stats = SchedulerStats()
        self._state_stats = StateStats()
        self._num_arrivals = 0
        # Of live requests, and of those that ended, as long as their callers hold them.
        self._page_hashes: WeakKeyDictionary[Request, list[bytes]] = WeakKeyDictionary()
        self._begin(pool)

    def _begin(self, pool: PagePool) -> None:
        """Without requests, and with an empty pool."""
        config = self.config
        self.pool = pool  # to read; only the page tables change it
        snapshots = None
        if self._num_state_slots is not None:
            snapshots = StateSnapshots(self._num_state_slots, pool, self._state_stats)
        self.page_tables = PageTables(config, pool, self._stats, snapshots, self._disk)
        self.fair_share = FairShare()
        self.followers = PrefixFollowers(config.prefix_follow_pages, self._stats)
        self.admission = Admission(config, self.page_tables, self.followers, self._stats)
        self._waiting = WaitingQueue(self.fair_share, config.ageing_steps)
        self._forks = Forks()
        self._running: dict[str, LiveRequest] = {}  # in the order of admission
        self._live: dict[str, LiveRequest] = {}  # waiting, parked or running
        self._prefixes: dict[str, Request] = {}  # those whose pages are pinned
        if self._drafts is not None:
            self._drafts.clear()
        self._num_unread = 0
        self._unwarned: tuple[Save, int] | None = None  # of a preemption to warn of, its number

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, apart from pins: at most what the whole pool holds."""
        return self.page_tables.max_model_len

    @property
    def live_ids(self) -> set[str]:
        """Of the requests that wait or run."""
        return set(self._live)

    @property
    def has_work(self) -> bool:
        """Something to plan, or a step to read."""
        return bool(self._live) or self._num_unread > 0

    # ---- requests come and go

    def add(self, asked: Request) -> LiveRequest:
        """Queue a request; its progress, to be read only. A fork follows the request it is a fork of,
        without a step between them.

        Raises PromptTooLong, QueueFull, InvalidParameter, and for a prefix PrefixQuotaExceeded and
        PagesPromised.
        """
        request = LiveRequest(
            asked,
            arrival=self._num_arrivals,
            queued_at=self.num_steps,
            length_limit=self.page_tables.length_limit(asked),
        )
        self._refuse(request)
        request.promised_length = min(request.length_limit, self.page_tables.capacity(request))
        if asked.pins:
            self._promise_pins(request)
        self._num_arrivals += 1
        self._live[request.id] = request
        self._page_hashes[asked] = request.page_hashes
        self.fair_share.arrive(asked.client)
        leader = self._live.get(asked.fork_of) if asked.fork_of is not None else None
        # Where there are recurrent states, it finds the prompt's last page boundary instead.
        is_fork = leader is not None and self._num_state_slots is None
        if is_fork and leader is not None and not leader.num_outputs:
            assert request.token_ids == leader.token_ids, f"{request.id} has another prompt"
            assert asked.cache_salt == leader.asked.cache_salt, f"{request.id} has another salt"
            request.leader = leader
            self._forks.park(request)
        else:
            self._waiting.add(request)
        if asked.guide is not None:
            asked.guide.ask()
        return request

    def _refuse(self, request: LiveRequest) -> None:
        """Raises what `add` does, but for prefixes."""
        if request.id in self._live:
            raise InvalidParameter("request_id", f"{request.id!r} is in use; choose another")
        if not request.num_prompt:
            raise InvalidParameter("prompt", "must have at least one token")
        self._refuse_too_long(request)
        num_waiting = self._num_waiting()
        if num_waiting >= self.config.max_num_waiting:
            raise QueueFull(
                f"{num_waiting} requests are waiting, and no more may "
                f"(max_num_waiting={self.config.max_num_waiting}); try again later"
            )

    def _refuse_too_long(self, request: LiveRequest) -> None:
        num_tokens, capacity = len(request.token_ids), self.page_tables.capacity(request)
        if num_tokens < capacity:
            return
        if capacity == self.config.max_model_len:
            raise PromptTooLong.for_answer(num_tokens, capacity)
        limit_ = f"the cache's {self.pool.num_pages} pages hold"
        advice = "raise gpu_memory_utilization or num_pages"
        if num_pinned := self.page_tables.pins.num_pages:
            limit_ = f"beside {num_pinned} pinned pages the cache holds"
            advice = "remove a named prefix"
        raise PromptTooLong.for_answer(num_tokens, capacity, limit=limit_, advice=advice)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Output]:
        """End a request now. Its pages are free once no unread step uses them.

        An output without tokens, or none if no live request has this id.
        """
        request = self._live.get(request_id)
        if request is None:
            return []
        self._end(request, reason)
        return [self._output(request, None, reason, request.num_outputs)]

    def abort_all(self) -> list[Output]:
        return [output for request_id in list(self._live) for output in self.abort(request_id)]

    def _end(self, request: LiveRequest, reason: FinishReason) -> None:
        del self._live[request.id]
        self.fair_share.leave(request.asked.client)
        if request in self._forks:
            self._forks.remove(request)
        elif request.state is RequestState.RUNNING:
            del self._running[request.id]
        elif request not in self.followers:
            self._waiting.remove(request)
        if (new_leader := self._forks.replace(request)) is not None:
            self._waiting.add(new_leader)
        self._queue(self.followers.leave(request))
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        if self._drafts is not None:
            self._drafts.forget(request)
        self.page_tables.end(request)

    def _queue(self, woken: Sequence[LiveRequest]) -> None:
        """Followers take their places in the queue again."""
        for request in woken:
            self._waiting.add(request)

    def _num_waiting(self) -> int:
        return len(self._waiting) + len(self.followers) + len(self._forks)

    # ---- pages that stay, and other sizes of the pool

    def unpin(self, request_id: str) -> None:
        """Let the pages of a named prefix be evicted again; no-op if there are none."""
        if self._prefixes.pop(request_id, None) is not None:
            self.abort(request_id)  # no-op unless `restart` has it computed again
        self.page_tables.unpin(request_id)

    def _promise_pins(self, request: LiveRequest) -> None:
        if not self.config.enable_prefix_caching:
            raise InvalidRequest(
                "named prefixes are kept in the prefix cache: turn enable_prefix_caching on"
            )
        self.page_tables.promise_pins(request)
        for other in self._live.values():
            if not self.page_tables.can_have(other, self.page_tables.owed(other)):
                self.page_tables.pins.cancel(request)
                raise PagesPromised(
                    "the pages of this prefix are promised to a request that is running or waiting, "
                    "whose answer it would cut. Try again when that has ended, shorten the prefix, "
                    "raise num_pages, or set max_tokens on requests: without it they are promised "
                    "the whole context."
                )

    def keep_pages(self, asked: Request, until: float) -> None:
        """Protect a request's cached pages from eviction: its conversation is about to continue."""
        if self.config.enable_prefix_caching:
            self.page_tables.keep_pages(self._page_hashes.get(asked, ()), until)

    def expire(self, now: float) -> None:
        """End the protection of pages that were to be kept until now."""
        self.page_tables.expire(now)

    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Forget every cached page except those of named prefixes.

        False, and nothing happened, while requests hold pages. `force` requeues these requests
        first; no step may be unread then.
        """
        if force:
            assert not self._num_unread, "an unread step uses pages"
            for request in reversed(list(self._running.values())):
                self._requeue(request)
        return self.page_tables.reset()

    def resize(self, num_pages: int) -> PoolResize:
        """Change the number of pages, preempting where it has to. No step may be unread.

        The caller first writes what is to be saved, and then moves what the pages hold. Raises
        InvalidParameter, PrefixQuotaExceeded and PagesPromised as `check_resize` does; nothing
        happened then.
        """
        assert not self._num_unread, "an unread step uses pages"
        check_resize(num_pages, self.page_tables, self._live.values())
        num_preempted, num_evicted = self._stats.num_preemptions, self.pool.num_evicted
        if num_pages < self.pool.num_pages:
            self._make_room(num_pages)
        moves = self.page_tables.resize(num_pages, self._running.values())
        return PoolResize(
            num_pages,
            self.max_model_len,
            self._stats.num_preemptions - num_preempted,
            self.pool.num_evicted - num_evicted,
            moves,
        )

    def _make_room(self, num_pages: int) -> None:
        for request in list(self._running.values()):
            if request.loading:
                self._requeue(request)
        while self.pool.num_used > num_pages:
            # Where requests share all their pages with each other, none of them alone frees one.
            self._preempt(self._victim() or next(reversed(self._running.values())))

    # ---- after a failure

    def restart(self, lost: Container[str] = ()) -> None:
        """Begin again with an empty pool, after any method or the device has failed.

        Of what this object holds only the known tokens of waiting requests are trusted. They go on
        waiting, but for those in `lost`; requests that held pages are dropped. Named prefixes are
        computed again, first of all, unless it was this that failed.
        """
        waiting = [
            request
            for request in self._live.values()
            if request.state is RequestState.WAITING and request.id not in lost
        ]
        ids = {request.id for request in waiting}
        prefixes, lives = self._prefixes, self._live
        self._begin(self.pool.renewed())
        for name, asked in prefixes.items():
            if name in ids or name not in lives:
                self._compute_again(asked)
        if len(self._prefixes) < len(prefixes):
            logger.error(
                "%d named prefixes are not kept in the cache any more: requests that use them "
                "compute them. Add them again.",
                len(prefixes) - len(self._prefixes),
            )
        for request in waiting:
            if request.id not in prefixes:
                self._wait_again(request)

    def _compute_again(self, prefix: Request) -> None:
        """Queue a named prefix whose pages are lost, unless its quota is exceeded."""
        request = LiveRequest(
            prefix,
            arrival=self._num_arrivals,
            queued_at=self.num_steps,
            length_limit=self.page_tables.length_limit(prefix),
        )
        request.promised_length = min(request.length_limit, self.page_tables.capacity(request))
        self._num_arrivals += 1
        with suppress(MlxServeError):
            self._wait_again(request)
            self._prefixes[prefix.id] = prefix

    def _wait_again(self, request: LiveRequest) -> None:
        """Queue a request that holds nothing, without the checks of its first arrival."""
        request.page_hashes[:] = request.asked.page_hashes
        request.leader = request.loading = None
        request.num_computed = request.num_lost = 0
        if request.asked.pins:
            self.page_tables.promise_pins(request)
        self._page_hashes[request.asked] = request.page_hashes
        self._live[request.id] = request
        self.fair_share.arrive(request.asked.client)
        self._waiting.add(request)

    # ---- preemption

    def might_preempt(self) -> bool:
        """Whether a plan made now might preempt: then read the unread step first.

        Errs on the side of yes: counts one page for each running request that has no slot left.
        """
        page_size, num_free = self.pool.page_size, self.pool.num_free
        if len(self._running) <= num_free:
            return False
        needed = sum(
            request.num_computed >= len(request.page_table) * page_size
            for request in self._running.values()
        )
        return needed > num_free

    def _grow(self, request: LiveRequest, end: int, step: Step) -> bool:
        """Make the request's table cover `end` tokens, by preempting where the step may."""
        while not self.page_tables.grow(request, end):
            victim = self._victim() if step.may_preempt else None
            if victim is None:
                return False
            step.refund(victim)
            step.has_preempted = True
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _victim(self) -> LiveRequest | None:
        """The request to preempt next; None if none would free a page."""
        return choose_victim(
            self._running.values(), self.pool, self.config.immune_after_preemptions
        )

    def _preempt(self, request: LiveRequest) -> None:
        """Requeue a request for lack of pages; in mode SWAP its own pages go to disk first."""
        request.num_preemptions += 1
        is_immune = request.num_preemptions == self.config.immune_after_preemptions
        self._stats.immune_requests += is_immune
        save, is_on_disk = None, False
        if self.config.preemption_mode is PreemptionMode.SWAP:
            save = self.page_tables.save(request)
            is_on_disk = save is None and self.page_tables.num_on_disk(request, 0) > 0
        self._requeue(request)
        self._stats.num_preemptions += 1
        number = self._stats.num_preemptions
        if number % PREEMPTIONS_PER_WARNING != 1:
            return
        if save is None:
            _warn(request.id, number, is_swapped=is_on_disk)
        else:  # what the disk takes is not known yet
            self._unwarned = save, number

    def limit_running(self, most: int | None) -> None:
        """Admit requests only while fewer than `most` run; None for `max_num_seqs`."""
        self.admission.max_running = min(self.config.max_num_seqs, most or self.config.max_num_seqs)

    def preempt_to(self, num_left: int) -> None:
        """Requeue all but the oldest of the first class; they wait. No step may be unread.

        Nothing is swapped: pages on their way to the disk take memory.
        """
        assert not self._num_unread, "an unread step uses pages"
        for request in reversed(sorted(self._running.values(), key=order)[num_left:]):
            request.num_preemptions += 1
            self._stats.num_preemptions += 1
            self._requeue(request)

    def _requeue(self, request: LiveRequest) -> None:
        """From running to waiting, without its pages."""
        assert request.num_in_flight == 0, "an unread step uses these pages"
        self.page_tables.release(request)
        request.num_lost = request.num_computed
        request.num_computed = 0
        request.state = RequestState.WAITING
        self._queue(self.followers.leave(request))
        del self._running[request.id]
        self._waiting.add(request)

    # ---- decide

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
        assert self._num_unread <= 1, "two steps are unread; call update() for the first"
        step = Step(self._limit_context(), self.config.step_budget, not self._num_unread, work)
        prefills = self._plan_decodes(step)
        for client, count in Counter([request.asked.client for request in step.plan]).items():
            self.fair_share.charge(client, decode=count)
        if prefill_budget is not None and step.plan and self.config.enable_chunked_prefill:
            step.restrict(max(prefill_budget, self.pool.page_size))
        self._stats.sched_budget_tokens = step.allowed
        for request in sorted(prefills, key=order):
            self._plan_prefill(request, step)
        if not step.has_preempted:
            running = self._running.values()
            for admitted in self.admission.choose(self._waiting, running, step, self.num_steps):
                self._start(admitted, step)
        if self._drafts is not None:
            self._plan_drafts(step, self._drafts)
        assert step.budget >= 0, "the step is overdrawn"
        chunks = self._launch(step)
        self._num_unread += bool(chunks)
        return chunks

    def _launch(self, step: Step) -> list[Chunk]:
        """The chunks of a plan, from now on counted as computed."""
        chunks = []
        for request in step.requests():
            share, draft = step.plan[request], step.drafts.get(request, ())
            start, num_known = request.num_computed, len(request.token_ids)
            request.num_computed = end = start + share.num_tokens  # of a draft when it is read
            request.num_in_flight += 1
            request.is_drafting = bool(draft)
            request.is_deferred = False
            chunks.append(
                Chunk(
                    request,
                    start,
                    share.num_tokens + len(draft),
                    request.page_table,
                    samples=end >= num_known,
                    is_lazy=start == num_known,
                    state=self.page_tables.plan_state(request, start, end),
                    draft=draft,
                )
            )
        return chunks

    def _limit_context(self) -> LimitContext:
        return LimitContext(
            page_size=self.pool.page_size,
            max_model_len=self.max_model_len,
            step_budget=self.config.step_budget,
            num_eligible=self._num_eligible(),
            long_prefill_token_threshold=self.config.long_prefill_token_threshold,
            is_chunked=self.config.enable_chunked_prefill,
            is_aligned=self.is_aligned,
            charges_pages=self.config.budget_mode is BudgetMode.ALIGNED,
        )

    def _num_eligible(self) -> int:
        """Requests that might use the step: those that run, and those in the queue that find a place.

        Parked ones wait for what these compute, so that a cap for their sake would delay them.
        """
        num_running = len(self._running)
        num_places = self.admission.max_running - num_running if self.pool.num_free else 0
        return num_running + min(len(self._waiting), max(0, num_places))

    def _plan_decodes(self, step: Step) -> list[LiveRequest]:
        """A token for every request that decodes. Returns the requests whose prompts are unfinished."""
        prefills: list[LiveRequest] = []
        for request in list(self._running.values()):
            start = request.num_computed
            if start < request.prefill_end:
                prefills.append(request)
            elif request.is_drafting:
                continue
            elif self._can_decode(request) and self._grow(request, start + 1, step):
                # Never trimmed: max_num_batched_tokens has a token for each of max_num_seqs.
                step.add(request, DECODE)
        return prefills

    def _can_decode(self, request: LiveRequest) -> bool:
        if request.num_computed + 1 >= self.page_tables.max_length(request):
            return False  # the token that is still unread is certainly its last
        if request.asked.guide is None:
            return True
        if request.num_computed < len(request.token_ids):
            return request.can_sample()
        guide = request.feed_guide()
        return guide is None or not guide.must_wait  # its next token is still unread

    def wants_read(self) -> bool:
        """Whether to read the unread step before a plan: what a draft goes on from must be known."""
        if self._drafts is None or not self._num_unread:
            return False
        if any(request.is_drafting for request in self._running.values()):
            return True
        if len(self._running) > MOST_DECODES:
            return False
        hopeful = [
            request
            for request in self._running.values()
            if _may_draft(request)
            and len(request.token_ids) == request.num_computed
            and self._num_draftable(request, len(request.token_ids) + 1) > 0
        ]
        # Each is looked at: one that was in sight and does not come counts as a failure.
        return sum(map(self._drafts.is_in_sight, hopeful)) > 0

    def _plan_drafts(self, step: Step, drafts: Drafts) -> None:
        """Have decodes verify drafts with what the step has left, if there are few of them."""
        decodes = [request for request, share in step.plan.items() if share is DECODE]
        if not 0 < len(decodes) <= MOST_DECODES:
            return
        most = MOST_ROWS // len(decodes) - 1
        for request in decodes:
            num_known = len(request.token_ids)
            if request.num_in_flight or not _may_draft(request):
                continue
            longest = min(most, step.budget, self._num_draftable(request, num_known))
            draft = drafts.draft(request, longest)
            draft = draft[: self._num_covered(request, num_known + len(draft)) - num_known]
            if draft:
                grown = self.page_tables.grow(request, num_known + len(draft))
                assert grown, "there was room for the draft"
                step.add_draft(request, draft)

    def _num_draftable(self, request: LiveRequest, num_known: int) -> int:
        """Tokens after the known ones that leave one more for the model to sample."""
        return self.page_tables.max_length(request) - num_known - 1

    def _num_covered(self, request: LiveRequest, end: int) -> int:
        """Tokens up to `end` that the request may have pages for, without any that others need
        next: a draft never makes a plan preempt."""
        page_size = self.pool.page_size
        num_held = len(request.page_table)
        if end <= num_held * page_size:
            return end
        running = self._running.values()
        num_spare = self.pool.num_free - self.admission.num_reserved(running) - len(running)
        return min(end, (num_held + max(0, num_spare)) * page_size)

    def _plan_prefill(self, request: LiveRequest, step: Step) -> None:
        if request.state is not RequestState.RUNNING:
            return  # preempted in this plan
        start = request.num_computed
        if request.loading:
            return
        # Without a free page it waits for the others; only if there are none does it preempt.
        if self.page_tables.room(request) == 0 and (
            step.plan or not self._grow(request, start + 1, step)
        ):
            return
        if self.page_tables.disk.num_left(request):
            self.page_tables.load(request)
            return
        budget = min(step.budget_at(start), self.page_tables.room(request))
        end = request.prefill_end
        share = limit(start, end, end, budget, step.ctx)
        if share.reason is LimitReason.ALIGNMENT:
            self.admission.count_deferral(request)
        if start + share.num_tokens >= request.prefill_end and not request.can_sample():
            return  # its last chunk would sample
        if share.num_tokens and self._grow(request, start + share.num_tokens, step):
            step.add(request, share)

    def _start(self, admitted: Admitted, step: Step) -> None:
        request, cached, num_on_disk, tail, share = admitted
        num_known = self.page_tables.cache.num_known(request)
        self._waiting.remove(request)
        self.page_tables.start(request, cached, num_on_disk, tail)
        if self.page_tables.cache.serves(request):
            self.followers.lead(request, request.page_hashes[len(cached) :])
        self._running[request.id] = request
        request.state = RequestState.RUNNING
        self._count_hits(request)
        request.prefill_end = len(request.token_ids)
        if request.cache is None:
            num_copied = tail.num_tokens if tail else 0
            request.cache = self.page_tables.cache.report(
                request, len(cached), num_copied, num_known, num_on_disk
            )
        if share is None:
            self.page_tables.load(request)
            return
        grown = self.page_tables.grow(request, request.num_computed + share.num_tokens)
        assert grown, "admitted without the pages it needs"
        if tail:
            self.page_tables.copy_tail(request, tail)
        step.add(request, share)

    def _count_hits(self, request: LiveRequest) -> None:
        num_hits = request.num_computed
        num_read = self.page_tables.disk.num_left(request)
        request.has_resumed = request.has_run
        if not request.has_run:
            request.num_cached = num_hits
            # Only here: what a preemption makes it compute again is not charged to its client.
            num_missing = len(request.token_ids) - num_hits - num_read
            self.fair_share.charge(request.asked.client, prefill=num_missing)
            self._stats.prompt_tokens += len(request.token_ids)
            if self.page_tables.cache.serves(request):
                self._stats.prefix_queries += len(request.token_ids)
                self._stats.prefix_hits += num_hits
        else:
            if self.page_tables.cache.serves(request):
                self._stats.resumed_queries += len(request.token_ids)
                self._stats.resumed_hits += num_hits
            self._stats.recomputed_tokens += max(0, request.num_lost - num_hits - num_read)

    # ---- samples of one prompt

    def _fork(self, leader: LiveRequest) -> None:
        """Its prompt has been computed: start the forks that waited for it, as far as possible."""
        for fork in self._forks.pop(leader):
            fork.leader = None
            passed = self._passed_by(fork)
            if passed is None:
                self._waiting.add(fork)
            else:
                self._start_fork(fork, leader)
                self.admission.count_overtaken(passed)

    def _passed_by(self, fork: LiveRequest) -> list[LiveRequest] | None:
        if fork.num_prompt == 1:
            return None
        running = self._running.values()
        return self.admission.passed_by_fork(fork, self._waiting, running, self.num_steps)

    def _start_fork(self, fork: LiveRequest, leader: LiveRequest) -> None:
        num_shared = self.page_tables.fork(fork, leader)
        fork.state = RequestState.RUNNING
        self._running[fork.id] = fork
        fork.prefill_end = fork.num_prompt
        fork.cache = self.page_tables.cache.report_fork(fork, num_shared)
        fork.num_cached = fork.cache.num_tokens
        self.fair_share.charge(fork.asked.client, prefill=1)
        self._stats.prompt_tokens += fork.num_prompt
        if self.page_tables.cache.serves(fork):
            self._stats.prefix_queries += fork.num_prompt
            self._stats.prefix_hits += fork.num_cached

    # ---- what the engine moves between steps

    def pop_copies(self) -> list[PageCopy]:
        """Pages to copy before the next step is planned, and before the planned one is launched:
        after that their sources may be written to."""
        return self.page_tables.pop_copies()

    def pop_disk_plan(self) -> DiskPlan:
        """What to move between the pool and the disk before the planned step is launched."""
        return self.page_tables.disk.pop_plan()

    def unwritten(self, most: int, *, is_idle: bool) -> list[tuple[bytes, int]]:
        """Up to `most` (hash, page) that should be on disk and are not, for the engine to write.

        Of all pages that no request holds, or unless the engine `is_idle`, of those about to be evicted.
        """
        disk = self.page_tables.disk
        return disk.unwritten(most) if is_idle else disk.endangered(most)

    def finish_save(self, save: Save, num_pages: int) -> None:
        """The disk took the first `num_pages` pages of this save."""
        self.page_tables.finish_save(num_pages)
        if self._unwarned is not None and self._unwarned[0] is save:
            _warn(save.request_id, self._unwarned[1], is_swapped=num_pages > 0)
            self._unwarned = None

    def accepts(self, load: Load) -> bool:
        """Whether a request still waits for the pages of this load."""
        request = self._live.get(load.request_id)
        return request is not None and request.loading is load.run

    def finish_load(self, load: Load, num_pages: int, *, has_state: bool = False) -> int | None:
        """The first `num_pages` pages of the load hold what was on disk; the others are lost.

        has_state: the recurrent state came as well; the id under which it is to be kept from now on,
        or None if it is not needed
        """
        request, first = self._live[load.request_id], load.run.first
        state_id = self.page_tables.finish_load(request, load, num_pages, has_state=has_state)
        self._queue(self.followers.pages_published(request.page_hashes[first : first + num_pages]))
        if not self._num_unread:
            self.page_tables.release_duplicates()
        return state_id

    def unwritten_states(self, most: int) -> list[tuple[bytes, int]]:
        """Up to `most` (hash of the page before, id) of recurrent states that should be on disk and
        are not, for an idle engine to write."""
        return self.page_tables.unwritten_states(most)

    def pop_dropped_states(self) -> list[int]:
        """Snapshots of recurrent states that are not needed once the planned step is launched."""
        return self.page_tables.pop_dropped_states()

    def state_ids(self) -> set[int] | None:
        """Ids of all snapshots that were planned and not dropped; None without recurrent states."""
        snapshots = self.page_tables.snapshots
        return None if snapshots is None else snapshots.ids()

    # ---- commit

    def update(self, chunks: Sequence[Chunk], sampled: Sequence[Sampled | None]) -> list[Output]:
        """Commit the results of the oldest unread step; `sampled` is None where a chunk does not."""
        if not chunks:
            return []
        assert self._num_unread > 0, "no step is unread"
        self._num_unread -= 1
        self.page_tables.release_duplicates()
        outputs: list[Output] = []
        page_size = self.pool.page_size
        for chunk, result in zip(chunks, sampled, strict=True):
            request = chunk.request
            assert chunk.samples == (result is not None), f"{request.id}: sampled out of turn"
            request.num_in_flight -= 1
            is_finished = request.state is RequestState.FINISHED
            taken: list[Sampled] = []
            reason = None
            if result is not None and not is_finished:
                taken, reason = self._take(request, chunk.draft, result)
            if chunk.draft:
                self._end_draft(chunk, taken)
            if chunk.end % page_size < chunk.length:  # it reached the end of a page
                self._publish(chunk)
            self.page_tables.commit_state(chunk)
            if is_finished:
                self.page_tables.release(request)
            elif taken:
                outputs += self._commit(request, taken, reason)
        if not self._num_unread:
            self.page_tables.release_duplicates()
        _ask_guides([chunk.request for chunk in chunks if chunk.samples])
        return outputs

    def _take(
        self, request: LiveRequest, draft: Sequence[int], result: Sampled
    ) -> tuple[list[Sampled], FinishReason | None]:
        """Append what was sampled: (what was appended, why the request ends with it).

        What follows a token of the draft counts if that token is the one that was sampled in its
        place, up to a token that ends the request. The numbers drawn for a position depend on seed
        and position alone (`sampler.key_of`), so these are the tokens that steps of one token would
        sample, also at a temperature: nothing is rejected at random.
        """
        taken = [result]
        request.token_ids.append(result.token_id)
        reason = self._reason(request)
        for guess, following in zip(draft, result.more, strict=True):
            if reason is not None or guess != taken[-1].token_id:
                break
            taken.append(following)
            request.token_ids.append(following.token_id)
            reason = self._reason(request)
        return taken, reason

    def _reason(self, request: LiveRequest) -> FinishReason | None:
        """Why the request ends with its newest token; None if it continues."""
        if request.token_ids[-1] in request.ends_on:
            return FinishReason.STOP
        if len(request.token_ids) >= self.page_tables.max_length(request):
            return FinishReason.LENGTH
        return FinishReason.REPETITION if _is_in_loop(request) else None

    def _end_draft(self, chunk: Chunk, taken: Sequence[Sampled]) -> None:
        """The rows of accepted tokens count as computed; the others will be written again."""
        request, num_accepted = chunk.request, max(0, len(taken) - 1)
        request.is_drafting = False
        request.num_computed += num_accepted
        request.num_drafted += len(chunk.draft)
        request.num_accepted += num_accepted
        self._stats.drafted_tokens += len(chunk.draft)
        self._stats.accepted_tokens += num_accepted
        if taken:
            self.fair_share.charge(request.asked.client, decode=num_accepted)
            if self._drafts is not None:
                self._drafts.learn(request, len(chunk.draft), num_accepted)

    def _publish(self, chunk: Chunk) -> None:
        """Make the pages findable that the chunk completed, now that it has been computed."""
        request, page_size = chunk.request, self.pool.page_size
        # A token that was dropped with its request's end stays unknown.
        end = min(chunk.end, len(request.token_ids))
        if chunk.draft:
            end = min(end, request.num_computed)  # the rows of rejected tokens hold others' keys
        first, end = chunk.start // page_size, end // page_size
        if first < end:
            self.page_tables.publish(request, first, end)
            self._queue(self.followers.pages_published(request.page_hashes[first:end]))

    def _commit(
        self, request: LiveRequest, taken: Sequence[Sampled], reason: FinishReason | None
    ) -> list[Output]:
        """The request's newest tokens were read: it continues, or ends for this reason."""
        if len(request.token_ids) == request.num_prompt + 1:
            self._fork(request)
        if reason is not None:
            self._finish(request, reason)
        *before, last = taken
        first = request.num_outputs - len(before)
        return [
            *[
                self._output(request, result, None, first + index)
                for index, result in enumerate(before)
            ],
            self._output(request, last, request.finish_reason, request.num_outputs),
        ]

    def _output(
        self,
        request: LiveRequest,
        result: Sampled | None,
        reason: FinishReason | None,
        num_outputs: int,
    ) -> Output:
        """`num_outputs`: tokens of the answer up to this one."""
        speculation = None
        if self._drafts is not None:
            speculation = SpeculationReport(request.num_drafted, request.num_accepted)
        return Output(
            request.id,
            (result.token_id,) if result else (),
            reason,
            request.num_prompt,
            request.num_cached,
            request.cache,
            (result.logprob,) if result and result.logprob else (),
            num_outputs,
            speculation,
        )

    def _finish(self, request: LiveRequest, reason: FinishReason) -> None:
        if request.asked.pins:
            self.page_tables.pin(request)
            self._prefixes[request.id] = request.asked
        self._end(request, reason)

    # ---- look inside

    def awaited_guide(self) -> Guide | None:
        """A guide whose next mask is not known yet."""
        guides = (request.asked.guide for request in self._live.values())
        return next((one for one in guides if one is not None and not one.is_ready), None)

    def requests(self) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """(running by admission, waiting with the next to be admitted first).

        Last those that wait for what another request computes: they have no place in the queue.
        """
        waiting = [*self._waiting.in_order(self.num_steps), *self.followers, *self._forks]
        return list(self._running.values()), waiting

    def stats(self) -> SchedulerStats:
        """A copy of the counters as of now."""
        self._stats.num_running = len(self._running)
        self._stats.num_waiting = self._num_waiting()
        return self._stats.copy()

    def state_stats(self) -> StateStats:
        """A copy of the counters of recurrent states."""
        return self._state_stats.copy()

    def check(self) -> None:
        """Audit requests and pool. Raises AssertionError."""
        live, running = list(self._live.values()), list(self._running.values())
        assert len(live) == self._num_waiting() + len(running), "a request is in limbo"
        assert len(running) <= self.config.max_num_seqs, "too many requests are running"
        self.page_tables.check(running, self._num_unread)
        self.page_tables.pins.check(live)
        self.fair_share.check(Counter(request.asked.client for request in live))
        self.followers.check(running, list(self._waiting))
        self._forks.check()
        parked = [*self.followers, *self._forks]
        check_waiting([*self._waiting, *parked], self.config.max_overtakes)
        for request in live:
            has_room = len(request.token_ids) < self.page_tables.capacity(request)
            assert has_room, f"{request.id} has no room to grow"


def _warn(request_id: str, number: int, *, is_swapped: bool) -> None:
    logger.warning(
        "Request %s is preempted by %s mode because there is not enough KV cache space. "
        "This can affect the end-to-end performance. Increase gpu_memory_utilization or "
        "tensor_parallel_size, or decrease max_num_seqs or max_num_batched_tokens. total_cumulative_preemption_cnt=%d",
        request_id,
        PreemptionMode.SWAP if is_swapped else PreemptionMode.RECOMPUTE,
        number,
    )


def _is_in_loop(request: LiveRequest) -> bool:
    params = request.asked.params
    return (
        params.stop_on_repetition
        and request.num_outputs >= params.min_tokens
        and repeats_itself(request.token_ids, request.num_prompt)
    )


def _ask_guides(requests: Sequence[LiveRequest]) -> None:
    """Have the masks computed that follow the tokens just read, all at once."""
    guided = [one for one in requests if one.asked.guide is not None and not one.is_finished]
    for guide in [request.feed_guide() for request in guided]:
        if guide is not None:
            guide.ask()


def _may_draft(request: LiveRequest) -> bool:
    """Not where a token's choice depends on the ones before it by more than the model: the sampler
    counts known tokens, and a guide has read only those."""
    return request.asked.guide is None and not request.asked.params.is_penalised

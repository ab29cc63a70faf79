"""GhostEngine: an engine without arrays, whose cache remembers which prefix each slot holds.

It plays the model, the cache and the pipeline around a real scheduler, and judges every step: a
chunk may attend only over slots that hold exactly its own prefix, written by an earlier step or by
itself. That one rule catches stale hits, pages shared across salts, evictions within a step, pages
published before they are computed, and pages freed while a step still uses them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, takewhile
from typing import Any

import pytest

from mlxserve.cache.groups import Window
from mlxserve.cache.hashing import extend_hashes, page_hash
from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.kind import EndKind, Uses
from mlxserve.cache.kinds.reclaim import Resize
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.pages import PagePool
from mlxserve.cache.pool_memory import PoolMemory
from mlxserve.core.config import PageTail, SchedulerConfig
from mlxserve.core.errors import MlxServeError
from mlxserve.core.forward_work import WorkBudget
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.stats import PoolStats
from mlxserve.images.picture import Placed, blocks_of, marks_of
from mlxserve.request import (
    GUESS,
    STATE_SLOTS,
    CacheMiss,
    CacheReport,
    Chunk,
    FinishReason,
    Guide,
    LiveRequest,
    Output,
    Request,
    RequestState,
    Resized,
    Sampled,
)
from mlxserve.scheduler.admission import MAX_CANDIDATES
from mlxserve.scheduler.disk_pages import Load
from mlxserve.scheduler.drafts import LookupDrafts
from mlxserve.scheduler.page_tables import PageCopy
from mlxserve.scheduler.scheduler import Scheduler
from tests.scheduler.fingerprint import fingerprint
from tests.scheduler.ghost_states import GhostStates
from tests.scheduler.ghost_windows import GhostWindows

VOCAB = 11
EOS = 0
ROOT = 1  # the name of the empty prefix
VERY_LONG = 1 << 30  # more tokens than any context


def advance(prefix: int, token_id: int) -> int:
    """The name of a prefix with one more token. Integers hash the same in every run."""
    return hash((prefix, token_id))


def next_token(prefix: int) -> int:
    """The fake model: greedy, and a function of the whole prefix."""
    return prefix // 7 % VOCAB


def move_slots(slots: dict[int, tuple[bytes, int]], resize: Resize, page_size: int) -> None:
    """Copy pages, and forget those that have no memory any more."""
    for source, target in zip(resize.sources, resize.targets, strict=True):
        for offset in range(page_size):
            slots.pop(target * page_size + offset, None)
            if (held := slots.get(source * page_size + offset)) is not None:
                slots[target * page_size + offset] = held
    for slot in [slot for slot in slots if slot >= resize.num_units * page_size]:
        del slots[slot]


def name_of(token_ids: Sequence[int]) -> int:
    return reduce(advance, token_ids, ROOT)


def seen(request: LiveRequest) -> list[int]:
    """Its tokens, and for a row of an image a number of the image as well: ids of two may be the same."""
    tokens = list(request.token_ids)
    for one in request.asked.pictures:
        for position in range(one.start, one.end):
            if tokens[position] < 0:
                tokens[position] = hash((tokens[position], int.from_bytes(one.picture.key)))
    return tokens


def answer(request: LiveRequest, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What the request would get alone, without cache, pages or steps."""
    prefix, tokens = name_of(seen(request)[: request.num_prompt]), []
    max_tokens = request.asked.params.max_tokens or max_model_len
    while True:
        tokens.append(next_token(prefix))
        prefix = advance(prefix, tokens[-1])
        if tokens[-1] in request.asked.stop_ids and not request.asked.params.ignore_eos:
            return tokens, FinishReason.STOP
        if len(tokens) >= max_tokens or request.num_prompt + len(tokens) >= max_model_len:
            return tokens, FinishReason.LENGTH


class GhostDrafts(LookupDrafts):
    """Drafts whose first tokens are right: how many is a function of the text, from none to all."""

    def expects_draft(self, request: LiveRequest) -> bool:
        return name_of(seen(request)) % 8 > 0

    def draft(self, request: LiveRequest, most: int) -> tuple[int, ...]:
        prefix = name_of(seen(request))
        length, num_right = min(most, 1 + prefix // 31 % 8), (0, 0, 1, 2, 4)[prefix // 1009 % 5]
        tokens: list[int] = []
        for index in range(length):
            right = next_token(prefix)
            tokens.append(right if index < num_right else (right + 1) % VOCAB)
            prefix = advance(prefix, tokens[-1])
        return tuple(tokens)


class GhostGuesses(GhostDrafts):
    """The same drafts, made on the device: the plan has placeholders, and some are never guessed."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._made: dict[LiveRequest, tuple[int, ...]] = {}
        self._num_made = 0

    def draft(self, request: LiveRequest, most: int) -> tuple[int, ...]:
        made = super().draft(request, most)
        self._num_made += 1
        self._made[request] = made if self._num_made % 5 else (GUESS,) * len(made)
        return (GUESS,) * len(made)

    def guessed(self, chunk: Chunk) -> tuple[int, ...]:
        return self._made[chunk.request][: len(chunk.draft)]


@dataclass
class GhostDisk:
    """What is on disk: for each hash the content of a page's slots, or a state."""

    pages: dict[bytes, list[tuple[bytes, int]]] = field(default_factory=dict)
    # After a page, by its hash.
    states: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    windows: dict[bytes, list[tuple[bytes, int]]] = field(default_factory=dict)  # as `pages`
    takes: int | None = None  # at most this many pages of each save
    is_fast: bool = True  # faster than computing
    # Units in memory of each kind, the last used last.
    used: dict[str, dict[bytes, None]] = field(default_factory=lambda: defaultdict(dict))

    def of(self, kind: str) -> dict[bytes, Any]:
        return {"pages": self.pages, "states": self.states, "windows": self.windows}[kind]

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(self.pages.__contains__, hashes))

    def has(self, kind: str, hash_: bytes) -> bool:
        return hash_ in self.of(kind)

    def pays(self, num_tokens: int, num_units: Mapping[str, int]) -> bool:
        assert num_tokens > 0, "asked about nothing"
        assert sum(num_units.values()) > 0, "nothing is read"
        return self.is_fast

    def use(self, uses: Mapping[str, Uses]) -> None:
        for kind, (hashes, _) in uses.items():
            for hash_ in reversed(hashes):
                self.used[kind].pop(hash_, None)
                self.used[kind][hash_] = None

    def unwritten(self, kind: str) -> Iterator[bytes]:
        return (hash_ for hash_ in reversed(self.used[kind]) if hash_ not in self.of(kind))

    def is_unwritten(self, kind: str, hash_: bytes) -> bool:
        return hash_ in self.used[kind] and hash_ not in self.of(kind)

    def forget(self, kind: str, hashes: Iterable[bytes]) -> None:
        for hash_ in hashes:
            self.used[kind].pop(hash_, None)


@dataclass
class GhostEngine:
    scheduler: Scheduler
    disk: GhostDisk = field(default_factory=GhostDisk)
    slots: dict[int, tuple[bytes, int]] = field(default_factory=dict)  # slot -> (salt, prefix)
    unread: deque[tuple[list[Chunk], list[Sampled | None]]] = field(default_factory=deque)
    prefixes: dict[LiveRequest, list[int]] = field(
        default_factory=dict
    )  # by position, on the device
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    tables: dict[LiveRequest, tuple[int, ...]] = field(default_factory=dict)
    reports: dict[str, CacheReport | None] = field(default_factory=dict)
    num_saved: int = 0  # pages of preempted requests that the disk took
    loads: list[Load] = field(default_factory=list)
    guesses: GhostGuesses | None = None  # of drafts that are made on the device
    pinned: list[LiveRequest] = field(default_factory=list)  # named prefixes, computed
    promises: dict[LiveRequest, int] = field(default_factory=dict)  # tokens it may have in any case
    num_computed: int = 0
    num_copied: int = 0  # pages
    num_resized: int = 0  # arrays that became smaller
    lost: set[LiveRequest] = field(default_factory=set)  # that a page on disk was lost for
    planned: bool = True  # whether the last plan had a chunk
    states: GhostStates = field(init=False)
    windows: GhostWindows = field(init=False)
    trace: list[list[tuple[str, int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = GhostStates(self.scheduler, ROOT)
        self.windows = GhostWindows(self.scheduler)

    @property
    def may_recompute(self) -> bool:
        """Cached pages may lack a recurrent state or a window there."""
        return self.states.are_kept or self.windows.are_kept

    @property
    def copies_tails(self) -> bool:
        """Not where there are recurrent states or windows: a tail ends in the middle of a page."""
        return self.scheduler.config.page_tail is PageTail.COPY and not self.may_recompute

    # ---- what a caller does

    def add(
        self,
        token_ids: Sequence[int],
        max_tokens: int | None = 4,
        *,
        request_id: str | None = None,
        salt: bytes = b"",
        priority: int = 0,
        client: str = "",
        ignore_eos: bool = True,
        pins: bool = False,
        pin_share: float = 1.0,
        fork_of: LiveRequest | None = None,
        guide: Guide | None = None,
        skips_cache: bool = False,
        pictures: Placed = (),
        now: float = 0.0,
    ) -> LiveRequest:
        asked = Request(
            id=request_id or f"r{len(self.requests)}",
            token_ids=list(token_ids),
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
            stop_ids=frozenset({EOS}),
            cache_salt=salt,
            client=client,
            priority=priority,
            pins=pins,
            pin_share=pin_share,
            fork_of=fork_of.id if fork_of else None,
            guide=guide,
            skips_cache=skips_cache,
            pictures=pictures,
        )
        if pictures:  # as the engine does, to compute only images that are not cached
            self.scheduler.planner.admission.num_found(asked)
        request = self.scheduler.add(asked, now)
        self._know(request)
        return request

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        was_live = request_id in self.requests and request_id not in self.ends
        outputs = self.scheduler.abort(request_id, reason)
        assert len(outputs) == was_live
        for output in outputs:
            assert output.token_ids == ()
            assert output.finish_reason is reason
            self.reports[request_id] = output.cache
            self.ends[request_id] = reason
        self.audit()

    @property
    def prefixes_under_way(self) -> bool:
        return any(request.asked.pins for request in self._live())

    def reset(self, *, force: bool = False) -> bool:
        while force and self.unread:
            self.read()
        done = self.scheduler.reset_prefix_cache(force=force)
        self.tables.clear()  # they were all given back at once
        self.audit()
        return done

    def resize(self, num_pages: int) -> Resized:
        """Refused if, and only if, it should be; and then nothing has happened."""
        while self.unread:
            self.read()
        is_refused, pool = self._is_refused(num_pages), self.scheduler.pool
        before = self.scheduler.stats(), PoolStats.from_owner(pool)
        whole = fingerprint(self.scheduler) if is_refused else None
        tables = {request: request.page_table for request in self._live()}
        live = {request.id for request in self._live()}
        try:
            resized = self.scheduler.resize(num_pages)
        except MlxServeError:
            assert is_refused, "refused without a reason"
            assert fingerprint(self.scheduler) == whole, "refused, and changed"
            self.audit()
            raise
        assert not is_refused, "not refused"
        prefixes = {prefix.id for prefix in self.pinned}
        assert live <= self.scheduler.roster.ids, "a request is lost"
        if num_pages < before[1].num_pages:
            assert resized.num_preempted == before[0].num_running
            assert resized.num_forgotten == before[1].num_cached
            assert self.scheduler.roster.ids == live | prefixes, "a named prefix is lost"
            self._begin_again()
        else:
            assert (resized.num_preempted, resized.num_forgotten) == (0, 0)
            assert all(request.page_table is table for request, table in tables.items())
        assert self.scheduler.pool.num_pages == resized.num_pages == num_pages
        self.audit()
        return resized

    def fail(self) -> None:
        """A step fails: what runs is lost, what waits and named prefixes are not."""
        running = {r.id for r in self._live() if r.state is RequestState.RUNNING}
        waiting = {r.id for r in self._live()} - running
        self.unread.clear()
        self.loads.clear()
        self.scheduler.restart()
        self.ends |= dict.fromkeys(running, FinishReason.ABORT)
        live = self.scheduler.roster.ids
        assert waiting <= live <= waiting | {prefix.id for prefix in self.pinned}
        self._begin_again()
        self.audit()

    def _begin_again(self) -> None:
        """The pool is another one, and empty: named prefixes are computed by new requests."""
        assert not any(load.is_wanted for load in self.loads), "a page that is gone is read"
        assert self.scheduler.pool.num_cached == self.scheduler.pool.num_used == 0
        self.slots.clear()
        self.states.forget()
        self.windows.slots.clear()
        self.tables.clear()
        self.pinned.clear()
        for request in self.scheduler.roster.live:
            if self.requests.get(request.id) is not request:
                name = (
                    f"{request.id} before step {self.scheduler.num_steps} of {len(self.requests)}"
                )
                self.requests[name] = self.requests.pop(request.id)
                self.answers[name] = self.answers.pop(request.id)
                self.ends[name] = self.ends.pop(request.id)
                self._know(request)

    def _know(self, request: LiveRequest) -> None:
        longest = request.num_prompt + (request.asked.params.max_tokens or VERY_LONG)
        self.promises[request] = min(longest, self.scheduler.page_tables.capacity.of(request))
        self.requests[request.id] = request
        self.answers[request.id] = []
        names = accumulate(seen(request), advance, initial=ROOT)
        self.prefixes[request] = list(names)[1:]

    def _is_refused(self, num_pages: int) -> bool:
        """By computing anew what each request and prefix needs."""
        scheduler = self.scheduler
        if num_pages >= scheduler.pool.num_pages:
            return False
        prefixes = [*self.pinned, *(request for request in self._live() if request.asked.pins)]
        claims = Counter(hash_ for prefix in prefixes for hash_ in self._pinned_hashes(prefix))
        quota = int(scheduler.config.max_pinned_fraction * num_pages)
        if len(claims) > quota or self._exceeds_a_share(prefixes, quota):
            return True

        def capacity(request: LiveRequest, num_pages: int) -> int:
            page_size = scheduler.pool.page_size
            if request.asked.pins:
                own = self._pinned_hashes(request)
                if self.may_recompute:  # it may have to compute what others have as well
                    own = [hash_ for hash_ in own if claims[hash_] == 1]
            elif request.asked.skips_cache or self.may_recompute:
                own = []
            else:
                own = self._page_hashes(request)[: (request.num_prompt - 1) // page_size]
            num_left = num_pages - len(claims.keys() - set(own))
            return min(scheduler.config.max_model_len, num_left * page_size)

        return any(
            capacity(request, num_pages) < max(self.promises[request], len(request.token_ids) + 1)
            for request in self._live()
        ) or any(capacity(prefix, num_pages) <= prefix.num_prompt for prefix in self.pinned)

    def _exceeds_a_share(self, prefixes: Sequence[LiveRequest], quota: int) -> bool:
        """Whether a client's prefixes have more pages than the largest share that was granted to it."""
        for client in {prefix.asked.client for prefix in prefixes}:
            own = [prefix for prefix in prefixes if prefix.asked.client == client]
            share = int(max(prefix.asked.pin_share for prefix in own) * quota)
            if len({hash_ for prefix in own for hash_ in self._pinned_hashes(prefix)}) > share:
                return True
        return False

    def _page_hashes(self, request: LiveRequest) -> list[bytes]:
        """Of all its full pages, computed anew."""
        hashes: list[bytes] = []
        page_size = self.scheduler.pool.page_size
        asked = request.asked
        marks = marks_of(asked.pictures)
        extend_hashes(hashes, request.token_ids, page_size, asked.cache_salt, marks)
        return hashes

    def _pinned_hashes(self, prefix: LiveRequest) -> list[bytes]:
        """Of the pages that a named prefix pins: the last one only if tails are copied."""
        num_full, num_in_tail = divmod(prefix.num_prompt, self.scheduler.pool.page_size)
        hashes = self._page_hashes(prefix)[:num_full]
        if num_in_tail and self.copies_tails:
            tail = prefix.token_ids[prefix.num_prompt - num_in_tail : prefix.num_prompt]
            parent = hashes[-1] if hashes else b""
            hashes.append(page_hash(parent, tail, prefix.asked.cache_salt))
        return hashes

    def unpin(self, request: LiveRequest) -> None:
        self.pinned.remove(request)
        self.scheduler.unpin(request.id)
        self.audit()

    def audit(self) -> None:
        """Invariants that hold between any two calls."""
        self.scheduler.check()
        self._judge_findable()
        self._judge_published()
        self._judge_releases()
        self._judge_pins()
        self._judge_reports()
        self._judge_counts()
        self.states.judge()
        self.windows.judge(self._live(), self._in_flight())

    def _in_flight(self) -> list[Chunk]:
        return [chunk for chunks, _ in self.unread for chunk in chunks]

    def must_divide(self, pictures: Placed) -> bool:
        """Whether a step with every other answer in it, or a window's pages, lack room for an image."""
        config, ends = self.scheduler.config, self.scheduler.page_tables.ends
        longest = max((end - first for first, end in blocks_of(pictures)), default=0)
        others = config.max_num_seqs - 1 if config.enable_chunked_prefill else 0
        most = [end.window.longest_block for end in ends if isinstance(end, WindowPages)]
        return longest > min([config.step_budget - others, *most])

    # ---- what a test says

    def pages(self, *numbers: int) -> list[int]:
        """A prompt with a page of each number."""
        return [number for number in numbers for _ in range(self.scheduler.pool.page_size)]

    def spans(self, chunks: Sequence[Chunk]) -> list[tuple[str, int, int]]:
        """(request, first position, tokens) of each chunk, in order."""
        return [(chunk.request.id, chunk.start, chunk.length) for chunk in chunks]

    # ---- what an engine does

    def launch(
        self, prefill_budget: int | None = None, work: WorkBudget | None = None
    ) -> list[Chunk]:
        """Plan a step and execute it at once, before anything later, as a device stream would."""
        chunks = self._launch(prefill_budget, work)
        self.audit()
        return chunks

    def read(self) -> list[Output]:
        """Read the oldest unread step."""
        outputs = self._read()
        self.audit()
        return outputs

    def _launch(
        self, prefill_budget: int | None = None, work: WorkBudget | None = None
    ) -> list[Chunk]:
        self._copy_pages()
        before = self._before_plan()
        chunks = self.scheduler.schedule(prefill_budget, work)
        self._copy_pages()
        self._transfer()
        self._judge_plan(chunks, before)
        if (
            prefill_budget is None
            and work is None
            and before["preemptions"] == self.scheduler.stats().num_preemptions
        ):
            self._judge_leftovers(chunks, before)
        self.trace.append(self.spans(chunks))
        if chunks:
            self.unread.append((chunks, self._execute(chunks)))
        self.states.drop()
        return chunks

    def _read(self) -> list[Output]:
        chunks, sampled = self.unread.popleft()
        outputs = self.scheduler.update(chunks, sampled)
        for output in outputs:
            self._take(output)
        return outputs

    def step(self) -> list[Chunk]:
        """One turn of the pipelined loop: launch step n+1, then read step n."""
        while len(self.unread) > 1 or (self.unread and self._must_know()):
            self._read()
        while self.loads:
            self.finish_load(self.loads[0])
        chunks = self._launch()
        while len(self.unread) > bool(chunks):
            self._read()
        self.audit()
        return chunks

    def _must_know(self) -> bool:
        return self.scheduler.must_read()

    def drain(self) -> None:
        """Run until every request has ended, and check that nothing is left."""
        turns = 0
        while self.scheduler.has_work:
            self.step()
            turns += 1
            assert turns < 10_000, "the scheduler makes no progress"
        assert not self.unread
        assert self.ends.keys() == self.requests.keys(), "a request never ended"
        assert self.scheduler.pool.num_used == self.scheduler.pool.num_pinned, "pages are lost"
        for end in self.scheduler.page_tables.ends:
            assert end.pool is None or end.pool.num_used == 0, f"units of {end.name} are lost"

    def fork(
        self, token_ids: Sequence[int], max_tokens: int | None, n: int, pictures: Placed = ()
    ) -> list[LiveRequest]:
        """n samples of one prompt; greedy, and so all the same."""
        leader = self.add(token_ids, max_tokens, pictures=pictures)
        others = (
            self.add(token_ids, max_tokens, fork_of=leader, pictures=pictures) for _ in range(n - 1)
        )
        return [leader, *others]

    def _copy_pages(self) -> None:
        balance = self.scheduler.moves.balance
        for resize in balance.pop_resizes() if balance is not None else ():
            assert not self.unread, "pages move while a step is unread"
            self.num_resized += 1
            if resize.dropped:
                self.states.drop_now(resize.dropped)
                continue
            page_size = self.scheduler.pool.page_size
            slots = self.slots if resize.kind == FullPages.name else self.windows.slots
            move_slots(slots, resize, page_size)
            if resize.kind == FullPages.name:
                targets = dict(zip(resize.sources, resize.targets, strict=True))
                for request, table in self.tables.items():
                    self.tables[request] = tuple(targets.get(page, page) for page in table)
        for copy in self.scheduler.moves.pop_copies():
            self._copy(copy)

    def _copy(self, copy: PageCopy) -> None:
        """Slots that were not written stay unwritten."""
        self.num_copied += 1
        for source, target in zip(self._slots(copy.source), self._slots(copy.target), strict=True):
            self.slots.pop(target, None)
            if source in self.slots:
                self.slots[target] = self.slots[source]

    # ---- the disk

    def _transfer(self) -> None:
        """Save at once; loads end later."""
        plan = self.scheduler.moves.disk.pop_plan()
        for save in plan.saves:
            assert not self.unread, "pages are saved while a step is unread"
            (_, full), *ends = save.units
            pages = dict(full[: self.disk.takes])
            self._write_to_disk("pages", pages)
            for kind, units in ends if len(pages) == len(full) else ():
                self._write_to_disk(kind, dict(units))
            self.num_saved += len(pages)
            self.scheduler.moves.finish_save(save, len(pages))
        self.loads += plan.loads

    def _write_to_disk(self, kind: str, units: Mapping[bytes, int]) -> None:
        for hash_, unit in units.items():
            assert hash_ not in self.disk.of(kind), f"unit {unit} of {kind} is written twice"
            self.disk.of(kind)[hash_] = self._content(kind, unit)

    def _content(self, kind: str, unit: int) -> Any:
        if kind == "states":
            return self.states.snapshots[unit]
        slots = self.slots if kind == "pages" else self.windows.slots
        return [slots[slot] for slot in self._slots(unit)]

    def _fill(self, kind: str, unit: int, content: Any) -> None:
        if kind == "states":
            self.states.snapshots[unit] = content
            return
        slots = self.slots if kind == "pages" else self.windows.slots
        slots.update(zip(self._slots(unit), content, strict=True))

    def clean(self, count: int, *, is_idle: bool = True) -> None:
        """Write pages that no request holds, as an engine does between two steps."""
        while self.unread:
            self._read()
        moves = self.scheduler.moves
        if not is_idle:
            self._write_to_disk("pages", dict(moves.disk.endangered(count)))
            for kind in moves.ends:
                units = moves.disk.endangered_at_end(kind, count)
                self._write_to_disk(kind.name, dict(units))
        for kind in moves.kinds if is_idle else ():
            self._write_to_disk(kind.name, dict(moves.disk.unwritten(kind, count)))
        self.audit()

    def finish_load(self, load: Load, at_most: int | None = None) -> None:
        """Write the first `at_most` pages of a load that are on disk, if a request waits for it."""
        self.loads.remove(load)
        if not load.is_wanted:
            return
        num_pages = self.disk.num_leading(load.run.hashes[:at_most])
        for hash_, page in zip(load.run.hashes[:num_pages], load.pages, strict=False):
            self._fill("pages", page, self.disk.pages[hash_])
        moves = self.scheduler.moves
        ends = [(end.name, each) for end, each in zip(moves.ends, load.ends, strict=load.is_last)]
        has_ends = load.is_last and num_pages == len(load.pages)
        has_ends = has_ends and all(
            self.disk.has(kind, hash_) for kind, units in ends for hash_, _ in units
        )
        for kind, units in ends if has_ends else ():
            for hash_, unit in units:
                self._fill(kind, unit, self.disk.of(kind)[hash_])
        if num_pages < len(load.pages) or has_ends != load.is_last:
            self.lost.add(load.request)
        moves.finish_load(load, num_pages, has_ends=has_ends)
        self.audit()

    def _slots(self, page: int) -> range:
        page_size = self.scheduler.pool.page_size
        return range(page * page_size, (page + 1) * page_size)

    # ---- the model and its cache

    def _execute(self, chunks: list[Chunk]) -> list[Sampled | None]:
        self._judge_in_flight(chunks)
        for chunk in chunks:
            self._judge_attention(chunk, chunk.start)  # before anything of this step is written
            self.states.run(chunk, self._prefixes_of(chunk))
        written: set[int] = set()
        for chunk in chunks:
            self._judge_written(chunk)
            prefixes = self._prefixes_of(chunk)
            for position in range(chunk.start, chunk.end):
                slot = self._slot(chunk, position)
                assert slot not in written, f"slot {slot} is written twice in one step"
                written.add(slot)
                self.slots[slot] = chunk.request.asked.cache_salt, prefixes[position]
        for chunk in chunks:
            self._judge_attention(chunk, chunk.end)
            self.num_computed += chunk.length
        rows = [(chunk, self._prefixes_of(chunk)) for chunk in chunks]
        self.windows.run(rows, self._in_flight())
        return [self._sample(chunk) for chunk in chunks]

    def _sample(self, chunk: Chunk) -> Sampled | None:
        if not chunk.samples:
            return None
        prefixes = self.prefixes[chunk.request]
        num_draft = len(chunk.draft)
        assert chunk.end - num_draft == len(prefixes), "sampled in the middle"
        first, *more = [
            next_token(prefix) for prefix in self._prefixes_of(chunk)[chunk.end - num_draft - 1 :]
        ]
        prefixes.append(advance(prefixes[-1], first))
        sampled = first
        draft = self._draft_of(chunk)
        for guess, following in zip(draft, more, strict=True):
            if guess != sampled:
                break
            sampled = following
            prefixes.append(advance(prefixes[-1], sampled))
        guesses = draft if chunk.draft[:1] == (GUESS,) else ()
        return Sampled(first, more=tuple(map(Sampled, more)), guesses=guesses)

    def _draft_of(self, chunk: Chunk) -> tuple[int, ...]:
        if chunk.draft[:1] != (GUESS,):
            return chunk.draft
        assert self.guesses is not None, "a placeholder that nothing fills"
        return self.guesses.guessed(chunk)

    def _prefixes_of(self, chunk: Chunk) -> list[int]:
        """By position, as far as the chunk goes: those of its draft included, right or wrong."""
        if not chunk.draft:
            return self.prefixes[chunk.request]
        before = self.prefixes[chunk.request][: chunk.start + 1]
        return before[:-1] + list(accumulate(self._draft_of(chunk), advance, initial=before[-1]))

    def _slot(self, chunk: Chunk, position: int) -> int:
        page_size = self.scheduler.pool.page_size
        return chunk.page_table[position // page_size] * page_size + position % page_size

    def _judge_attention(self, chunk: Chunk, end: int) -> None:
        prefixes = self._prefixes_of(chunk)
        for position in range(end):
            held = self.slots.get(self._slot(chunk, position))
            wanted = chunk.request.asked.cache_salt, prefixes[position]
            assert held == wanted, (
                f"{chunk.request.id} attends over {held} at {position}, not over its own prefix"
            )

    def _judge_in_flight(self, chunks: list[Chunk]) -> None:
        for unread, _ in self.unread:
            for other in unread:
                for chunk in chunks:
                    if chunk.request is other.request:
                        continue
                    page_size = self.scheduler.pool.page_size
                    last = (chunk.end - 1) // page_size + 1
                    mine = set(chunk.page_table[chunk.start // page_size : last])
                    assert not mine & set(other.page_table), (
                        "a page in flight is written by another"
                    )

    def _judge_written(self, chunk: Chunk) -> None:
        """A page is written only by its single holder, before it can be found."""
        pool = self.scheduler.pool
        for page in chunk.page_table[
            chunk.start // pool.page_size : -(-chunk.end // pool.page_size)
        ]:
            assert pool.ref_count(page) == 1, f"page {page} is shared and written"
            assert pool.index.hash_of(page) is None, f"page {page} is findable and written"

    def _judge_findable(self) -> None:
        pool = self.scheduler.pool
        for chunks, _ in self.unread:
            for chunk in chunks:
                last = (chunk.end - 1) // pool.page_size + 1
                for page in chunk.page_table[chunk.start // pool.page_size : last]:
                    assert pool.index.hash_of(page) is None, (
                        f"page {page} is found, but not yet computed"
                    )

    def _judge_published(self) -> None:
        """A page that can be found holds its request's tokens, and none of a rejected draft."""
        pool = self.scheduler.pool
        for request in self._live():
            for index, page in enumerate(request.page_table):
                if pool.index.hash_of(page) is None:
                    continue
                end = (index + 1) * pool.page_size
                assert end <= len(request.token_ids), f"page {page} is findable before its tokens"
                wanted = request.asked.cache_salt, self.prefixes[request][end - 1]
                assert self.slots[self._slots(page)[-1]] == wanted, f"page {page} holds others"

    def _judge_releases(self) -> None:
        """Of the pages that a request released just now, the last is evicted first."""
        rank = {page: index for index, page in enumerate(self.scheduler.pool.order.first())}
        for request in self.requests.values():
            before = self.tables.get(request, ())
            self.tables[request] = request.page_table
            if before and not request.page_table:
                # Others may have been moved to what is blank since then.
                hash_of = self.scheduler.pool.index.hash_of
                own = zip(before, request.page_hashes, strict=False)
                ranks = [rank[page] for page, h in own if page in rank and hash_of(page) == h]
                assert ranks == sorted(ranks, reverse=True), "a prefix is evicted before its end"

    def _judge_reports(self) -> None:
        for request in self.requests.values():
            if (report := request.cache) is not None:
                num_copied = report.num_tokens - report.num_pages * self.scheduler.pool.page_size
                assert 0 <= num_copied < self.scheduler.pool.page_size
                assert not num_copied or self.copies_tails
                assert report.num_tokens <= report.differs_at < request.num_prompt
                assert report.num_tokens == request.num_cached
                is_off = not self._serves(request)
                assert (report.reason is CacheMiss.OFF) == is_off

    def _serves(self, request: LiveRequest) -> bool:
        """Whether the prefix cache is there for the request."""
        is_on: bool = self.scheduler.config.enable_prefix_caching
        return is_on and not request.asked.skips_cache

    def _judge_pins(self) -> None:
        """Every page of a named prefix is found until the prefix is dropped."""
        pool = self.scheduler.pool
        for request in self.pinned:
            num_full, num_in_tail = divmod(request.num_prompt, pool.page_size)
            found = pool.index.match(request.page_hashes[:num_full], request.token_ids)
            assert len(found) == num_full, f"a page of prefix {request.id} was evicted"
            if num_in_tail and self.copies_tails:
                page = pool.index.page_of(self._pinned_hashes(request)[-1])
                wanted = request.asked.cache_salt, name_of(request.token_ids[: request.num_prompt])
                last = page * pool.page_size + num_in_tail - 1
                assert self.slots[last] == wanted, f"the tail of prefix {request.id} is lost"

    def _judge_counts(self) -> None:
        """Each request counts once, even if it is preempted."""
        stats = self.scheduler.stats()
        admitted = [request for request in self.requests.values() if request.has_run]
        assert stats.prompt_tokens == sum(request.num_prompt for request in admitted)
        served = [request for request in admitted if self._serves(request)]
        assert stats.prefix_queries == sum(request.num_prompt for request in served)
        assert stats.prefix_hits == sum(request.num_cached for request in admitted)
        assert stats.resumed_hits <= stats.resumed_queries
        assert stats.swapped_tokens == self.num_saved * self.scheduler.pool.page_size
        assert stats.overtakes == sum(r.num_overtaken for r in self.requests.values())

    # ---- the judge of plans

    def _before_plan(self) -> dict[str, object]:
        running = [r for r in self._live() if r.state is RequestState.RUNNING]
        waiting = [r for r in self._live() if r.state is RequestState.WAITING]
        return {
            "decodes": [r for r in running if r.num_computed >= r.prefill_end and self._goes_on(r)],
            "waiting": set(waiting),
            "overtaken": {request: request.num_overtaken for request in waiting},
            "preemptions": self.scheduler.stats().num_preemptions,
            "held": {r: len(r.page_table) for r in running},
            "yielded": self.scheduler.stats().priority_preemptions,
            "may_yield": {r for r in running if len(r.token_ids) >= r.spared_until},
            "might_preempt": self.scheduler.preemption.might_preempt(),
            "unread": len(self.unread),
        }

    def _judge_plan(self, chunks: list[Chunk], before: dict[str, object]) -> None:
        config, scheduler = self.scheduler.config, self.scheduler
        preempted = scheduler.stats().num_preemptions != before["preemptions"]
        assert sum(chunk.length for chunk in chunks) <= config.step_budget
        assert len({chunk.request for chunk in chunks}) == len(chunks), "two chunks of one request"
        for chunk in chunks:
            self._judge_chunk(chunk)
        self._judge_drafts([chunk for chunk in chunks if chunk.draft], before["held"])
        is_prefill = [chunk.start < chunk.request.prefill_end for chunk in chunks]
        assert is_prefill == sorted(is_prefill), "a decode comes after a prefill"
        planned = {chunk.request for chunk in chunks}
        for request in before["decodes"]:
            left_out = request.state is RequestState.RUNNING and request not in planned
            num_free = scheduler.page_tables.num_free
            assert not left_out or (before["unread"] and num_free == 0), (
                f"{request.id} could decode, but is left out"
            )
        if preempted:
            assert not before["unread"], "preempted while a step was unread"
            # An image that one chunk computes may need more pages than it counts.
            has_images = any(request.asked.blocks for request in self.requests.values())
            assert before["might_preempt"] or has_images, "preempted although it said no"
            assert not planned & before["waiting"], "admitted in a step that preempted"
        if scheduler.stats().priority_preemptions != before["yielded"]:
            assert not before["unread"], "preempted while a step was unread"
            made_way = {r for r in before["may_yield"] if r.spared_until > len(r.token_ids)}
            highest = min(request.asked.priority for request in before["waiting"])
            num_yielded = scheduler.stats().priority_preemptions - before["yielded"]
            assert sum(r.asked.priority > highest for r in made_way) >= num_yielded
        self._judge_order(planned & before["waiting"], before)
        is_read = any(load.is_wanted for load in self.loads)
        # A request that holds the duplicate of a pinned page may have to preempt itself.
        assert chunks or before["unread"] or is_read or preempted or not self._live(), (
            "nothing is planned, ever"
        )
        assert chunks or not preempted or self.planned, "preempted twice in a row without a plan"
        self.planned = bool(chunks)

    def _judge_drafts(self, drafted: list[Chunk], held: dict[LiveRequest, int]) -> None:
        """Of answers whose tokens depend on the model alone, and in pages that no other request needs next."""
        scheduler, page_size = self.scheduler, self.scheduler.pool.page_size
        running = scheduler.roster.running.values()
        needed = len(running) + sum(
            max(0, -(-request.prefill_end // page_size) - len(request.page_table))
            for request in running
        )
        for chunk in drafted:
            guide = chunk.request.asked.guide
            is_forced = guide is None or chunk.draft == tuple(guide.foreseen[: len(chunk.draft)])
            assert is_forced, "a draft of a guided answer without masks"
            own = max(held.get(chunk.request, 0), chunk.start // page_size + 1)
            has_more = len(chunk.page_table) > own
            assert not has_more or scheduler.pool.num_free >= needed, "a draft took others' pages"

    def _judge_order(self, admitted: set[LiveRequest], before: dict[str, object]) -> None:
        """A request that was overtaken lacks memory, or a page of budget, or follows a leader. Only
        for lack of memory is it overtaken, and only within its class."""
        if any(request.is_deferred for request in self._live()):
            return
        for request in before["waiting"] - admitted:
            if request in self.scheduler.roster.followers:
                continue
            if request.state is not RequestState.WAITING or request.leader is not None:
                continue
            for other in admitted:
                is_alike = (request.asked.client, request.has_run) == (
                    other.asked.client,
                    other.has_run,
                )
                if not is_alike or self._is_ageing(request, other):
                    continue
                place, others = ((r.asked.priority, r.arrival) for r in (request, other))
                if place < others:
                    assert request.asked.priority == other.asked.priority, (
                        f"{request.id} is overtaken by another class"
                    )
                    assert request.num_overtaken > before["overtaken"][request], (
                        f"{request.id} is overtaken without a reason"
                    )

    def _judge_leftovers(self, chunks: list[Chunk], before: dict[str, object]) -> None:
        """Where every waiting request would find pages and a slot, each one that fits into what
        is left of the step is in it, at any place in the queue."""
        scheduler, config, pool = self.scheduler, self.scheduler.config, self.scheduler.pool
        waiting = [r for r in before["waiting"] if r.state is RequestState.WAITING]
        waiting = [r for r in waiting if r.leader is None]
        needed = sum(-(-len(r.token_ids) // pool.page_size) for r in waiting) + len(chunks)
        running, _ = scheduler.requests()
        if (
            not config.enable_chunked_prefill
            or len(waiting) > MAX_CANDIDATES
            or needed > pool.num_free - scheduler.planner.admission.num_reserved()
            or len(running) + len(waiting) > config.max_num_seqs
            or self.windows.are_kept  # they bound each chunk
            or not self.states.have_room(len(waiting))
        ):
            return
        left = config.step_budget - sum(map(self._most_charged, chunks))
        for request in waiting:
            is_follower = request in scheduler.roster.followers
            guide = request.asked.guide
            has_mask = guide is None or guide.is_ready
            is_too_long = len(request.token_ids) > left
            assert is_follower or is_too_long or not has_mask, f"{request.id} is left out"

    def _most_charged(self, chunk: Chunk) -> int:
        if chunk.start >= chunk.request.prefill_end:
            return chunk.length
        page_size = self.scheduler.pool.page_size
        return (-(-chunk.end // page_size) - chunk.start // page_size) * page_size

    def _is_ageing(self, *requests: LiveRequest) -> bool:
        now, steps = self.scheduler.num_steps, self.scheduler.config.ageing_steps
        return any(now - request.queued_at >= steps for request in requests)

    def _judge_chunk(self, chunk: Chunk) -> None:
        request, page_size = chunk.request, self.scheduler.pool.page_size
        assert request.state is RequestState.RUNNING
        assert chunk.length >= 1
        assert chunk.end <= self.scheduler.max_model_len
        assert len(chunk.page_table) * page_size >= chunk.end
        assert chunk.is_lazy == (chunk.start == len(request.token_ids))
        assert chunk.samples == (chunk.end >= len(request.token_ids))
        if chunk.draft:
            self._judge_draft(chunk)
        if self.scheduler.rules.is_aligned and chunk.start < request.prefill_end:
            edges = [edge for block in request.asked.blocks for edge in block]
            assert chunk.end % page_size == 0 or chunk.end in (request.prefill_end, *edges)
        self._judge_blocks(chunk)
        if chunk.is_lazy:
            assert self._goes_on(request), "decodes past a certain end"

    def _judge_blocks(self, chunk: Chunk) -> None:
        """An image whose rows attend to one another is computed in one chunk."""
        request = chunk.request
        for first, end in request.asked.blocks:
            assert not first < chunk.end < end, f"a chunk of {request.id} ends inside an image"
            # What is computed again has the rows before it in its pages.
            may_divide = request in self.lost or request.asked.fork_of is not None
            assert may_divide or not first < chunk.start < end, (
                f"a chunk of {request.id} begins inside an image"
            )

    def _judge_draft(self, chunk: Chunk) -> None:
        request = chunk.request
        assert chunk.start == len(request.token_ids) - 1, "drafted after an unknown token"
        assert chunk.length == 1 + len(chunk.draft)
        assert chunk.start >= request.prefill_end
        most = request.asked.params.max_tokens or VERY_LONG
        longest = min(request.num_prompt + most, self.scheduler.page_tables.capacity.of(request))
        assert chunk.end < longest, "drafted past a certain end"

    def _live(self) -> list[LiveRequest]:
        return [request for name, request in self.requests.items() if name not in self.ends]

    def _goes_on(self, request: LiveRequest) -> bool:
        """Whether the tokens sampled so far, read or not, leave room for one more.

        A guide may want to see the one that is unread first, and then to compute its mask.
        """
        if any(
            chunk.draft and chunk.request is request for step, _ in self.unread for chunk in step
        ):
            return False  # where it goes on is not read yet
        sampled = len(self.prefixes[request])
        max_tokens = request.asked.params.max_tokens
        is_unread = sampled > len(request.token_ids)
        guide = request.asked.guide
        if guide is not None and (guide.must_wait if is_unread else not guide.is_ready):
            return False
        return sampled < self.scheduler.page_tables.capacity.of(request) and (
            max_tokens is None or sampled - request.num_prompt < max_tokens
        )

    def _take(self, output: Output) -> None:
        request = self.requests[output.request_id]
        assert output.request_id not in self.ends, "an output after the end"
        assert len(output.token_ids) == 1
        assert output.num_prompt == request.num_prompt
        tokens = self.answers[output.request_id]
        tokens += output.token_ids
        assert output.num_outputs == len(tokens)
        known = [*request.token_ids[request.num_prompt :]]
        assert known[: len(tokens)] == tokens, "outputs changed"
        wanted, reason = answer(request, self.scheduler.page_tables.capacity.of(request))
        assert tokens == wanted[: len(tokens)], "another answer than alone"
        if output.finish_reason is not None:
            self.reports[output.request_id] = output.cache
            if request.asked.pins:
                self.pinned.append(request)
            assert (tokens, output.finish_reason) == (wanted, reason)
            is_short = len(request.token_ids) < self.promises[request]
            assert reason is FinishReason.STOP or not is_short, "an answer is cut"
            self.ends[output.request_id] = output.finish_reason


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., GhostEngine]:
    def make(
        num_pages: int = 64,
        page_size: int = 4,
        hot_after_hits: int = 2,
        num_open: int | None = None,
        num_state_slots: int | None = None,
        disk: GhostDisk | None = None,
        window: int | None = None,
        num_window_pages: int = 0,
        longest_block: int = 0,
        shared: int | None = None,
        state_bytes: int | None = None,
        on_device: bool = False,
        **options: object,
    ) -> GhostEngine:
        """Make an engine whose kinds share memory if one of two sizes is given.

        shared: bytes of a window's page where one of the other layers has 1
        state_bytes: bytes of a state in this measure
        """
        options = {
            "max_num_batched_tokens": 32,
            "max_num_seqs": 8,
            "max_model_len": 128,
            "long_prefill_token_threshold": 0,
            **options,
        }
        num_open = num_open and min(num_open, num_pages)
        pool = PagePool(num_pages, page_size, hot_after_hits, num_open)
        disk, config = disk or GhostDisk(), SchedulerConfig(**options)
        ends: list[EndKind] = []
        nbytes, page_bytes = num_pages, {FullPages.name: 1}
        if state_bytes is not None:
            nbytes += STATE_SLOTS * state_bytes
            page_bytes[StateSlots.name] = state_bytes
        if window is not None:
            seen = Window(window, page_size, longest_block)
            num_window_pages = max(seen.num_held, num_window_pages)
            if shared is not None:
                nbytes += seen.num_held * shared
                num_window_pages = max(seen.num_held, (nbytes - 2) // shared)
                page_bytes[WindowPages.name] = shared
            num_open_too = num_open and min(num_open, num_window_pages)
            window_pool = PagePool(num_window_pages, page_size, hot_after_hits, num_open_too)
            ends.append(WindowPages(window_pool, seen))
        if state_bytes is not None:
            num_state_slots = max(STATE_SLOTS, (nbytes - 2) // state_bytes)
        if num_state_slots is not None:
            ends.append(StateSlots(num_state_slots, pool))
        memory = PoolMemory(nbytes, page_bytes) if len(page_bytes) > 1 else None
        source = GhostGuesses if on_device else GhostDrafts
        drafts = source(config.speculative_tokens) if config.speculative_tokens else None
        engine = GhostEngine(Scheduler(config, pool, disk, drafts, ends, memory), disk)
        engine.guesses = drafts if isinstance(drafts, GhostGuesses) else None
        return engine

    return make

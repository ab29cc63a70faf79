"""StateSlots: after which pages the recurrent state of a sequence is kept, and for how long.

A model with recurrent layers cannot continue from cached pages alone: it also needs the state after
the last of them. So pages count as found only up to the last one with a snapshot, and snapshots are
taken where another prompt will probably continue:

    the last page boundary of a prompt before its last token     the same prompt again
    the last one at least `TURN_END` tokens before its end      the next turn of a conversation:
                                                                 templates end a prompt with a marker
                                                                 that the next turn leaves out
    where its cached pages ended without a snapshot              a beginning that prompts share
    where a follower waits for it                                the same, for prompts side by side
    the end of a named prefix

Each running request also owns its newest page boundary, which can be found once it has given up its
pages. Knows ids only, by the hash of the page: the runner owns the arrays. One slot is one state in memory;
each running request takes two, for its own state and for its newest boundary, and more while it verifies
drafts (`DraftStates`). How many slots there are may change: full pages and states can share memory
(`StateEnds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from mlxserve.cache.kinds.draft_states import DraftStates, num_needed
from mlxserve.cache.kinds.kind import EndKind, Has, Room, Start, UnitEvents, Units, Uses
from mlxserve.cache.kinds.state_ends import PROMPT_STATES, StateEnds
from mlxserve.cache.kinds.turn_ends import likely_ends
from mlxserve.cache.pages import PagePool
from mlxserve.core.stats import StateStats
from mlxserve.request import STATE_SLOTS, CacheMiss, Chunk, LiveRequest, StatePlan


@dataclass(slots=True)
class _Running:
    """The states of a running request."""

    is_cached: bool  # it restores snapshots, and takes some for others
    wanted: set[int] = field(default_factory=set)  # positions where others will continue
    boundary: tuple[int, int] | None = None  # (position, id) of its own newest snapshot
    last_kept: int = 0  # position of the last snapshot that it took for others


class StateRoom(Room):
    """The slots that waiting requests may have; changes nothing."""

    def __init__(self, ends: StateEnds) -> None:
        self._ends = ends

    def num_own(self, request: LiveRequest) -> int:  # noqa: ARG002
        return STATE_SLOTS

    def num_lacking(self, request: LiveRequest, num_cached: int, num_reserved: int) -> int:  # noqa: ARG002
        return STATE_SLOTS + num_reserved - self._ends.num_free


class StateSlots(EndKind):
    """Plans which states are kept and restored; at most `num_slots` of them fit into memory."""

    name = StateEnds.name
    missing = CacheMiss.NO_SNAPSHOT
    names_units = True

    def __init__(
        self,
        num_slots: int,
        pool: PagePool,
        stats: StateStats | None = None,
        *,
        is_replayed: bool = False,
        events: UnitEvents | None = None,
    ) -> None:
        """Take the pool of full pages, whose hashes identify the snapshots.

        is_replayed: the model keeps one state for all rows of a draft
        events: what findable snapshots are reported to
        """
        self.stats = stats or StateStats()
        self._pool = pool
        self._is_replayed = is_replayed
        self._running: dict[LiveRequest, _Running] = {}
        self._unread: dict[int, bool] = {}  # ids in unread steps; whether others are to find them
        self._next_id = 0
        self._drafts = DraftStates()
        self._num_lacking = 0  # slots that drafts of the next step lack
        self.reclaimer = self._ends = StateEnds(num_slots, pool, self.stats, self._num_held, events)
        self.room = StateRoom(self._ends)

    def renewed(self, pool: PagePool) -> StateSlots:
        return StateSlots(
            self._ends.max_units,
            pool,
            self.stats,
            is_replayed=self._is_replayed,
            events=self._ends.events,
        )

    # ---- prefix hits

    def has(self, hash_: bytes) -> bool:
        return self._ends.has(hash_)

    def unit_of(self, hash_: bytes) -> int:
        return self._ends.id_of(hash_)

    def num_usable(self, hashes: Sequence[bytes], num_pages: int, has: Has | None = None) -> int:
        """Return how many of the first `num_pages` cached pages end with a known state."""
        has = has or self._ends.has
        while num_pages and not has(hashes[num_pages - 1]):
            num_pages -= 1
        return num_pages

    # ---- lifecycle of a request

    def begin(self, request: LiveRequest, start: Start) -> None:
        page_size = self._pool.page_size
        running = self._running[request] = _Running(start.is_cached)
        num_pages, num_known = start.num_pages, start.num_known
        if not start.is_reading:
            self.begin_again(request, num_pages)
        if num_known > num_pages:
            running.wanted.add(num_known * page_size)
            self.stats.missed_tokens += (num_known - num_pages) * page_size
        self._ends.make_room(0)

    def begin_again(self, request: LiveRequest, num_pages: int) -> None:
        if num_pages:
            self._ends.restore(request, request.page_hashes[num_pages - 1])

    def expect(self, request: LiveRequest, num_pages: int) -> None:
        """Plan a snapshot after the first `num_pages` pages; no-op if the request does not run."""
        if request in self._running:
            self._running[request].wanted.add(num_pages * self._pool.page_size)

    def stop(self, request: LiveRequest) -> None:
        """Publish the request's newest boundary."""
        running = self._running.pop(request, None)
        if running is None:
            return
        self._drafts.end(request)
        if running.boundary is not None:
            self._publish(request, *running.boundary)
        num_pages = request.num_computed // self._pool.page_size
        self._ends.stop(request, request.page_hashes[:num_pages])

    def release(self, request: LiveRequest) -> None:
        """Mark the pages as useless that lead to no state."""
        hashes = request.page_hashes
        lost = map(self._pool.index.find, reversed(hashes[self._ends.last_end(hashes) :]))
        self._pool.order.mark_useless([page for page in lost if page is not None])

    # ---- the disk

    def used_by(self, request: LiveRequest) -> Uses:
        """Return the latest snapshot first, but after all pages, which they need."""
        hashes = request.page_hashes[: len(request.page_table)]
        return Uses(hashes[::-1], num_before=max(0, len(hashes) - 1))

    def num_to_read(self, hashes: Sequence[bytes], num_pages: int) -> int:  # noqa: ARG002
        return 1

    def load(self, request: LiveRequest, end: int) -> Units:
        """Return the state after the last page, under a new id."""
        self._next_id += 1
        return ((request.page_hashes[end - 1], self._next_id),)

    def loaded(self, request: LiveRequest, units: Units, parent: Callable[[int], bytes]) -> None:  # noqa: ARG002
        """Start the request with the state that was read."""
        [(_, id_)] = units
        self._running[request].boundary = request.num_computed, id_
        self._ends.names.restore(request, id_)
        self.stats.num_restored += 1

    # ---- protection from eviction

    def pin(self, prefix: LiveRequest) -> None:  # noqa: ARG002
        self._ends.change_protection()

    def unpin(self, prefix_id: str) -> None:  # noqa: ARG002
        self._ends.change_protection()

    def keep(self, hashes: Sequence[bytes], until: float) -> None:  # noqa: ARG002
        self._ends.change_protection()

    # ---- steps

    def take_draft(self, request: LiveRequest, num_tokens: int) -> int:
        """Take slots for the states after each token: those that cost least, and no one needs next.

        Two for each running request stay: for the states that its prompt has left, from which the next turns of
        conversations continue, and for the next request that begins.
        """
        page_size, start = self._pool.page_size, request.num_computed
        needed = partial(
            num_needed, start=start, page_size=page_size, is_replayed=self._is_replayed
        )
        wanted = needed(num_tokens)
        num_left = PROMPT_STATES * len(self._running)
        room = self._ends.make_room_for_drafts(wanted, num_left)
        self._num_lacking += wanted - room
        while num_tokens and needed(num_tokens) > room:
            num_tokens -= 1
        if num_tokens:
            self._drafts.take(request, needed(num_tokens))
        return num_tokens

    def plan(self, chunks: list[Chunk]) -> list[Chunk]:
        self._ends.num_for_drafts, self._num_lacking = self._num_lacking, 0
        if self._drafts.num_slots:
            for chunk in chunks:
                if not chunk.draft:
                    self._drafts.advance(chunk.request)
        return [
            # A decode's state is kept at page boundaries only.
            chunk
            if chunk.start >= chunk.request.prefill_end
            and chunk.end % self._pool.page_size >= chunk.length
            else chunk._replace(state=self._plan(chunk.request, chunk.start, chunk.end))
            for chunk in chunks
        ]

    def _plan(self, request: LiveRequest, start: int, end: int) -> StatePlan:
        """Return what a chunk does with the state; `end` is the position after its last token."""
        running = self._running[request]
        restore = self._ends.names.pop_restored(request)
        if not running.is_cached:
            return StatePlan(None, ())
        keeps = self._plan_snapshots(request, start, end)
        page_size = self._pool.page_size
        # Of a draft each boundary is kept, as it is not known which ones are accepted.
        first = start if start >= request.prefill_end else end - 1
        for position in range(first - first % page_size + page_size, end + 1, page_size):
            if position not in dict(keeps):
                keeps.append((position, self._new_id(is_public=False)))
        return StatePlan(restore, tuple(keeps))

    def _plan_snapshots(self, request: LiveRequest, start: int, end: int) -> list[tuple[int, int]]:
        """Return (position, id) of the snapshots to take for other prompts, while there are slots."""
        if start >= request.prefill_end:
            return []
        page_size, running = self._pool.page_size, self._running[request]
        likely = {num_pages * page_size for num_pages in likely_ends(request, page_size)}
        named = set()
        if request.asked.pins:
            named.add(request.num_prompt // page_size * page_size)
        keeps: list[tuple[int, int]] = []
        for position in sorted(likely | running.wanted | named):
            if not start < position <= end:
                continue
            is_likely = position in likely and position not in running.wanted
            saved = position - (running.last_kept if is_likely else 0)
            if self._ends.make_room_for(inf if position in named else saved):
                keeps.append((position, self._new_id(is_public=True)))
                running.last_kept = position
        return keeps

    def _new_id(self, *, is_public: bool) -> int:
        self._next_id += 1
        self._unread[self._next_id] = is_public
        return self._next_id

    def commit(self, chunk: Chunk) -> None:
        """Publish the snapshots that the chunk took for others, and keep its own boundary.

        Snapshots beyond the last accepted token of a draft are dropped.
        """
        if chunk.draft:
            self._drafts.read(chunk.request)
        if chunk.state is None:
            return
        for position, id_ in chunk.state.keeps:
            if chunk.draft and position > chunk.request.num_computed:
                del self._unread[id_]
                self._ends.names.drop(id_)
                continue
            running = self._running.get(chunk.request)
            if self._unread.pop(id_) or running is None:
                self._publish(chunk.request, position, id_)
            else:
                if running.boundary is not None:
                    self._ends.names.drop(running.boundary[1])
                running.boundary = position, id_

    def _publish(self, request: LiveRequest, position: int, id_: int) -> None:
        num_pages, hashes = position // self._pool.page_size, request.page_hashes
        # A token of the last page may have been dropped with its request's end.
        self._ends.add(hashes[:num_pages] if num_pages <= len(hashes) else None, id_)
        self._ends.make_room(0)

    def _num_held(self) -> int:
        """Return the slots of running requests and their drafts, and of snapshots that were planned."""
        num_running = STATE_SLOTS * len(self._running) + self._drafts.num_slots
        return sum(self._unread.values()) + num_running

    # ---- the whole

    def forget(self, hashes: Iterable[bytes]) -> None:  # noqa: ARG002
        self._ends.drop_lost()

    def reset(self) -> None:
        self._ends.drop_lost()

    def pop_dropped(self) -> list[int]:
        return self._ends.names.pop_dropped()

    def ids(self) -> set[int]:
        own = {r.boundary[1] for r in self._running.values() if r.boundary is not None}
        return own | {*self._ends.ids(), *self._unread, *self._ends.names.dropped}

    def check(self, running: Sequence[LiveRequest], holders: Sequence[LiveRequest]) -> None:  # noqa: ARG002
        assert self._running.keys() == set(running), "a request has no state, or has ended"
        self._ends.check(running)
        assert self._unread.keys().isdisjoint(self._ends.ids()), (
            "a snapshot could be found before its step was read"
        )
        assert self._ends.num_spare >= 0 or not self._ends.ids(), "too many snapshots"

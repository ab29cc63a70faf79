"""GhostStates: recurrent states as names of prefixes, judged whenever a chunk begins.

A state is right if it has seen exactly the tokens before the chunk, under its salt. That one rule
catches a state of another position or request, a snapshot taken from a token that was dropped, one
that is found too early or given up too early. After a draft there is a state for each of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mlxserve.cache.kinds.kind import find
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.request import STATE_SLOTS, Chunk, LiveRequest, RequestState
from mlxserve.scheduler.scheduler import Scheduler

State = tuple[bytes, int]  # (salt, prefix)


@dataclass
class GhostStates:
    scheduler: Scheduler
    root: int  # the name of the empty prefix
    live: dict[LiveRequest, dict[int, State]] = field(default_factory=dict)  # by position
    snapshots: dict[int, State] = field(default_factory=dict)
    num_restored: int = 0

    @property
    def are_kept(self) -> bool:
        return "states" in self.scheduler.moves.unit_names()

    def have_room(self, num_requests: int) -> bool:
        """Whether so many requests could begin."""
        states = find(self.scheduler.page_tables.ends, StateSlots)
        return states is None or STATE_SLOTS * num_requests <= states.reclaimer.num_free

    def run(self, chunk: Chunk, prefixes: Sequence[int]) -> None:
        """`prefixes`: names of the request's prefixes by their last position."""
        if not self.are_kept:
            assert chunk.state is None
            return
        request, salt = chunk.request, chunk.request.asked.cache_salt
        wanted = salt, prefixes[chunk.start - 1] if chunk.start else self.root
        assert self._before(chunk) == wanted, (
            f"{request.id} begins at {chunk.start} with the state of another prefix"
        )
        for position, id_ in chunk.state.keeps if chunk.state is not None else ():
            assert chunk.start < position <= chunk.end, "kept outside of the chunk"
            assert position % self.scheduler.pool.page_size == 0, "kept in the middle of a page"
            assert id_ not in self.snapshots, "an id is used twice"
            self.snapshots[id_] = salt, prefixes[position - 1]
        self._judge_slots(chunk)
        first = chunk.end - len(chunk.draft)
        self.live[request] = {end: (salt, prefixes[end - 1]) for end in range(first, chunk.end + 1)}

    def _judge_slots(self, chunk: Chunk) -> None:
        """The states after the tokens of its draft have slots, and those of the draft before it."""
        states = find(self.scheduler.page_tables.ends, StateSlots)
        assert states is not None
        num_drafted = len(chunk.draft)
        if chunk.start in self.live.get(chunk.request, {}):
            num_drafted += len(self.live[chunk.request]) - 1
        num_held = STATE_SLOTS * len(self.scheduler.roster.running) + num_drafted
        assert num_held <= states.reclaimer.limit - states.reclaimer.num_free, "without a slot"

    def _before(self, chunk: Chunk) -> State:
        if chunk.state is not None and chunk.state.restore is not None:
            self.num_restored += 1
            return self.snapshots[chunk.state.restore]
        if chunk.start == 0:
            return chunk.request.asked.cache_salt, self.root
        return self.live[chunk.request][chunk.start]

    def forget(self) -> None:
        """Everything: the pool is another one."""
        self.live.clear()
        self.snapshots.clear()

    def drop_now(self, ids: Iterable[int]) -> None:
        """Before a step is planned, whose memory others get."""
        for id_ in ids:
            del self.snapshots[id_]

    def drop(self) -> None:
        """Once a step is launched."""
        for _, dropped in self.scheduler.moves.pop_dropped():
            self.drop_now(dropped)
        for request in [r for r in self.live if r.state is not RequestState.RUNNING]:
            del self.live[request]

    def judge(self) -> None:
        """Exactly the snapshots exist that the scheduler counts, and no more than fit."""
        if self.are_kept:
            assert self.scheduler.moves.unit_names()["states"] == self.snapshots.keys()

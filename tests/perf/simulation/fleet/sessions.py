"""Coding agents as lengths: the distributions of `AgentsWorkload`, without its token lists.

A chain is the text that the prompts of a session share. It begins with a template that many sessions have, or with
what a parent's chain had when its sub-agents began.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import count

from tests.perf.simulation.workloads import AgentsWorkload, draw_lognormal

TEMPLATE = AgentsWorkload.TEMPLATE  # tokens
NUM_TEMPLATES = 3
MAX_CONTEXT = 100_000
_MAX_ANSWER = AgentsWorkload.MAX_ANSWER


@dataclass(eq=False, slots=True)
class Chain:
    """The growing text of a session.

    shared: tokens at the beginning that are the parent chain's, or the template's without a parent
    """

    number: int
    template: int
    parent: Chain | None = None
    shared: int = TEMPLATE


@dataclass(eq=False, slots=True)
class Session:
    """One agent's work on a task. `length`: tokens of its text so far."""

    number: int
    slot: int
    draw: random.Random
    turns_left: int
    chain: Chain
    length: int
    parent: Session | None = None
    children: int = 0


@dataclass(eq=False, slots=True)
class Turn:
    """A request of a session, sent at `time`: its prompt and its answer, in tokens."""

    time: float
    session: Session
    prompt: int
    answer: int
    before: int = 0  # tokens of the prompt that were sent or answered before


class Agents:
    """Agents that work on one task after another, forever."""

    def __init__(self, num_agents: int, seed: int) -> None:
        self._draws = [random.Random(f"{seed}/{slot}") for slot in range(num_agents)]
        self._chains = count()
        self._sessions = count()

    def begin(self) -> list[Turn]:
        """Return the first turn of every agent, within a minute."""
        return [
            self._ask(self._new(slot, draw), draw.uniform(0, 60))
            for slot, draw in enumerate(self._draws)
        ]

    def finished(self, turn: Turn, now: float) -> list[Turn]:
        """Return the turns that follow from an answer."""
        session = turn.session
        session.turns_left -= 1
        session.length = turn.prompt + turn.answer
        if session.turns_left > 0:
            return self._next(session, now)
        parent = session.parent
        if parent is None:
            draw = self._draws[session.slot]
            return [self._ask(self._new(session.slot, draw), now + draw.expovariate(1 / 60))]
        parent.children -= 1
        return [] if parent.children else [self._go_on(parent, now)]

    def _new(self, slot: int, draw: random.Random) -> Session:
        turns = max(1, round(draw.expovariate(1 / 30)))
        session = Session(next(self._sessions), slot, draw, turns, self._chain(draw), 0)
        self._open(session)
        return session

    def _chain(self, draw: random.Random) -> Chain:
        [template] = draw.choices(range(NUM_TEMPLATES), [1, 1 / 2, 1 / 3])
        return Chain(next(self._chains), template)

    def _open(self, session: Session) -> None:
        """Start with the template and a task."""
        session.length = TEMPLATE + int(draw_lognormal(session.draw, 1400, 0.6, 50, 20_000))

    def _next(self, session: Session, now: float) -> list[Turn]:
        if session.parent is None and session.draw.random() < 0.03:
            return self._delegate(session, now)
        return [self._go_on(session, now)]

    def _go_on(self, session: Session, now: float) -> Turn:
        draw, before = session.draw, session.length
        session.length += int(draw_lognormal(draw, 735, 1.3, 16, 30_000))
        if session.length + _MAX_ANSWER >= MAX_CONTEXT:
            self._compact(session)
            before = TEMPLATE
        is_human = draw.random() < 0.08
        pause = draw.expovariate(1 / 180) if is_human else draw_lognormal(draw, 2, 1.2, 0.05, 600)
        return self._ask(session, now + pause, before)

    def _compact(self, session: Session) -> None:
        """Keep the template, and a summary of 10 to 20 % of the context."""
        session.chain = Chain(next(self._chains), session.chain.template)
        self._open(session)
        session.length += int(MAX_CONTEXT * session.draw.uniform(0.1, 0.2))

    def _delegate(self, session: Session, now: float) -> list[Turn]:
        """Sub-agents share the context so far, and begin at the same moment."""
        session.children = session.draw.randint(2, 8)
        turns = []
        for _ in range(session.children):
            draw = random.Random(session.draw.random())
            chain = Chain(next(self._chains), session.chain.template, session.chain, session.length)
            turns_left = 1 + int(draw.expovariate(1 / 3))
            child = Session(
                next(self._sessions), session.slot, draw, turns_left, chain, session.length, session
            )
            child.length += int(draw_lognormal(draw, 300, 0.5, 20, 2000))
            before = session.length
            if child.length + _MAX_ANSWER >= MAX_CONTEXT:
                self._compact(child)
                before = TEMPLATE
            turns.append(self._ask(child, now, before))
        return turns

    @staticmethod
    def _ask(session: Session, time: float, before: int = 0) -> Turn:
        answer = int(draw_lognormal(session.draw, 270, 0.9, 4, _MAX_ANSWER))
        return Turn(time, session, session.length, answer, before)

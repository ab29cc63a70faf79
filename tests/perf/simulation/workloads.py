"""Workloads of the simulator: which prompts are sent when.

    slot ── session 0 ─ gap ─ session 1 ─ ...        a slot is a person, an agent, a stream
              └ turn ─ pause ─ turn ─ ...            a turn is one request

Each session draws from its own generator, seeded by (seed, slot, session). Two schedulers that
finish turns in different orders still get the same turns, so a difference between them is not
chance.

Tokens are symbols. Each piece of text (a template, an appended message, an answer) is one token id
repeated. A page's hash chains over all pages before it, so pieces are as distinct as real text, and
a prompt of 100,000 tokens takes a tenth of a millisecond to make. A session's next turn takes over
the token list and the page hashes of the previous turn.

The distributions follow published traces (ShareGPT, BurstGPT, Mooncake, TraceLab and the Codex card
of SWE-bench Pro); none of their data is used.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import count

from mlxserve.core.errors import InvalidConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import BACKGROUND, LiveRequest, Request, TokenIds, as_token_ids
from tests.perf.simulation.costs import CostModel, StepWork

_TEMPLATES = 1 << 30  # token ids from here on are templates; lower ones belong to one session


@dataclass(eq=False, slots=True)
class Session:
    """One conversation, or one agent's work on a task."""

    slot: int
    draw: random.Random
    turns_left: int
    template: int = 0  # number of the template that its prompts begin with
    parent: Session | None = None  # the session that waits for this one
    children: int = 0  # sessions that it waits for
    # Empty while one of its turns is running.
    token_ids: MutableSequence[int] = field(default_factory=as_token_ids)
    page_hashes: list[bytes] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """One turn of a session: a request and the time it is sent."""

    time: float
    session: Session
    request: Request


class SimulatedWorkload(ABC):
    """Slots that each play a fixed number of sessions."""

    def __init__(self, *, seed: int, num_slots: int, num_sessions: int, max_context: int) -> None:
        """`num_sessions`: per slot. `max_context`: most tokens of a prompt plus its answer."""
        self.num_slots = num_slots
        self.num_background = 0  # slots, the first ones, whose requests nobody waits for
        self._seed = seed
        self._num_sessions = num_sessions
        self._max_context = max_context
        self._played = [0] * num_slots
        self._names = count()
        self._symbols = count(1)
        self.num_turns = 0

    def begin(self) -> list[SimulatedRequest]:
        """The first turns of every slot."""
        return [turn for slot in range(self.num_slots) for turn in self._next_session(slot, 0.0)]

    def arrived(self, turn: SimulatedRequest) -> list[SimulatedRequest]:
        """The turns that follow from sending this one: none, unless arrivals are open-loop."""
        return []

    def finished(
        self, turn: SimulatedRequest, answered: LiveRequest, now: float
    ) -> list[SimulatedRequest]:
        """The turns that follow from answering this one."""
        session = turn.session
        session.token_ids, session.page_hashes = answered.token_ids, answered.page_hashes
        session.turns_left -= 1
        if session.turns_left > 0:
            return self._next_turns(session, now)
        if session.parent is not None:
            return self._child_ended(session.parent, now)
        return self._next_session(session.slot, now)

    def _next_session(self, slot: int, now: float) -> list[SimulatedRequest]:
        number = self._played[slot]
        if number == self._num_sessions:
            return []
        self._played[slot] += 1
        draw = random.Random(f"{self._seed}/{slot}/{number}")
        return self._start(slot, draw, now)

    def _turn(self, session: Session, time: float, max_tokens: int) -> SimulatedRequest:
        """Send the session's tokens; the turn owns them until it is answered."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        request = Request(
            str(next(self._names)),
            session.token_ids,
            params,
            priority=BACKGROUND if session.slot < self.num_background else 0,
            page_hashes=session.page_hashes,
        )
        session.token_ids, session.page_hashes = as_token_ids(), []
        self.num_turns += 1
        return SimulatedRequest(time, session, request)

    def _write(self, session: Session, length: int) -> None:
        """Append text that is unique to the session."""
        session.token_ids.extend(as_token_ids([next(self._symbols)]) * length)

    @abstractmethod
    def _start(self, slot: int, draw: random.Random, now: float) -> list[SimulatedRequest]:
        """The first turns of a slot's next session."""

    def _next_turns(self, session: Session, now: float) -> list[SimulatedRequest]:
        """The turns after an answered turn of a session with turns left."""
        raise AssertionError("a session of one turn was continued")

    def _child_ended(self, parent: Session, now: float) -> list[SimulatedRequest]:
        parent.children -= 1
        if parent.children:
            return []
        return self._next_session(parent.slot, now)


class ChatWorkload(SimulatedWorkload):
    """People: a shared system prompt, short messages, sometimes a pasted text, and pauses."""

    MEAN_TURNS = 5.0

    def _start(self, slot: int, draw: random.Random, now: float) -> list[SimulatedRequest]:
        session = Session(slot, draw, _geometric(draw, self.MEAN_TURNS))
        session.token_ids = _template(0, 400)
        return self._say(session, now + draw.expovariate(1 / 10))

    def _next_turns(self, session: Session, now: float) -> list[SimulatedRequest]:
        return self._say(session, now + draw_lognormal(session.draw, 12, 1.0, 1, 600))

    def _say(self, session: Session, time: float) -> list[SimulatedRequest]:
        draw = session.draw
        is_pasted = draw.random() < 0.1
        length = int(draw_lognormal(draw, *((2000, 1.0) if is_pasted else (50, 1.0)), 5, 12_000))
        answer = int(draw_lognormal(draw, 250, 0.8, 4, 1500))
        if len(session.token_ids) + length + answer >= self._max_context:
            session.token_ids, session.page_hashes = _template(0, 400), []  # a new conversation
            length = min(length, self._max_context - answer - 401)
        self._write(session, length)
        return [self._turn(session, time, answer)]


class FanOutWorkload(SimulatedWorkload):
    """Jobs with a common template: a document and 2 to 8 questions about it at the same moment."""

    MEAN_TURNS = 5.0
    TEMPLATE = 4096

    def _start(self, slot: int, draw: random.Random, now: float) -> list[SimulatedRequest]:
        time = now + draw.expovariate(1 / 5)
        job = Session(slot, draw, 0, children=draw.randint(2, 8))
        job.token_ids = _template(_zipf(draw, 4), self.TEMPLATE)
        self._write(job, int(draw_lognormal(draw, 3000, 0.8, 200, self._max_context // 2)))
        turns = []
        for _ in range(job.children):
            child = Session(slot, draw, 1, parent=job, token_ids=job.token_ids[:])
            self._write(child, int(draw_lognormal(draw, 80, 0.7, 10, 400)))
            turns.append(self._turn(child, time, int(draw_lognormal(draw, 200, 0.7, 4, 1000))))
        return turns


class AgentsWorkload(SimulatedWorkload):
    """Coding agents: about 12,000 tokens at first, tool results with heavy-tailed lengths, pauses of
    seconds (of minutes for 8 % of the turns), compaction when the context is full, and sometimes 2
    to 8 sub-agents that share the context so far.
    """

    MEAN_TURNS = 54.0  # including the sub-agents' turns; measured
    TEMPLATE = 10_240
    MAX_ANSWER = 4000

    def _start(self, slot: int, draw: random.Random, now: float) -> list[SimulatedRequest]:
        session = Session(slot, draw, max(1, round(draw.expovariate(1 / 30))))
        session.template = _zipf(draw, 3)
        self._open(session)
        return self._ask(session, now + draw.expovariate(1 / 60))

    def _open(self, session: Session) -> None:
        """Start with the template and a task."""
        session.token_ids = _template(session.template, self.TEMPLATE)
        session.page_hashes = []
        self._write(session, int(draw_lognormal(session.draw, 1400, 0.6, 50, 20_000)))

    def _next_turns(self, session: Session, now: float) -> list[SimulatedRequest]:
        draw = session.draw
        if session.parent is None and draw.random() < 0.03:
            return self._delegate(session, now)
        return self._go_on(session, now)

    def _go_on(self, session: Session, now: float) -> list[SimulatedRequest]:
        draw = session.draw
        self._write(session, int(draw_lognormal(draw, 735, 1.3, 16, 30_000)))
        if len(session.token_ids) + self.MAX_ANSWER >= self._max_context:
            self._compact(session)
        is_human = draw.random() < 0.08
        pause = draw.expovariate(1 / 180) if is_human else draw_lognormal(draw, 2, 1.2, 0.05, 600)
        return self._ask(session, now + pause)

    def _compact(self, session: Session) -> None:
        """Keep the template; replace the rest by a summary of 10 to 20 % of the context."""
        length = int(self._max_context * session.draw.uniform(0.1, 0.2))
        self._open(session)
        self._write(session, length)

    def _delegate(self, session: Session, now: float) -> list[SimulatedRequest]:
        session.children = session.draw.randint(2, 8)
        turns = []
        for number in range(session.children):
            draw = random.Random(f"{session.draw.random()}/{number}")
            child = Session(
                session.slot,
                draw,
                _geometric(draw, 4),
                session.template,
                session,
                token_ids=session.token_ids[:],
                page_hashes=session.page_hashes.copy(),
            )
            self._write(child, int(draw_lognormal(draw, 300, 0.5, 20, 2000)))
            if len(child.token_ids) + self.MAX_ANSWER >= self._max_context:
                self._compact(child)
            turns += self._ask(child, now)
        return turns

    def _child_ended(self, parent: Session, now: float) -> list[SimulatedRequest]:
        parent.children -= 1
        return [] if parent.children else self._go_on(parent, now)

    def _ask(self, session: Session, time: float) -> list[SimulatedRequest]:
        answer = int(draw_lognormal(session.draw, 270, 0.9, 4, self.MAX_ANSWER))
        return [self._turn(session, time, answer)]


class BurstyWorkload(SimulatedWorkload):
    """Open-loop arrivals in bursts (Gamma gaps), at 80 % of the machine's capacity."""

    MEAN_TURNS = 1.0
    LOAD = 0.8
    SHAPE = 0.25  # of the gaps' Gamma distribution; 1 is Poisson, less is burstier
    _PROMPT, _ANSWER = (1000, 1.2, 8, 24_000), (150, 1.0, 1, 2000)

    def __init__(
        self, *, cost: CostModel, seed: int, num_slots: int, num_sessions: int, max_context: int
    ) -> None:
        super().__init__(
            seed=seed, num_slots=num_slots, num_sessions=num_sessions, max_context=max_context
        )
        self._gap = self.num_slots * self._service(cost) / self.LOAD

    def _service(self, cost: CostModel) -> float:
        """Seconds that one request takes on a machine that decodes 8 at a time."""
        prompt, answer = _mean(*self._PROMPT[:2]), _mean(*self._ANSWER[:2])
        decodes = StepWork(decodes=8, decode_context=int(8 * (prompt + answer / 2)))
        prefill = StepWork(prefill=int(prompt), prefill_context=prompt * prompt / 2)
        return cost.seconds(prefill) - cost.step + answer * cost.seconds(decodes) / 8

    def _start(self, slot: int, draw: random.Random, now: float) -> list[SimulatedRequest]:
        time = now + draw.gammavariate(self.SHAPE, self._gap / self.SHAPE)
        session = Session(slot, draw, 1)
        if draw.random() < 0.3:
            session.token_ids = _template(_zipf(draw, 20), 512)
        room = self._max_context - self._ANSWER[3] - 513
        self._write(session, min(int(draw_lognormal(draw, *self._PROMPT)), room))
        return [self._turn(session, time, int(draw_lognormal(draw, *self._ANSWER)))]

    def arrived(self, turn: SimulatedRequest) -> list[SimulatedRequest]:
        return self._next_session(turn.session.slot, turn.time)

    def finished(
        self,
        turn: SimulatedRequest,
        answered: LiveRequest,
        now: float,
    ) -> list[SimulatedRequest]:
        return []


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload with sizes that put the scheduler under pressure.

    pool_tokens: capacity of the KV cache. num_slots: people, agents or streams.
    """

    name: str
    workload: Callable[..., SimulatedWorkload]
    mean_turns: float
    num_slots: int
    pool_tokens: int
    max_context: int

    def make(self, *, seed: int, num_requests: int, cost: CostModel) -> SimulatedWorkload:
        """About `num_requests` requests: whole sessions, equally many in every slot."""
        sessions = max(1, round(num_requests / (self.num_slots * self.mean_turns)))
        sizes = {
            "seed": seed,
            "num_slots": self.num_slots,
            "num_sessions": sessions,
            "max_context": self.max_context,
        }
        if self.workload is BurstyWorkload:
            return self.workload(cost=cost, **sizes)
        return self.workload(**sizes)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("chat", ChatWorkload, ChatWorkload.MEAN_TURNS, 24, 65_536, 16_384),
        Scenario("fan-out", FanOutWorkload, FanOutWorkload.MEAN_TURNS, 3, 131_072, 32_768),
        Scenario("agents", AgentsWorkload, AgentsWorkload.MEAN_TURNS, 5, 262_144, 100_000),
        Scenario("bursty", BurstyWorkload, BurstyWorkload.MEAN_TURNS, 4, 65_536, 32_768),
    )
}


def find_scenario(name: str) -> Scenario:
    """Raises InvalidConfig, which lists the known names."""
    if name not in SCENARIOS:
        raise InvalidConfig(f"unknown workload {name!r}; choose one of {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


def draw_lognormal(
    draw: random.Random, median: float, sigma: float, low: float, high: float
) -> float:
    """A heavy-tailed positive number, clipped to `low` and `high`."""
    return min(high, max(low, draw.lognormvariate(math.log(median), sigma)))


def _mean(median: float, sigma: float) -> float:
    return median * math.exp(sigma * sigma / 2)


def _geometric(draw: random.Random, mean: float) -> int:
    return 1 + int(draw.expovariate(1.0) / -math.log(1 - 1 / mean))


def _zipf(draw: random.Random, number: int) -> int:
    """A number from 0 to number - 1, drawn in proportion to 1 / (itself + 1)."""
    return draw.choices(range(number), [1 / rank for rank in range(1, number + 1)])[0]


def _template(number: int, length: int) -> TokenIds:
    return as_token_ids([_TEMPLATES + number]) * length


def symbols(token_ids: Sequence[int]) -> Iterator[int]:
    """The pieces of a prompt, in order, for tests."""
    previous = None
    for token_id in token_ids:
        if token_id != previous:
            yield token_id
        previous = token_id

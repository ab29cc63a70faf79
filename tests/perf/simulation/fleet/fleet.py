"""FleetSimulation: agents, a router, servers and a store under one clock.

    turn ──▶ router ──▶ server: read from the store, wait, compute the prompt, answer ──▶ next turn
               ▲           │ KV events, late
               └───────────┘

Prompts of a server are computed one after another, and answers side by side; a step's time is the cost model's.
Servers fail and come back empty; what ran there is sent again.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from mlxserve.bench.report import quantile
from tests.perf.simulation.costs import ASSUMED, CostModel
from tests.perf.simulation.fleet.machines import PAGE, Run, Server, Store, whole_pages
from tests.perf.simulation.fleet.routing import POLICIES, Load
from tests.perf.simulation.fleet.sessions import Agents, Turn


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Sizes of a run. Times in seconds, memory in tokens.

    store_bytes_per_second: of the one store's link; None without a store
    failure_seconds: mean time between two failures of a server
    warm_up: what happens before it is not counted
    """

    policy: str
    num_servers: int
    store_bytes_per_second: float | None = None
    agents_per_server: int = 3
    server_tokens: int = 262_144
    store_tokens: int = 4_000_000
    event_delay: float = 0.1
    failure_seconds: float = 4 * 3600.0
    down_seconds: float = 60.0
    warm_up: float = 300.0
    seconds: float = 600.0
    seed: int = 0

    @property
    def label(self) -> str:
        return self.policy if self.store_bytes_per_second is None else f"{self.policy} + store"


@dataclass(slots=True)
class FleetResult:
    """What was counted after the warm-up. Tokens are of prompts; bytes are the store's."""

    config: FleetConfig
    num_requests: int = 0
    num_again: int = 0  # sent again after a failure
    prompt_tokens: int = 0
    cached_tokens: int = 0
    store_tokens: int = 0  # of the cached ones
    known_tokens: int = 0  # that were computed before, somewhere
    num_pages: int = 0  # told of by events
    waits: list[float] = field(default_factory=list)
    by_server: list[int] = field(default_factory=list)
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_refused: int = 0

    @property
    def share(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def known_share(self) -> float:
        """The share that one server with unlimited memory would find."""
        return self.known_tokens / max(1, self.prompt_tokens)

    def wait(self, q: float) -> float:
        """Seconds before a prompt is computed, of the q-quantile of turns."""
        return quantile(self.waits, q)

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.config.seconds

    @property
    def pages_per_second(self) -> float:
        return self.num_pages / self.config.seconds


class FleetSimulation:
    """One run."""

    def __init__(self, config: FleetConfig, cost: CostModel = ASSUMED) -> None:
        self._config = config
        self._servers = [Server(n, cost, config.server_tokens) for n in range(config.num_servers)]
        self._load = Load(config.num_servers)
        self._router = POLICIES[config.policy](config.num_servers, self._load, config.event_delay)
        rate = config.store_bytes_per_second
        self._store = None if rate is None else Store(config.store_tokens, rate)
        self._agents = Agents(config.num_servers * config.agents_per_server, config.seed)
        self._failures = random.Random(f"failures {config.seed}")
        self._result = FleetResult(config, by_server=[0] * config.num_servers)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._num_up = config.num_servers

    def run(self) -> FleetResult:
        config, events = self._config, self._events
        for turn in self._agents.begin():
            self._send(turn, turn.time)
        for server in self._servers:
            self._plan_failure(server, 0.0)
        before = (0, 0, 0)
        is_warm = False
        while events and events[0][0] < config.warm_up + config.seconds:
            now, _, event = heapq.heappop(events)
            if not is_warm and now >= config.warm_up:
                is_warm, before = True, self._store_bytes()
            event(now)
        after = self._store_bytes()
        result = self._result
        result.bytes_read, result.bytes_written, result.bytes_refused = (
            now - then for now, then in zip(after, before, strict=True)
        )
        return result

    def _store_bytes(self) -> tuple[int, int, int]:
        store = self._store
        if store is None:
            return 0, 0, 0
        return store.bytes_read, store.bytes_written, store.bytes_refused

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _send(self, turn: Turn, time: float) -> None:
        self._at(time, lambda now: self._arrive(turn, now))

    # ---- a turn

    def _arrive(self, turn: Turn, now: float) -> None:
        if not self._num_up:
            self._send(turn, now + 1.0)
            return
        server = self._servers[self._router.choose(turn, now)]
        local = min(server.memory.length(turn.session.chain), turn.prompt - 1)
        cached, ready = self._with_store(server, turn, whole_pages(local), now)
        start = max(now, server.free_at, ready)
        computed = turn.prompt - cached
        first = server.free_at = start + server.prefill_seconds(computed, cached)
        run = Run(turn, server.number, server.epoch, computed)
        server.runs.add(run)
        self._load.requests[server.number] += 1
        self._load.tokens[server.number] += computed
        if now >= self._config.warm_up:
            self._count(turn, server.number, cached, cached - whole_pages(local), start - now)
        self._at(first, lambda now: self._first(run, now))

    def _with_store(self, server: Server, turn: Turn, local: int, now: float) -> tuple[int, float]:
        """Return (cached tokens, when they are in memory): the store's as well, if reading is faster."""
        store = self._store
        if store is None:
            return local, now
        known = whole_pages(min(store.memory.length(turn.session.chain), turn.prompt - 1))
        if known <= local:
            return local, now
        ready = store.ready_at(known - local, now)
        if ready - now >= server.prefill_seconds(known - local, local):
            return local, now
        store.read(known - local, now)
        return known, ready

    def _count(self, turn: Turn, server: int, cached: int, stored: int, wait: float) -> None:
        result = self._result
        result.num_requests += 1
        result.prompt_tokens += turn.prompt
        result.cached_tokens += cached
        result.store_tokens += stored
        result.known_tokens += whole_pages(turn.before)
        result.num_pages += (turn.prompt + turn.answer - cached) // PAGE
        result.waits.append(wait)
        result.by_server[server] += 1

    def _first(self, run: Run, now: float) -> None:
        """The prompt is computed, and the answer begins."""
        server, turn = self._servers[run.server], run.turn
        if server.epoch != run.epoch:
            return
        self._keep(server, turn, turn.prompt, now)
        self._load.tokens[server.number] -= run.computed
        seconds = server.begin_answer(turn)
        self._at(now + seconds, lambda now: self._done(run, now))

    def _done(self, run: Run, now: float) -> None:
        server, turn = self._servers[run.server], run.turn
        if server.epoch != run.epoch:
            return
        server.runs.discard(run)
        server.end_answer(turn)
        self._load.requests[server.number] -= 1
        self._keep(server, turn, turn.prompt + turn.answer, now)
        if self._store is not None:
            self._store.write(turn.session.chain, turn.prompt + turn.answer, now)
        for following in self._agents.finished(turn, now):
            self._send(following, following.time)

    def _keep(self, server: Server, turn: Turn, num_tokens: int, now: float) -> None:
        chain = turn.session.chain
        for evicted in server.memory.keep(chain, num_tokens):
            self._router.lost(server.number, evicted, now)
        self._router.kept(server.number, chain, num_tokens, now)

    # ---- failures

    def _plan_failure(self, server: Server, now: float) -> None:
        time = now + self._failures.expovariate(1 / self._config.failure_seconds)
        self._at(time, lambda now: self._fail(server, now))

    def _fail(self, server: Server, now: float) -> None:
        self._num_up -= 1
        self._load.set_down(server.number, is_down=True)
        self._router.failed(server.number)
        for turn in server.fail(now):
            self._result.num_again += 1
            self._send(turn, now)
        self._at(now + self._config.down_seconds, lambda now: self._come_back(server, now))

    def _come_back(self, server: Server, now: float) -> None:
        self._num_up += 1
        self._load.set_down(server.number, is_down=False)
        server.free_at = now
        self._plan_failure(server, now)

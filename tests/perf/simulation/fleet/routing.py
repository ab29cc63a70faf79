"""Policies of a router: what each knows of the servers, and which one it chooses.

    round_robin        nothing
    cache_aware        what it has sent to each server: guesses, which no eviction corrects
    consistent_hash    the session
    kv_aware           KV events, late by `delay`, and the tokens that each server works on
    kv_aware, sessions the same, and a session stays where it began

These are models of vllm-router 0.1.17, whose `kv_aware` was observed through servers that count. A server's cost is

    2 x tokens that prompts under way compute there + tokens of this prompt that it lacks

where a prompt is under way until the first token of a streamed answer. Running answers cost nothing.
"""

# ruff: noqa: B027 (a policy overrides what concerns it)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

import numpy as np
import numpy.typing as npt

from tests.perf.simulation.fleet.sessions import NUM_TEMPLATES, TEMPLATE, Chain, Turn

Floats = npt.NDArray[np.float64]

_CACHE_THRESHOLD = (
    0.3  # of the prompt; below it cache_aware takes the server with the fewest characters
)
_BALANCE_ABS, _BALANCE_REL = 64, 1.5
_UNDER_WAY = 2.0  # weight of a token that is being computed for another prompt
_DOWN = 1e18  # cost of a server that does not answer


class Load:
    """What the router counts itself, at once: the work that it has sent to each server."""

    def __init__(self, num_servers: int) -> None:
        self.requests: Floats = np.zeros(num_servers)
        self.tokens: Floats = np.zeros(num_servers)  # of prompts under way, to be computed
        self.down: Floats = np.zeros(num_servers)  # _DOWN where a server is down

    def set_down(self, server: int, *, is_down: bool) -> None:
        self.down[server] = _DOWN if is_down else 0.0
        if is_down:
            self.requests[server] = self.tokens[server] = 0.0

    def least(self, costs: Floats) -> int:
        """Return the server that costs least and answers; ties are the first one's."""
        return int(np.argmin(costs + self.down))


class Router(ABC):
    """One policy. Servers are numbers."""

    def __init__(self, num_servers: int, load: Load, delay: float) -> None:
        self.num_servers = num_servers
        self.load = load
        self.delay = delay

    @abstractmethod
    def choose(self, turn: Turn, now: float) -> int:
        """Return the server for a turn."""

    def kept(self, server: int, chain: Chain, num_tokens: int, now: float) -> None:
        """A server has told, at `now`, that it has the first tokens of a chain."""

    def lost(self, server: int, chain: int, now: float) -> None:
        """A server has told that it has a chain no longer."""

    def failed(self, server: int) -> None:
        """A server has failed, and has nothing any more."""

    def up(self, server: int) -> int:
        """Return this server, or the next one that answers."""
        while self.load.down[server]:
            server = (server + 1) % self.num_servers
        return server


class RoundRobin(Router):
    _next = 0

    def choose(self, turn: Turn, now: float) -> int:
        server = self.up(self._next)
        self._next = (server + 1) % self.num_servers
        return server


class ConsistentHash(Router):
    def choose(self, turn: Turn, now: float) -> int:
        return self.up(turn.session.number * 2_654_435_761 % (1 << 32) % self.num_servers)


class Held:
    """Which server has how many tokens of each chain, as far as a router knows."""

    def __init__(self, num_servers: int) -> None:
        self._by_chain: dict[int, dict[int, int]] = {}
        self._by_server: list[set[int]] = [set() for _ in range(num_servers)]
        self.has_template: npt.NDArray[np.bool_] = np.zeros((NUM_TEMPLATES, num_servers), bool)

    def add(self, server: int, chain: Chain, num_tokens: int) -> None:
        self._by_chain.setdefault(chain.number, {})[server] = num_tokens
        self._by_server[server].add(chain.number)
        self.has_template[chain.template, server] = True

    def remove(self, server: int, chain: int) -> None:
        self._by_chain.get(chain, {}).pop(server, None)
        self._by_server[server].discard(chain)

    def clear(self, server: int) -> None:
        for chain in self._by_server[server]:
            self._by_chain[chain].pop(server, None)
        self._by_server[server].clear()
        self.has_template[:, server] = False

    def of(self, turn: Turn) -> dict[int, int]:
        """Return the tokens of the prompt beyond the template, by server."""
        chain = turn.session.chain
        found = self._by_chain.get(chain.number, {})
        if chain.parent is not None:
            inherited = self._by_chain.get(chain.parent.number, {})
            found = {s: min(tokens, chain.shared) for s, tokens in inherited.items()} | found
        return {server: min(tokens, turn.prompt) for server, tokens in found.items()}


class CacheAware(Router):
    def __init__(self, num_servers: int, load: Load, delay: float) -> None:
        super().__init__(num_servers, load, delay)
        self._sent = Held(num_servers)
        self._sizes: Floats = np.zeros(num_servers)

    def choose(self, turn: Turn, now: float) -> int:
        requests = self.load.requests
        most, least = requests.max(), requests.min()
        if most - least > _BALANCE_ABS and most > _BALANCE_REL * least:
            server = self.load.least(requests)
        else:
            server = self._matching(turn)
        self._sent.add(server, turn.session.chain, turn.prompt)
        self._sizes[server] += turn.prompt - turn.before
        return server

    def _matching(self, turn: Turn) -> int:
        answering = {s: n for s, n in self._sent.of(turn).items() if not self.load.down[s]}
        server = max(answering, key=answering.__getitem__, default=-1)
        if server < 0:
            holders = self._sent.has_template[turn.session.chain.template] & (self.load.down == 0)
            if _CACHE_THRESHOLD * turn.prompt >= TEMPLATE or not holders.any():
                return self.load.least(self._sizes)
            return int(np.argmax(holders))
        if answering[server] <= _CACHE_THRESHOLD * turn.prompt:
            return self.load.least(self._sizes)
        return server

    def failed(self, server: int) -> None:
        self._sent.clear(server)
        self._sizes[server] = 0.0


class KvAware(Router):
    def __init__(self, num_servers: int, load: Load, delay: float) -> None:
        super().__init__(num_servers, load, delay)
        self._held = Held(num_servers)
        # (when the router hears of it, server, chain or its number, tokens)
        self._news: deque[tuple[float, int, Chain | int, int]] = deque()

    def choose(self, turn: Turn, now: float) -> int:
        self._hear(now)
        chain, costs = turn.session.chain, _UNDER_WAY * self.load.tokens
        lacking = np.where(self._held.has_template[chain.template], 0.0, float(TEMPLATE))
        best = self.load.least(costs + lacking)
        least = costs[best] + lacking[best] + turn.prompt - TEMPLATE
        for server, tokens in self._held.of(turn).items():
            cost = costs[server] + self.load.down[server] + turn.prompt - tokens
            if cost < least or (cost == least and server < best):
                best, least = server, cost
        return best

    def kept(self, server: int, chain: Chain, num_tokens: int, now: float) -> None:
        self._news.append((now + self.delay, server, chain, num_tokens))

    def lost(self, server: int, chain: int, now: float) -> None:
        self._news.append((now + self.delay, server, chain, 0))

    def failed(self, server: int) -> None:
        self._news = deque(news for news in self._news if news[1] != server)
        self._held.clear(server)

    def _hear(self, now: float) -> None:
        while self._news and self._news[0][0] <= now:
            _, server, chain, tokens = self._news.popleft()
            if isinstance(chain, Chain):
                self._held.add(server, chain, tokens)
            else:
                self._held.remove(server, chain)


class KvAwareSessions(KvAware):
    def __init__(self, num_servers: int, load: Load, delay: float) -> None:
        super().__init__(num_servers, load, delay)
        self._bound: dict[int, int] = {}

    def choose(self, turn: Turn, now: float) -> int:
        bound = self._bound.get(turn.session.number)
        if bound is None or self.load.down[bound]:
            bound = self._bound[turn.session.number] = super().choose(turn, now)
        return bound


POLICIES: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "consistent_hash": ConsistentHash,
    "cache_aware": CacheAware,
    "kv_aware": KvAware,
    "kv_aware, sessions": KvAwareSessions,
}

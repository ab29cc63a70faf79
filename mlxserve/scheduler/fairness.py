"""FairShare: how many tokens each client has used, so that the one with the fewest goes first.

The virtual token counter of arXiv 2401.00588: prompt tokens that had to be computed, and answer
tokens, which cost more. A client that returns is lifted to the lowest counter of the clients with
requests: it is not owed anything for the time it was away.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush, heapreplace

PREFILL_WEIGHT = 1
DECODE_WEIGHT = 2  # the paper's


class FairShare:
    """Counters of the clients with live requests, and of clients that left with a higher one."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._num_live: Counter[str] = Counter()
        # A heap of live clients, and of some that left. Counters only grow, so an entry may be too low.
        self._lowest: list[tuple[int, str]] = []
        self._in_heap: set[str] = set()

    def tokens_of(self, client: str) -> int:
        """Return a client's weighted tokens, to be compared with those of other clients."""
        return self._tokens[client]

    def arrive(self, client: str) -> None:
        """Count one more live request of a client."""
        if client not in self._num_live:
            self._tokens[client] = max(self._tokens.get(client, 0), self._min_tokens())
            if client not in self._in_heap:
                self._in_heap.add(client)
                heappush(self._lowest, (self._tokens[client], client))
        self._num_live[client] += 1

    def leave(self, client: str) -> None:
        """Count one live request less of a client."""
        self._num_live[client] -= 1
        if self._num_live[client]:
            return
        del self._num_live[client]
        if not self._num_live:
            self._tokens.clear()  # no client waits, so none is owed anything
            self._lowest.clear()
            self._in_heap.clear()
            return
        if self._tokens[client] <= self._min_tokens():
            del self._tokens[client]  # it would be lifted to that anyway

    def _min_tokens(self) -> int:
        """Return the lowest counter of a live client; 0 without any."""
        while self._lowest:
            tokens, client = self._lowest[0]
            if client not in self._num_live:
                heappop(self._lowest)
                self._in_heap.remove(client)
            elif tokens != self._tokens[client]:
                heapreplace(self._lowest, (self._tokens[client], client))
            else:
                return tokens
        return 0

    def charge(self, client: str, *, prefill: int = 0, decode: int = 0) -> None:
        self._tokens[client] += PREFILL_WEIGHT * prefill + DECODE_WEIGHT * decode

    def check(self, clients: Counter[str]) -> None:
        """Audit against the clients of all live requests. Raises AssertionError."""
        assert self._num_live == clients, "a client's requests are miscounted"
        assert self._num_live.keys() <= self._tokens.keys(), "a client has no counter"
        assert clients or not self._tokens, "a counter is left over"
        lowest = min((self._tokens[client] for client in clients), default=0)
        assert self._min_tokens() == lowest, "the lowest counter is not found"

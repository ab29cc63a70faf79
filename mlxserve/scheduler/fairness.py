"""FairShare: how many tokens each client has got, so that the one with the least goes first.

The virtual token counter of arXiv 2401.00588: prompt tokens that had to be computed, and answer
tokens, which cost more. A client that comes back starts at the least of those who are there: it is
owed nothing for the time it was away.
"""

from __future__ import annotations

from collections import Counter

PREFILL_WEIGHT = 1
DECODE_WEIGHT = 2  # the paper's


class FairShare:
    """Counters of the clients that have requests, and of those that left with more than they."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._num_live: Counter[str] = Counter()

    def of(self, client: str) -> int:
        """Weighted tokens; only differences between clients mean anything."""
        return self._tokens[client]

    def arrive(self, client: str) -> None:
        """It has one more request."""
        if not self._num_live[client]:
            least = min(
                (self._tokens[other] for other in self._num_live if other != client), default=0
            )
            self._tokens[client] = max(self._tokens.get(client, 0), least)
        self._num_live[client] += 1

    def leave(self, client: str) -> None:
        """It has one request less."""
        self._num_live[client] -= 1
        if self._num_live[client]:
            return
        del self._num_live[client]
        if not self._num_live:
            self._tokens.clear()  # nobody waits: nobody is owed anything
            return
        least = min(self._tokens[other] for other in self._num_live)
        if self._tokens[client] <= least:
            del self._tokens[client]  # it would be lifted to that anyway

    def charge(self, client: str, *, prefill: int = 0, decode: int = 0) -> None:
        self._tokens[client] += PREFILL_WEIGHT * prefill + DECODE_WEIGHT * decode

    def check(self, clients: Counter[str]) -> None:
        """Audit against the clients of all live requests. Raises AssertionError."""
        assert self._num_live == clients, "a client's requests are miscounted"
        assert self._num_live.keys() <= self._tokens.keys(), "a client has no counter"
        assert clients or not self._tokens, "a counter is left over"

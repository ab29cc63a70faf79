"""FairShare: how many tokens each client has used, so that the one with the fewest goes first.

The virtual token counter of arXiv 2401.00588: prompt tokens that had to be computed, and answer
tokens, which cost more. A client that returns is lifted to the lowest counter of the clients with
requests: it is not owed anything for the time it was away.
"""

from __future__ import annotations

from collections import Counter

PREFILL_WEIGHT = 1
DECODE_WEIGHT = 2  # the paper's


class FairShare:
    """Counters of the clients with live requests, and of clients that left with a higher one."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._num_live: Counter[str] = Counter()

    def tokens_of(self, client: str) -> int:
        """Weighted tokens; only differences between clients mean anything."""
        return self._tokens[client]

    def arrive(self, client: str) -> None:
        """The client has one more live request."""
        if not self._num_live[client]:
            least = min(
                (self._tokens[other] for other in self._num_live if other != client), default=0
            )
            self._tokens[client] = max(self._tokens.get(client, 0), least)
        self._num_live[client] += 1

    def leave(self, client: str) -> None:
        """The client has one live request less."""
        self._num_live[client] -= 1
        if self._num_live[client]:
            return
        del self._num_live[client]
        if not self._num_live:
            self._tokens.clear()  # no client waits, so none is owed anything
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

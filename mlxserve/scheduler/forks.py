"""Forks: samples of one prompt. One request computes the prompt, the others start from its pages.

    parked ──┬─ its leader has computed the prompt ── running: full pages shared, the tail a copy
             ├─ ... without a free page or slot for it ── waiting, like any other request
             └─ its leader ended before ── the first fork leads the others

A fork computes only the prompt's last token again, in a page of its own: its first sample is drawn
from that token's logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from mlxserve.request import LiveRequest


@dataclass(slots=True)
class Forks:
    """The parked forks of each leader."""

    _parked: dict[LiveRequest, list[LiveRequest]] = field(default_factory=dict)  # by their leader

    def __len__(self) -> int:
        """Return the number of parked forks."""
        return sum(map(len, self._parked.values()))

    def __iter__(self) -> Iterator[LiveRequest]:
        return chain.from_iterable(self._parked.values())

    def __contains__(self, request: LiveRequest) -> bool:
        return request in self._parked.get(request.leader or request, ())

    def park(self, fork: LiveRequest) -> None:
        assert fork.leader is not None, f"{fork.id} has no leader"
        self._parked.setdefault(fork.leader, []).append(fork)

    def remove(self, fork: LiveRequest) -> None:
        """Remove a fork that ended while it was parked."""
        assert fork.leader is not None, f"{fork.id} has no leader"
        parked = self._parked[fork.leader]
        parked.remove(fork)
        if not parked:
            del self._parked[fork.leader]

    def pop(self, leader: LiveRequest) -> list[LiveRequest]:
        """Remove and return the forks of this leader."""
        return self._parked.pop(leader, [])

    def replace(self, leader: LiveRequest) -> LiveRequest | None:
        """Replace a leader that ended before its prompt was computed by its first fork; return that."""
        forks = self.pop(leader)
        if not forks:
            return None
        first, *others = forks
        first.leader = None
        for fork in others:
            fork.leader = first
            self.park(fork)
        return first

    def check(self) -> None:
        """Audit the invariants. Raises AssertionError."""
        for leader, forks in self._parked.items():
            assert forks, f"no fork waits for {leader.id}"
            assert leader not in self, f"{leader.id} leads and follows"
            assert not leader.is_finished, f"{leader.id} has ended, but forks wait for it"
            assert leader.num_outputs == 0, f"{leader.id} has its prompt, but forks wait for it"
            for fork in forks:
                assert fork.leader is leader, f"{fork.id} waits for another leader"

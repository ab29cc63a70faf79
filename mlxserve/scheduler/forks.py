"""Forks: samples of one prompt, of which one request computes it and the others start from its pages.

    parked ──┬─ its leader has computed the prompt ── running: full pages shared, the tail a copy
             ├─ ... but there is no page or no place for it ── waiting, like any other
             └─ its leader ended before ── the first one leads the others

A fork computes the prompt's last token once more, in a page of its own: that is what its first
sample is drawn from, and the only thing that is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from mlxserve.request import LiveRequest


@dataclass(slots=True)
class Forks:
    """Who waits for whom."""

    _parked: dict[LiveRequest, list[LiveRequest]] = field(default_factory=dict)  # by their leader

    def __len__(self) -> int:
        """Forks that wait for their leader."""
        return sum(map(len, self._parked.values()))

    def __iter__(self) -> Iterator[LiveRequest]:
        return chain.from_iterable(self._parked.values())

    def __contains__(self, request: LiveRequest) -> bool:
        return request in self._parked.get(request.leader or request, ())

    def park(self, fork: LiveRequest) -> None:
        assert fork.leader is not None, f"{fork.id} has no leader"
        self._parked.setdefault(fork.leader, []).append(fork)

    def remove(self, fork: LiveRequest) -> None:
        """It ended while it was parked."""
        assert fork.leader is not None, f"{fork.id} has no leader"
        parked = self._parked[fork.leader]
        parked.remove(fork)
        if not parked:
            del self._parked[fork.leader]

    def release(self, leader: LiveRequest) -> list[LiveRequest]:
        """Those that waited for this leader; they do so no more."""
        return self._parked.pop(leader, [])

    def succeed(self, leader: LiveRequest) -> LiveRequest | None:
        """The leader ended before its prompt was computed: the fork that leads the others now."""
        heirs = self.release(leader)
        if not heirs:
            return None
        first, *others = heirs
        first.leader = None
        for fork in others:
            fork.leader = first
            self.park(fork)
        return first

    def check(self) -> None:
        """Audit. Raises AssertionError."""
        for leader, forks in self._parked.items():
            assert forks, f"nobody waits for {leader.id}"
            assert leader not in self, f"{leader.id} leads and follows"
            assert not leader.is_finished, f"{leader.id} has ended, but is waited for"
            assert leader.num_outputs == 0, f"{leader.id} has its prompt, but is waited for"
            for fork in forks:
                assert fork.leader is leader, f"{fork.id} waits for another one"

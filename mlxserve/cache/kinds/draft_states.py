"""DraftStates: the slots that the states after the tokens of drafts take.

take      a step is planned that verifies a draft: a state after each of its tokens
advance   the next step is planned, which continues the last accepted one
read      that step has been computed: only its own draft takes slots
"""

from __future__ import annotations

from mlxserve.request import LiveRequest


class DraftStates:
    """The slots by request; `num_slots` is their sum."""

    def __init__(self) -> None:
        self.num_slots = 0
        self._kept: dict[LiveRequest, int] = {}  # of the last step
        self._passed: dict[LiveRequest, int] = {}  # of the step before, until the last one is read

    def take(self, request: LiveRequest, num_slots: int) -> None:
        """Take slots for the draft of a request in the next step."""
        self.advance(request)
        self._kept[request] = num_slots
        self.num_slots += num_slots

    def advance(self, request: LiveRequest) -> None:
        """Note that the next step continues a state that the last one has left."""
        self.read(request)
        if request in self._kept:
            self._passed[request] = self._kept.pop(request)

    def read(self, request: LiveRequest) -> None:
        """Give up the slots of the step before the last, which is computed."""
        self.num_slots -= self._passed.pop(request, 0)

    def end(self, request: LiveRequest) -> None:
        """Give up all slots of a request."""
        self.read(request)
        self.num_slots -= self._kept.pop(request, 0)


def num_needed(num_tokens: int, start: int, page_size: int, *, is_replayed: bool = False) -> int:
    """Return the slots for a draft of `num_tokens` after the token at `start`.

    There is a state after each token; only the one before all of them where layers compute those after accepted
    tokens once more (`is_replayed`). At page boundaries snapshots are taken as well, of which only the
    newest has a slot of the request.
    """
    num_boundaries = (start + 1 + num_tokens) // page_size - start // page_size
    num_states = min(1, num_tokens) if is_replayed else num_tokens
    return num_states + max(0, num_boundaries - 1)

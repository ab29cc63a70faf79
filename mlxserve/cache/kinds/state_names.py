"""StateNames: ids of recurrent states that requests will begin with, and of those that can be dropped."""

from __future__ import annotations

from collections.abc import Sequence

from mlxserve.request import LiveRequest


class StateNames:
    """The ids between the scheduler and the owner of the arrays.

    `restoring`, by request, and `dropped` may be read by others.
    """

    def __init__(self) -> None:
        self.restoring: dict[LiveRequest, int] = {}  # the state that its next chunk begins with
        self.dropped: Sequence[int] = []  # of states that no other request can find

    def restore(self, request: LiveRequest, id_: int) -> None:
        """Let the next chunk of a request begin with a state."""
        self.restoring[request] = id_

    def pop_restored(self, request: LiveRequest) -> int | None:
        """Return the id of the state that the next chunk of a request begins with, and forget it."""
        return self.restoring.pop(request, None)

    def drop(self, *ids: int) -> None:
        """Drop states, once no request will begin with them."""
        self.dropped = [*self.dropped, *ids]

    def pop_dropped(self) -> list[int]:
        """Return the ids that can be dropped: all but those that a request will begin with."""
        needed = set(self.restoring.values())
        dropped = [id_ for id_ in self.dropped if id_ not in needed]
        self.dropped = [id_ for id_ in self.dropped if id_ in needed]
        return dropped

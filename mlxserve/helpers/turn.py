"""take_turn: does pieces of a helper's job until the turn of their request is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

Piece = TypeVar("Piece")
Result = TypeVar("Result")

# Of a processor. What is left of a request then waits until other clients had theirs.
TURN_SECONDS = 0.5


def take_turn(
    pieces: Iterable[Piece], seconds: float, do: Callable[[Piece, float], Result]
) -> Generator[Result, None, float]:
    """Yield the results of pieces, at least one; return the processor's seconds that they took.

    seconds: of a processor, for all pieces of the request that are left
    do: does a piece, in no more than the seconds of its second argument
    """
    began, used = time.thread_time(), 0.0
    for piece in pieces:
        yield do(piece, seconds - used)
        used = time.thread_time() - began
        if used >= min(seconds, TURN_SECONDS):
            break
    return used

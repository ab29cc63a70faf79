"""HighlightWorker: highlights code in a helper process, since some of Pygments' lexers never end."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

from pygments.lexers import get_lexer_by_name

from mlxserve.helpers.turn import take_turn

Run: TypeAlias = tuple[str | None, int]  # (class, characters)

_CLASSES = {
    "Comment": "comment",
    "Keyword": "keyword",
    "Operator.Word": "keyword",
    "Literal.String": "string",
    "Literal.Number": "number",
    "Name.Function": "name",
    "Name.Class": "name",
    "Name.Tag": "name",
    "Name.Builtin": "name",
    "Name.Decorator": "name",
}


class HighlightWorker:
    """Runs lexers, alone in its process."""

    def runs(
        self, blocks: Sequence[tuple[str, str]], seconds: float
    ) -> Generator[list[Run] | None, None, float]:
        """Yield the runs of each (lexer, code); None for a block that did not finish in time.

        Stops and returns as `take_turn` does.
        """
        return take_turn(blocks, seconds, _runs)


def _runs(block: tuple[str, str], seconds: float) -> list[Run] | None:
    lexer, code = block
    end = time.thread_time() + seconds
    pieces: list[Run] = []
    for _, kind, text in get_lexer_by_name(lexer, stripnl=False).get_tokens_unprocessed(code):
        if time.thread_time() > end:
            return None
        pieces.append((_class_of(kind), len(text)))
    grouped = groupby(pieces, itemgetter(0))
    return [(name, sum(length for _, length in same)) for name, same in grouped]


def _class_of(kind: Sequence[str]) -> str | None:
    for length in (2, 1):
        if name := _CLASSES.get(".".join(kind[:length])):
            return name
    return None

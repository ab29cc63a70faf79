"""MarkdownWorker: parses Markdown in a helper process, since no parser's time is linear by construction."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from mlxserve.api.page.highlighting import Node
from mlxserve.api.page.markdown import Markdown
from mlxserve.helpers.turn import take_turn

T = TypeVar("T")
Growing: TypeAlias = tuple[list[Node], int, int]


class MarkdownWorker:
    """Runs the parser, alone in its process."""

    def __init__(self, text_seconds: float) -> None:
        """text_seconds: processor time of one text."""
        self._text_seconds = text_seconds
        self._parser = Markdown()

    def trees(
        self, texts: Sequence[str], seconds: float
    ) -> Generator[list[Node] | None, None, float]:
        """Yield the nodes of each text; None for a text that did not finish in time.

        Stops and returns as `take_turn` does.
        """
        return take_turn(texts, seconds, self._within(self._parser.nodes))

    def growing(
        self, texts: Sequence[str], seconds: float
    ) -> Generator[Growing | None, None, float]:
        """Yield for each end of a text what `Markdown.growing` returns; otherwise like `trees`."""
        return take_turn(texts, seconds, self._within(self._parser.growing))

    def _within(self, parse: Callable[[str, float], T]) -> Callable[[str, float], T]:
        return lambda text, seconds: parse(text, min(seconds, self._text_seconds))

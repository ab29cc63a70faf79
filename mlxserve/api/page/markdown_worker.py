"""MarkdownWorker: parses Markdown in a helper process, since no parser's time is linear by construction."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from mlxserve.api.page.highlighting import Node
from mlxserve.api.page.markdown import Markdown


class MarkdownWorker:
    """Runs the parser, alone in its process."""

    def __init__(self, seconds: float) -> None:
        """seconds: processor time of one job."""
        self._seconds = seconds
        self._parser = Markdown()

    def trees(self, texts: Sequence[str]) -> Iterator[list[Node] | None]:
        """Yield the nodes of each text; None for a text that did not finish in time."""
        end = time.thread_time() + self._seconds
        for text in texts:
            yield self._parser.nodes(text, max(0.0, end - time.thread_time()))

    def growing(self, texts: Sequence[str]) -> Iterator[tuple[list[Node], int, int] | None]:
        """Yield for each end of a text what `Markdown.growing` returns."""
        end = time.thread_time() + self._seconds
        for text in texts:
            yield self._parser.growing(text, max(0.0, end - time.thread_time()))

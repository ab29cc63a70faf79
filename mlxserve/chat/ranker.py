"""Ranker: how relevant documents are for a query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Ranker(Protocol):
    """Ranks documents with one model."""

    def prepare(
        self, query: str, documents: Sequence[str], instruction: str | None = None
    ) -> tuple[Sequence[Any], int]:
        """Turn the documents into texts for `rank`, and count those that were cut to fit.

        instruction: defines relevance, for a model that reads one; None for its usual one

        Raises InvalidRequest, InvalidParameter.
        """
        ...

    async def rank(self, texts: Sequence[Any], *, client: str = "") -> list[float]:
        """Return the relevance of each document: a score, or the cosine between vectors.

        Raises InvalidRequest, PromptTooLong, EngineStopped.
        """
        ...

"""Ranker: how relevant documents are for a query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Ranker(Protocol):
    """Of one model."""

    def prepare(
        self, query: str, documents: Sequence[str], instruction: str | None = None
    ) -> tuple[Sequence[Any], int]:
        """What `rank` takes, texts with a length in tokens, and how many documents were cut to fit.

        instruction: what makes a document relevant, for a model that reads one; None for its usual one
        Raises InvalidRequest, InvalidParameter.
        """
        ...

    async def rank(self, texts: Sequence[Any], *, client: str = "") -> list[float]:
        """The relevance of each document: a score, or the cosine between vectors.

        Raises InvalidRequest, PromptTooLong, EngineStopped.
        """
        ...

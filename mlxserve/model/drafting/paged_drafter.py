"""PagedDrafter: a drafter with keys and values of its own, in a pool with the ids of the model's pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlxserve.model.batch import Batch
from mlxserve.model.drafting.draft_pages import DraftPages
from mlxserve.model.drafting.drafter import Drafter, DraftPart
from mlxserve.model.load import LoadedModel
from mlxserve.request import Chunk


class PagedDrafter(Drafter):
    """A loaded model or head that drafts: it computes the rows of prompts as well, and what is missing of others.

    A source of guesses overrides `_logits` and `follow`.
    """

    keeps_guesses = True  # the row of an accepted guess is the one that its token has
    pages: DraftPages

    def __init__(
        self,
        loaded: LoadedModel,
        pages: DraftPages,
        *,
        vocab_size: int,
        max_rows: int,
        seed: int = 0,
    ) -> None:
        """loaded: what drafts, as long as its positions go.

        max_rows: missing rows that are computed in one step
        vocab_size, seed: as in `Drafter`
        """
        super().__init__(vocab_size=vocab_size, max_length=loaded.context.longest, seed=seed)
        self.pages = pages
        self._max_rows = max_rows

    def _parts(self, chunks: Sequence[Chunk]) -> list[DraftPart]:
        parts, left = [], self._max_rows
        for number, chunk in enumerate(chunks):
            first = self.pages.num_leading(chunk)
            if chunk.end > self._max_length:
                continue
            num_missing = chunk.start - first
            length = min(num_missing, left)
            left -= length
            is_complete = length == num_missing
            length += is_complete
            if not length:
                continue
            parts.append(DraftPart(_rows(chunk, first, length, samples=is_complete), number))
            guessed = len(chunk.draft) - 1 if is_complete and self.keeps_guesses else 0
            # Those of rejected guesses are overwritten by the next step before they are read.
            self.pages.mark(chunk, first, first + length + guessed)
        return sorted(parts, key=lambda part: part.chunk.length > 1 or not part.chunk.samples)

    def _first(self, parts: list[DraftPart]) -> tuple[mx.array, mx.array | None]:
        chunks = [part.chunk for part in parts]
        batch = self.batch(chunks)
        return self._guess(chunks, batch, mx.array(batch.tokens), None)

    def _next(
        self, chunks: Sequence[Chunk], offset: int, ids: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        rows = [_rows(chunk, chunk.start + offset, 1, samples=True) for chunk in chunks]
        rows = [row._replace(is_lazy=True) for row in rows]
        num = len(rows)
        return self._guess(
            rows, self.batch(rows), ids[:num], None if carried is None else carried[:num]
        )

    def batch(self, chunks: Sequence[Chunk]) -> Batch:
        """Return the batch of these rows; a row of an image counts as the first token."""
        batch = Batch.from_chunks(chunks, self.pages.page_size, is_of_drafter=True)
        return replace(batch, tokens=np.maximum(batch.tokens, 0), pictures=None)


def _rows(chunk: Chunk, start: int, length: int, *, samples: bool) -> Chunk:
    """Return a chunk of the same request and pages, without what concerns the model alone."""
    return Chunk(chunk.request, start, length, chunk.page_table, samples)

"""DraftModel: a small model with the same vocabulary guesses what the model samples."""

# ruff: noqa: ARG002 (a source uses what concerns it)

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxserve.model.batch import Batch
from mlxserve.model.drafting.draft_pages import DraftPages
from mlxserve.model.drafting.paged_drafter import PagedDrafter
from mlxserve.model.forward import forward_of
from mlxserve.model.load import LoadedModel
from mlxserve.model.states import StateStore
from mlxserve.request import Chunk


class DraftModel(PagedDrafter):
    """A model of its own, called for the prompts' chunks and for each token of a draft."""

    def __init__(self, loaded: LoadedModel, pages: DraftPages, **options: int) -> None:
        """The arguments are those of `PagedDrafter`."""
        assert not loaded.has_states, "states would have to return to the last accepted token"
        super().__init__(loaded, pages, **options)
        self._num_known = loaded.vocab_size
        self._forward = forward_of(loaded, pages.kv, StateStore(()))

    def _logits(
        self, batch: Batch, tokens: mx.array, rows: list[int], carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        if self._num_known < self._vocab_size:
            # A guess from logits that are no numbers may be any token of the model.
            tokens = mx.minimum(tokens, self._num_known - 1)
        return self._forward.logits(batch, tokens, rows), None

    def follow(self, chunks: Sequence[Chunk], tokens: mx.array, hidden: mx.array | None) -> None:
        """Compute the prompts' chunks as well, and rows before them that are missing."""
        left, parts = self._max_rows, []
        for chunk in chunks:
            if chunk.start >= chunk.request.prefill_end or chunk.end > self._max_length:
                continue
            first = self.pages.num_leading(chunk)
            if length := min(chunk.end - first, left):
                parts.append(Chunk(chunk.request, first, length, chunk.page_table, samples=False))
                self.pages.mark(chunk, first, first + length)
                left -= length
        if parts:
            batch = self.batch(sorted(parts, key=lambda part: part.length > 1))
            self._forward.logits(batch, mx.array(batch.tokens), [len(batch.tokens) - 1])

    def batch(self, chunks: Sequence[Chunk]) -> Batch:
        """Return the batch of these rows; a token that the draft model lacks counts as the first one."""
        batch = super().batch(chunks)
        batch.tokens[batch.tokens >= self._num_known] = 0
        return batch

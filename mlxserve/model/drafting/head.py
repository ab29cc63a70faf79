"""MtpHead: a layer of the model's own checkpoint guesses the token after the next one (multi-token prediction).

    position          p - 1        p          p + 1
    model             hidden ─┐    hidden
    token                     └──▶ row p ──▶  guess          a row is a function of tokens 0 .. p, and the
    head's pages                   k, v                      page's hash names it

The row at p is made of the model's hidden state at p - 1 and the token at p. So nothing of a cached prefix is lost:
only the first row after a hit has zeros in place of a hidden state that nobody kept. The rows of guesses are made of
the head's own hidden states, and are computed again from the model's with the first row of the next draft.

Steps without drafts leave their hidden states here, and their rows are computed when a draft needs them, or a page is
full: a page that others find has all of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.model.batch import Batch
from mlxserve.model.drafting.draft_pages import DraftPages
from mlxserve.model.drafting.head_model import HeadModel
from mlxserve.model.drafting.paged_drafter import PagedDrafter
from mlxserve.model.forward import forward_of
from mlxserve.model.load import LoadedModel
from mlxserve.model.states import StateStore
from mlxserve.request import Chunk, LiveRequest, RequestState


class _Kept(NamedTuple):
    """The model's hidden states of a request at positions start .. end, in these rows of an array."""

    start: int
    end: int
    array: mx.array
    row: int


class MtpHead(PagedDrafter):
    """A head as a drafter, with keys and values of its layer in the model's pages."""

    wants_hidden = True
    keeps_guesses = False

    def __init__(self, loaded: LoadedModel, pages: DraftPages, **options: int) -> None:
        """The arguments are those of `PagedDrafter`; `loaded` is a HeadModel."""
        assert isinstance(loaded.model, HeadModel), "a head reads hidden states"
        super().__init__(loaded, pages, **options)
        self._head = loaded.model
        self.wants_unnormed = not self._head.takes_normed
        # A recorded graph would keep the hidden states of the step that it was recorded in.
        self._forward = forward_of(loaded, pages.kv, StateStore(()), is_recorded=False)
        self._kept: dict[LiveRequest, list[_Kept]] = {}
        self._newest: mx.array | None = None  # of the last step

    @property
    def num_kept(self) -> int:
        """Number of requests with hidden states."""
        return len(self._kept)

    def arrays(self) -> Sequence[mx.array]:
        return () if self._newest is None else (self._newest,)

    def restart(self) -> None:
        self._kept.clear()
        self._newest = None

    def _logits(
        self, batch: Batch, tokens: mx.array, rows: list[int], carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        hidden = self._hidden_before(batch.plan) if carried is None else carried
        with self._head.showing(hidden):
            logits = self._forward.logits(batch, tokens, rows)
        return logits, self._head.carried[mx.array(rows)]

    def follow(self, chunks: Sequence[Chunk], tokens: mx.array, hidden: mx.array | None) -> None:
        """Compute the rows of prompts and of full pages; keep the hidden states of all others."""
        assert hidden is not None, "the model shows its hidden states"
        for request in [each for each in self._kept if each.state is not RequestState.RUNNING]:
            del self._kept[request]
        first = 0
        for chunk in chunks:
            self._keep(chunk, _Kept(chunk.start, chunk.end, hidden, first))
            first += chunk.length
        self._compute(chunks, tokens)
        self._drop_computed(chunks, hidden)

    def _keep(self, chunk: Chunk, kept: _Kept) -> None:
        """Add a step's hidden states; those of rejected guesses, at the same positions, are dropped."""
        before = self._kept.get(chunk.request, [])
        cut = [each._replace(end=min(each.end, chunk.start)) for each in before]
        self._kept[chunk.request] = [*(each for each in cut if each.start < each.end), kept]

    def _compute(self, chunks: Sequence[Chunk], tokens: mx.array) -> None:
        left, parts, lazy = self._max_rows, [], []
        first = 0
        for chunk in chunks:
            start, end = self._due(chunk)
            if length := max(0, min(end - start, left)):
                part = Chunk(chunk.request, start, length, chunk.page_table, samples=False)
                parts.append(part._replace(is_lazy=chunk.is_lazy and part.end > chunk.start))
                if parts[-1].is_lazy:
                    lazy.append((parts[-1], first))
                self.pages.mark(chunk, start, part.end)
                left -= length
            first += chunk.length
        if not parts:
            return
        parts.sort(key=lambda part: part.length > 1)
        batch = self.batch(parts)
        known = mx.array(batch.tokens)
        if lazy:
            ends = list(accumulate(part.length for part in parts))
            at = [ends[parts.index(part)] - 1 for part, _ in lazy]
            known[mx.array(at)] = tokens[mx.array([row for _, row in lazy])]
        self._logits(batch, known, [len(batch.tokens) - 1], None)

    def _due(self, chunk: Chunk) -> tuple[int, int]:
        """Return the rows to compute in this step, up to the last one whose token is certain."""
        if chunk.end > self._max_length:
            return 0, 0
        if chunk.start < chunk.request.prefill_end:
            return self.pages.num_leading(chunk), chunk.end
        certain = chunk.start + 1
        full = certain // self.pages.page_size * self.pages.page_size
        return self.pages.num_leading(chunk, certain), full

    def _drop_computed(self, chunks: Sequence[Chunk], hidden: mx.array) -> None:
        """Keep the hidden states of rows that are missing, and the last one; not the whole step's array."""
        rows: list[int] = []
        for chunk in chunks:
            missing = self.pages.num_leading(chunk, chunk.end)
            *before, newest = self._kept[chunk.request]
            first = max(newest.start, min(missing, chunk.end) - 1)
            kept = [each for each in before if each.end >= missing]
            kept.append(_Kept(first, newest.end, hidden, len(rows)))
            rows += range(newest.row + first - newest.start, newest.row + newest.end - newest.start)
            self._kept[chunk.request] = kept
        self._newest = newest_rows = hidden[mx.array(rows)]
        for chunk in chunks:
            self._kept[chunk.request][-1] = self._kept[chunk.request][-1]._replace(
                array=newest_rows
            )

    def batch(self, chunks: Sequence[Chunk]) -> Batch:
        """Return the batch of these rows; a lazy one's token is 0 in it."""
        batch = super().batch(chunks)
        first = 0
        for chunk in chunks:
            if chunk.is_lazy and chunk.length > 1:
                known = chunk.request.token_ids[chunk.start : chunk.end - 1]
                batch.tokens[first : first + len(known)] = np.maximum(known, 0)
            first += chunk.length
        return batch

    def _hidden_before(self, chunks: Sequence[Chunk]) -> mx.array | None:
        """Return the hidden state before each row: (rows, size); zeros where nobody kept it.

        None if nobody kept any.
        """
        arrays: dict[int, mx.array] = {}
        starts: dict[int, int] = {}
        total = 1  # row 0 is zeros
        index = np.zeros(sum(chunk.length for chunk in chunks), np.int32)
        first = 0
        for chunk in chunks:
            for kept in self._kept.get(chunk.request, ()):
                start = max(kept.start, chunk.start - 1)
                end = min(kept.end, chunk.end - 1)
                if start >= end:
                    continue
                if id(kept.array) not in arrays:
                    arrays[id(kept.array)], starts[id(kept.array)] = kept.array, total
                    total += len(kept.array)
                source = starts[id(kept.array)] + kept.row + start - kept.start
                at = first + start + 1 - chunk.start
                index[at : at + end - start] = np.arange(source, source + end - start)
            first += chunk.length
        if not arrays:
            return None
        known = list(arrays.values())
        zeros = mx.zeros((1, known[0].shape[-1]), known[0].dtype)
        return mx.concatenate([zeros, *known])[mx.array(index)]

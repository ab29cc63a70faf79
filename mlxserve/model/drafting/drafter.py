"""Drafter: what guesses tokens on the device, mostly with keys and values of its own in the model's pages.

A step of the runner:

    begin(chunks)                    the rows that the step computes
    propose(chunks) -> ids           guesses, which enter the step's batch without being read
        (the model's forward)
    follow(chunks, tokens, hidden)   the step is built: prompts are computed here as well

A guess is drawn as the model will draw: through the same filters, with the same noise by seed, position and
token id. So the two agree more often than any independent draw (drafter-invariant coupling, Daliri et al.,
arXiv 2408.07978), and at a temperature of 0 it is the drafter's best token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.model.batch import Batch
from mlxserve.model.drafting.draft_pages import DraftPages
from mlxserve.model.sampler import Draw, sample, seed_of
from mlxserve.request import GUESS, Chunk


class DraftPart(NamedTuple):
    """Rows of a chunk's request that the drafter computes; the last one guesses if `chunk.samples`."""

    chunk: Chunk
    number: int  # of the chunk among those that draft


class Drafter(ABC):
    """Guesses the tokens of drafts. Lives on the engine's thread.

    A source of guesses overrides `_logits` and `follow`.
    """

    wants_hidden = False  # `follow` reads the model's hidden states
    wants_unnormed = False  # those before the model's last norm
    keeps_guesses = True  # the row of an accepted guess is the one that its token has

    def __init__(
        self,
        pages: DraftPages | None,
        *,
        vocab_size: int,
        max_length: int,
        max_rows: int,
        seed: int,
    ) -> None:
        """pages: of its own; None for a source that keeps none, which has its own `_parts`, `_first`, `_next`.

        vocab_size: the model's, to which the noise of its draws belongs
        max_length: positions that the drafter can compute
        max_rows: missing rows that are computed in one step
        seed: the engine's
        """
        self.pages = pages
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._max_rows = max_rows
        self._seed = seed

    @abstractmethod
    def _logits(
        self, batch: Batch, tokens: mx.array, rows: list[int], carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Write the batch's rows; return (logits of `rows`, what their next call is given).

        carried: what the last call returned for these rows; None in the first call of a step
        """

    @abstractmethod
    def follow(self, chunks: Sequence[Chunk], tokens: mx.array, hidden: mx.array | None) -> None:
        """Take note of a step that was built; `tokens` (T,) and `hidden` (T, size) are not evaluated.

        hidden: the input of the model's head; None unless the drafter wants it and the head shows it
        """

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Begin a step, before its rows are computed."""
        if self.pages is not None:
            self.pages.overwrite(chunks)

    def arrays(self) -> Sequence[mx.array]:
        """Return what a step computes besides the pages, for later ones."""
        return ()

    def restart(self) -> None:  # noqa: B027 (most keep nothing)
        """Forget what is kept besides the pages, after a step that failed."""

    def propose(self, chunks: Sequence[Chunk]) -> mx.array:
        """Return the guesses of these chunks' drafts, in order: (sum of lengths,) int32, not evaluated.

        They are GUESS where too many rows are missing, some of which are computed now.
        """
        parts = self._parts(chunks)
        sizes = [len(chunk.draft) for chunk in chunks]
        drafting = [part.number for part in parts if part.chunk.samples]
        if not drafting:
            if parts:
                self._first(parts)
            return mx.full((sum(sizes),), GUESS, mx.int32)
        # Longest drafts first: those that continue are always the first ones.
        ranks = sorted(drafting, key=lambda number: -sizes[number])
        ids, carried = self._first(parts)
        order = mx.array([drafting.index(number) for number in ranks])
        calls = [ids[order]]
        carried = None if carried is None else carried[order]
        for offset in range(1, sizes[ranks[0]]):
            running = [chunks[number] for number in ranks if sizes[number] > offset]
            ids, carried = self._next(running, offset, calls[-1], carried)
            calls.append(ids)
        # Where each chunk's guesses are in what the calls returned; GUESS is the last entry.
        firsts = [0, *accumulate(call.size for call in calls)]
        where = [
            firsts[offset] + ranks.index(number) if number in ranks else firsts[-1]
            for number, size in enumerate(sizes)
            for offset in range(size)
        ]
        return mx.concatenate([*calls, mx.array([GUESS], mx.int32)])[mx.array(where)]

    def _parts(self, chunks: Sequence[Chunk]) -> list[DraftPart]:
        """Return the rows to compute before guesses: what is missing, and the chunks' first rows.

        Single rows come first, as in every batch.
        """
        assert self.pages is not None, "a source without pages has parts of its own"
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
        """Compute known tokens; return (a guess for each part that is complete, what comes after it)."""
        chunks = [part.chunk for part in parts]
        batch = self.batch(chunks)
        return self._guess(chunks, batch, mx.array(batch.tokens), None)

    def _next(
        self, chunks: Sequence[Chunk], offset: int, ids: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Compute the guesses `ids` of these chunks and of others after them; return as `_first`."""
        rows = [_rows(chunk, chunk.start + offset, 1, samples=True) for chunk in chunks]
        rows = [row._replace(is_lazy=True) for row in rows]
        num = len(rows)
        return self._guess(
            rows, self.batch(rows), ids[:num], None if carried is None else carried[:num]
        )

    def _guess(
        self,
        chunks: Sequence[Chunk],
        batch: Batch,
        tokens: mx.array,
        carried: mx.array | None,
    ) -> tuple[mx.array, mx.array | None]:
        rows = batch.sample_rows.tolist() or [len(batch.tokens) - 1]
        logits, carried = self._logits(batch, tokens, rows, carried)
        draws = [
            Draw(chunk.request, seed_of(chunk.request, self._seed), chunk.end)
            for chunk in chunks
            if chunk.samples
        ]
        if not draws:
            return mx.zeros(0, mx.int32), None
        # Noise belongs to the ids of the model's vocabulary, which may be padded to another size.
        logits = logits[:, : self._vocab_size]
        if (missing := self._vocab_size - logits.shape[-1]) > 0:
            logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        return sample(logits, draws).ids, carried

    def batch(self, chunks: Sequence[Chunk]) -> Batch:
        """Return the batch of these rows; a row of an image counts as the first token."""
        assert self.pages is not None, "a source without pages has batches of its own"
        batch = Batch.from_chunks(chunks, self.pages.page_size)
        return replace(batch, tokens=np.maximum(batch.tokens, 0), pictures=None)


def _rows(chunk: Chunk, start: int, length: int, *, samples: bool) -> Chunk:
    """Return a chunk of the same request and pages, without what concerns the model alone."""
    return Chunk(chunk.request, start, length, chunk.page_table, samples)

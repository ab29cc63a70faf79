"""Drafter: what guesses tokens on the device.

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
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

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

    A source with pages of its own is a `PagedDrafter`.
    """

    pages: DraftPages | None = None  # of its own
    wants_hidden = False  # `follow` reads the model's hidden states
    wants_unnormed = False  # those before the model's last norm

    def __init__(self, *, vocab_size: int, max_length: int, seed: int) -> None:
        """vocab_size: the model's, to which the noise of its draws belongs.

        max_length: positions that the drafter can compute
        seed: the engine's
        """
        self._vocab_size = vocab_size
        self._max_length = max_length
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

    @abstractmethod
    def _parts(self, chunks: Sequence[Chunk]) -> list[DraftPart]:
        """Return the rows to compute before guesses: what is missing, and the chunks' first rows.

        Single rows come first, as in every batch.
        """

    @abstractmethod
    def _first(self, parts: list[DraftPart]) -> tuple[mx.array, mx.array | None]:
        """Compute known tokens; return (a guess for each part that is complete, what comes after it)."""

    @abstractmethod
    def _next(
        self, chunks: Sequence[Chunk], offset: int, ids: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Compute the guesses `ids` of these chunks and of others after them; return as `_first`."""

    def _guess(
        self,
        chunks: Sequence[Chunk],
        batch: Batch,
        tokens: mx.array,
        carried: mx.array | None,
    ) -> tuple[mx.array, mx.array | None]:
        rows = batch.sample_rows.tolist() or [len(batch.tokens) - 1]
        logits, carried = self._logits(batch, tokens, rows, carried)
        # A grammar's mask is known for the first guess; those after others are lazy.
        draws = [
            Draw(
                chunk.request,
                seed_of(chunk.request, self._seed),
                chunk.end,
                0 if chunk.is_lazy else None,
            )
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

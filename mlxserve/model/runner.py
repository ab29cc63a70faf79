"""ModelRunner: one forward for all chunks of a step, sampled on the device, read one step later.

launch(chunks, previous) -> Pending     builds the graph; lazy tokens come from `previous`
start(pending)                          starts the device (launch does if writes are in place)
collect(pending) -> [Sampled | None]    waits for the device
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metal_kernels.reading import evaluate, read
from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.kv import KVPool
from mlxserve.cache.window_kv import WindowKV
from mlxserve.core.errors import OutOfMemory
from mlxserve.core.stats import MemoryUse
from mlxserve.model.batch import Batch
from mlxserve.model.drafting.draft_pages import PairedPages
from mlxserve.model.drafting.drafter import Drafter
from mlxserve.model.drafting.guided_guesses import allowed_guesses
from mlxserve.model.embedding import Embedding
from mlxserve.model.forward import forward_of
from mlxserve.model.load import LoadedModel
from mlxserve.model.sampler import Draw, PendingSample, sample, seed_of
from mlxserve.model.scoring import Scoring
from mlxserve.model.shared_features import RemoteVision
from mlxserve.model.states import StateStore
from mlxserve.model.vision import Vision
from mlxserve.model.workers import Workers
from mlxserve.request import GUESS, Chunk, Pooling, Sampled

log = logging.getLogger("mlxserve.runner")


@dataclass(frozen=True, slots=True)
class Pending:
    """A launched step that was not collected yet.

    References no array of the pool: a second reference would turn the next write to it into a copy.
    """

    chunks: tuple[Chunk, ...]
    # Draws of the chunks that sample, in order; several of one with a draft.
    draws: tuple[Draw, ...]
    sample: PendingSample | None  # None where no chunk samples
    done: mx.array  # small; computed when the step is
    guesses: mx.array | None = None  # of drafts that the device makes, in the order of their chunks

    def row_of(self, chunk: Chunk) -> int:
        """Index of the sampled row of the chunk's request."""
        for row, draw in enumerate(self.draws):
            if draw.request is chunk.request:
                return row
        raise LookupError(f"request {chunk.request.id} did not sample in the previous step")


class ModelRunner:
    """Runs the model's forward over the pool. Lives on the engine's thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv: KVPool,
        seed: int = 0,
        memory_limit: int | None = None,
        workers: Workers | None = None,
        windows: WindowKV | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """memory_limit: bytes of device memory that a growing pool may use.

        workers: the other ranks, on rank 0; they are told about each call before it is made
        drafter: makes the drafts of placeholders; its pages, if any, have the ids of those of `kv`
        """
        self._memory_limit = memory_limit
        self._loaded = loaded
        self._kv = kv
        self._workers = workers
        self._states = StateStore(loaded.states, is_used=loaded.has_states, replay=loaded.replay)
        self._drafter = drafter
        self._forward = forward_of(loaded, kv, self._states, windows)
        # The pages of all positions, with the drafter's if it has some.
        pages = None if drafter is None else drafter.pages
        self._pages = kv if pages is None else PairedPages(kv, pages)
        # Pools by the kind of their units.
        self._pools: dict[str, KVPool | PairedPages] = {FullPages.name: self._pages}
        if windows is not None:
            self._pools[WindowPages.name] = windows.kv
        # What reads and writes the units of each kind.
        self._units: dict[str, KVPool | PairedPages | StateStore] = {
            **self._pools,
            StateSlots.name: self._states,
        }
        self._writes_in_place = all(pool.writes_in_place for pool in self._pools.values())
        self._seed = seed

    @property
    def model(self) -> nn.Module:
        return self._loaded.model

    def launch(self, chunks: Sequence[Chunk], previous: Pending | None = None) -> Pending:
        """Build the step's graph. If the pool's writes are in place, also start it."""
        pending = self.build(chunks, previous)
        if self._writes_in_place:
            self._begin(pending)
        return pending

    def build(self, chunks: Sequence[Chunk], previous: Pending | None = None) -> Pending:
        """Build the step's graph without evaluating it."""
        batch = Batch.from_chunks(chunks, self._kv.page_size)
        lazy = _lazy_rows(batch, previous)
        if self._workers is not None:
            self._workers.step(chunks, lazy)
        tokens, guesses = _tokens(batch, previous, lazy), None
        if self._drafter is None:
            logits = self.logits(batch, tokens)
        else:
            logits, guesses = self._drafted(self._drafter, batch, tokens)
            if guesses is not None:
                begin = partial(self.compute, [logits]) if self._writes_in_place else None
                guesses = allowed_guesses(_drafting(chunks), guesses, begin)
        if batch.sampling:
            draws = tuple(draw for chunk in batch.sampling for draw in self._draws(chunk, lazy))
            previous_ids = previous.sample.ids if previous and previous.sample else None
            has_drafts = len(draws) > len(batch.sampling)
            inputs = tokens[mx.array(batch.sample_rows)] if has_drafts else None
            result = sample(logits, draws, previous_ids, inputs)
            if self._workers is not None:
                result = replace(result, ids=self._workers.share(result.ids))
            return Pending(tuple(chunks), draws, result, result.ids, guesses)
        return Pending(tuple(chunks), (), None, mx.argmax(logits, axis=-1))

    def _drafted(
        self, drafter: Drafter, batch: Batch, tokens: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """Return (logits, guesses): those of the drafter take the places of the drafts' tokens."""
        chunks = batch.plan
        drafter.begin(chunks)
        guesses = None
        if drafting := _drafting(chunks):
            guesses = drafter.propose(drafting)
            if self._workers is not None:
                guesses = self._workers.share(guesses)
                # Before the collectives of the forward: in a pipeline these do not depend on tokens here.
                mx.async_eval(guesses)  # type: ignore[no-untyped-call]
            tokens[mx.array(draft_rows(chunks))] = mx.maximum(guesses, 0)
        if not drafter.wants_hidden:
            logits = self.logits(batch, tokens)
            drafter.follow(chunks, tokens, None)
            return logits, guesses
        with self._loaded.selector.capturing(before_norm=drafter.wants_unnormed) as captured:
            logits = self.logits(batch, tokens)
        # A model that is called for one sequence after the other shows the hidden states of each.
        rows = [each.reshape(-1, each.shape[-1]) for each in captured]
        drafter.follow(chunks, tokens, mx.concatenate(rows) if rows else None)
        return logits, guesses

    def start(self, pending: Pending) -> None:
        """Start the device unless `launch` did. Every earlier step must have been collected."""
        if not self._writes_in_place:
            self._begin(pending)

    def collect(self, pending: Pending) -> list[Sampled | None]:
        """Wait for the step; one entry per chunk, None for a chunk that does not sample.

        Raises DeviceError.
        """
        if pending.sample is None:
            evaluate(pending.done)
            return [None] * len(pending.chunks)
        sampled = iter(pending.sample.read(pending.draws))
        # The step's tokens depend on them, so that they are computed.
        guesses = iter([] if pending.guesses is None else read(pending.guesses).tolist())
        return [
            _of_chunk(chunk, sampled, guesses) if chunk.samples else None
            for chunk in pending.chunks
        ]

    def embedding(
        self,
        token_ids: Sequence[int],
        pooling: Pooling,
        dimensions: int | None,
        adapter: int | None = None,
    ) -> Embedding:
        """Create the embedding of a text, computed between steps and without the pool."""
        model, selector = self._model_with(adapter), self._loaded.selector
        return Embedding(model, selector, token_ids, pooling, dimensions, workers=self._workers)

    @property
    def vision(self) -> Vision | None:
        """The image encoder; None if the model reads text only."""
        vision = self._loaded.vision
        assert not isinstance(vision, RemoteVision), "rank 0 encodes images"
        return vision

    @property
    def no_vision_reason(self) -> str:
        """Why a model trained to see does not; empty if it does, or was not trained to."""
        return self._loaded.no_vision_reason

    @property
    def no_drafts_reason(self) -> str:
        """Why the model's own head makes no drafts; empty if it does, or there is none."""
        return self._loaded.no_drafts_reason

    def scoring(
        self, token_ids: Sequence[int], num_top: int, adapter: int | None = None
    ) -> Scoring:
        """Create the scoring of a text's tokens, computed between steps and without the pool."""
        return Scoring(self._model_with(adapter), token_ids, num_top, self._workers)

    def _model_with(self, adapter: int | None) -> Any:
        loaded = self._loaded
        if adapter is None:
            return loaded.model
        assert loaded.adapters is not None, "a number is that of an adapter"
        return loaded.adapters.applied(loaded.model, adapter)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """`KVPool.copy_pages`, ordered after the steps launched so far and before the next one."""
        if self._workers is not None:
            self._workers.copy_pages(sources, targets)
        self._pages.copy_pages(sources, targets)

    def resize(self, num_pages: int) -> None:
        """Resize the pool (`KVPool.resize`); a smaller one drops recurrent states and window pages.

        Every step must have been collected. Raises OutOfMemory, and changes nothing, if the device
        cannot hold that many pages.
        """
        if num_pages > self._kv.num_pages:
            self.refuse_too_many(num_pages)
        if self._workers is not None:
            self._workers.resize(num_pages)
        if num_pages < self._kv.num_pages:
            self._states.clear()
            self._empty_windows()
        self._pages.resize(num_pages)

    def _empty_windows(self) -> None:
        for pool in self._pools.values():
            if pool is not self._pages:
                pool.restart(pool.num_pages)

    def back(self, kind: str, num_pages: int) -> None:
        """Call `KVPool.back` before the first `num_pages` pages of a kind are used."""
        pool = self._pools[kind]
        if num_pages > pool.num_backed:
            if self._workers is not None:
                self._workers.back(kind, num_pages)
            pool.back(num_pages)

    def shrink(
        self, kind: str, sources: Sequence[int], targets: Sequence[int], num_pages: int
    ) -> None:
        """Copy pages of a kind, and then `KVPool.shrink`: what other kinds back has its memory."""
        assert self._workers is None, "ranks have pools of fixed sizes"
        pool = self._pools[kind]
        if sources:
            pool.copy_pages(sources, targets)
        pool.shrink(num_pages)

    def back_ahead(self, kind: str, num_pages: int) -> None:
        """Call `KVPool.back_ahead`; each rank does for one of its own layers."""
        if self._workers is not None:
            self._workers.back(kind, num_pages, is_ahead=True)
        self._pools[kind].back_ahead(num_pages)

    def restart(self, num_pages: int) -> None:
        """Replace the arrays by empty ones of `num_pages` after a failure.

        No earlier step may be used again. Raises OutOfMemory.
        """
        try:
            mx.synchronize()
        except RuntimeError as error:  # the step is lost in any case
            log.warning("The device reports: %s", error)
        self._states.clear()
        self._empty_windows()
        if self._drafter is not None:
            self._drafter.restart()
        self._pages.restart(num_pages)

    def drop(self, kind: str, units: Sequence[int]) -> None:
        """Drop these units, and the states of requests that no longer run."""
        assert kind == StateSlots.name, "no other kind names its units"
        ended = self._states.drop(units)
        if self._workers is not None and (units or ended):
            self._workers.drop_states(units, [request.arrival for request in ended])

    def check(self, num_pages: int, units: Mapping[str, Collection[int]]) -> None:
        """Audit the arrays against the scheduler's pages and named units. Raises AssertionError."""
        assert self._kv.num_pages == num_pages, "the arrays have another number of pages"
        for pool in self._pools.values():
            pool.check()
        self._states.check(units.get(StateSlots.name, ()))

    def refuse_too_many(self, num_pages: int) -> None:
        """Raises OutOfMemory if an array cannot grow, for which both old and new must fit."""
        if self._workers is not None:
            self._workers.refuse_too_many(num_pages)
        if self._memory_limit is None:
            return
        twice = max((array.nbytes for array in self._pages.arrays()), default=0)
        left = self._memory_limit - mx.get_active_memory() - twice + self._pages.nbytes
        if self._pages.nbytes_of(num_pages) > left:
            max_pages = max(self._kv.num_pages, left // self._pages.nbytes_of(1))
            raise OutOfMemory(
                f"{num_pages} pages need {self._pages.nbytes_of(num_pages) / (1 << 30):.2f} GiB, but "
                f"next to the model the device has {max(0, left) / (1 << 30):.2f} GiB. Ask for at "
                f"most {max_pages} pages."
            )

    def read(self, kind: str, units: Sequence[int]) -> list[bytes]:
        """Return the content of units. Every step must have been collected."""
        return self._units[kind].read_units(units)

    def write(self, kind: str, units: Sequence[int], payloads: Sequence[bytes]) -> None:
        """Write what `read` returned for a model with the same layers."""
        self._units[kind].write_units(units, payloads)

    def memory(self) -> MemoryUse:
        """Bytes allocated now, according to mlx."""
        return MemoryUse(
            kv_cache=sum(pool.nbytes for pool in self._pools.values()),
            active=mx.get_active_memory(),
            reserved=mx.get_cache_memory(),
            peak=mx.get_peak_memory(),
            kv_cache_dtype=self._kv.dtype,
        )

    def logits(self, batch: Batch, tokens: mx.array, *, all_rows: bool = False) -> mx.array:
        """Return (rows, vocabulary), not evaluated.

        These are the rows that sample (the last row if none does), or all rows.
        """
        rows = batch.sample_rows.tolist() or [len(batch.tokens) - 1]
        wanted = None if all_rows else rows
        if batch.pictures is None:
            return self._forward.logits(batch, tokens, wanted)
        assert self._loaded.vision is not None, "a request has pictures, and the model does not see"
        with self._loaded.vision.showing(batch.pictures):
            return self._forward.logits(batch, tokens, wanted)

    def _begin(self, pending: Pending) -> None:
        self.compute([pending.done] if pending.sample is None else pending.sample.arrays())

    def compute(self, arrays: Sequence[mx.array]) -> None:
        """Start evaluating them, and what a step has written."""
        written = [array for pool in self._pools.values() for array in pool.arrays()]
        drafter = () if self._drafter is None else self._drafter.arrays()
        mx.async_eval(*arrays, *written, *drafter, *self._states.arrays())  # type: ignore[no-untyped-call]

    def _draws(self, chunk: Chunk, lazy: dict[Chunk, int]) -> list[Draw]:
        """Draws of the chunk's last row, or of all rows if it has a draft.

        Each has its own position, and so the random numbers that it would have without the draft.
        """
        seed, first = seed_of(chunk.request, self._seed), chunk.end - len(chunk.draft)
        positions = range(first, chunk.end + 1)
        return [
            Draw(chunk.request, seed, position, lazy.get(chunk), num_drafted)
            for num_drafted, position in enumerate(positions)
        ]


def _lazy_rows(batch: Batch, previous: Pending | None) -> dict[Chunk, int]:
    """Map each lazy chunk to the row of the previous step that samples its token."""
    if not batch.lazy:
        return {}
    assert previous is not None, "a lazy token needs the previous step"
    return {chunk: previous.row_of(chunk) for chunk in batch.lazy}


def _tokens(batch: Batch, previous: Pending | None, lazy: dict[Chunk, int]) -> mx.array:
    """Return the batch's tokens; a lazy one is what the previous step samples."""
    tokens = mx.array(batch.tokens)
    if lazy:
        assert previous is not None
        assert previous.sample is not None, "a lazy token needs a step that sampled"
        sources = mx.array([lazy[chunk] for chunk in batch.lazy])
        tokens[mx.array(batch.lazy_rows)] = previous.sample.ids[sources]
    return tokens


def _drafting(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks whose drafts the device makes."""
    return [chunk for chunk in chunks if chunk.draft[:1] == (GUESS,)]


def draft_rows(chunks: Sequence[Chunk]) -> list[int]:
    """Rows of the drafts that the device makes."""
    rows: list[int] = []
    end = 0
    for chunk in chunks:
        end += chunk.length
        if chunk.draft[:1] == (GUESS,):
            rows += range(end - len(chunk.draft), end)
    return rows


def _of_chunk(chunk: Chunk, sampled: Iterator[Sampled], guesses: Iterator[int]) -> Sampled:
    """Return the chunk's next token, followed by those after its draft."""
    first = next(sampled)
    if not chunk.draft:
        return first
    more = tuple(islice(sampled, len(chunk.draft)))
    made = tuple(islice(guesses, len(chunk.draft))) if chunk.draft[0] == GUESS else ()
    return replace(first, more=more, guesses=made)

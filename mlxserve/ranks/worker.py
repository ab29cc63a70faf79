"""RankWorker: the loop of every rank but 0, which executes rank 0's frames in order.

It begins each step at once, holds at most two, and takes the next frame without waiting for the
device. It samples nothing: the ids of a step come from rank 0 as part of the graph, so that the
next step can be built before they are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels.reading import evaluate
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kv import KVPool
from mlxserve.cache.window_kv import WindowKV
from mlxserve.core.errors import OutOfMemory
from mlxserve.model.batch import Batch
from mlxserve.model.load import LoadedModel
from mlxserve.model.rank_group import RankGroup
from mlxserve.model.runner import ModelRunner, draft_rows
from mlxserve.ranks.follower import Follower
from mlxserve.ranks.wire import (
    POOLED_KINDS,
    FrameKind,
    PlanDecoder,
    RankFrame,
    adapter_of,
    from_int32,
)

_MAX_UNREAD = 2  # steps that may be under way
_CLOSE_SECONDS = 3.0  # to write records


class KeptRecords(Protocol):
    """This rank's parts of records on disk."""

    def take(self, body: bytes, /) -> None:
        """Do what a message of rank 0 says."""

    def close(self, seconds: float, /) -> None:
        """Write accepted records for at most `seconds`."""


class RankWorker:
    """Lives on the thread that computes."""

    def __init__(
        self,
        group: RankGroup,
        follower: Follower,
        loaded: LoadedModel,
        kv: KVPool,
        memory_limit: int | None = None,
        windows: WindowKV | None = None,
    ) -> None:
        self._group = group
        self._follower = follower
        self._kv = kv
        self._runner = ModelRunner(loaded, kv, memory_limit=memory_limit, windows=windows)
        self._decoder = PlanDecoder(has_states=loaded.has_states)
        self._ids: mx.array | None = None  # ids of the last step that sampled
        self._unread: list[mx.array] = []  # one small array of each step that may be under way
        self._loaded = loaded
        # Models and caches of texts that are being embedded.
        self._texts: dict[int, tuple[Any, list[Any]]] = {}
        self._records: KeptRecords | None = None

    def keep(self, records: KeptRecords | None) -> None:
        """Keep units on disk, if rank 0 does."""
        self._records = records

    def read(self, kind: str, units: Sequence[int]) -> list[bytes]:
        """Return the content of units, once all steps so far are computed."""
        self._wait()
        return self._runner.read(kind, units)

    def write(self, kind: str, units: Sequence[int], payloads: Sequence[bytes]) -> None:
        """Write what `read` returned."""
        self._wait()
        self._runner.write(kind, units, payloads)

    def run(self) -> None:
        """Execute frames until rank 0 closes the connection."""
        acts = {
            FrameKind.STEP: self._step,
            FrameKind.COPY: self._copy,
            FrameKind.BACK: self._back,
            FrameKind.ASK_SIZE: self._say_size,
            FrameKind.RESIZE: self._resize,
            FrameKind.DROP: self._drop,
            FrameKind.BEGIN_TEXT: self._begin_text,
            FrameKind.EMBED: self._embed,
            FrameKind.DISK: self._disk,
        }
        for frame in self._follower.frames():
            acts[frame.kind](frame)
        self._wait()
        if self._records is not None:
            self._records.close(_CLOSE_SECONDS)

    def _step(self, frame: RankFrame) -> None:
        chunks, sources = self._decoder.decode(frame.body)
        batch = Batch.from_chunks(chunks, self._kv.page_size)
        tokens = mx.array(batch.tokens)
        if batch.lazy:
            assert self._ids is not None, "a lazy token needs a step that sampled"
            where = mx.array([sources[chunk] for chunk in batch.lazy])
            tokens[mx.array(batch.lazy_rows)] = self._ids[where]
        if guessed := draft_rows(chunks):
            guesses = self._group.share(mx.zeros(len(guessed), mx.int32))
            mx.async_eval(guesses)  # type: ignore[no-untyped-call]  # as on rank 0, before the forward
            tokens[mx.array(guessed)] = mx.maximum(guesses, 0)
        # This comes after all collectives of the forward.
        done = self._runner.logits(batch, tokens)[:, 0]
        if batch.sampling:
            # Not before `done`: what is sent first over a connection must be received first.
            nothing = mx.depends(mx.zeros(len(batch.sample_rows), mx.int32), done)
            self._ids = done = self._group.share(nothing)
        if not self._kv.writes_in_place or len(self._unread) == _MAX_UNREAD:
            self._wait()
        self._runner.compute([done])
        self._unread.append(done)

    def _wait(self) -> None:
        evaluate(*self._unread)
        self._unread.clear()

    def _copy(self, frame: RankFrame) -> None:
        pages = from_int32(frame.body)
        half = len(pages) // 2
        self._runner.copy_pages(pages[:half], pages[half:])

    def _back(self, frame: RankFrame) -> None:
        kind, num_pages, is_ahead = from_int32(frame.body)
        back = self._runner.back_ahead if is_ahead else self._runner.back
        back(POOLED_KINDS[kind], num_pages)

    def _say_size(self, frame: RankFrame) -> None:
        refusal = ""
        try:
            self._runner.refuse_too_many(from_int32(frame.body)[0])
        except OutOfMemory as error:
            refusal = str(error)
        self._follower.send(FrameKind.MAX_PAGES, refusal.encode())

    def _resize(self, frame: RankFrame) -> None:
        self._wait()
        self._kv.settle()
        self._runner.resize(from_int32(frame.body)[0])

    def _drop(self, frame: RankFrame) -> None:
        count, *numbers = from_int32(frame.body)
        self._decoder.forget(numbers[count:])
        self._runner.drop(StateSlots.name, numbers[:count])

    def _embed(self, frame: RankFrame) -> None:
        text, *token_ids = from_int32(frame.body)
        if not token_ids:
            self._texts.pop(text, None)
            return
        model, cache = self._texts[text]
        evaluate(model(mx.array([token_ids]), cache=cache))

    def _begin_text(self, frame: RankFrame) -> None:
        text, number = from_int32(frame.body)
        model, adapter = self._loaded.model, adapter_of(number)
        if adapter is not None:
            assert self._loaded.adapters is not None, "all ranks have the same adapters"
            model = self._loaded.adapters.applied(model, adapter)
        self._texts[text] = model, make_prompt_cache(model)

    def _disk(self, frame: RankFrame) -> None:
        assert self._records is not None, "the ranks have agreed on a disk cache"
        self._records.take(frame.body)

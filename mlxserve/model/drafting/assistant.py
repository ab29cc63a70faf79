"""Assistant: a drafter without keys and values of its own, which reads those of the model in its pages.

    positions    0  1  2  ...  p-1 |  p        p+1       p+2
    tokens       known             |  known    guess     guess
    keys         in the model's pages
    1st call     hidden state of p-1, token p  ──> guess at p+1, hidden state
    2nd call                 that hidden state, guess at p+1  ──> guess at p+2, ...

Every call of a draft is at the position of p-1, as in mlx-vlm and vLLM (in `transformers` it is p), and sees the keys up
to there: none is written for guesses. A layer with a window sees as many as the model's, of which `transformers` sees
one more. So nothing is to be computed for prompts, kept, copied or stored: a prefix that is found in
the cache, read from disk or shared is an assistant's as soon as it is the model's. Only hidden states are kept, of the
rows that sampled last.
"""

# ruff: noqa: ARG002 (a source uses what concerns it)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from mlxserve.cache import key_owners
from mlxserve.cache.kv import KVPool, LayerSpec
from mlxserve.cache.layer_kv import LayerKV
from mlxserve.cache.layout import StepLayout
from mlxserve.cache.window_kv import WindowKV
from mlxserve.model.batch import Batch
from mlxserve.model.drafting.assistant_model import AssistantModel
from mlxserve.model.drafting.drafter import Drafter, DraftPart
from mlxserve.model.drafting.target_embedding import embedding_of
from mlxserve.model.load import LoadedModel
from mlxserve.request import Chunk, LiveRequest, RequestState

FULL, SLIDING = "full_attention", "sliding_attention"


class _Kept(NamedTuple):
    """Hidden states of a request: those of positions `start` .. are `states[first:]`, `length` of them."""

    states: mx.array  # (rows, size), of all requests of a step
    first: int
    start: int
    length: int


def last_layers(layers: Sequence[LayerSpec]) -> dict[str, int]:
    """Map each type of layer to the last one of that type that has keys of its own."""
    return {FULL if spec.window is None else SLIDING: at for at, spec in enumerate(layers)}


class Assistant(Drafter):
    """Guesses with one of Gemma 4's assistants."""

    wants_hidden = True

    def __init__(
        self,
        model: AssistantModel,
        target: LoadedModel,
        kv: KVPool,
        windows: WindowKV | None = None,
        *,
        seed: int = 0,
    ) -> None:
        """kv, windows: the pools of the target, as its runner has them."""
        super().__init__(vocab_size=target.vocab_size, max_length=target.context.longest, seed=seed)
        self._model = model
        self._embed = embedding_of(target.model)
        self._page_size = kv.page_size
        layers = last_layers(target.layers)
        self._layers = {kind: _place(layers[kind], kv, windows) for kind in model.layer_types}
        self._kept: dict[LiveRequest, _Kept] = {}
        self._newest: list[mx.array] = []

    def arrays(self) -> Sequence[mx.array]:
        return self._newest

    def restart(self) -> None:
        self._kept, self._newest = {}, []

    def follow(self, chunks: Sequence[Chunk], tokens: mx.array, hidden: mx.array | None) -> None:
        """Keep the hidden states of the rows that sample: the next draft begins after one of them."""
        assert hidden is not None, "the head of Gemma 4 shows them"
        rows: list[int] = []
        where: list[tuple[Chunk, int]] = []
        end = 0
        for chunk in chunks:
            end += chunk.length
            if chunk.samples:
                where.append((chunk, len(rows)))
                rows += range(end - 1 - len(chunk.draft), end)
        self._kept = {
            request: kept
            for request, kept in self._kept.items()
            if request.state is not RequestState.FINISHED
        }
        self._newest = [hidden[mx.array(rows)]] if rows else []
        for chunk, first in where:
            length = 1 + len(chunk.draft)
            start = chunk.end - length
            self._kept[chunk.request] = _Kept(self._newest[0], first, start, length)

    def _parts(self, chunks: Sequence[Chunk]) -> list[DraftPart]:
        """Return a row for each chunk whose hidden state is known."""
        return [
            DraftPart(_row(chunk, chunk.start)._replace(is_lazy=False), number)
            for number, chunk in enumerate(chunks)
            if self._index_before(chunk) is not None
        ]

    def _first(self, parts: list[DraftPart]) -> tuple[mx.array, mx.array | None]:
        chunks = [part.chunk for part in parts]
        tokens = mx.array([chunk.request.token_ids[chunk.start] for chunk in chunks], mx.int32)
        return self._guess(chunks, self.batch(chunks), tokens, self._hidden_before(chunks))

    def _next(
        self, chunks: Sequence[Chunk], offset: int, ids: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        assert carried is not None
        rows, num = [_row(chunk, chunk.start + offset) for chunk in chunks], len(chunks)
        return self._guess(rows, self.batch(chunks), ids[:num], carried[:num])

    def batch(self, chunks: Sequence[Chunk]) -> Batch:
        """Return the batch of the rows before these chunks, of which only positions and pages are read."""
        before = [_row(chunk, chunk.start - 1) for chunk in chunks]
        return replace(Batch.from_chunks(before, self._page_size), pictures=None)

    def _logits(
        self, batch: Batch, tokens: mx.array, rows: list[int], carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        assert carried is not None
        positions = mx.array(batch.positions)
        layouts = [_layout(batch, positions)]
        if batch.windows is not None:
            layouts.append(_layout(batch.windows, positions))
        embedded = self._embed(tokens)
        with key_owners.one_forward():
            shared = {
                kind: _keys_of(LayerKV(pool, index, layouts[windowed]))
                for kind, (pool, index, windowed) in self._layers.items()
            }
            return self._model(embedded, carried.astype(embedded.dtype), positions, shared)

    def _index_before(self, chunk: Chunk) -> int | None:
        """Return where the hidden state of the position before the chunk is; None if it is not kept."""
        kept = self._kept.get(chunk.request)
        if kept is None or not kept.start < chunk.start <= kept.start + kept.length:
            return None
        return kept.first + chunk.start - 1 - kept.start

    def _hidden_before(self, chunks: Sequence[Chunk]) -> mx.array:
        """Return the hidden states of the positions before these chunks: (chunks, size)."""
        firsts: dict[int, int] = {}  # of each step's states, by id: usually there is one step
        steps: list[mx.array] = []
        rows: list[int] = []
        for chunk in chunks:
            states, index = self._kept[chunk.request].states, self._index_before(chunk)
            assert index is not None, "only such chunks draft"
            if id(states) not in firsts:
                firsts[id(states)] = sum(each.shape[0] for each in steps)
                steps.append(states)
            rows.append(firsts[id(states)] + index)
        return (steps[0] if len(steps) == 1 else mx.concatenate(steps))[mx.array(rows)]


def _row(chunk: Chunk, position: int) -> Chunk:
    """Return one row of the chunk's request, without what concerns the model alone."""
    return chunk._replace(
        start=position, length=1, samples=True, is_lazy=True, state=None, draft=()
    )


def _place(layer: int, kv: KVPool, windows: WindowKV | None) -> tuple[KVPool, int, bool]:
    """Return the pool of a layer, its index there, and whether it is that of windows."""
    if windows is None:
        return kv, layer, False
    has_window, index = windows.places[layer]
    return (windows.kv if has_window else kv), index, has_window


def _layout(batch: Batch, positions: mx.array) -> StepLayout:
    return StepLayout(positions, batch.slots, batch.num_decodes, batch.decodes, batch.chunks)


def _keys_of(layer: LayerKV) -> tuple[mx.array, mx.array]:
    """Return what stands for a layer's keys and values: attention to them is attention to the layer's pages."""
    keys = mx.zeros(0)
    key_owners.remember(keys, layer)
    return keys, keys

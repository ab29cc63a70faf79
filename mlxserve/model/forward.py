"""A step's forward: the logits of its rows, with the caches that its layers are called with.

    Rows        the model is called once: every token is a row of the batch, (T, 1); with (1, T) where the step
                is one chunk beside recurrent layers, and attention is fused, which takes both
    Sequences   the model is called for each sequence, (1, tokens), as mlx-lm does: for models whose
                attention needs a whole sequence. Decodes do not share a product, which is slower

Both write to the same pages and leave the same states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias, cast

import mlx.core as mx
import numpy as np

from metal_kernels.choice import is_linux_cpu
from metal_kernels.limits import MIN_COPIED_ROWS
from metal_kernels.long_chunks import counted_copies
from metal_kernels.tables import SequenceTables
from mlxserve.cache import key_owners
from mlxserve.cache.kv import KVPool, LayerSpec
from mlxserve.cache.layer_kv import LayerKV
from mlxserve.cache.layout import StepLayout
from mlxserve.cache.window_kv import StepPools, WindowKV
from mlxserve.core.step_rows import rows_under_way
from mlxserve.model.adapted_layers import RowAdapters
from mlxserve.model.batch import Batch, tables_alone
from mlxserve.model.bidirectional import Bidirectional
from mlxserve.model.caches import ElsewhereLeaf
from mlxserve.model.command_buffers import Commits
from mlxserve.model.fused_qkv import num_fused
from mlxserve.model.gathered import GatheredKV
from mlxserve.model.layer_state import GroupCaches, LayerState, RecurrentRows
from mlxserve.model.load import LoadedModel
from mlxserve.model.state_groups import Group, order_of_rows
from mlxserve.model.states import StateStore
from mlxserve.model.step_graphs import StepGraphs
from mlxserve.system import machine

# A layer's kv heads, head dimension, dtype and window.
_Shape: TypeAlias = tuple[int, int, mx.Dtype, "int | None"]
Activations: TypeAlias = Callable[[], AbstractContextManager[None]]  # entered for each forward


class Forward(Protocol):
    """Computes the logits of a step's batch. Lives on the engine's thread."""

    def logits(self, batch: Batch, tokens: mx.array, rows: list[int] | None) -> mx.array:
        """Return (rows, vocabulary), not evaluated; `rows` None for all. `tokens`: (T,)."""


def forward_of(
    loaded: LoadedModel,
    kv: KVPool,
    states: StateStore,
    windows: WindowKV | None = None,
    *,
    is_recorded: bool = True,
) -> Forward:
    """Choose the forward of a model.

    windows: the pool of sliding-window layers, if separate
    is_recorded: steps may be recorded, because the model reads nothing beside its tokens
    """
    if loaded.by_sequence:
        assert windows is None, "the whole sequence is gathered"
        return Sequences(loaded, kv, states)
    return Rows(loaded, kv, states, windows, is_recorded=is_recorded)


class Rows:
    """All rows of a step in one call."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv: KVPool,
        states: StateStore,
        windows: WindowKV | None = None,
        *,
        is_recorded: bool = True,
    ) -> None:
        self._pools = StepPools(kv, windows)
        self._states = states
        self._selector = loaded.selector
        self._adapters = loaded.adapters
        self._commits = _commits()
        self._shapes = _attention_shapes(loaded.layers)
        self._is_told_positions = loaded.vision is not None and loaded.vision.is_told_positions
        self._bidirectional = loaded.vision.bidirectional if loaded.vision is not None else None
        # A partial of a function: a bound method would be a ring, which keeps the pool alive.
        # Steps of several ranks are not recorded: a graph that is built again must not change the
        # order of its collectives, which nobody has tried.
        call = _call if loaded.adapters is None else _call_with_adapters
        self._forward = partial(call, loaded, _activations_of(loaded, kv))
        is_recorded = is_recorded and loaded.group is None
        self._takes_chunks = (  # chunks as (1, T)
            is_recorded
            and windows is None
            and states.is_used
            and loaded.adapters is None
            and num_fused(loaded.model) == len(loaded.layers)
        )
        self._graphs = StepGraphs(
            self._forward, self._pools, loaded.selector, is_recorded=is_recorded
        )

    def logits(self, batch: Batch, tokens: mx.array, rows: list[int] | None) -> mx.array:
        pictures, positions = batch.pictures, batch.positions
        if pictures is not None and pictures.positions is not None:
            # Keys and queries are rotated by these.
            positions = pictures.positions[0]
        groups: Sequence[Group] = ()
        if self._states.is_used:
            groups = self._states.groups(batch.plan, batch.num_decodes)
        is_chunk = len(groups) == 1 and groups[0].length > 1 and pictures is None
        layout = StepLayout(
            positions=mx.array(positions),
            slots=batch.slots,
            num_decodes=batch.num_decodes,
            decodes=batch.decodes,
            chunks=batch.chunks,
            after_layer=None if self._commits is None else self._after_layer(self._commits, batch),
            offset=mx.array([groups[0].start]) if is_chunk and self._takes_chunks else None,
        )
        if (windows := batch.windows) is not None:
            layout = layout.with_windows(windows.slots, windows.decodes, windows.chunks)
        if batch.ahead is not None:
            layout = self._with_images(layout, batch)
        if self._adapters is not None:
            layout = replace(layout, adapters=self._adapters.of_chunks(batch.plan))
        if rows is not None and len(rows) == len(batch.tokens):
            rows = None  # all of them, in order
        if rows is None and pictures is not None and (pictures.parts or self._is_told_positions):
            # What is shown is of this step, and would be a constant of a recorded one.
            logits = self._forward(groups, self._pools, layout, tokens)
        elif rows is None:
            logits = self._graphs.logits(groups, layout, tokens)
        else:
            logits = self._of_rows(rows, groups, layout, tokens)
        if self._states.is_used:
            self._states.commit(groups)
        return logits

    def _with_images(self, layout: StepLayout, batch: Batch) -> StepLayout:
        """Return the layout of a step in which rows of images see positions after their own."""
        windows = layout.windows
        if windows is not None:
            assert batch.windows is not None, "the layout has its rows"
            windows = replace(windows, chunks=batch.windows.ahead)
        if self._bidirectional is Bidirectional.ALL_LAYERS:
            return replace(layout, chunks=batch.ahead, windows=windows)
        return replace(layout, windowed=batch.ahead, windows=windows)

    def _after_layer(self, commits: Commits, batch: Batch) -> Callable[[mx.array], None] | None:
        num_decodes = batch.num_decodes
        seen = int(batch.positions[:num_decodes].sum()) + num_decodes
        copied = 0 if batch.chunks is None else _num_copied(batch.chunks, self._shapes)
        return commits.of_step(len(batch.positions), num_decodes, seen, copied)

    def _of_rows(
        self, rows: list[int], groups: Sequence[Group], layout: StepLayout, tokens: mx.array
    ) -> mx.array:
        wanted = mx.array(rows)
        with self._selector.choosing(wanted, len(tokens), int(layout.offset is not None)):
            logits = self._forward(groups, self._pools, layout, tokens)
        if logits.shape[0] != len(rows):
            # A head that is not wrapped computed every row.
            logits = logits[wanted]
        return logits


def _activations_of(loaded: LoadedModel, kv: KVPool) -> Activations:
    """Return mlx's activations, or on a Linux CPU the vectorised ones, installed in the model."""
    if not is_linux_cpu() or any(backend.name != "cpu" for backend in kv.backends):
        return nullcontext
    from mlxserve.model import activations

    activations.install(loaded.model)
    return activations.vectorised


def _commits() -> Commits | None:
    """Return the commits of a Metal device; None elsewhere."""
    if not machine.is_metal():
        return None
    return Commits(rows_under_way(machine.total_memory()))


def _attention_shapes(layers: Sequence[LayerSpec]) -> frozenset[_Shape]:
    """Distinct layer shapes that decide whether a chunk's pages are copied."""
    return frozenset(
        (spec.kv_heads, spec.key_dim, spec.dtype, spec.window)
        for spec in layers
        if not spec.is_latent
    )


def _num_copied(chunks: SequenceTables, shapes: frozenset[_Shape]) -> int:
    """Positions that the copies of all chunks count as, in the layers that copy the most."""
    lengths = np.diff(chunks.query_starts)
    return sum(
        max((counted_copies(int(rows), int(context), *shape) for shape in shapes), default=0)
        for rows, context in zip(lengths, chunks.context_lens, strict=True)
    )


def _call_with_adapters(
    loaded: LoadedModel,
    activations: Activations,
    groups: Sequence[Group],
    pools: StepPools,
    layout: StepLayout,
    tokens: mx.array,
) -> mx.array:
    """Call a model with adapters; see `_call`."""
    assert loaded.adapters is not None
    chosen = None if layout.adapters is None else RowAdapters(*layout.adapters)
    with loaded.adapters.rows.choosing(chosen):
        return _call(loaded, activations, groups, pools, layout, tokens)


def _call(
    loaded: LoadedModel,
    activations: Activations,
    groups: Sequence[Group],
    pools: StepPools,
    layout: StepLayout,
    tokens: mx.array,
) -> mx.array:
    """Return (rows, vocabulary)."""
    num_arrays = [len(spec.arrays) for spec in loaded.states]
    state_class = loaded.caches.state_class
    layer = partial(pools.layer, layout=layout)

    def elsewhere(leaf: ElsewhereLeaf) -> LayerState | LayerKV:
        if leaf.is_state:
            return LayerState(recurrent, -1)
        return LayerKV.elsewhere(pools.kv, leaf.window, layout)

    with key_owners.one_forward(), activations():
        if layout.offset is not None:
            [group] = groups
            states = GroupCaches(group, num_arrays, state_class)
            caches = loaded.caches.build(layer, states.__getitem__)
            logits: mx.array = loaded.model(tokens[None], cache=caches)
            states.commit()
            # An index takes the host three times as long.
            return logits.squeeze(0)
        adapters = None if loaded.adapters is None else loaded.adapters.rows
        has_drafts = len(groups) > 1 and (groups[1].level > 0 or groups[0].drafts is not None)
        order = order_of_rows(groups) if has_drafts else None
        recurrent = RecurrentRows(
            groups, layout.positions, len(tokens), num_arrays, state_class, adapters, order
        )
        caches = loaded.caches.build(layer, partial(LayerState, recurrent), elsewhere)
        logits = loaded.model(tokens[:, None], cache=caches)
    return logits.squeeze(1)


class Sequences:
    """One call per chunk; several for a chunk whose state is kept within it, or that has a draft."""

    def __init__(self, loaded: LoadedModel, kv: KVPool, states: StateStore) -> None:
        self._loaded = loaded
        self._kv = kv
        self._states = states
        self._activations = _activations_of(loaded, kv)
        self._commits = _commits()

    def logits(self, batch: Batch, tokens: mx.array, rows: list[int] | None) -> mx.array:
        groups = self._states.groups_of_sequences(batch.plan)
        outputs = []
        for group in groups:
            inside = range(group.first, group.end)
            wanted = None if rows is None else [row - group.first for row in rows if row in inside]
            outputs.append(self._of_group(group, batch, tokens[group.first : group.end], wanted))
        self._states.commit(groups)
        return mx.concatenate(outputs)

    def _of_group(
        self, group: Group, batch: Batch, tokens: mx.array, wanted: list[int] | None
    ) -> mx.array:
        """Return (rows of the group, vocabulary), or only the wanted rows."""
        num_arrays = [len(spec.arrays) for spec in self._states.specs]
        states = GroupCaches(group, num_arrays, self._loaded.caches.state_class)
        layout = self._layout(group, batch)
        caches = self._loaded.caches.build(
            lambda index: GatheredKV(self._kv, index, layout, group.start), states.__getitem__
        )
        chosen = None if wanted is None else mx.array(wanted or [group.length - 1])
        with self._loaded.selector.choosing(chosen, group.length, axis=1), self._activations():
            logits: mx.array = self._model_of(group)(tokens[None], cache=caches)[0]
        states.commit()
        if wanted is None:
            return logits
        if wanted and logits.shape[0] != len(wanted):
            # A head that is not wrapped computed every row.
            return logits[mx.array(wanted)]
        return logits[: len(wanted)]

    def _model_of(self, group: Group) -> Callable[..., mx.array]:
        """Return the model with the adapter of the group's sequence."""
        number = group.chunks[0].request.asked.adapter
        if self._loaded.adapters is None or number is None:
            return cast(Callable[..., mx.array], self._loaded.model)
        return self._loaded.adapters.applied(self._loaded.model, number)

    def _layout(self, group: Group, batch: Batch) -> StepLayout:
        [chunk] = group.chunks
        where = slice(group.first, group.end)
        end = group.start + group.length
        tables = tables_alone(chunk, group.start, end, self._kv.page_size)
        positions = batch.positions[where]
        return StepLayout(
            mx.array(positions),
            batch.slots[where],
            num_decodes=0,
            decodes=None,
            chunks=tables,
            after_layer=None
            if self._commits is None
            else self._commits.of_step(
                group.length, 0, 0, end if group.length >= MIN_COPIED_ROWS else 0
            ),
        )

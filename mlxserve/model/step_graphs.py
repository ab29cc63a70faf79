"""StepGraphs: a model's forward for one step, recorded once and built again for many steps.

Building the graph of a step in Python takes longer than a GPU needs to compute a small model's: 60 us a
layer on x86. The graph of two steps of as many decodes is the same, but for arrays. So it is recorded by
mx.compile, which builds it again without Python (7 us a layer), where Metal kernels write in place:

    recorded(tokens, positions, moves, page tables, partitions, first pages, fences, states, adapters)
        -> logits, fences, states, hidden states if a drafter reads them

Moves, page tables, partitions and first pages are those of each pool: layers with a window have their own.
Whatever else the forward reads is a constant of the recording: weights, and nothing else. Pools and
fences that were not passed are refused by mx.compile, numbers of the step by `RecordedTables`; a model
whose forward reads arrays back fails, and is never recorded. Arrays are padded to few sizes
(`plans.rounded`), so that an answer of 1,000 tokens meets a handful of graphs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import mlx.core as mx

from metal_kernels.first_page import first_pages
from metal_kernels.metal import MetalBackend
from metal_kernels.recording import StepInputs
from metal_kernels.step_ways import StepWay
from metal_kernels.tables import MakeArrays
from mlxserve.cache.layout import StepLayout
from mlxserve.cache.window_kv import StepPools
from mlxserve.core.errors import in_one_line
from mlxserve.model.packed_states import Stack
from mlxserve.model.paged import RowSelector
from mlxserve.model.state_groups import Group

log = logging.getLogger("mlxserve.model")

# A recording costs as much as building four graphs; each use saves most of one.
TIMES_BEFORE = 3  # builds of a step of these shapes before it is recorded
# Kept, the last used; of 36 layers one takes 0.9 MB.
MAX_GRAPHS = 64
_MAX_COUNTED = 4096

Forward: TypeAlias = Callable[[Sequence[Group], StepPools, StepLayout, mx.array], mx.array]
Record: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def record(step: Callable[..., Any]) -> Callable[..., Any]:
    """A function that builds the same graph as `step`, which it calls once."""
    recorded: Callable[..., Any] = mx.compile(step)
    return recorded


class StepGraphs:
    """The recorded step graphs of a model over its pools. Lives on the engine's thread."""

    def __init__(
        self,
        forward: Forward,
        pools: StepPools,
        selector: RowSelector,
        *,
        is_recorded: bool = True,
    ) -> None:
        """forward: maps its arguments alone to the logits of all rows of (T,) tokens.

        selector: collects the model's hidden states, if anybody does
        """
        self._forward = forward
        self._pools = pools
        self._selector = selector
        # None if steps are not recorded.
        self._backend = _recordable(pools) if is_recorded else None
        # Of each pool, the makers of its layers' uploads.
        self._makers: list[dict[Hashable, MakeArrays]] = [{} for _ in pools.each]
        self._num_built: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, Callable[..., Any]] = {}  # the last used is the last

    def logits(self, groups: Sequence[Group], layout: StepLayout, tokens: mx.array) -> mx.array:
        """Return (T, vocabulary), not evaluated; the groups then hold the states after the step."""
        decodes, backend = layout.decodes, self._backend
        is_built = backend is None or decodes is None or layout.chunks is not None
        # Evaluated as its layers are called.
        is_built = is_built or layout.after_layer is not None
        # One group, or none where there are no states: beside others are sequences that begin, or drafts.
        if (
            is_built
            or len(groups) > 1
            or any(group.before is None or group.drafts is not None for group in groups)
        ):
            return self._forward(groups, self._pools, layout, tokens)
        assert backend is not None
        arrays = [pool.arrays() for pool in self._pools.each]
        k_pools, bound = self._pools.keys_of(arrays), [first_pages(own) for own in arrays]
        step = self._inputs(layout, arrays)
        adapters = list(layout.adapters or ())
        build = self._build_of(backend, step, adapters)
        if build is not None:
            waits = backend.fences.state(k_pools)
            try:
                before = [group.before for group in groups]
                logits, fences, after, hidden = build(
                    tokens,
                    layout.positions,
                    [inputs.arrays() for inputs in step],
                    bound,
                    waits,
                    before,
                    adapters,
                )
            except Exception as error:  # a model's code, run in an unusual way, raises anything
                log.info("Steps are built anew each time: %s", in_one_line(error), exc_info=error)
                self._backend = None
            else:
                backend.fences.resume(k_pools, fences)
                self._selector.show_recorded(hidden)
                for group, arrays in zip(groups, after, strict=True):
                    group.after = arrays
                return cast(mx.array, logits)
        logits = self._forward(groups, self._pools, layout, tokens)
        for makers, own in zip(self._makers, layout.by_pool, strict=True):
            assert own.decodes is not None
            makers.update((key, make) for key, (make, _) in own.decodes.uploads.items())
        return logits

    def _inputs(
        self, layout: StepLayout, arrays: Sequence[Sequence[mx.array]]
    ) -> tuple[StepInputs, ...]:
        """Return the inputs of the kernels over each pool. Raises ValueError, as `collect` does."""
        inputs = []
        for own, makers, (k_pool, *_) in zip(layout.by_pool, self._makers, arrays, strict=True):
            assert own.decodes is not None
            inputs.append(StepInputs.collect(own.slots, own.plans, own.decodes, makers, k_pool))
        return tuple(inputs)

    def _build_of(
        self, backend: MetalBackend, step: Sequence[StepInputs], adapters: Sequence[mx.array]
    ) -> Callable[..., Any] | None:
        """Return the recorded builder of such a step's graph; None to build it in Python."""
        shapes = tuple(inputs.shapes for inputs in step), *(each.size for each in adapters[:1])
        build = self._recorded.pop(shapes, None)
        if build is None:
            if len(self._num_built) == _MAX_COUNTED:
                self._num_built.clear()
            self._num_built[shapes] += 1
            if self._num_built[shapes] <= TIMES_BEFORE:
                return None
            if len(self._recorded) == MAX_GRAPHS:
                del self._recorded[next(iter(self._recorded))]
            build = record(_recording(self._forward, self._pools, self._selector, backend, step))
        self._recorded[shapes] = build
        return build


def _recording(
    forward: Forward,
    pools: StepPools,
    selector: RowSelector,
    backend: MetalBackend,
    like: Sequence[StepInputs],
) -> Callable[..., Any]:
    """Return a step as a function of arrays; see the module's docstring."""

    def step(
        tokens: mx.array,
        positions: mx.array,
        arrays: list[list[mx.array]],
        bound: list[list[mx.array]],
        fences: list[list[mx.array]],
        states: list[Stack],
        adapters: list[mx.array],
    ) -> tuple[
        mx.array, list[list[mx.array]], list[list[list[mx.array | None] | None]], list[mx.array]
    ]:
        first, *others = (each.over(own) for each, own in zip(like, arrays, strict=True))
        k_pools = pools.keys_of(bound)
        kernels = backend.recording(k_pools, fences)
        layout = StepLayout(positions, first.slots, first.num_rows, first.tables, None)
        if adapters:
            layout = replace(layout, adapters=(adapters[0], adapters[1]))
        for windows in others:
            layout = layout.with_windows(windows.slots, windows.tables, None)
        for inputs, own in zip((first, *others), layout.by_pool, strict=True):
            inputs.keep_moves(own.plans)
        groups = [Group.of_decodes(first.num_rows, before) for before in states]
        with selector.recording() as hidden:
            logits = forward(groups, pools.with_arrays(bound, kernels), layout, tokens)
        return logits, kernels.fences.state(k_pools), [group.after for group in groups], hidden

    return step


def _recordable(pools: StepPools) -> MetalBackend | None:
    """Return the backend shared by all layers, if its steps can be recorded."""
    backends = [backend for pool in pools.each for backend in pool.backends]
    first = backends[0] if backends else None
    if not isinstance(first, MetalBackend) or StepWay.RECORDED in first.without:
        return None
    return first if all(other is first for other in backends) else None

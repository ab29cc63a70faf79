"""A recorded step is the step that Python builds: the same kernels with the same inputs, bit by bit."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from metal_kernels.first_page import first_page
from metal_kernels.kernels import Kernel, KernelSpec, Size
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Backend
from metal_kernels.reading import read
from metal_kernels.step_ways import StepWay
from metal_kernels.x86.backend import X86Backend
from mlxserve.cache.kv import KVPool
from mlxserve.cache.window_kv import pools_of
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.hub.adapter_files import find_adapter
from mlxserve.model import step_graphs
from mlxserve.model.batch import Batch
from mlxserve.model.fused_layers import FusedLayers
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, PageTable, Request, as_page_table
from tests.adapters import write_adapter
from tests.conftest import write_model
from tests.emulated import emulated_backend

PAGE = 16
PAGES_EACH = 40
NUM_PAGES = 3 * PAGES_EACH
NUM_WINDOW_PAGES = NUM_PAGES + 9
Step = Sequence[tuple[int, int, int]]  # (sequence, start, end) of its chunks


class HashingFactory:
    """Kernels whose outputs are hashes of the kernel and of all its inputs, in their order.

    Integers, so that a single different bit anywhere in a step changes its logits and its fences.
    """

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, spec: KernelSpec, source: str) -> Kernel:
        def run(
            *,
            inputs: list[mx.array],
            template: list[tuple[str, int | mx.Dtype]],
            grid: Size,
            threadgroup: Size,
            output_shapes: list[tuple[int, ...]],
            output_dtypes: list[mx.Dtype],
        ) -> list[mx.array]:
            self.num_calls += 1
            inputs = [
                first_page(array) if name in ("k_pool", "v_pool") else array
                for name, array in zip(spec.inputs, inputs, strict=True)
            ]
            seed = sum(map(ord, spec.name)) + sum(grid) + sum(threadgroup)
            seen = mx.concatenate([_hash(mx.array([seed])), *map(_hash, inputs)], axis=1)
            found = _hash(seen)
            return [
                _spread(found, at, shape, dtype)
                for at, (shape, dtype) in enumerate(zip(output_shapes, output_dtypes, strict=True))
            ]

        return run


# Whole numbers in float64 are exact. Products between all other ops keep mlx from fusing them, as
# compiling a fused op takes a CPU half a second.
_PRIME = mx.array(65521, mx.float64)


def _hash(array: mx.array) -> mx.array:
    row = array.reshape(1, -1).view(mx.uint8).astype(mx.float64)
    weights = mx.arange(1, row.size + 1, dtype=mx.float64)[:, None]
    return mx.remainder(row @ weights, _PRIME)


def _spread(found: mx.array, output: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    weights = mx.arange(1 + output, 1 + output + math.prod(shape), dtype=mx.float64)
    return mx.remainder(found @ weights[None], _PRIME).reshape(shape).astype(dtype)


BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]
pytestmark = pytest.mark.usefixtures("compiled", "on_a_cpu")  # a GPU has no float64


@pytest.fixture(scope="module")
def loaded(build_model: BuildModel) -> LoadedModel:
    """Of layers with and without a window, sinks, and experts."""
    return prepare(*build_model("gpt_oss", head_dim=64), "tiny")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("qwen3_next", marks=pytest.mark.slow),
        pytest.param("falcon_h1", marks=pytest.mark.long),
    ],
)
def stateful(request: pytest.FixtureRequest, build_model: BuildModel) -> LoadedModel:
    """Recurrent layers beside attention, and both in one layer."""
    return prepare(*build_model(request.param, head_dim=64), "tiny")


class Steps:
    """Steps of three sequences over a pool, or over two: layers with a window have their own."""

    def __init__(
        self,
        loaded: LoadedModel,
        backend: Backend,
        num_backed: tuple[int | None, int | None] = (None, None),
        adapters: Sequence[int | None] = (None, None, None),
        *,
        has_windows: bool = False,
    ) -> None:
        self._pools = [KVPool(loaded.layers, NUM_PAGES, PAGE, backend, num_backed[0])]
        windows = None
        if has_windows:
            sizes = (NUM_PAGES, NUM_WINDOW_PAGES), num_backed
            kv, windows = pools_of(loaded.layers, backend, PAGE, *sizes)
            self._pools = [kv, windows.kv]
        self._has_windows = has_windows
        self.runner = ModelRunner(loaded, self._pools[0], windows=windows)
        self._requests = []
        for at in range(3):
            ids = [(7 * position + at) % 200 for position in range(PAGE * PAGES_EACH)]
            request = Request(str(at), ids, SamplingParams(), adapter=adapters[at])
            self._requests.append(LiveRequest(request))

    def logits(self, step: Step) -> np.ndarray:
        chunks = [
            Chunk(
                self._requests[at],
                start,
                end - start,
                _pages(at),
                samples=True,
                window_table=_window_pages(at) if self._has_windows else None,
            )
            for at, start, end in step
        ]
        batch = Batch.from_chunks(chunks, PAGE)
        return read(self.runner.logits(batch, mx.array(batch.tokens)))

    def back_all(self) -> None:
        """Give all pages memory: in other arrays."""
        for pool in self._pools:
            pool.back(pool.num_pages)


def _pages(sequence: int) -> PageTable:
    return as_page_table(range(sequence, NUM_PAGES, 3))


def _window_pages(sequence: int) -> PageTable:
    """Others than those of `_pages`."""
    return as_page_table(range(5 - sequence, NUM_WINDOW_PAGES, 3))


def decodes(*positions: int) -> Step:
    return [(at, position, position + 1) for at, position in enumerate(positions)]


def growing(begin: int, num_steps: int) -> list[Step]:
    """Two answers that cross the ends of pages, and one the end of a partition; chunks beside."""
    steps: list[Step] = [decodes(begin + at, 9 + at) for at in range(num_steps)]
    steps.insert(6, [*decodes(begin - 20, 7), (2, 0, 20)])
    return steps


def from_the_beginning(num_steps: int) -> list[Step]:
    """The same for states, which no position is skipped of; a third sequence joins the decodes."""
    steps: list[list[tuple[int, int, int]]] = [[(0, 0, 56)], [(1, 0, 9)]]
    for at in range(num_steps):
        steps.append(list(decodes(56 + at, 9 + at)))
        if at == 8:
            steps[-1].append((2, 0, 20))
        elif at > 8:
            steps[-1].append((2, 11 + at, 12 + at))
    return steps


def num_recorded(
    loaded: LoadedModel,
    steps: Sequence[Step],
    adapters: Sequence[int | None] = (None, None, None),
    *,
    has_windows: bool = False,
) -> int:
    """How many steps were not built in Python. All are compared with built ones."""
    built, recorded = HashingFactory(), HashingFactory()
    expected, found = (
        Steps(loaded, MetalBackend(f), (60, 70), adapters=adapters, has_windows=has_windows)
        for f in (built, recorded)
    )
    count = 0
    for number, step in enumerate(steps):
        if number == 12:
            expected.back_all()
            found.back_all()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_graphs, "TIMES_BEFORE", 10**6)
            logits = expected.logits(step)
        calls = recorded.num_calls
        assert (found.logits(step) == logits).all()
        count += recorded.num_calls == calls
    return count


def test_a_recorded_step_equals_a_built_one_bit_by_bit(loaded: LoadedModel) -> None:
    """Recorded kernels get the same inputs, fences among them, and no number of another step."""
    assert num_recorded(loaded, growing(56, 18)) >= 6


@pytest.mark.parametrize(
    "kind", ["gpt_oss", *(pytest.param(k, marks=pytest.mark.slow) for k in ("qwen3", "qwen3_next"))]
)
def test_a_recorded_step_of_fused_layers_equals_a_built_one(
    kind: str, build_model: BuildModel
) -> None:
    """Cosines and sines are those of the step's own positions, and not constants of a recording."""
    loaded = prepare(*build_model(kind, head_dim=64), "tiny")
    fused = FusedLayers.fuse(loaded.model, loaded.dtype, loaded.context.longest)
    assert len(fused.attention) == len(loaded.layers)
    steps = from_the_beginning(20) if loaded.states else growing(56, 18)
    assert num_recorded(loaded, steps) >= 6


def test_a_recorded_step_over_pools_in_8_bits_equals_a_built_one(loaded: LoadedModel) -> None:
    assert num_recorded(loaded.in_8_bits(), growing(56, 18)) >= 6


@pytest.mark.parametrize("is_quantised", [False, True])
def test_a_recorded_step_over_two_pools_equals_a_built_one(
    is_quantised: bool, loaded: LoadedModel
) -> None:
    """Each layer reads the pages and fences of its own pool, also after both have other arrays."""
    model = loaded.in_8_bits() if is_quantised else loaded
    assert num_recorded(model, growing(56, 18), has_windows=True) >= 6


@pytest.mark.parametrize("has_windows", [False, True])
def test_a_recorded_step_past_a_pool_is_refused(has_windows: bool, loaded: LoadedModel) -> None:
    """A kernel would write there. Of two pools the one for windows is the smaller."""
    pages = (NUM_PAGES, 30) if has_windows else (60, NUM_WINDOW_PAGES)
    steps = Steps(loaded, MetalBackend(HashingFactory()), pages, has_windows=has_windows)
    for position in range(100, 106):
        steps.logits(decodes(position, 9))
    with pytest.raises(ValueError, match="slots and pages must be within"):
        steps.logits(decodes(PAGE * 25, 9))


def test_a_recorded_step_with_states_equals_a_built_one_bit_by_bit(stateful: LoadedModel) -> None:
    """The logits of a step show the states that the one before has left."""
    assert num_recorded(stateful, from_the_beginning(26)) >= 12


@pytest.mark.slow
def test_a_recorded_step_has_the_adapters_of_its_own_rows(
    build_model: BuildModel, tmp_path: Path
) -> None:
    """Two rows of different adapters, then one of each alone, and none: each time the same graph would be
    built again if adapters were constants of a recording."""
    base = write_model(tmp_path, "llama")
    found = [
        find_adapter(name, write_adapter(tmp_path / name, base, seed=seed, rank=2 * seed))
        for seed, name in ((1, "a"), (2, "b"))
    ]
    model, config = build_model("llama")
    loaded = prepare(model, config, "tiny").with_adapters(found)
    steps = growing(56, 6)
    alone: list[Step] = [[(at, 70 + n, 71 + n)] for n in range(8) for at in (0, 1, 2)]
    assert num_recorded(loaded, [*steps, *alone], adapters=(0, 1, None)) >= 12
    logits = {
        numbers: Steps(loaded, MetalBackend(HashingFactory()), adapters=numbers).logits(steps[0])
        for numbers in ((0, 1, None), (1, 0, None), (None, None, None))
    }
    assert len({rows.tobytes() for rows in logits.values()}) == 3


@pytest.mark.parametrize(
    ("has_states", "has_windows"), [(False, False), (False, True), (True, False)]
)
def test_a_recorded_step_gives_the_logits_of_plain_mlx(
    has_states: bool,
    has_windows: bool,
    loaded: LoadedModel,
    stateful: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Emulated kernels cannot be recorded: the function that would be runs in their place. They are bound
    to whole pools. Plain mlx has one pool for all layers, also where the kernels have two."""
    recorded: list[object] = []

    def record(step: Callable[..., Any]) -> Callable[..., Any]:
        recorded.append(step)
        return step

    monkeypatch.setattr(step_graphs, "record", record)
    monkeypatch.setattr(step_graphs, "first_pages", lambda pools: pools)
    model = stateful if has_states else loaded
    plain = Steps(model, X86Backend())
    kernels = Steps(model, emulated_backend(), has_windows=has_windows)
    steps = from_the_beginning(16) if has_states else [[(0, 0, 62)], [(1, 0, 9)], *growing(62, 8)]
    for step in steps:
        expected = plain.logits(step)
        assert np.abs(kernels.logits(step) - expected).max() < 1e-4 * np.abs(expected).max()
    assert recorded


def test_only_the_graphs_used_last_are_kept(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(step_graphs, "TIMES_BEFORE", 1)
    factory = HashingFactory()
    steps = Steps(loaded, MetalBackend(factory))

    def is_built(*positions: int) -> bool:
        calls = factory.num_calls
        steps.logits(decodes(*positions))
        return factory.num_calls > calls

    one, two, three = (5,), (5, 5), (5, 5, 5)
    assert is_built(*one)  # shows which arrays a step uploads
    for positions in (one, two):
        assert [is_built(*positions) for _ in range(3)] == [True, True, False]
    assert not is_built(*one)
    assert is_built(*three)
    assert is_built(*three)
    assert not is_built(*one)
    assert is_built(*two)


def test_steps_are_built_each_time_where_the_self_test_of_recorded_ones_failed(
    loaded: LoadedModel,
) -> None:
    factory = HashingFactory()
    without = frozenset([StepWay.RECORDED])
    steps = Steps(loaded, MetalBackend(factory, without=without))
    calls = []
    for position in range(5, 11):
        steps.logits(decodes(position))
        calls.append(factory.num_calls)
    assert len({after - before for before, after in pairwise(calls)}) == 1


def test_a_model_that_reads_arrays_back_is_built_each_time(
    build_model: BuildModel, caplog: pytest.LogCaptureFixture
) -> None:
    model, config = build_model("llama", head_dim=64)
    expected = Steps(prepare(model, config, "tiny"), MetalBackend(HashingFactory()))
    logits = [expected.logits(step) for step in growing(20, 8)]

    class Reading(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def __call__(self, hidden: mx.array) -> mx.array:
            return self.norm(hidden) if hidden.sum().item() else hidden

    model.model.norm = Reading(model.model.norm)
    steps = Steps(prepare(model, config, "tiny"), MetalBackend(HashingFactory()))
    with caplog.at_level(logging.INFO, "mlxserve"):
        for step, right in zip(growing(20, 8), logits, strict=True):
            assert (steps.logits(step) == right).all()
    assert "Steps are built anew each time" in caplog.text

"""What writes a step's rows is planned once for each array of slots, in whatever order layers take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import kernels, plain, plans
from metal_kernels.kernels import Dispatch, Kernel, KernelSpec
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Backend, Heads
from metal_kernels.plain import PlainBackend
from metal_kernels.tables import Plans
from metal_kernels.writes import page_moves, row_moves
from mlxserve.cache.kv import KVPool, LayerSpec
from mlxserve.cache.layer_kv import LayerKV
from mlxserve.cache.layout import StepLayout
from mlxserve.cache.window_kv import pools_of
from tests.emulated import emulated_backend

SIZE = 16
SLOTS = np.array([3, 37], np.int32)
IN_WINDOWS = np.array([20, 5], np.int32)
CHUNK = np.arange(16, 42, dtype=np.int32)  # a whole page, and ten slots of the next
WINDOWED = (False, True, True, False, True, False, False, True)  # of layers, which take turns
HEADS = Heads(4, 2, 64, 64)

Layer = Callable[[LayerKV, int], None]


def nothing(spec: KernelSpec, source: str) -> Kernel:
    """A kernel that computes nothing."""

    def run(
        *, output_shapes: list[tuple[int, ...]], output_dtypes: list[mx.Dtype], **_options: Any
    ) -> list[mx.array]:
        return [mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)]

    return run


def written(layer: LayerKV, rows: int) -> None:
    layer.update_and_fetch(*(mx.zeros((rows, 2, 1, 64), mx.float16) for _ in range(2)))


def rotated(layer: LayerKV, rows: int) -> None:
    projected = [mx.zeros((rows, 1, width), mx.float16) for width in HEADS.widths]
    layer.rotate_and_write(projected, mx.zeros((rows, 1, 1, 64)), HEADS, None)


class Planned:
    """Counts what is made for a step: dispatches by kernel, uploads, and lists of the rows that a CPU writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dispatches: Counter[str] = Counter()
        self.uploads = self.row_writes = 0
        make, upload, of = Dispatch.__init__, plans.upload, plain.RowWrites.of

        def count_dispatch(
            dispatch: Dispatch, kernel: Kernel, spec: KernelSpec, *rest: Any
        ) -> None:
            self.dispatches[spec.name] += 1
            make(dispatch, kernel, spec, *rest)

        def count_upload(*arguments: Any) -> mx.array:
            self.uploads += 1
            return upload(*arguments)

        def count_rows(*arguments: Any) -> plain.RowWrites:
            self.row_writes += 1
            return of(*arguments)

        monkeypatch.setattr(kernels.Dispatch, "__init__", count_dispatch)
        monkeypatch.setattr(plans, "upload", count_upload)
        monkeypatch.setattr(plain.RowWrites, "of", count_rows)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    return Planned(monkeypatch)


def run_step(backend: Backend, layer: Layer, slots: tuple[np.ndarray, np.ndarray]) -> list[KVPool]:
    """Both pools, after a step of layers that take turns between them."""
    spec = LayerSpec(kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float16)
    specs = [replace(spec, window=8 if windowed else None) for windowed in WINDOWED]
    kv, windows = pools_of(specs, backend, SIZE, (3, 3), (None, None))
    own, others = slots
    step = StepLayout(mx.arange(len(own)), own, len(own), None, None)
    step = replace(step, windows=replace(step, slots=others))
    assert step.windows is not None
    for windowed, place in windows.places:
        pool, layout = (windows.kv, step.windows) if windowed else (kv, step)
        layer(LayerKV(pool, place, layout), len(own))
    return [kv, windows.kv]


@pytest.mark.parametrize(
    ("layer", "kernel"), [(written, "write_kv_tokens"), (rotated, "rotate_and_write")]
)
def test_layers_of_two_pools_in_turn_are_planned_once_for_each_pool(
    planned: Planned, layer: Layer, kernel: str
) -> None:
    run_step(MetalBackend(nothing), layer, (SLOTS, IN_WINDOWS))
    assert planned.dispatches == {kernel: 2}
    assert planned.uploads == 2


def test_rows_of_a_chunk_are_planned_once_for_each_pool(planned: Planned) -> None:
    run_step(MetalBackend(nothing), written, (CHUNK, CHUNK + 3))
    assert planned.dispatches == {"write_kv_pages": 1, "write_kv_tokens": 2}
    assert planned.uploads == 2 + 1  # of the second no rows fill a whole page


@pytest.mark.parametrize(
    "layers", [(written, rotated), (rotated, written)], ids=["", "fused first"]
)
def test_fused_and_unfused_layers_of_a_step_write_all_of_its_rows(
    layers: tuple[Layer, ...],
) -> None:
    """A fused layer writes one by one what another writes as whole pages and the rest."""
    rows: dict[str, int] = {}

    def counting(spec: KernelSpec, source: str) -> Kernel:
        def run(*, inputs: list[mx.array], **options: Any) -> list[mx.array]:
            moves = np.array(inputs[spec.inputs.index("moves")])
            rows[spec.name] = len(moves[moves.any(axis=1)])  # but those that pad a short list
            return nothing(spec, source)(inputs=inputs, **options)

        return run

    spec = LayerSpec(kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float16)
    kv = KVPool([spec] * 2, 3, SIZE, MetalBackend(counting))
    step = StepLayout(mx.arange(len(CHUNK)), CHUNK, 0, None, None)
    for place, layer in enumerate(layers):
        layer(LayerKV(kv, place, step), len(CHUNK))
    assert rows == {
        "write_kv_pages": 1,
        "write_kv_tokens": len(CHUNK) - SIZE,
        "rotate_and_write": len(CHUNK),
    }


def test_a_cpu_plans_its_rows_once_for_each_pool(planned: Planned) -> None:
    run_step(PlainBackend(), written, (SLOTS, IN_WINDOWS))
    assert planned.row_writes == 2


@pytest.mark.parametrize("make", [emulated_backend, PlainBackend])
def test_each_pool_is_written_in_its_own_slots(make: Callable[[], Backend]) -> None:
    def ones(layer: LayerKV, rows: int) -> None:
        layer.update_and_fetch(*(mx.ones((rows, 2, 1, 64), mx.float16) for _ in range(2)))

    for pool, slots in zip(
        run_step(make(), ones, (SLOTS, IN_WINDOWS)), (SLOTS, IN_WINDOWS), strict=True
    ):
        pages = [np.frombuffer(page, np.float16) for page in pool.read_units(range(3))]
        rows = np.concatenate([page.reshape(-1, SIZE, 2, 64) for page in pages], axis=1)
        is_written = np.isin(np.arange(3 * SIZE), slots)
        assert (rows == is_written[:, None, None]).all()


def test_pages_from_the_disk_are_planned_once_for_all_layers(planned: Planned) -> None:
    spec = LayerSpec(kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float16)
    kv = KVPool([spec] * 4, 3, SIZE, MetalBackend(nothing))
    planned.dispatches.clear()
    kv.write_units([2, 0], [bytes(kv.nbytes // 3)] * 2)
    assert planned.dispatches == {"write_kv_pages": 1}


def test_another_layout_of_the_same_rows_has_plans_of_its_own() -> None:
    step = StepLayout(mx.arange(2), SLOTS, 2, None, None)
    moves = row_moves(step.slots, step.plans)
    assert row_moves(step.slots, step.plans) is moves
    other = replace(step, slots=IN_WINDOWS)
    assert row_moves(other.slots, other.plans).tokens[:, 1].tolist() == IN_WINDOWS.tolist()


def test_windows_have_slots_of_their_own() -> None:
    step = StepLayout(mx.arange(2), SLOTS, 2, None, None).with_windows(IN_WINDOWS, None, None)
    for layout, slots in zip(step.by_pool, (SLOTS, IN_WINDOWS), strict=True):
        assert row_moves(layout.slots, layout.plans).tokens[:, 1].tolist() == slots.tolist()


def test_a_whole_page_is_listed_apart_from_its_rows() -> None:
    kept = Plans()
    assert len(page_moves(CHUNK, SIZE, kept).pages) == 1
    assert len(row_moves(CHUNK, kept).tokens) == len(CHUNK)


def test_rows_that_fill_no_page_are_listed_once_for_every_kernel() -> None:
    kept = Plans()
    assert page_moves(SLOTS, SIZE, kept) is row_moves(SLOTS, kept)
    moves = page_moves(CHUNK, SIZE, Plans())
    assert (moves.pages.tolist(), len(moves.tokens)) == ([[0, 1]], 10)

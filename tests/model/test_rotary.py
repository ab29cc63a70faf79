"""A step's layers share the cosines and sines of its positions, and the bits are mlx's own."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_kernels import select_backend
from mlxserve.cache.kv import KVPool
from mlxserve.model.batch import Batch
from mlxserve.model.forward import is_on_cpu
from mlxserve.model.load import prepare
from mlxserve.model.rotary import shared_angles
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from mlxserve.sampling_params import SamplingParams
from tests.emulated import emulated_backend

BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]
PAGE, HEAD_DIM = 16, 32
pytestmark = pytest.mark.usefixtures("on_a_cpu")  # a GPU has a kernel for whole rotations
# RemoteLayer a compiler may fuse a product with a sum, which rounds once instead of twice.
IS_EXACT = platform.machine() in ("x86_64", "AMD64")
TOLERANCE = {mx.float32: 1e-6, mx.float16: 4e-3, mx.bfloat16: 4e-2}
FREQS = mx.array([1.5 * 10.0**exponent for exponent in range(HEAD_DIM // 4)])


def rope(x: mx.array, offset: int | mx.array, **options: Any) -> mx.array:
    settings = {"dims": HEAD_DIM, "traditional": False, "base": 1e4, "scale": 1.0, **options}
    return mx.fast.rope(x, settings.pop("dims"), offset=offset, **settings)


def rows(num: int, *, heads: int = 3, positions: int = 1, dtype: mx.Dtype = mx.float32) -> mx.array:
    shape = (num, heads, positions, HEAD_DIM)
    return mx.random.normal(shape, key=mx.random.key(num)).astype(dtype)


def num_sines(folder: Path, *arrays: mx.array) -> int:
    """How often a sine is computed for these arrays."""
    graph = folder / "graph.dot"
    mx.export_to_dot(str(graph), *arrays)
    return graph.read_text().count('"Sin"')


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("num", [1, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"traditional": True},
        {"dims": HEAD_DIM // 2},
        {"dims": HEAD_DIM // 2, "traditional": True},
        {"base": 5e5, "scale": 0.25},
        {"base": None, "freqs": FREQS, "dims": HEAD_DIM // 2},
    ],
)
def test_the_bits_are_those_of_mlx(options: dict[str, Any], num: int, dtype: mx.Dtype) -> None:
    offset = mx.array([4095 * row // 2 for row in range(num)])
    queries, keys = rows(num, dtype=dtype), rows(num, heads=1, dtype=dtype)
    expected = [rope(x, offset, **options) for x in (queries, keys)]
    with shared_angles(is_on=True):
        found = [rope(x, offset, **options) for x in (queries, keys)]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert one.shape == other.shape
        difference = mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max().item()
        assert difference <= (0 if IS_EXACT else TOLERANCE[dtype])


def test_the_angles_are_computed_once_for_each_kind_of_rotation(tmp_path: Path) -> None:
    offset, other = mx.array([3, 1]), mx.array([3, 1])
    x = rows(2)
    with shared_angles(is_on=True):
        same = [rope(x, offset) for _ in range(4)]
        assert num_sines(tmp_path, *same) == 1
        assert num_sines(tmp_path, *same, rope(x, offset, base=5e5)) == 2
        assert num_sines(tmp_path, *same, rope(x, offset, traditional=True)) == 2
        assert num_sines(tmp_path, *same, rope(x, other)) == 2
    with shared_angles(is_on=True):
        assert num_sines(tmp_path, *same, rope(x, offset)) == 2, "an earlier forward's were used"


def test_nothing_is_shared_outside_of_a_forward_over_pages(tmp_path: Path) -> None:
    offset, x = mx.array([3, 1]), rows(2)
    with pytest.raises(ZeroDivisionError), shared_angles(is_on=True):
        1 / 0  # noqa: B018
    assert num_sines(tmp_path, *(rope(x, offset) for _ in range(4))) == 4
    with shared_angles(is_on=False):
        assert num_sines(tmp_path, *(rope(x, offset) for _ in range(4))) == 4


@pytest.mark.parametrize(("positions", "offset"), [(1, 7), (4, 7), (4, [7, 2]), (1, mx.array(7))])
def test_whole_sequences_are_turned_by_mlx(
    positions: int, offset: int | list[int] | mx.array
) -> None:
    at = mx.array(offset) if isinstance(offset, list) else offset
    x = rows(2, positions=positions)
    expected = rope(x, at)
    with shared_angles(is_on=True):
        assert mx.array_equal(rope(x, at), expected)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_step_of_a_model_computes_one_sine(
    num_rows: int, build_model: BuildModel, tmp_path: Path
) -> None:
    loaded = prepare(*build_model("llama"), "tiny")
    kv = KVPool(loaded.layers, 4, PAGE, select_backend("cpu"))
    runner = ModelRunner(loaded, kv)
    chunks = [
        Chunk(
            LiveRequest(Request(str(row), [1, 2], SamplingParams())),
            *(0, 1, as_page_table([row])),
            samples=True,
        )
        for row in range(num_rows)
    ]
    batch = Batch.of(chunks, PAGE)
    logits = runner.logits(batch, mx.array(batch.tokens))
    assert len(loaded.layers) > 1
    assert num_sines(tmp_path, logits) == 1


def test_metal_turns_with_a_kernel_of_its_own(build_model: BuildModel) -> None:
    layers = prepare(*build_model("llama", head_dim=64), "tiny").layers
    assert is_on_cpu(KVPool(layers, 1, PAGE, select_backend("cpu")))
    assert not is_on_cpu(KVPool(layers, 1, PAGE, emulated_backend()))

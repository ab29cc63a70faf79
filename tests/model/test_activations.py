"""A CPU's activations are mlx-lm's to a few roundings, within a forward over pages and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama

from metal_kernels.choice import select_backend
from mlxserve.cache.kv import KVPool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model.activations import MANY, install, vectorised
from mlxserve.model.batch import Batch
from mlxserve.model.load import prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table

pytestmark = pytest.mark.usefixtures("compiled")

BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]
PAGE = 16


@pytest.fixture(autouse=True)
def _replaced(build_model: BuildModel, on_a_cpu: None) -> None:
    """mlx has kernels of its own on a GPU."""
    model, _ = build_model("llama")
    install(model)


def slow_operations(folder: Path, *arrays: mx.array) -> int:
    """How many operations compute a sigmoid or a tangent as mlx does."""
    graph = folder / "graph.dot"
    mx.export_to_dot(str(graph), *arrays)
    return sum(graph.read_text().count(name) for name in ("Sigmoid", "Tanh"))


def logits(runner: ModelRunner) -> mx.array:
    """Of a prompt of 64 tokens, not evaluated."""
    prompt = [1 + number % 7 for number in range(4 * PAGE)]
    request = LiveRequest(Request("a", prompt, SamplingParams()))
    chunks = [Chunk(request, 0, len(prompt), as_page_table(range(4)), samples=True)]
    batch = Batch.from_chunks(chunks, PAGE)
    return runner.logits(batch, mx.array(batch.tokens))


@pytest.mark.parametrize("name", ["silu", pytest.param("gelu_approx", marks=pytest.mark.slow)])
def test_an_activation_is_that_of_mlx_to_a_few_roundings(name: str) -> None:
    activation, x = getattr(nn, name), mx.linspace(-20, 20, 50_001)
    expected = activation(x)
    with vectorised():
        found = activation(x)
    assert not mx.array_equal(found, expected), "mlx's own was compared with itself"
    assert mx.allclose(found, expected, rtol=5e-6, atol=1e-6).item()


def test_a_gate_is_multiplied_with_its_other_half() -> None:
    gate, x = mx.random.normal((2, MANY // 2), key=mx.random.key(1)), mx.full((2, MANY // 2), 3.0)
    expected = llama.swiglu(gate, x)
    with vectorised():
        found = llama.swiglu(gate, x)
    assert not mx.array_equal(found, expected)
    assert mx.allclose(found, expected, rtol=5e-6, atol=1e-6).item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_left_to_mlx(dtype: mx.Dtype) -> None:
    x = mx.random.normal((MANY,), key=mx.random.key(2)).astype(dtype)
    expected = nn.silu(x)
    with vectorised():
        assert mx.array_equal(nn.silu(x), expected)


def test_few_elements_are_left_to_mlx() -> None:
    x = mx.random.normal((MANY,), key=mx.random.key(2))
    expected = nn.silu(x)
    with vectorised():
        assert mx.array_equal(nn.silu(x[:-1]), expected[:-1])
        assert not mx.array_equal(nn.silu(x), expected)


def test_nothing_changes_outside_of_a_forward() -> None:
    x = mx.random.normal((MANY,), key=mx.random.key(3))
    expected = x * mx.sigmoid(x)
    with pytest.raises(ZeroDivisionError), vectorised():
        1 / 0  # noqa: B018
    assert mx.allclose(nn.silu(x), expected, rtol=0, atol=1e-7).item()
    assert mx.allclose(nn.silu(x=x), expected, rtol=0, atol=1e-7).item()


def test_what_is_replaced_twice_is_replaced_once(build_model: BuildModel) -> None:
    silu = nn.silu
    install(build_model("llama")[0])
    assert nn.silu is silu


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma2"])
def test_a_step_of_a_model_has_no_slow_activation(
    kind: str, build_model: BuildModel, tmp_path: Path
) -> None:
    loaded = prepare(*build_model(kind), "tiny")
    found, dense = [], []
    for backend, results in ((select_backend("cpu"), found), (select_backend("reference"), dense)):
        runner = ModelRunner(loaded, KVPool(loaded.layers, 4, PAGE, backend))
        results.append(logits(runner))
        results.append(slow_operations(tmp_path, results[0]))
    assert found[1] < dense[1]
    assert mx.allclose(found[0], dense[0], rtol=1e-4, atol=1e-4).item()

"""Kernels that Apple's compiler accepts run unmodified, and compute what they should.

They are MLX's own, from the headers in its wheel, and mlx-lm's, from its wheel. (MLX ships no
header for rms_norm, so the norm is mlx-lm's.) Check mode must find nothing in them.
"""

import importlib.util
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.emulator import OutputBuffer, metal_kernel
from tests.emulator.tests.mlx_headers import (
    DTYPES,
    Floats,
    assert_close,
    exact,
    load,
    random,
    scalar,
    strides,
)

SIMD = 32


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, causal: bool) -> Floats:
    """q [B, H, qL, D], k and v [B, Hkv, N, D]; the last query sees every key."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(exact(x), groups, axis=1) for x in (k, v))
    scores = np.einsum("bhqd,bhtd->bhqt", exact(q), keys) * scale
    if causal:
        last = keys.shape[2] - q.shape[2] + np.arange(q.shape[2])
        scores = np.where(np.arange(keys.shape[2]) <= last[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out: Floats = np.einsum("bhqt,bhtd->bhqd", weights / weights.sum(-1, keepdims=True), values)
    return out


every_dtype = pytest.mark.parametrize("name", DTYPES)


@every_dtype
def test_sdpa_vector(name: str) -> None:
    heads, kv_heads, queries, keys, dim, causal = 4, 2, 3, 45, 64, True
    q = random(DTYPES[name], 1, heads, queries, dim, seed=1)
    k, v = (random(DTYPES[name], 1, kv_heads, keys, dim, seed=s) for s in (2, 3))
    run = load("sdpa_vector.h", f"sdpa_vector<{name}, {dim}>", {22: causal})
    out = run(
        {
            0: q,
            1: k,
            2: v,
            4: scalar(heads // kv_heads, np.int32),
            5: scalar(keys, np.int32),
            6: scalar(keys * dim, np.uint64),
            7: scalar(dim, np.uint64),
            8: scalar(keys * dim, np.uint64),
            9: scalar(dim, np.uint64),
            10: scalar(dim**-0.5, np.float32),
        },
        {3: OutputBuffer(q.shape, q.dtype)},
        grid=(heads * 1024, queries, 1),
        threadgroup=(1024, 1, 1),
    )[3]
    assert_close(out, attention(q, k, v, dim**-0.5, causal))


@every_dtype
def test_sdpa_vector_in_two_passes(name: str) -> None:
    heads, kv_heads, queries, keys, dim, blocks = 4, 2, 2, 77, 128, 32
    q = random(DTYPES[name], 1, heads, queries, dim, seed=1)
    k, v = (random(DTYPES[name], 1, kv_heads, keys, dim, seed=s) for s in (2, 3))
    constants: dict[int, bool | int] = {22: False, 26: blocks}
    first = load("sdpa_vector.h", f"sdpa_vector_2pass_1<{name}, {dim}>", constants)
    rows = (heads, queries, blocks)
    partial = first(
        {
            0: q,
            1: k,
            2: v,
            7: scalar(keys, np.int32),
            8: scalar(keys * dim, np.uint64),
            9: scalar(dim, np.uint64),
            10: scalar(keys * dim, np.uint64),
            11: scalar(dim, np.uint64),
            12: scalar(dim**-0.5, np.float32),
        },
        {
            3: OutputBuffer((*rows, dim), q.dtype),
            4: OutputBuffer(rows, mx.float32),
            5: OutputBuffer(rows, mx.float32),
        },
        grid=(kv_heads * SIMD, heads // kv_heads, blocks * queries),
        threadgroup=(SIMD, heads // kv_heads, queries),
    )
    second = load("sdpa_vector.h", f"sdpa_vector_2pass_2<{name}, {dim}>", constants)
    out = second(
        {0: partial[3], 1: partial[4], 2: partial[5], 4: scalar(blocks, np.int32)},
        {3: OutputBuffer(q.shape, q.dtype)},
        grid=(heads * 1024, queries, 1),
        threadgroup=(1024, 1, 1),
    )[3]
    assert_close(out, attention(q, k, v, dim**-0.5, causal=False))


STEEL_PARAMS = np.dtype(
    [
        *((field, np.int32) for field in ("B", "H", "D", "qL", "kL", "gqa_factor")),
        ("scale", np.float32),
        *((field, np.int32) for field in ("NQ", "NK", "NQ_aligned", "NK_aligned")),
        *((field, np.int32) for field in ("qL_rem", "kL_rem", "qL_off")),
        *((field, np.int64, 3) for field in ("Q", "K", "V", "O")),
    ]
)


def steel_params(q: mx.array, k: mx.array, block: int) -> NDArray[np.void]:
    """AttnParams of steel/attn/params.h."""
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    params = np.zeros((), STEEL_PARAMS)
    params["B"], params["H"], params["D"] = batch, heads, dim
    params["qL"], params["kL"], params["gqa_factor"] = queries, keys, heads // k.shape[1]
    params["scale"], params["qL_off"] = dim**-0.5, keys - queries
    for name, length in (("Q", queries), ("K", keys)):
        params[f"N{name}"] = -(-length // block)
        params[f"N{name}_aligned"] = length // block
        params[f"{name.lower()}L_rem"] = length % block
    params["Q"] = params["O"] = strides(q)[:3]
    params["K"] = params["V"] = strides(k)[:3]
    return params


def run_steel_attention(name: str, check: bool) -> None:
    heads, kv_heads, queries, keys, dim, block = 2, 1, 41, 75, 64, 32
    q = random(DTYPES[name], 1, heads, queries, dim, seed=1)
    k, v = (random(DTYPES[name], 1, kv_heads, keys, dim, seed=s) for s in (2, 3))
    constants: dict[int, bool | int] = {200: False, 201: False, 301: True}
    kernel = f"attention<{name}, {block}, {block}, {dim}, {dim}, 4, 1, float, float>"
    # The second front end refuses what MMATile returns: references to its members.
    header = "steel/attn/kernels/steel_attention.h"
    run = load(header, kernel, constants, check=check, strict=False)
    out = run(
        {0: q, 1: k, 2: v, 4: steel_params(q, k, block)},
        {3: OutputBuffer(q.shape, q.dtype)},
        grid=(-(-queries // block) * SIMD, heads * 4, 1),
        threadgroup=(SIMD, 4, 1),
    )[3]
    assert_close(out, attention(q, k, v, dim**-0.5, causal=True))


@every_dtype
def test_steel_attention(name: str) -> None:
    run_steel_attention(name, check=False)


def test_steel_attention_passes_every_check() -> None:
    run_steel_attention("half", check=True)


@every_dtype
def test_steel_attention_passes_every_check_in_every_dtype(name: str) -> None:
    run_steel_attention(name, check=True)


def run_softmax(kernel: str, name: str, columns: int, threads: int) -> None:
    x = random(DTYPES[name], 3, columns, seed=4)
    run = load("softmax.h", f"{kernel}<{name}, float>", {})
    out = run(
        {0: x, 2: scalar(columns, np.int32)},
        {1: OutputBuffer(x.shape, x.dtype)},
        grid=(3 * threads, 1, 1),
        threadgroup=(threads, 1, 1),
    )[1]
    shifted = np.exp(exact(x) - exact(x).max(-1, keepdims=True))
    assert_close(out, shifted / shifted.sum(-1, keepdims=True))


@every_dtype
def test_softmax_of_a_row_per_threadgroup(name: str) -> None:
    run_softmax("softmax_single_row", name, columns=333, threads=96)


@every_dtype
def test_softmax_in_a_loop(name: str) -> None:
    run_softmax("softmax_looped", name, columns=4200, threads=1024)


@every_dtype
def test_rms_norm_of_mlx_lm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A copy of the module that builds its kernel with the emulator; other tests keep theirs.
    monkeypatch.setattr(mx.fast, "metal_kernel", partial(metal_kernel, check=True))
    spec = importlib.util.find_spec("mlx_lm.kernels.rms_norm_sigmoid_gate")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Strided, as attention hands it over.
    x = random(DTYPES[name], 2, 5, 3, 80, seed=5).swapaxes(1, 2)
    gate = random(DTYPES[name], 2, 5, 3 * 80, seed=6)
    out = module.rms_norm_sigmoid_gate(x, gate, eps=1e-5)
    rows = exact(x.swapaxes(1, 2))
    norm = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5)
    gates = 1 / (1 + np.exp(-exact(gate).reshape(norm.shape)))
    assert_close(out, (norm * gates).reshape(out.shape))

"""Shapes and dtypes of layers and pools that the Metal kernels refuse."""

from __future__ import annotations

import mlx.core as mx

from metal_kernels import quantised
from metal_kernels.latents import LATENT_DIMS
from metal_kernels.limits import HEAD_DIMS
from metal_kernels.ops import FLOATS


def refusal(
    key_dim: int,
    value_dim: int,
    dtype: mx.Dtype,
    is_latent: bool = False,
    is_quantised: bool = False,
) -> str | None:
    """Why the kernels cannot run a layer of this shape; None if they can.

    dtype: of the layer's computation
    """
    if dtype not in FLOATS:
        return f"the Metal kernels take float16, bfloat16 and float32, got {dtype}"
    if is_latent and is_quantised:
        return "the Metal kernels take no latents in 8 bits"
    if is_latent:
        if (key_dim, value_dim) in LATENT_DIMS:
            return None
        return (
            f"the Metal kernels take latents and rotated keys of dimensions {LATENT_DIMS}, got "
            f'{(key_dim, value_dim)}; attention_backend="cpu" takes any'
        )
    if key_dim != value_dim:
        return (
            f"the Metal kernels take keys and values of one head dimension, got {key_dim} and "
            f'{value_dim}; attention_backend="cpu" takes any'
        )
    if key_dim not in HEAD_DIMS:
        return (
            f"the Metal kernels take head dimensions {HEAD_DIMS}, got {key_dim}; "
            'attention_backend="cpu" takes any'
        )
    return None


def check_pools(k_pool: mx.array, v_pool: mx.array, *, may_be_latent: bool = False) -> None:
    key_dim, value_dim, dtype, is_quantised = dims_of(k_pool, v_pool)
    reason = refusal(key_dim, value_dim, dtype)
    if reason is not None and not (
        may_be_latent and refusal(key_dim, value_dim, dtype, True, is_quantised) is None
    ):
        raise ValueError(reason)
    if k_pool.shape[:-1] != v_pool.shape[:-1] or k_pool.dtype != v_pool.dtype:
        raise ValueError("the pools of keys and of values must be alike")


def dims_of(k_pool: mx.array, v_pool: mx.array) -> tuple[int, int, mx.Dtype, bool]:
    """Return (key dimension, value dimension, dtype to compute in, whether quantised)."""
    is_quantised = k_pool.dtype == quantised.DTYPE
    dims = (
        quantised.head_dim_of(k_pool.shape[-1], k_pool.dtype),
        quantised.head_dim_of(v_pool.shape[-1], v_pool.dtype),
    )
    return *dims, mx.float32 if is_quantised else k_pool.dtype, is_quantised

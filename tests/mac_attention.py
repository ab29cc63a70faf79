"""MLX's attention as a Mac's answers to `force_fused`, computed on this machine.

The rules are those of mlx 0.32.4: `has_fused_kernel` in its metal/scaled_dot_product_attention.cpp, and the text of
its error in the wheel for macOS 26.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

# With a kernel for long chunks, on every chip and on an M5.
HEAD_DIMS = frozenset({64, 72, 80, 96, 128, 192, 256})
HEAD_DIMS_ON_M5 = HEAD_DIMS | {512}

_attention = mx.fast.scaled_dot_product_attention


class MacAttention:
    """Stands for `mx.fast.scaled_dot_product_attention`.

    forced: (head dimension, kind of mask) of each call with `force_fused`
    """

    def __init__(self, head_dims: frozenset[int] = HEAD_DIMS) -> None:
        """head_dims: with a fused kernel"""
        self._head_dims = head_dims
        self.forced: list[tuple[int, str]] = []

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        force_fused: bool = False,
        **options: Any,
    ) -> mx.array:
        if force_fused:
            mask = options["mask"]
            self.forced.append((queries.shape[-1], mask if isinstance(mask, str) else "array"))
            if queries.shape[-1] not in self._head_dims:
                raise ValueError(
                    "[scaled_dot_product_attention] force_fused=True but no fused kernel is available"
                )
        out: mx.array = _attention(queries, keys, values, **options)
        return out

"""The tile kernel of cooperative tensors: which chunks it takes, and its tiles.

Neural accelerators multiply cooperative tensors (Metal 4), and 8x8 matrices they do not. Apple leaves
open which lane holds which number of a tensor. So a trial on this machine compares results first
(`chunk_trial.py`), and the kernel takes no chunk before.
"""

from __future__ import annotations

import mlx.core as mx

# Of two numbers each, and with registers for the sums of a line.
HEAD_DIMS = (64, 128, 256)
DTYPES = (mx.float16, mx.bfloat16)
THREADS = 128  # four simdgroups
_LINES = 16  # of a simdgroup

# By head dimension and dtype, the fewest rows of a chunk that the kernel takes; see `use_timed`.
timed_rows: dict[tuple[int, mx.Dtype], int | None] = {}


def use_timed(head_dim: int, dtype: mx.Dtype, first: int | None) -> None:
    """Take chunks of `first` rows or more in this process from now on; None: none.

    The first call for a head dimension counts: another model's layers change no answer.
    """
    timed_rows.setdefault((head_dim, dtype), first)


def refuse(head_dim: int, dtype: mx.Dtype) -> None:
    """Take no chunk in this process from now on, whatever was timed for a model before.

    A text that another model needs, of 8 bits or of images, failed its trial on this machine.
    """
    timed_rows[head_dim, dtype] = None


def first_rows(head_dim: int, dtype: mx.Dtype) -> int | None:
    """The fewest rows of a chunk that the kernel takes; None if a trial has not chosen it."""
    return timed_rows.get((head_dim, dtype))


def is_supported(head_dim: int, dtype: mx.Dtype) -> bool:
    return head_dim in HEAD_DIMS and dtype in DTYPES


def tile_lines(head_dim: int) -> int:
    """Lines of a tile: two simdgroups share 16 above 128 dimensions, as their sums are twice as many."""
    return _LINES * THREADS // 32 // (2 if head_dim > 128 else 1)

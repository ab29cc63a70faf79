"""Shapes and dtypes that the kernels support, and the backends' names. Standard library only."""

from __future__ import annotations

BACKENDS = ("auto", "metal", "cpu", "reference")
PAGE_SIZES = (16, 32, 64)
# Of the Metal kernels; the other backends take any.
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)

# MLX's own kernels attend to chunks of at least this many rows, over copies of their pages
# (`long_chunks.py`), and of fewer where they compute on neural accelerators, or a trial found them faster.
MIN_COPIED_ROWS = 256
MIN_ACCELERATED_ROWS = 64
# Head dimensions for which MLX has such kernels on every chip.
COPIED_DIMS = (64, 80, 96, 128)
# Divisor of the machine's memory that one layer's copies may take: 512 MiB of 16 GB, which are
# 128 Ki positions of 8 kv heads of 128 dimensions. Copies of one or two layers are alive at
# once, as a step waits for those before (`mlxserve/model/command_buffers.py`).
SHARE_COPIED = 32
# Bytes of a position's copies with these heads: what a step counts its copies in
# (`mlxserve/core/step_rows.py`).
COPY_BYTES = 4096
# Copies of a chunk have room for the next power of two of positions, or from here on for the next
# multiple of this number.
_ROOM = 8192


def room_for(positions: int) -> int:
    """Positions that copies of `positions` have room for.

    MLX uses freed memory again for arrays that are at most 32 KB smaller. With room for exactly
    what a chunk sees, each chunk's copies would be new memory: 13 GB in 384 buffers for a prompt of
    32 Ki tokens of an 8B model.
    """
    if positions >= _ROOM:
        return -(-positions // _ROOM) * _ROOM
    return 1 << max(0, positions - 1).bit_length()


def positions_in(room: int) -> int:
    """Maximum number of positions whose copies fit into this room."""
    if room >= _ROOM:
        return room // _ROOM * _ROOM
    return 1 << room.bit_length() - 1 if room else 0

"""Shapes and dtypes that the kernels support, and the backends' names. Standard library only."""

from __future__ import annotations

BACKENDS = ("auto", "metal", "cpu", "reference")
PAGE_SIZES = (16, 32, 64)
# Of the Metal kernels; the other backends take any.
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)

# Chunks of so many rows are attended to by MLX's own kernels, over copies of their pages (`long_chunks.py`).
MIN_COPIED_ROWS = 256
# Head dimensions of which that is so on every chip.
COPIED_DIMS = (64, 80, 96, 128)
# The share of the machine's memory that one layer's copies may take, one in: 512 MiB of 16 GB, which are 128 Ki
# positions of 8 kv heads of 128 dimensions. Copies of one or two layers are alive at once, as a step waits
# for those before (`mlxserve/model/command_buffers.py`).
SHARE_COPIED = 32

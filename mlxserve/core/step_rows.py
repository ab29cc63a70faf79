"""The rows that a step may have under way on Metal, and as how many rows a layer counts.

MLX keeps what an operation reads until its command buffer completes, so these rows decide a step's
peak memory (`model/command_buffers.py`). These are plain numbers, so that a step can be estimated
without mlx as well.
"""

from __future__ import annotations

# Rows, times layers, of a step with a prompt that MLX may have encoded and not computed yet: 6
# layers of 512 rows, which keep 0.7 GB of an 8B model, on small machines. The more, the earlier the
# host continues with the step before. (memory in GB below which they hold, rows)
_ROWS_UNDER_WAY = ((24, 3072), (48, 6144), (96, 8192))
_MAX_ROWS_UNDER_WAY = 16384
# Positions of a decode whose partial results take as much memory as what a row leaves in a layer.
_POSITIONS_OF_A_ROW = 1024
# Positions of a chunk whose copies (`metal_kernels/long_chunks.py`) take as much memory: 4 KB each
# of 8 kv heads of 128 dimensions, where an 8B model keeps 230 KB of a row.
_COPIES_OF_A_ROW = 64
# Decodes that count as fewer rows are left to MLX: of 128 Ki positions a layer keeps 9 MB.
_MIN_ROWS_OF_DECODES = 128


def rows_under_way(total: int) -> int:
    """Rows, times layers, that a step with a prompt may have under way; total: bytes of a Mac."""
    gib = total / (1 << 30)
    return next((rows for below, rows in _ROWS_UNDER_WAY if gib < below), _MAX_ROWS_UNDER_WAY)


def rows_kept(num_rows: int, num_decodes: int, positions: int, copied: int = 0) -> int:
    """Rows that a layer of this step counts as; 0 if MLX's own limits suffice.

    positions: seen by all decodes together
    copied: seen by chunks whose pages are copied; the scores of unfused attention over them count
        as positions of as many bytes
    """
    of_decodes = positions // _POSITIONS_OF_A_ROW
    if num_rows == num_decodes:
        return of_decodes if of_decodes >= _MIN_ROWS_OF_DECODES else 0
    return num_rows + of_decodes + copied // _COPIES_OF_A_ROW


def layers_under_way(num_rows: int, copied: int, total: int) -> int:
    """Layers of a step with a chunk whose arrays are alive at once.

    These are the layers under way, the one that is encoded and the one that the host waits for.

    copied: positions that the chunk sees copies of, as in `rows_kept`
    total: bytes of the Mac's memory
    """
    return rows_under_way(total) // rows_kept(num_rows, 0, 0, copied) + 2

"""MLX's unfused attention over copies of a chunk's pages, in blocks of its rows.

MLX takes it for head dimensions of 192 and 256, unless its slower fused kernel is forced, and where it has
none. It computes scores as one array, and masks them and their softmax in that array:

    rows of block 0 | positions up to its last row
    rows of block 1 | positions up to its last row ...
    ...

A block bounds one array. The memory of all blocks is planned for (`long_chunks.py`): they are in one
command buffer, which keeps what its kernels read until it completes, so the scores of one block are not
free when the next one begins. Blocks that cannot overlap would need a command buffer each, and a host that
waits for the one before: the device would pause as often, and the host could not go on with the layers
that follow. Their scores are in the share of memory that copies have, so a chunk reads its pages by tiles
where they have no room.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import mlx.core as mx

# Of 16 query heads a block has 256 rows at 32 Ki positions and 64 at 128 Ki. By its arithmetic a block of fewer
# than some 32 rows would wait for the keys, which it reads again for each head.
BLOCK_BYTES = 256 << 20


def attention_in_blocks(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str,
    sinks: mx.array | None,
    window: int | None,
    block_bytes: int = BLOCK_BYTES,
) -> mx.array:
    """MLX's attention, (1, heads, rows, head_dim), of as many rows at once as it prefers to compute.

    queries: of the last positions of keys
    mask: (rows, positions) bool where some row does not see the first position, else "causal"
    window: positions that a row sees, including its own; None for all
    block_bytes: of a block's scores
    """
    num_heads, num_rows = queries.shape[1:3]
    seen = keys.shape[2]
    outputs = []
    for first, end in blocks_of(num_rows, seen * num_heads * queries.dtype.size, block_bytes):
        stop = seen - num_rows + end
        start = 0 if window is None else max(0, seen - num_rows + first - window + 1)
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, first:end],
                keys[:, :, start:stop],
                values[:, :, start:stop],
                scale=scale,
                mask=mask if isinstance(mask, str) else mask[first:end, start:stop],
                sinks=sinks,
            )
        )
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def blocks_of(num_rows: int, row_bytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of blocks of about as many rows, whose scores fit into `block_bytes`.

    row_bytes: of a row's scores. A block has at least one row.
    """
    num_blocks = -(-num_rows // max(1, block_bytes // row_bytes))
    bounds = [num_rows * block // num_blocks for block in range(num_blocks + 1)]
    yield from pairwise(bounds)

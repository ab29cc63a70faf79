"""A pool of more than 2^31 elements, which a Mac with 512 GB may have: pages at its end are as right as others."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import psutil
import pytest

from metal_kernels.numpy_attention import attend, in_8_bits, unpacked
from metal_kernels.ops import Attention
from metal_kernels.reading import read
from metal_kernels.rounding import TOLERANCES, row_error
from metal_kernels.tables import SequenceTables
from tests.emulated import emulated_backend

KV_HEADS, PAGE_SIZE, HEAD_DIM, GROUP = 8, 64, 128, 2
ROW = HEAD_DIM + 4  # bytes of a row in 8 bits
NUM_PAGES = 2**31 // (KV_HEADS * PAGE_SIZE * ROW) + 4
LENGTH = 2 * PAGE_SIZE - 3
_NEEDED = 6 << 30  # bytes: the emulator copies both pools


@pytest.mark.long
@pytest.mark.skipif(psutil.virtual_memory().available < _NEEDED, reason="needs 6 GB of memory")
def test_pages_beyond_two_billion_elements_are_written_copied_and_read() -> None:
    backend = emulated_backend()
    shape = NUM_PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM
    pools = tuple(backend.new_pool(*shape, mx.int8) for _ in range(2))
    assert pools[0].size > 2**31
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        drawn = mx.array(rng.standard_normal(shape, np.float32)).astype(mx.float16)
        return read(drawn.astype(mx.float32))

    keys, values = draw(LENGTH, KV_HEADS, HEAD_DIM), draw(LENGTH, KV_HEADS, HEAD_DIM)
    queries = draw(LENGTH, KV_HEADS * GROUP, HEAD_DIM)
    last = np.array([[NUM_PAGES - 1, NUM_PAGES - 3]], np.int32)
    positions = np.arange(LENGTH)
    slots = last[0, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    rows = (mx.array(side).astype(mx.float16) for side in (keys, values))
    backend.write_kv(*rows, *pools, slots.astype(np.int32))
    backend.copy_pages(*pools, last[0, :1], np.array([NUM_PAGES - 2], np.int32), PAGE_SIZE)

    right = attend(queries, in_8_bits(keys), in_8_bits(values))
    asked = mx.array(queries).astype(mx.float16)
    copied = np.array([[NUM_PAGES - 2, NUM_PAGES - 3]], np.int32)
    for pages in (last, copied):
        for num_rows, op in ((1, backend.paged_decode), (LENGTH, backend.paged_prefill)):
            starts = np.array([0, num_rows], np.int32)
            tables = SequenceTables(pages, np.array([LENGTH], np.int32), starts, PAGE_SIZE)
            found = op(asked[-num_rows:], *pools, tables, Attention(HEAD_DIM**-0.5))
            answer = read(found.astype(mx.float32))
            assert row_error(answer, right[-num_rows:]) <= TOLERANCES[mx.float16]
    held = backend.read_kv(*pools, np.array([0, *slots[:2]], np.int32))
    assert not read(held[0][0]).any(), "nothing was written at the beginning"
    assert np.allclose(unpacked(read(held[0][1:])), in_8_bits(keys[:2]), atol=0.05)

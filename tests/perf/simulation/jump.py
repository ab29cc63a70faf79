"""Jumps: consecutive steps of decodes with the same plan, computed as one. Only simulators jump.

    step by step   [d][d][d][d][d][d]     pages allocated when a request crosses a page's end
    jumped         [d  x  6        ]      the same pages, allocated in the same order

`steps_left` and the pages left say how far the plan stays the same, `jump` makes a planned step that
long, and `append_tokens` adds its tokens once the step before it has been read.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxserve.request import Chunk
from mlxserve.scheduler.page_tables import PageTables


def steps_left(tables: PageTables, chunks: Sequence[Chunk]) -> int:
    """Steps of these decodes until the first request certainly ends, this step included."""
    # A chunk's own token is known when the chunk runs.
    return min(tables.capacity.max_length(chunk.request) - chunk.end for chunk in chunks)


def jump(tables: PageTables, chunks: Sequence[Chunk], at_most: int) -> tuple[Chunk, ...]:
    """The chunks of a planned step of decodes, up to `at_most` tokens long instead of one."""
    page_size = tables.pool.page_size
    growths = _growths(chunks, at_most, page_size)
    # Leave a page for every request in every step, or the engine would plan differently.
    room = max(0, tables.pool.num_free - len(chunks))
    length = growths[room][0] if len(growths) > room else at_most
    if length < 2:
        return tuple(chunks)
    for step, index in growths[:room]:
        request = chunks[index].request
        if step < length:
            grown = tables.grow(request, (len(request.page_table) + 1) * page_size)
            assert grown, "a jump is longer than the pool has pages"
    for chunk in chunks:
        chunk.request.num_computed += length - 1
    return tuple(
        Chunk(c.request, c.start, length, c.request.page_table, True, c.is_lazy) for c in chunks
    )


def append_tokens(chunks: Sequence[Chunk], token_id: int) -> None:
    """Give the requests of a jump its tokens, all but the last, which is read with the step."""
    for chunk in chunks:
        chunk.request.token_ids.extend([token_id] * (chunk.length - 1))
        chunk.request.commits_until = 0  # pages are published with it, wherever it ends


def _growths(chunks: Sequence[Chunk], length: int, page_size: int) -> list[tuple[int, int]]:
    """(step, chunk) of every page that a jump allocates, in the order of single steps."""
    growths = []
    for index, chunk in enumerate(chunks):
        first = len(chunk.page_table) * page_size - chunk.start
        growths += [(step, index) for step in range(first, length, page_size)]
    return sorted(growths)

"""Batch: the rows of one step, as numpy arrays on the host.

Rows follow the order of the chunks: decodes first, then prompt chunks. A row's token is either
known here or still being sampled by the previous step (`lazy_rows`); the runner then takes it from
that step's pending array without reading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from metal_kernels.tables import SequenceTables
from mlxserve.model.picture_rows import PictureRows
from mlxserve.request import Chunk

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows of S sequences; see StepLayout for their order.

    tokens       (T,) int32; 0 where the token is lazy
    positions    (T,) int32
    slots        (T,) int32
    sample_rows  rows whose logits are needed, in the order of `sampling`: the last of each chunk,
                 and all of a chunk with a draft
    sampling     the chunks that sample
    lazy_rows    rows whose token comes from the previous step, in the order of `lazy`
    lazy         the chunks of those rows
    plan         all chunks of the step, in the order of their rows
    windows      the same rows in the pages of sliding-window layers, if those have a pool of their own
    pictures     images of the step's requests; None if no request has any
    ahead        `chunks` for layers in which rows of images see all of an image; None if no chunk has such rows
    """

    tokens: IntArray
    positions: IntArray
    slots: IntArray
    num_decodes: int
    decodes: SequenceTables | None
    chunks: SequenceTables | None
    sample_rows: IntArray
    sampling: tuple[Chunk, ...]
    lazy_rows: IntArray
    lazy: tuple[Chunk, ...]
    plan: tuple[Chunk, ...]
    windows: Batch | None
    pictures: PictureRows | None
    ahead: SequenceTables | None

    @classmethod
    def from_chunks(
        cls, chunks: Sequence[Chunk], page_size: int, *, is_of_drafter: bool = False
    ) -> Batch:
        """Build the batch of a step's chunks. Chunks of length 1 that sample must come first.

        is_of_drafter: rows of images only look back, and chunks may end inside one
        """
        has_windows = chunks[0].window_table is not None
        ends = list(accumulate(chunk.length for chunk in chunks))
        starts = [end - chunk.length for end, chunk in zip(ends, chunks, strict=True)]
        num_rows = ends[-1]
        tokens = np.zeros(num_rows, np.int32)
        positions = np.empty(num_rows, np.int32)
        slots = np.empty(num_rows, np.int32)
        tables = [np.frombuffer(chunk.page_table, np.int32) for chunk in chunks]
        has_pictures = has_blocks = False
        for chunk, table, start, end in zip(chunks, tables, starts, ends, strict=True):
            has_pictures |= chunk.request.asked.pictures != ()
            has_blocks |= chunk.request.asked.blocks != ()
            # Numbers, because numpy's calls would take ten times as long.
            if chunk.length == 1:
                page, offset = divmod(chunk.start, page_size)
                positions[start] = chunk.start
                slots[start] = chunk.page_table[page] * page_size + offset
                if not chunk.is_lazy:
                    tokens[start] = chunk.request.token_ids[chunk.start]
                continue
            if chunk.draft:
                tokens[start:end] = chunk.request.token_ids[chunk.start], *chunk.draft
            elif not chunk.is_lazy:
                tokens[start:end] = chunk.request.token_ids[chunk.start : chunk.end]
            positions[start:end] = np.arange(chunk.start, chunk.end, dtype=np.int32)
            page, offset = divmod(chunk.start, page_size)
            pages = table[page : -(-chunk.end // page_size)]
            of_pages = (pages[:, None] * page_size + np.arange(page_size, dtype=np.int32)).ravel()
            slots[start:end] = of_pages[offset : offset + chunk.length]
        parts = _parts(chunks)
        num_decodes = next((i for i, c in enumerate(parts) if c.length > 1), len(parts))
        part_tables = [np.frombuffer(chunk.page_table, np.int32) for chunk in parts]
        sampling = [i for i, chunk in enumerate(chunks) if chunk.samples]
        lazy = [i for i, chunk in enumerate(chunks) if chunk.is_lazy]
        return cls(
            tokens=tokens,
            positions=positions,
            slots=slots,
            num_decodes=num_decodes,
            decodes=(
                _tables(parts[:num_decodes], part_tables[:num_decodes], page_size)
                if num_decodes
                else None
            ),
            chunks=(
                _tables(parts[num_decodes:], part_tables[num_decodes:], page_size)
                if num_decodes < len(parts)
                else None
            ),
            sample_rows=np.array(
                [
                    row
                    for i in sampling
                    for row in range(ends[i] - 1 - len(chunks[i].draft), ends[i])
                ],
                np.int32,
            ),
            sampling=tuple(chunks[i] for i in sampling),
            lazy_rows=np.array([starts[i] for i in lazy], np.int32),
            lazy=tuple(chunks[i] for i in lazy),
            plan=tuple(chunks),
            windows=cls.from_chunks(_in_windows(chunks), page_size) if has_windows else None,
            pictures=PictureRows.from_chunks(chunks, tokens) if has_pictures else None,
            ahead=_ahead(parts[num_decodes:], part_tables[num_decodes:], page_size)
            if has_blocks and not is_of_drafter
            else None,
        )


def _in_windows(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks with the page tables of sliding-window layers."""
    moved = []
    for chunk in chunks:
        assert chunk.window_table is not None, f"{chunk.request.id} has no page table for windows"
        moved.append(chunk._replace(page_table=chunk.window_table, window_table=None))
    return moved


def _parts(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """Split chunks with drafts into one decode per row.

    All rows of a step are written before any attends, and a decode attends up to its own position.
    So a token is computed in the same order with a draft and without, also where a backend reads
    the pages of these rows together.
    """
    if not any(chunk.draft for chunk in chunks):
        return chunks
    parts: list[Chunk] = []
    for chunk in chunks:
        if chunk.draft:
            positions = range(chunk.start, chunk.end)
            parts += [chunk._replace(start=position, length=1) for position in positions]
        else:
            parts.append(chunk)
    return parts


def _ahead(
    chunks: Sequence[Chunk], tables: Sequence[IntArray], page_size: int
) -> SequenceTables | None:
    """Return the chunks' tables with the ends of images whose rows see all of them; None without any."""
    ends = [np.arange(chunk.start, chunk.end, dtype=np.int32) + 1 for chunk in chunks]
    is_ahead = False
    for chunk, own in zip(chunks, ends, strict=True):
        for first, end in chunk.request.asked.blocks:
            if chunk.start < end and first < chunk.end:
                assert end <= chunk.end, f"a chunk of {chunk.request.id} ends inside an image"
                own[max(0, first - chunk.start) : end - chunk.start] = end
                is_ahead = True
    if not is_ahead:
        return None
    return replace(_tables(chunks, tables, page_size), ends=np.concatenate(ends))


def tables_alone(chunk: Chunk, start: int, end: int, page_size: int) -> SequenceTables:
    """Page table of a chunk's part from `start` to `end`, as the only sequence of a dispatch."""
    part = chunk._replace(start=start, length=end - start)
    return _tables([part], [np.frombuffer(chunk.page_table, np.int32)], page_size)


def _tables(chunks: Sequence[Chunk], tables: Sequence[IntArray], page_size: int) -> SequenceTables:
    page_tables = np.zeros((len(chunks), max(map(len, tables))), np.int32)
    for row, table in zip(page_tables, tables, strict=True):
        row[: len(table)] = table
    return SequenceTables(
        page_tables=page_tables,
        context_lens=np.array([chunk.end for chunk in chunks], np.int32),
        query_starts=np.array([0, *accumulate(chunk.length for chunk in chunks)], np.int32),
        page_size=page_size,
    )

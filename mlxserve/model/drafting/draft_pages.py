"""DraftPages: the keys and values of a drafter, in pages with the ids of the model's own pages.

    page id          0        1        2      ...
    model's pool     layers 0 .. L-1               one page table, hash, eviction, copy and record on disk
    drafter's pool   its layers                    for both

So whatever the scheduler decides about a page holds for the drafter's rows in it. The row at position p is a
function of tokens 0 .. p alone, as the model's is, and the page's hash names it too. Rows may be missing,
because not every step is computed by the drafter: the number of good first rows is counted for each page.

Wrong rows may cost accepted tokens, and never change one: the model samples every token itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxserve.cache.kv import KVPool
from mlxserve.core.errors import OutOfMemory
from mlxserve.request import Chunk

_COUNT = np.dtype("<i4")  # the number of good rows at the end of a page's payload


class DraftPages:
    """A drafter's pool, and how many first rows of each page are good."""

    def __init__(self, kv: KVPool) -> None:
        self.kv = kv
        self._num_good = np.zeros(kv.num_pages, np.int32)

    @property
    def page_size(self) -> int:
        return self.kv.page_size

    # ---- rows

    def overwrite(self, chunks: Sequence[Chunk]) -> None:
        """Forget the rows that a step computes, and those after them on their pages.

        They are left from rejected guesses, or from a former owner of the page.
        """
        size = self.page_size
        for chunk in chunks:
            for index in range(chunk.start // size, (chunk.end - 1) // size + 1):
                page = chunk.page_table[index]
                self._num_good[page] = min(self._num_good[page], max(0, chunk.start - index * size))

    def num_leading(self, chunk: Chunk, before: int | None = None) -> int:
        """Return how many positions from the first one on have good rows, at most those before the chunk.

        before: a position in or after the chunk in place of its start
        """
        size = self.page_size
        start = chunk.start if before is None else before
        pages = np.frombuffer(chunk.page_table, np.int32)[: -(-start // size)]
        counts = self._num_good[pages]
        short = np.flatnonzero(counts < size)
        if not len(short):
            return start
        first = int(short[0])
        return min(first * size + int(counts[first]), start)

    def mark(self, chunk: Chunk, start: int, end: int) -> None:
        """Count the rows from `start` to `end` as good; all before them are."""
        size = self.page_size
        for index in range(start // size, (end - 1) // size + 1):
            page = chunk.page_table[index]
            self._num_good[page] = max(self._num_good[page], min(size, end - index * size))

    # ---- pages

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.kv.copy_pages(sources, targets)
        self._num_good[list(targets)] = self._num_good[list(sources)]

    def resize(self, num_pages: int) -> None:
        """Resize as `KVPool.resize` does."""
        self.kv.resize(num_pages)
        before = self._num_good
        self._num_good = np.zeros(num_pages, np.int32)
        if num_pages >= len(before):  # a smaller pool begins empty
            self._num_good[: len(before)] = before

    def undo_growth(self, num_pages: int) -> None:
        """Return to `num_pages`, after the other pool could not grow."""
        self.kv.shrink(num_pages)
        self.kv.num_pages = num_pages
        self._num_good = self._num_good[:num_pages]

    def restart(self, num_pages: int) -> None:
        """Replace the arrays by empty ones."""
        self._num_good = np.zeros(num_pages, np.int32)
        self.kv.restart(num_pages)

    # ---- the disk

    @property
    def payload_size(self) -> int:
        """Bytes of a page's payload."""
        return self.kv.nbytes_of(1) + _COUNT.itemsize

    def read_units(self, pages: Sequence[int]) -> list[bytes]:
        counts = self._num_good[list(pages)].astype(_COUNT)
        rows = self.kv.read_units(pages)
        return [row + count.tobytes() for row, count in zip(rows, counts, strict=True)]

    def write_units(self, pages: Sequence[int], payloads: Sequence[bytes]) -> None:
        end = self.kv.nbytes_of(1)
        self.kv.write_units(pages, [payload[:end] for payload in payloads])
        counts: npt.NDArray[np.int32] = np.frombuffer(
            b"".join(payload[end:] for payload in payloads), _COUNT
        )
        self._num_good[list(pages)] = counts

    def check(self) -> None:
        """Audit arrays and counts. Raises AssertionError."""
        self.kv.check()
        assert len(self._num_good) == self.kv.num_pages, "a page has no count of its rows"
        assert 0 <= self._num_good.min() <= self._num_good.max() <= self.page_size, (
            "a page has more rows than slots"
        )


class PairedPages:
    """The model's pool and its drafter's as one: each page is in both.

    Has the methods of `KVPool` that move, read and write pages.
    """

    def __init__(self, own: KVPool, drafter: DraftPages) -> None:
        assert own.num_pages == drafter.kv.num_pages, "each page is in both pools"
        assert own.page_size == drafter.page_size, "pages of both pools have the same positions"
        self._own = own
        self._drafter = drafter

    @property
    def writes_in_place(self) -> bool:
        return self._own.writes_in_place and self._drafter.kv.writes_in_place

    @property
    def num_pages(self) -> int:
        return self._own.num_pages

    @property
    def num_backed(self) -> int:
        """Number of pages that have memory in both pools."""
        return min(self._own.num_backed, self._drafter.kv.num_backed)

    @property
    def nbytes(self) -> int:
        return self._own.nbytes + self._drafter.kv.nbytes

    def nbytes_of(self, num_pages: int) -> int:
        """Return the size of `num_pages` pages in bytes."""
        return self._own.nbytes_of(num_pages) + self._drafter.kv.nbytes_of(num_pages)

    def arrays(self) -> list[mx.array]:
        return [*self._own.arrays(), *self._drafter.kv.arrays()]

    def check(self) -> None:
        self._own.check()
        self._drafter.check()
        assert self._own.num_pages == self._drafter.kv.num_pages, "the drafter lacks pages"

    def back(self, num_pages: int) -> None:
        self._own.back(num_pages)
        self._drafter.kv.back(num_pages)

    def back_ahead(self, num_pages: int) -> bool:
        return self._own.back_ahead(num_pages) or self._drafter.kv.back_ahead(num_pages)

    def shrink(self, num_pages: int) -> None:
        self._own.shrink(num_pages)
        self._drafter.kv.shrink(num_pages)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._own.copy_pages(sources, targets)
        self._drafter.copy_pages(sources, targets)

    def resize(self, num_pages: int) -> None:
        """Resize both pools, or neither if they are to grow. Raises OutOfMemory as `KVPool.resize` does."""
        before = self._own.num_pages
        self._drafter.resize(num_pages)
        try:
            self._own.resize(num_pages)
        except OutOfMemory:
            if num_pages > before:
                self._drafter.undo_growth(before)
            raise

    def restart(self, num_pages: int) -> None:
        self._own.restart(num_pages)
        self._drafter.restart(num_pages)

    def read_units(self, pages: Sequence[int]) -> list[bytes]:
        own, others = self._own.read_units(pages), self._drafter.read_units(pages)
        return [first + second for first, second in zip(own, others, strict=True)]

    def write_units(self, pages: Sequence[int], payloads: Sequence[bytes]) -> None:
        end = self._own.nbytes_of(1)
        self._own.write_units(pages, [payload[:end] for payload in payloads])
        self._drafter.write_units(pages, [payload[end:] for payload in payloads])

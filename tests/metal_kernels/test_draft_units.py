"""Rows of a draft read their pages together, and each is computed as alone, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from metal_kernels import draft_units
from metal_kernels.draft_units import GROUPED_KEYS, MAX_ROWS
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention
from metal_kernels.plans import HeadSplit, Partitions, is_large_group, partition_size
from metal_kernels.reading import read
from metal_kernels.tables import IntArray, SequenceTables

PAGE_SIZE = 16
FloatArray: TypeAlias = npt.NDArray[np.float32]


def tables(*sequences: tuple[int, int], room: int = 2) -> SequenceTables:
    """Sequences of (context of the first row, rows), each on pages of its own in descending order."""
    lengths = [context + row for context, rows in sequences for row in range(rows)]
    columns = -(-max(lengths) // PAGE_SIZE) + room
    pages = np.arange(len(sequences) * columns, dtype=np.int32)[::-1].reshape(-1, columns)
    page_tables = np.repeat(pages, [rows for _, rows in sequences], axis=0)
    # Past a row's last page there may be anything.
    for row, length in zip(page_tables, lengths, strict=True):
        row[-(-length // PAGE_SIZE) :] = 2**31 - 1
    starts = np.arange(len(lengths) + 1, dtype=np.int32)
    return SequenceTables(page_tables, np.array(lengths, np.int32), starts, PAGE_SIZE)


def alone(rows: SequenceTables, row: int) -> SequenceTables:
    return SequenceTables(
        rows.page_tables[row : row + 1],
        rows.context_lens[row : row + 1],
        np.array([0, 1], np.int32),
        rows.page_size,
    )


def units(rows: SequenceTables, window: int | None = None, most: int = MAX_ROWS) -> list[list[int]]:
    return draft_units.draft_units(rows, window, 64, most).tolist()


def test_partitions_of_the_same_keys_are_one_unit() -> None:
    assert units(tables((126, 4))) == [[0, 2, 4, 6], [1, 3, 5, 7], [-1, -1, -1, 8]]


def test_sequences_are_not_joined_and_long_drafts_are_divided() -> None:
    assert units(tables((30, 3), (40, 2))) == [[0, 1, 2], [-1, 3, 4]]
    assert units(tables((30, 5)), most=3) == [[0, 1, 2], [-1, 3, 4]]
    assert units(tables((30, 5)), most=1) == [[0]]


def test_windows_join_rows_that_begin_in_the_same_keys() -> None:
    # They begin at 26, 27, 28 and 29: a simdgroup reads 24 to 27 at a time.
    assert units(tables((50, 4)), window=24) == [[0, 1], [2, 3]]
    # At 62, 63, 64 and 65: the first two see a partition more.
    assert units(tables((70, 4)), window=8) == [[-1, -1, 0, 2], [1, 3, 4, 5]]


def test_large_groups_join_rows_that_begin_in_the_same_sixteen_keys() -> None:
    rows = tables((37, 6))  # which begin at 28 to 33
    found = draft_units.draft_units(rows, 9, 64, 6, GROUPED_KEYS)
    assert found.tolist() == [[0, 1, 2, 3], [-1, -1, 4, 5]]


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 4), (80, 3), (128, 2), (192, 1), (512, 1)])
def test_rows_of_large_groups_have_the_registers_of_256_dimensions(
    head_dim: int, rows: int
) -> None:
    assert draft_units.rows_of_large_groups(head_dim) == rows


def test_rows_that_are_no_draft_have_no_units() -> None:
    for rows in (tables((30, 1)), tables((30, 1), (31, 1)), tables((30, 1), (30, 1), (400, 1))):
        assert units(rows) == [[0]]


def test_rows_on_other_pages_are_not_joined() -> None:
    """Forks that share all but a page, whose lengths follow one another."""
    rows = tables((40, 2))
    pages = rows.page_tables.copy()
    pages[1, 2] = 100
    assert units(replace(rows, page_tables=pages)) == [[0]]
    pages = rows.page_tables.copy()
    pages[1, 3] = 100  # past the rows' pages
    assert units(replace(rows, page_tables=pages)) == [[0, 1]]


@pytest.mark.parametrize("window", [None, 1, 13, 70])
@pytest.mark.parametrize("seed", range(5))
def test_each_partition_is_in_one_unit_with_others_of_the_same_pages(
    seed: int, window: int | None
) -> None:
    rng = np.random.default_rng(seed)
    sequences = [(int(rng.integers(1, 300)), int(rng.integers(1, 7))) for _ in range(6)]
    rows, most = tables(*sequences), int(rng.integers(2, 6))
    cut = Partitions.cut(rows, window, 64)
    found = draft_units.draft_units(rows, window, 64, most)
    assert found.shape[1] <= most
    assert sorted(found[found >= 0].tolist()) == list(range(len(cut.sequence)))
    for unit in found:
        members = unit[unit >= 0]
        assert np.array_equal(unit[len(unit) - len(members) :], members)
        last = members[-1]
        assert np.all(np.diff(cut.sequence[members]) == 1)
        assert len(set((cut.begin[members] // 4).tolist())) == 1
        assert np.all(cut.end[members] <= cut.end[last])
        for member in members:
            pages = slice(cut.begin[member] // PAGE_SIZE, -(-cut.end[member] // PAGE_SIZE))
            first, second = rows.page_tables[cut.sequence[[member, last]]]
            assert np.array_equal(first[pages], second[pages])


@pytest.mark.parametrize("seed", range(5))
def test_rows_without_a_window_have_the_units_of_a_window_beyond_all_keys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = tables(*[(int(rng.integers(1, 300)), int(rng.integers(1, 7))) for _ in range(6)])
    assert units(rows) == units(rows, 10**6)


def keys_read(rows: SequenceTables, most: int) -> int:
    """Keys that threadgroups of one kv head read."""
    size = partition_size(8)
    cut = Partitions.cut(rows, None, size)
    found = draft_units.draft_units(rows, None, size, most)
    of_units = np.arange(len(cut.end)) if found.shape[1] == 1 else found[:, -1]
    return int((cut.end - cut.begin)[of_units].sum())


def test_a_draft_of_four_reads_its_pages_once_instead_of_five_times() -> None:
    rows = tables((4093, 5))
    together, one_by_one = keys_read(rows, MAX_ROWS), keys_read(rows, 1)
    assert together == 4096 + 1  # the last rows' keys, and the last partition's only one
    assert one_by_one == sum(range(4093, 4098))
    assert one_by_one / together > 4.99


@pytest.mark.parametrize(
    ("group", "head_dim", "rows"),
    [(1, 128, 8), (2, 128, 8), (4, 128, 4), (4, 64, 8), (7, 128, 2), (2, 256, 4), (1, 512, 1)],
)
def test_rows_of_a_unit_fit_in_registers(group: int, head_dim: int, rows: int) -> None:
    assert draft_units.rows_together(group, head_dim) == rows
    for count in range(2, rows + 1):
        split = draft_units.UnitSplit.of(group, head_dim, count)
        assert split.threads <= 256
        assert split.parts * split.heads >= group * count
        assert split.heads <= HeadSplit.of(1024, head_dim).heads


@dataclass(frozen=True)
class Drafts:
    """Rows of drafts over random keys and values, and what attention makes of them."""

    group: int = 2
    head_dim: int = 64
    dtype: mx.Dtype = mx.float16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    is_quantised: bool = False
    kv_heads: int = 1
    sequences: tuple[tuple[int, int], ...] = ((63, 4), (10, 1), (126, 5), (1, 2))

    def check(self, backend: MetalBackend) -> None:
        """Raises AssertionError where a row is another one than alone."""
        rows = tables(*self.sequences)
        pools = self._pools(backend, rows)
        heads = self.kv_heads * self.group
        queries = _draw((len(rows), heads, self.head_dim), 3).astype(self.dtype)
        attention = Attention(self.head_dim**-0.5, self.window, self.softcap)
        sinks = _draw((heads,), 4).astype(self.dtype) if self.has_sinks else None
        together = backend.paged_decode(queries, *pools, rows, attention, sinks)
        assert any(key[0] == "units" and array.shape[1] > 1 for key, array in _uploads(rows))
        for row in range(len(rows)):
            own = queries[row : row + 1]
            expected = backend.paged_decode(own, *pools, alone(rows, row), attention, sinks)
            assert mx.array_equal(together[row : row + 1], expected), row
        assert np.isfinite(read(together.astype(mx.float32))).all()

    def _pools(self, backend: MetalBackend, rows: SequenceTables) -> tuple[mx.array, mx.array]:
        """NaN in every unused slot."""
        num_pages = len(self.sequences) * rows.page_tables.shape[1]
        num_slots = num_pages * PAGE_SIZE
        dtype = mx.int8 if self.is_quantised else self.dtype
        pools = [
            backend.new_pool(num_pages, self.kv_heads, PAGE_SIZE, self.head_dim, dtype)
            for _ in range(2)
        ]
        # Matrices of large groups multiply the values of 16 keys, those before a window by 0.
        is_large = is_large_group(self.group, is_quantised=self.is_quantised)
        used = _used(rows, self.window, GROUPED_KEYS if is_large else 1)
        written = []
        for seed in (1, 2):
            numbers = np.full((num_slots, self.kv_heads, self.head_dim), np.nan, np.float32)
            drawn = _draw((len(used), self.kv_heads, self.head_dim), seed)
            numbers[used] = read(drawn)
            written.append(mx.array(numbers).astype(self.dtype))
        k_pool, v_pool = backend.write_kv(*written, *pools, np.arange(num_slots, dtype=np.int32))
        return k_pool, v_pool


def _uploads(rows: SequenceTables) -> list[tuple[tuple[object, ...], mx.array]]:
    return [(key, arrays[0]) for key, (_, arrays) in rows.uploads.items()]  # type: ignore[misc]


def _used(rows: SequenceTables, window: int | None = None, keys: int = 1) -> IntArray:
    """Slots that any row sees, from the first of so many keys on."""
    found = [
        rows.slots(row, np.arange(max(0, length - (window or length)) // keys * keys, length))
        for row, length in enumerate(rows.context_lens.tolist())
    ]
    return np.unique(np.concatenate(found))


def _draw(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize("group", [2, 8])
def test_rows_of_drafts_are_those_alone(group: int, fast_backend: MetalBackend) -> None:
    Drafts(group=group).check(fast_backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafts",
    [
        Drafts(window=37, softcap=2.0, has_sinks=True),
        Drafts(is_quantised=True, window=21),
        Drafts(group=4, head_dim=128, dtype=mx.bfloat16, kv_heads=2),
        Drafts(group=3, head_dim=80, dtype=mx.float32),
        Drafts(group=1, head_dim=256, sequences=((60, 8),)),
        Drafts(group=2, head_dim=96, window=1),
        Drafts(group=9, window=37, softcap=2.0, has_sinks=True),
        Drafts(group=4, head_dim=96, is_quantised=True, window=21),
        Drafts(group=12, head_dim=128, dtype=mx.bfloat16, kv_heads=2),
        Drafts(group=17, head_dim=80, dtype=mx.float32),
        Drafts(group=40, sequences=((60, 4),)),
    ],
    ids=str,
)
def test_rows_of_drafts_are_those_alone_and_pass_every_check(
    drafts: Drafts, checked_backend: MetalBackend
) -> None:
    drafts.check(checked_backend)


@pytest.mark.slow
@pytest.mark.parametrize("group", [2, 8])
def test_what_a_later_row_wrote_does_not_reach_an_earlier_one(
    group: int, fast_backend: MetalBackend
) -> None:
    check_infinite_values(fast_backend, group)


def check_infinite_values(backend: MetalBackend, group: int = 2) -> None:
    """A wrong draft's values may be infinite, and 0 * infinity is NaN."""
    rows = tables((29, 4))  # rows before the last see a part of its last four keys
    pools = [backend.new_pool(4, 1, PAGE_SIZE, 64, mx.float32) for _ in range(2)]
    slots = _used(rows)
    keys, values = (_draw((len(slots), 1, 64), seed) for seed in (1, 2))
    queries = _draw((4, group, 64), 3)

    def attend(values: mx.array) -> FloatArray:
        backend.write_kv(keys, values, *pools, slots)
        return read(backend.paged_decode(queries, *pools, rows, Attention(0.125)))

    right = attend(values)
    for row in (2, 3):
        written = rows.slots(row, rows.context_lens[row : row + 1] - 1)[0]
        found = attend(mx.where(mx.array(slots == written)[:, None, None], mx.inf, values))
        assert np.array_equal(found[:row], right[:row])
        assert not np.isfinite(found[row]).any()

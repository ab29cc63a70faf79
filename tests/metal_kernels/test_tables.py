from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_kernels.tables import Arrays, RecordedTables, SequenceTables


def tables(
    page_tables: list[list[int]],
    context_lens: list[int],
    query_starts: list[int] | None = None,
    page_size: int = 4,
) -> SequenceTables:
    starts = range(len(context_lens) + 1) if query_starts is None else query_starts
    return SequenceTables(
        np.array(page_tables, np.int32).reshape(len(page_tables), -1),
        np.array(context_lens, np.int32),
        np.array(starts, np.int32),
        page_size,
    )


@st.composite
def sequences(draw: st.DrawFn) -> tuple[SequenceTables, int]:
    """(one sequence's tables, a first position); pages often follow one another."""
    size = draw(st.sampled_from([1, 4, 16]))
    pages: list[int] = []
    for start, count in draw(
        st.lists(st.tuples(st.integers(0, 90), st.integers(1, 5)), min_size=1)
    ):
        pages += range(start, start + count)
    context = draw(st.integers((len(pages) - 1) * size + 1, len(pages) * size))
    padding = draw(st.lists(st.sampled_from([0, 2**31 - 1, -5]), max_size=3))
    first = draw(st.integers(0, context - 1))
    return tables([pages + padding], [context], page_size=size), first


@settings(deadline=None)
@given(sequences())
def test_runs_are_the_slots_of_the_positions_in_order(drawn: tuple[SequenceTables, int]) -> None:
    found, first = drawn
    size, table = found.page_size, found.page_tables[0]
    positions = np.arange(first, int(found.context_lens[0]))
    expected = [int(table[p // size]) * size + p % size for p in positions.tolist()]
    assert found.slots(0, positions).tolist() == expected
    assert [slot for start, end in found.runs(0, first) for slot in range(start, end)] == expected


@settings(deadline=None)
@given(sequences())
def test_runs_are_as_long_as_they_can_be(drawn: tuple[SequenceTables, int]) -> None:
    runs = drawn[0].runs(0, drawn[1])
    assert all(start < end for start, end in runs)
    assert all(end != start for (_, end), (start, _) in pairwise(runs))


@settings(deadline=None)
@given(sequences())
def test_every_break_begins_another_run(drawn: tuple[SequenceTables, int]) -> None:
    assert drawn[0].num_breaks == len(drawn[0].runs(0, 0)) - 1


def test_breaks_of_all_sequences_are_counted() -> None:
    assert tables([[7, 2, 99], [0, 4, 2], [3, 4, 5]], [6, 9, 12]).num_breaks == 3


def test_consecutive_pages_make_one_run() -> None:
    assert tables([[3, 4, 5]], [10]).runs(0, 2) == [(14, 22)]


def test_each_sequence_has_its_own_runs() -> None:
    found = tables([[7, 2, 99], [0, 99, 99]], [6, 3])
    assert found.runs(0, 0) == [(28, 32), (8, 10)]
    assert found.runs(1, 1) == [(1, 3)]


def test_rows_are_counted_and_listed_by_sequence() -> None:
    found = tables([[0], [1], [2]], [3, 4, 2], [0, 3, 4, 6])
    assert (len(found), found.num_rows) == (3, 6)
    assert list(found.queries()) == [(0, 0, 3), (1, 3, 4), (2, 4, 6)]


def test_padding_does_not_count_for_the_highest_page() -> None:
    assert tables([[3, 8, 77], [5, 77, 77]], [8, 4]).highest_page == 8
    assert tables([[3, 8, 77]], [5]).highest_page == 8


def test_tables_that_do_not_fit_together_are_refused() -> None:
    for changes, message in [
        ({"context_lens": [3]}, "do not belong together"),
        ({"query_starts": [0, 1]}, "do not belong together"),
        ({"query_starts": [1, 2, 3]}, "begin at 0"),
        ({"query_starts": [0, 1, 1]}, "every sequence a row"),
        ({"query_starts": [0, 2, 1]}, "every sequence a row"),
        ({"query_starts": [0, 4, 5]}, "its sequence's own rows"),
        ({"context_lens": [3, 9]}, "9 tokens does not fit in 2 pages of 4"),
        ({"page_tables": [[0, 1], [-1, 3]]}, "numbered from 0"),
    ]:
        arguments: dict[str, Any] = {
            "page_tables": [[0, 1], [2, 3]],
            "context_lens": [3, 6],
            "query_starts": [0, 1, 2],
        }
        tables(**arguments)
        with pytest.raises(ValueError, match=message):
            tables(**{**arguments, **changes})


def test_tables_without_a_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="a row"):
        SequenceTables(np.zeros((0, 1), np.int32), np.zeros(0, np.int32), np.zeros(1, np.int32), 16)


def contexts(of: SequenceTables) -> Arrays:
    return (mx.array(of.context_lens),)


def test_an_upload_is_made_once_and_says_what_makes_it_from_other_tables() -> None:
    some = tables([[1, 2], [3, 4]], [5, 6])
    assert some.upload("contexts", contexts) is some.upload("contexts", contexts)
    [(key, (make, arrays))] = some.uploads.items()
    assert key == "contexts"
    assert [array.tolist() for array in arrays] == [[5, 6]]
    assert make(tables([[1, 2]], [7]))[0].tolist() == [7]


def test_recorded_tables_have_uploads_and_no_numbers() -> None:
    recorded = RecordedTables(2, 4, {"contexts": (mx.zeros(2),)})
    assert (len(recorded), recorded.num_rows, recorded.page_size) == (2, 2, 4)
    assert recorded.upload("contexts", contexts)[0].tolist() == [0, 0]
    with pytest.raises(AttributeError, match="context_lens"):
        recorded.upload("another", contexts)


def test_ends_of_rows_must_lie_between_their_own_position_and_the_context() -> None:
    pages, contexts = np.zeros((2, 2), np.int32), np.array([10, 5], np.int32)
    starts = np.array([0, 3, 5], np.int32)

    def build(*ends: int) -> SequenceTables:
        return SequenceTables(pages, contexts, starts, 16, np.array(ends, np.int32))

    plain = build(8, 9, 10, 4, 5)
    assert plain.ends_of(0) is None
    ahead = build(10, 10, 10, 4, 5)
    assert ahead.ends_of(1) is None
    assert ahead.ends_of(0).tolist() == [10, 10, 10]
    for ends in ((7, 9, 10, 4, 5), (8, 9, 11, 4, 5), (8, 9, 10, 4, 6), (8, 9, 10, 3, 5)):
        with pytest.raises(ValueError, match="a row must see its own position"):
            build(*ends)
    with pytest.raises(ValueError, match="5 rows have ends"):
        build(8, 9, 10)

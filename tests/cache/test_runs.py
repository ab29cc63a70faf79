from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.cache.runs import RunSet


def test_consecutive_ids_are_taken() -> None:
    assert RunSet(8).take(5) == [0, 1, 2, 3, 4]


def test_a_run_is_continued_where_it_ended() -> None:
    runs = RunSet(64)
    first, second = runs.take(4), runs.take(4)
    assert runs.take(3, after=first[-1]) == [4, 5, 6]
    assert runs.take(3, after=second[-1]) == [second[-1] + i for i in (1, 2, 3)]


def test_sequences_that_grow_in_turns_keep_their_runs() -> None:
    runs = RunSet(1024)
    tables = [runs.take(4) for _ in range(8)]
    for _ in range(60):
        for table in tables:
            table += runs.take(1, after=table[-1])
    assert all(table == list(range(table[0], table[0] + 64)) for table in tables)


def test_without_one_long_run_several_are_joined() -> None:
    runs = RunSet(7)
    taken = runs.take(7)
    for page in (0, 1, 3, 4, 5):
        runs.add(page)
    assert runs.take(4) == [3, 4, 5, 0]
    assert sorted(taken) == list(range(7))


def test_neighbours_are_joined_in_any_order_of_their_return() -> None:
    runs = RunSet(5)
    for page in runs.take(5)[::2]:
        runs.add(page)
    assert runs.runs() == [(0, 1), (2, 1), (4, 1)]
    runs.add(3)
    runs.add(1)
    assert runs.runs() == [(0, 5)]


def test_higher_ids_join_the_run_below_them() -> None:
    runs = RunSet(3)
    runs.take(1)
    runs.extend(3, 40)
    assert runs.runs() == [(1, 42)]
    runs.check()
    assert runs.take(42) == list(range(1, 43))
    runs.extend(43, 2)
    assert runs.take(2) == [43, 44]
    runs.check()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.data())
def test_runs_agree_with_a_set_after_any_takes_and_adds(size: int, data: st.DataObject) -> None:
    runs, free = RunSet(size), set(range(size))
    for _ in range(30):
        taken = sorted(set(range(size)) - free)
        if taken and data.draw(st.booleans()):
            page = data.draw(st.sampled_from(taken))
            runs.add(page)
            free.add(page)
        else:
            count = data.draw(st.integers(0, len(free)))
            after = data.draw(st.one_of(st.none(), st.integers(0, size)))
            pages = runs.take(count, after)
            if count and after is not None and after not in free and after + 1 in free:
                assert pages[0] == after + 1
            assert len(set(pages)) == count
            assert free.issuperset(pages)
            free.difference_update(pages)
        runs.check()
        assert len(runs) == len(free)

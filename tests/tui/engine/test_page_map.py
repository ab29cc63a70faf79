from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.api.native.page_map import PageMapFeed
from tui.engine.page_map import PageMapReplica, UnreadableMap


def snapshot(pages: str, num_pages: int, **more: Any) -> dict[str, Any]:
    return {
        "page_size": 32,
        "num_pages": num_pages,
        "pages": pages,
        "requests": [],
        "gone": [],
        **more,
    }


def delta(**more: Any) -> dict[str, Any]:
    return {"pages": [], "requests": [], "gone": [], **more}


def begun(pages: str, num_pages: int, **more: Any) -> PageMapReplica:
    page_map = PageMapReplica()
    page_map.apply("snapshot", snapshot(pages, num_pages, **more))
    return page_map


def cells(page_map: PageMapReplica) -> str:
    return page_map.fold(1 << 30, ()).cells


def test_a_snapshot_sets_and_a_delta_changes_page_states() -> None:
    page_map = begun("p2a1f5", 8)
    assert (cells(page_map), page_map.page_size) == ("ppafffff", 32)
    page_map.apply("delta", delta(pages=[[2, "c1s2"], [7, "a1"]]))
    assert cells(page_map) == "ppcssffa"
    assert [page_map.count(state) for state in "fdcasp"] == [2, 0, 1, 1, 2, 2]


def test_pages_of_windows_are_kept_beside_the_others() -> None:
    page_map = begun("p2a1f5", 8, window_pages="a2f4")
    assert (page_map.num_window_pages, page_map.fold_windows(6).cells) == (6, "aaffff")
    page_map.apply("delta", delta(window_pages=[[1, "c1s2"]]))
    assert page_map.fold_windows(3).cells == "asf"
    assert page_map.fold_windows(3).pages_per_cell == 2
    assert [page_map.count_windows(state) for state in "fcas"] == [2, 1, 1, 2]
    assert cells(page_map) == "ppafffff"
    with pytest.raises(UnreadableMap):
        page_map.apply("delta", delta(window_pages=[[5, "c2"]]))
    page_map.apply("snapshot", snapshot("f8", 8))
    assert page_map.num_window_pages == 0


def test_a_pool_of_another_size_starts_over() -> None:
    page_map = begun("a4f4", 8, requests=[{"id": "x", "from": 0, "pages": [[2, 2]]}])
    own = [{"id": "x", "from": 0, "pages": [[0, 2]]}]
    page_map.apply("snapshot", snapshot("a2f1", 3, requests=own))
    assert (page_map.num_pages, cells(page_map)) == (3, "aaf")
    assert list(page_map.pages_of("x")) == [0, 1]
    page_map.apply("snapshot", snapshot("a2f8", 10, requests=own))
    assert page_map.fold(5, page_map.pages_of("x")).cells == "aafff"


def test_a_page_table_grows_and_is_replaced_from_an_index_on() -> None:
    page_map = begun("a4f4", 8, requests=[{"id": "x", "from": 0, "pages": [[2, 2], [0, 1]]}])
    assert list(page_map.pages_of("x")) == [2, 3, 0]
    page_map.apply("delta", delta(requests=[{"id": "x", "from": 2, "pages": [[5, 2]]}]))
    assert list(page_map.pages_of("x")) == [2, 3, 5, 6]
    assert list(page_map.pages_of("y")) == list(page_map.pages_of(None)) == []


def test_a_finished_request_keeps_its_pages_until_they_are_reused() -> None:
    page_map = begun("a4f4", 8, requests=[{"id": "x", "from": 0, "pages": [[0, 4]]}])
    page_map.apply("delta", delta(pages=[[0, "c3f1"]], gone=["x"]))
    assert list(page_map.pages_of("x")) == [0, 1, 2], "a free page is dropped"
    again = {"id": "y", "from": 0, "pages": [[0, 1], [2, 1]]}
    page_map.apply("delta", delta(pages=[[0, "a1c1a1"]], requests=[again]))
    assert list(page_map.pages_of("x")) == [0, 1], (
        "page 2 is at another index now, so its contents have changed"
    )
    page_map.apply("delta", delta(pages=[[1, "f1"]]))
    assert list(page_map.pages_of("x")) == [0]


def test_a_folded_map_shows_the_strongest_state_of_each_cell() -> None:
    page_map = begun("f3c1f2a1f1s1f2p1", 12)
    folded = page_map.fold(3, own=[5, 11])
    assert (folded.cells, folded.pages_per_cell) == ("cap", 4)
    assert folded.own == {1, 2}


def test_of_a_large_pool_the_used_part_is_drawn() -> None:
    page_map = begun("a3c2f1019", 1024)
    folded = page_map.fold(8, own=[4])
    assert (folded.cells, folded.own, folded.num_left_out) == ("aaaccfff", {4}, 1016)
    page_map.apply("delta", delta(pages=[[29, "s1"]]))
    folded = page_map.fold(8, own=[4])
    assert (folded.cells, folded.pages_per_cell, folded.num_left_out) == ("acfffffs", 4, 992)
    page_map.apply("delta", delta(pages=[[29, "f1"]]))
    assert page_map.fold(8, own=[]).num_left_out == 992, "it keeps its scale"


def test_an_empty_map_has_no_cells() -> None:
    assert PageMapReplica().fold(100, ()).cells == ""


def test_a_malformed_event_is_an_error() -> None:
    for kind, data in [
        ("snapshot", snapshot("p2", 3)),
        ("snapshot", snapshot("x3", 3)),
        ("snapshot", snapshot("p999999999", 999999999)),
        ("snapshot", {"pages": "f1"}),
        ("delta", delta(pages=[[7, "a9"]])),
        ("delta", delta(pages=[[-1, "a1"]])),
        ("delta", delta(requests=[{"id": "x", "from": 0, "pages": [[6, 9]]}])),
        ("delta", delta(pages=7)),
    ]:
        with pytest.raises(UnreadableMap, match="Cannot read the server's page map"):
            begun("f8", 8).apply(kind, data)


def test_events_of_another_kind_are_ignored() -> None:
    page_map = begun("f8", 8)
    page_map.apply("message", {})
    assert cells(page_map) == "ffffffff"


states = st.lists(st.integers(0, 5), min_size=12, max_size=12)
tables = st.dictionaries(
    st.sampled_from("xyz"), st.lists(st.integers(0, 11), unique=True, max_size=6).map(tuple)
)


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(st.lists(st.tuples(states, tables, states), min_size=1, max_size=6))
def test_the_replica_equals_the_server_s_map(
    moments: list[tuple[list[int], dict[str, tuple[int, ...]], list[int]]],
) -> None:
    import json

    theirs, ours = PageMapFeed(lambda _: True), PageMapReplica()
    for pages, holders, windows in moments:
        moment = SimpleNamespace(
            page_size=32,
            pages=bytes(pages),
            window_pages=bytes(windows),
            requests=[SimpleNamespace(id=n, page_table=t) for n, t in holders.items()],
        )
        event = theirs.next_event(moment)  # type: ignore[arg-type]
        if event is not None:
            kind, data = event.decode().strip().split("\n")
            ours.apply(kind.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        assert cells(ours) == "".join("fascpd"[state] for state in pages)
        assert ours.fold_windows(12).cells == "".join("fascpd"[state] for state in windows)
        for name, table in holders.items():
            if table:
                assert list(ours.pages_of(name)) == list(table)

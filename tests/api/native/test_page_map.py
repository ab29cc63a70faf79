"""A reader that applies the map's events as documented has the engine's state."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.api.native.page_map import LETTERS, MAX_RUNS, PageMapFeed
from mlxserve.core.stats import MemoryUse, Stats
from mlxserve.engine.snapshot import Phase, RequestView, Snapshot

NUM_PAGES = 12


def holder(name: str, table: tuple[int, ...], client: str = "") -> RequestView:
    return RequestView(
        id=name,
        client=client,
        phase=Phase.DECODING,
        position=None,
        num_prompt=1,
        num_cached=0,
        num_computed=1,
        num_to_compute=1,
        num_outputs=1,
        num_preemptions=0,
        priority=0,
        age=1.0,
        page_table=table,
    )


def snapshot(pages: bytes, *requests: RequestView, windows: bytes = b"") -> Snapshot:
    return Snapshot(
        stats=Stats(),
        memory=MemoryUse(0, 0, 0, 0, "float32"),
        page_size=16,
        pages=pages,
        window_pages=windows,
        requests=requests,
        prefill_rate=0,
        generation_rate=0,
    )


class Reader:
    """The state of a client that applies the events."""

    def __init__(self) -> None:
        self.pages = self.windows = ""
        self.tables: dict[str, list[int]] = {}
        self.seq = 0

    def read(self, frame: bytes) -> None:
        first, second, *_ = frame.decode().split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert data["seq"] == self.seq
        self.seq += 1
        if first == "event: snapshot":
            self.pages = decoded(data["pages"])
            assert len(self.pages) == data["num_pages"]
            self.windows = decoded(data.get("window_pages", ""))
            self.tables = {}
        else:
            assert first == "event: delta"
            self.pages = changed(self.pages, data["pages"])
            self.windows = changed(self.windows, data.get("window_pages", []))
        for gone in data["gone"]:
            del self.tables[gone]
        for one in data["requests"]:
            known = self.tables.get(one["id"], [])[: one["from"]]
            assert len(known) == one["from"]
            runs = [page for start, n in one["pages"] for page in range(start, start + n)]
            self.tables[one["id"]] = known + runs


def changed(pages: str, changes: list[tuple[int, str]]) -> str:
    for start, runs in changes:
        text = decoded(runs)
        pages = pages[:start] + text + pages[start + len(text) :]
    return pages


def decoded(runs: str) -> str:
    return "".join(letter * int(count) for letter, count in re.findall(r"([a-z])(\d+)", runs))


def lettered(pages: bytes) -> str:
    return "".join(LETTERS[state] for state in pages)


tables = st.lists(st.integers(0, NUM_PAGES - 1), unique=True).map(tuple)
snapshots = st.builds(
    lambda pages, held, windows: snapshot(
        bytes(pages), *(holder(n, t) for n, t in held.items()), windows=bytes(windows)
    ),
    st.lists(st.integers(0, 4), min_size=NUM_PAGES, max_size=NUM_PAGES),
    st.dictionaries(st.sampled_from("abcd"), tables),
    st.lists(st.integers(0, 5), min_size=5, max_size=5),
)


@settings(derandomize=True, database=None, max_examples=60, deadline=None)
@given(st.lists(snapshots, min_size=1, max_size=6))
def test_a_reader_of_the_events_has_the_state_of_the_engine(seen: Any) -> None:
    page_map, reader = PageMapFeed(lambda _: True), Reader()
    for one in seen:
        event = page_map.next_event(one)
        if event is not None:
            reader.read(event)
        assert reader.pages == lettered(one.pages)
        assert reader.windows == lettered(one.window_pages)
        assert reader.tables == {r.id: [*r.page_table] for r in one.requests if r.page_table}


def test_nothing_is_sent_when_nothing_changes() -> None:
    page_map = PageMapFeed(lambda _: True)
    same = snapshot(bytes(8), holder("a", (1, 2)))
    assert page_map.next_event(same)
    assert page_map.next_event(same) is None


def test_the_events_have_the_documented_format() -> None:
    page_map = PageMapFeed(lambda _: True)
    first = snapshot(bytes([4, 4, 1, 1, 1, 0, 0, 0]), holder("8f", (2, 3, 4)), holder("77", (2,)))
    frame = page_map.next_event(first)
    assert frame == (
        b"event: snapshot\n"
        b'data: {"seq":0,"page_size":16,"num_pages":8,"pages":"p2a3f3",'
        b'"requests":[{"id":"8f","from":0,"pages":[[2,3]]},{"id":"77","from":0,"pages":[[2,1]]}],'
        b'"gone":[]}\n\n'
    )
    second = snapshot(bytes([4, 4, 1, 1, 1, 1, 0, 0]), holder("8f", (2, 3, 4, 5)))
    assert page_map.next_event(second) == (
        b"event: delta\n"
        b'data: {"seq":1,"pages":[[5,"a1"]],'
        b'"requests":[{"id":"8f","from":3,"pages":[[5,1]]}],"gone":["77"]}\n\n'
    )


def test_requests_of_other_keys_are_hidden_but_their_pages_are_not() -> None:
    page_map = PageMapFeed(lambda one: one.client == "me")
    reader = Reader()
    pages = bytes([1, 1, 0, 0])
    reader.read(page_map.next_event(snapshot(pages, holder("a", (0,), "me"), holder("b", (1,)))))
    assert reader.tables == {"a": [0]}
    assert reader.pages == "aaff"


def test_changes_that_do_not_fit_into_an_event_come_with_the_next() -> None:
    scattered = tuple(range(0, 4 * MAX_RUNS, 2))
    page_map, reader = PageMapFeed(lambda _: True), Reader()
    seen = snapshot(bytes(4 * MAX_RUNS), holder("a", scattered), holder("b", scattered[::-1]))
    sizes = []
    while (event := page_map.next_event(seen)) is not None:
        reader.read(event)
        sizes.append(len(event))
    assert len(sizes) == 4
    assert max(sizes) < 20 * MAX_RUNS
    assert reader.tables == {"a": [*scattered], "b": [*scattered[::-1]]}


def test_a_resize_starts_the_map_over() -> None:
    page_map, reader = PageMapFeed(lambda _: True), Reader()
    for pages, tables in (
        (bytes([1, 1, 1, 0, 0, 0]), {"a": (0, 1), "b": (2,)}),
        (bytes([1, 1, 0]), {"a": (0, 1)}),
        (bytes([0, 1, 1]), {"a": (2, 1)}),
        (bytes([0, 1, 1, 0, 0]), {"a": (2, 1)}),
    ):
        event = page_map.next_event(snapshot(pages, *(holder(n, t) for n, t in tables.items())))
        assert event is not None
        reader.read(event)
        assert reader.pages == "".join(LETTERS[state] for state in pages)
        assert reader.tables == {name: list(table) for name, table in tables.items()}

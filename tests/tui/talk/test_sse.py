import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tui.talk.sse import MAX_EVENT_SIZE, EventReader, EventTooLarge, ServerEvent

LINES = st.sampled_from(
    ["data: a", "data:b", "data", "data: ", ": comment", "event: ping", "id: 7", "junk", "", "dätä"]
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from(["\n", "\r", "\r\n"]))).map(
    lambda lines: "".join(line + end for line, end in lines).encode()
)


def read(stream: bytes, *cuts: int) -> list[ServerEvent]:
    reader = EventReader()
    edges = [0, *sorted(cuts), len(stream)]
    parts = [stream[a:b] for a, b in itertools.pairwise(edges)]
    return [event for part in parts for event in reader.feed(part)]


def test_an_event_ends_at_an_empty_line() -> None:
    assert read(b"data: one\n\ndata: two\n") == [ServerEvent("one")]


def test_lines_of_data_are_joined() -> None:
    assert read(b"data: a\ndata:  b\n\n") == [ServerEvent("a\n b")]


def test_every_kind_of_line_end_works() -> None:
    assert read(b"data: a\r\n\r\ndata: b\r\rdata: c\n\n") == [*map(ServerEvent, "abc")]


def test_comments_and_unknown_fields_are_ignored() -> None:
    assert read(b": keep-alive\n\nid: 3\nretry: 1\n\n") == []


def test_a_name_without_data_is_not_an_event() -> None:
    assert read(b"event: ping\n\ndata: a\n\n") == [ServerEvent("a")]


def test_a_name_goes_with_its_data() -> None:
    assert read(b"event: error\ndata: a\n\n") == [ServerEvent("a", "error")]


def test_a_byte_order_mark_is_not_part_of_the_first_field() -> None:
    assert read(b"\xef\xbb\xbfdata: a\n\n") == [ServerEvent("a")]


def test_bytes_that_are_not_text_are_replaced() -> None:
    assert read(b"data: a\xffb\n\n") == [ServerEvent("a\ufffdb")]


def test_a_character_cut_in_two_is_whole_again() -> None:
    assert read("data: é\n\n".encode(), 7) == [ServerEvent("é")]


@settings(deadline=None)
@given(stream=STREAMS, data=st.data())
def test_chunk_boundaries_make_no_difference(stream: bytes, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(stream))))
    assert read(stream, *cuts) == read(stream)


@settings(deadline=None)
@given(stream=st.binary(), cut=st.integers(0, 50))
def test_any_bytes_are_read_without_an_exception(stream: bytes, cut: int) -> None:
    assert read(stream, min(cut, len(stream))) == read(stream)


def test_an_event_without_end_is_refused() -> None:
    reader = EventReader()
    reader.feed(b"data: " + b"x" * (MAX_EVENT_SIZE - 10) + b"\n")
    with pytest.raises(EventTooLarge, match=str(MAX_EVENT_SIZE)):
        reader.feed(b"data: more and more")

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


READ = {
    "an event ends at an empty line": (b"data: one\n\ndata: two\n", ["one"]),
    "lines of data are joined": (b"data: a\ndata:  b\n\n", ["a\n b"]),
    "every kind of line end": (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", ["a", "b", "c"]),
    "comments and unknown fields": (b": keep-alive\n\nid: 3\nretry: 1\n\n", []),
    "a name without data is not an event": (b"event: ping\n\ndata: a\n\n", ["a"]),
    "a byte order mark": (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
    "bytes that are not text are replaced": (b"data: a\xffb\n\n", ["a\ufffdb"]),
}


def test_a_stream_is_read_as_events() -> None:
    for what, (stream, events) in READ.items():
        assert read(stream) == [ServerEvent(data) for data in events], what


def test_a_name_goes_with_its_data() -> None:
    assert read(b"event: error\ndata: a\n\n") == [ServerEvent("a", "error")]


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

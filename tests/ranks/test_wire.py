"""A plan on the wire: what a worker decodes is what rank 0 planned, and nothing else is accepted."""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.images.picture import Picture, Placed, PlacedPicture
from mlxserve.model.batch import Batch
from mlxserve.model.runner import draft_rows
from mlxserve.ranks.wire import (
    Channel,
    FrameKind,
    PlanDecoder,
    PlanEncoder,
    ProtocolError,
    as_int32,
    from_int32,
)
from mlxserve.request import GUESS, Chunk, LiveRequest, Request, StatePlan, as_page_table

PAGE_SIZE = 16
_Planned: TypeAlias = tuple[int, int, bool, bool, bool, bool]


def _pictures(number: int) -> Placed:
    """Two images, the second one of rows that have positions of their own."""
    inputs = {"pixels": np.full(3, number, np.float32)}
    one = Picture.from_prompt([5, *[7] * 9, 5], 7, inputs, None)
    other = Picture.from_prompt([7] * 12, 7, inputs, (1, 3, 4))
    return PlacedPicture(10, one), PlacedPicture(60, other)


class Conversation:
    """A request of a growing text, as the scheduler would move it on."""

    def __init__(self, number: int) -> None:
        ids = [(number * 31 + i) % 997 for i in range(400)]
        pictures = _pictures(number) if number % 2 else ()
        for placed in pictures:
            ids[placed.start : placed.end] = placed.picture.ids
        request = Request(
            str(number),
            ids,
            SamplingParams(),
            adapter=(None, 0, 300)[number % 3],
            pictures=pictures,
        )
        self.live = LiveRequest(request, arrival=number)
        self.pages = self.windows = as_page_table()
        self.done = 0

    def chunk(
        self,
        length: int,
        first_page: int,
        *,
        samples: bool,
        state: bool,
        has_windows: bool,
        draft: tuple[int, ...],
    ) -> Chunk:
        need = -(-(self.done + length) // PAGE_SIZE)
        if need > len(self.pages):
            new = range(first_page, first_page + need - len(self.pages))
            self.pages = self.pages + as_page_table(new)
            self.windows = self.windows + as_page_table(page + 7 for page in new)
        plan = StatePlan(self.done or None, ((self.done + length, first_page),)) if state else None
        windows = self.windows if has_windows else None
        chunk = Chunk(
            self.live,
            self.done,
            length,
            self.pages,
            samples,
            state=plan,
            draft=draft,
            window_table=windows,
        )
        self.done += length
        return chunk


def steps() -> st.SearchStrategy[list[list[_Planned]]]:
    """(request, length, samples, has a state plan, begins again with other pages, is a draft) of each chunk."""
    chunk = st.tuples(st.integers(1, 6), st.integers(1, 40), *[st.booleans()] * 4)
    step = st.lists(chunk, min_size=1, max_size=6, unique_by=lambda one: one[0])
    return st.lists(step, min_size=1, max_size=8)


@given(steps(), st.booleans())
def test_any_sequence_of_plans_decodes_to_equal_batches(
    plans: list[list[_Planned]],
    has_windows: bool,
) -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder(has_states=True)
    requests: dict[int, Conversation] = {}
    page = 0
    for plan in plans:
        chunks = []
        for number, length, samples, state, again, is_drafted in plan:
            if number not in requests or again or requests[number].done + length > 400:
                requests[number] = Conversation(number)
            chunks.append(
                requests[number].chunk(
                    length,
                    page,
                    samples=samples or is_drafted,
                    state=state,
                    has_windows=has_windows,
                    # Of earlier text, or to be guessed.
                    draft=tuple(range(1, length) if state else [GUESS] * (length - 1))
                    if is_drafted
                    else (),
                )
            )
            page += 8
        chunks.sort(key=lambda chunk: chunk.length > 1)
        told, sources = decoder.decode(encoder.encode(chunks, {}))
        assert sources == {}
        assert [chunk.draft for chunk in told] == [chunk.draft for chunk in chunks]
        assert draft_rows(told) == draft_rows(chunks)
        adapters = [chunk.request.asked.adapter for chunk in told]
        assert adapters == [chunk.request.asked.adapter for chunk in chunks]
        blocks = [chunk.request.asked.blocks for chunk in told]
        assert blocks == [chunk.request.asked.blocks for chunk in chunks]
        assert [chunk.state for chunk in told] == [chunk.state for chunk in chunks]
        assert_equal(Batch.from_chunks(told, PAGE_SIZE), Batch.from_chunks(chunks, PAGE_SIZE))


def assert_equal(found: Batch, wanted: Batch) -> None:
    assert (found.windows is None) == (wanted.windows is None)
    if found.windows is not None and wanted.windows is not None:
        assert_equal(found.windows, wanted.windows)
    for name in ("tokens", "positions", "slots", "sample_rows", "lazy_rows"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    assert (found.pictures is None) == (wanted.pictures is None)
    if found.pictures is not None and wanted.pictures is not None:
        rows = [(part.first, part.end) for part in found.pictures.parts]
        assert rows == [(part.first, part.end) for part in wanted.pictures.parts]
        positions, expected_positions = found.pictures.positions, wanted.pictures.positions
        assert (positions is None) == (expected_positions is None)
        assert positions is None or np.array_equal(positions, expected_positions)
    assert found.num_decodes == wanted.num_decodes
    for name in ("decodes", "chunks"):
        tables, expected = getattr(found, name), getattr(wanted, name)
        assert (tables is None) == (expected is None)
        if tables is not None:
            assert np.array_equal(tables.page_tables, expected.page_tables)
            assert np.array_equal(tables.context_lens, expected.context_lens)
            assert np.array_equal(tables.query_starts, expected.query_starts)


def live(number: int, length: int = 64) -> LiveRequest:
    return LiveRequest(Request(str(number), list(range(length)), SamplingParams()), arrival=number)


def test_a_lazy_token_comes_from_a_row_of_the_step_before() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder(has_states=False)
    request, table = live(1), as_page_table([4, 2, 7, 9, 1])
    first = Chunk(request, 60, 4, table, samples=True)
    decoder.decode(encoder.encode([first], {}))
    lazy = Chunk(request, 64, 1, table, samples=True, is_lazy=True)
    [told], sources = decoder.decode(encoder.encode([lazy], {lazy: 3}))
    assert sources == {told: 3}
    assert (told.is_lazy, told.start, told.page_table) == (True, 64, table)


def test_a_table_that_has_not_changed_is_not_sent_again() -> None:
    encoder = PlanEncoder()
    request, table = live(1), as_page_table(range(2_000))
    whole = encoder.encode([Chunk(request, 60, 1, table, samples=True)], {})
    again = encoder.encode([Chunk(request, 61, 1, table, samples=True)], {})
    assert len(whole) > 8_000
    assert len(again) < 80


def test_a_request_that_ended_is_forgotten_and_one_that_pauses_is_not() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder(has_states=True)
    table = as_page_table([0])
    [first], _ = decoder.decode(encoder.encode([Chunk(live(1), 0, 4, table, samples=False)], {}))
    decoder.decode(encoder.encode([Chunk(live(2), 0, 4, table, samples=False)], {}))
    [again], _ = decoder.decode(encoder.encode([Chunk(live(1), 4, 4, table, samples=False)], {}))
    assert again.request is first.request
    decoder.forget([1])
    [new], _ = decoder.decode(encoder.encode([Chunk(live(1), 0, 4, table, samples=False)], {}))
    assert new.request is not first.request


def plan_of(numbers: Sequence[int]) -> bytes:
    return as_int32(numbers)


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ([], "not enough values"),
        (
            [1, 1, 0, 0, 0, 0, 0, *(0, 1, 2, -1, 5, 0, 0, 0, 0, 0)],
            "other lengths",
        ),  # no step was told
        ([1, 0, 0, 0, 0, 0, 0, *(0, 1, 2, -1, 5, 3, 0, 0, 0, 0)], "5"),  # no page of it is known
        ([1, 0, 0, 0, 0, 0, 0, *(0, 1, 8, -1, 5, 0, 0, 3, 0, 0)], "5"),  # the same, of windows
        ([9, 0, 0, 0, 0, 0, 0, *(0, 1, 2, -1, 5, 0, 0, 0, 0, 0)], "other lengths"),
        ([1, 0, 0, 0, 1, 0, 0, *(0, 1, 0, -1, 5, 0, 0, 0, 0, 0)], "other lengths"),
        ([1, 0, 0, 0, 1, 0, 0, *(0, 1, 0, -1, 5, 0, 0, 0, 0, 1), 7], "a draft without a known"),
        ([1, 0, 0, 0, 1, 0, 0, *(0, 1, 0, -1, 5, 0, 0, 0, 0, -1), 7], "a draft without a known"),
        ([1, 0, 0, 0, 1, 0, 1, *(0, 1, 16, -1, 5, 0, 0, 0, 0, 0), 7, 1], "not enough values"),
        (
            [1, 0, 0, 0, 1, 0, 8, *(0, 1, 16, -1, 5, 0, 0, 0, 0, 0), 7, 1, 3, 5, 0, 0, 0, 0, 9],
            "a picture without its ids",
        ),
        ([-1, 0, 0, 0, 0, 0, 0], "other lengths"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(numbers: Sequence[int], why: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        PlanDecoder(has_states=False).decode(plan_of(numbers))
    assert why in str(refused.value.__cause__)


def test_a_plan_of_other_than_whole_numbers_is_refused() -> None:
    with pytest.raises(ProtocolError):
        PlanDecoder(has_states=False).decode(b"\x01\x00\x00")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel, socket.socket]]:
    """Two channels of one connection, and the second one's socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    first, second = Channel(one), Channel(other)
    yield first, second, other
    first.close()
    second.close()


def test_frames_arrive_whole_and_in_order(
    ends: tuple[Channel, Channel, socket.socket],
) -> None:
    first, second, _ = ends
    first.send(FrameKind.GO)
    first.send(FrameKind.COPY, as_int32([1, -2, 2**31 - 1]))
    go, copy = second.receive(), second.receive()
    assert (go.kind, go.number, go.body) == (FrameKind.GO, 1, b"")
    assert (copy.kind, copy.number) == (FrameKind.COPY, 2)
    assert from_int32(copy.body) == array("i", [1, -2, 2**31 - 1])


@pytest.mark.parametrize(
    "head", [struct.pack("<IBxxxI", 1 << 31, 4, 1), struct.pack("<IBxxxI", 0, 99, 1)]
)
def test_a_forged_head_is_refused(
    head: bytes, ends: tuple[Channel, Channel, socket.socket]
) -> None:
    first, _, raw = ends
    raw.sendall(head)
    with pytest.raises(ProtocolError):
        first.receive()


def test_the_end_of_a_connection_is_an_error(
    ends: tuple[Channel, Channel, socket.socket],
) -> None:
    first, second, _ = ends
    second.close()
    with pytest.raises(ConnectionError):
        first.receive()

"""The rows of several requests' pictures in one step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.images.picture import Picture, pictures_of
from mlxserve.model.batch import Batch
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from tests.images.test_picture import picture, place

PAGE_SIZE = 16


def chunk(prompt: Sequence[int], start: int, end: int, first_page: int = 0) -> Chunk:
    request = LiveRequest(Request("a", prompt, SamplingParams(), pictures=pictures_of(prompt)))
    table = as_page_table(range(first_page, first_page + 8))
    return Chunk(request, start, end - start, table, samples=end == len(prompt))


def test_rows_of_all_chunks_are_numbered_in_their_order() -> None:
    one, other = picture(2, 3), picture(1, 4, seed=1)
    first, second = place(3, one, 2), place(1, other, 4)
    batch = Batch.from_chunks(
        [chunk([5, 6], 1, 2), chunk(first, 5, 11), chunk(second, 0, 5, 8)], PAGE_SIZE
    )
    assert batch.pictures is not None
    assert [(part.picture, part.first, part.end) for part in batch.pictures.parts] == [
        (one, 2, 6),
        (other, 0, 4),
    ]
    assert batch.pictures.num_rows == 8
    assert batch.tokens.tolist() == [6, -1, -2, -3, -4, 1, 2, 1, -5, -6, -7, -8]
    assert batch.pictures.positions is not None
    assert batch.pictures.positions.T.tolist() == [
        [1, 1, 1],
        *([3, 3, 5], [3, 4, 3], [3, 4, 4], [3, 4, 5], [6, 6, 6], [7, 7, 7]),
        *([0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 1, 4]),
    ]
    assert batch.positions.tolist() == [1, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4]


def test_an_answer_after_an_image_has_positions_and_no_rows() -> None:
    prompt = place(1, picture(2, 3), 2)
    batch = Batch.from_chunks([chunk(prompt, 8, 9)], PAGE_SIZE)
    assert batch.pictures is not None
    assert batch.pictures.parts == ()
    assert batch.pictures.positions is not None
    assert batch.pictures.positions.tolist() == [[5], [5], [5]]


def test_a_step_without_pictures_has_nothing_of_them() -> None:
    assert Batch.from_chunks([chunk([5, 6, 7], 0, 3)], PAGE_SIZE).pictures is None


def two_way(num_rows: int) -> Picture:
    return Picture.from_prompt([7, *([900] * num_rows), 7], 900, {}, None, is_bidirectional=True)


def test_rows_of_an_image_see_up_to_its_end() -> None:
    """Beside decodes and text; images beside each other are apart."""
    prompt = place(2, two_way(3), two_way(2), 2)
    text = chunk([5] * 9, 2, 5, 8)
    batch = Batch.from_chunks([chunk([5, 6], 1, 2), text, chunk(prompt, 1, 12)], PAGE_SIZE)
    assert batch.ahead is not None
    assert batch.ahead.ends is not None
    assert batch.ahead.ends.tolist() == [3, 4, 5, 2, 3, 6, 6, 6, 7, 8, 10, 10, 11, 12]
    assert batch.chunks is not None
    assert batch.chunks.ends is None
    assert batch.ahead.context_lens.tolist() == batch.chunks.context_lens.tolist()


def test_a_step_without_such_rows_has_no_ends() -> None:
    prompt = place(2, two_way(3), 9)
    for chunks in (
        [chunk(prompt, 7, 12)],
        [chunk(prompt, 9, 10)],
        [chunk(place(1, picture(2, 3)), 0, 7)],
    ):
        assert Batch.from_chunks(chunks, PAGE_SIZE).ahead is None


def test_a_chunk_that_ends_inside_such_an_image_is_an_error() -> None:
    with pytest.raises(AssertionError, match="ends inside an image"):
        Batch.from_chunks([chunk(place(2, two_way(3), 9), 0, 5)], PAGE_SIZE)


def test_a_drafter_may_end_inside_an_image_and_only_looks_back() -> None:
    cut = [chunk(place(2, two_way(3), 9), 0, 5)]
    assert Batch.from_chunks(cut, PAGE_SIZE, is_of_drafter=True).ahead is None

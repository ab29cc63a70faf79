"""A rank without an image encoder knows of a request's images what their rows need."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from mlxserve.images.picture import Picture, Placed, PlacedPicture, blocks_of
from mlxserve.model.told_pictures import NO_PICTURES, numbers_of, pictures_in

_IMAGE = 7


def _picture(token_ids: list[int], *, is_bidirectional: bool = False) -> Picture:
    inputs = {"pixel_values": np.ones((2, 3), np.float32)}
    grid = None if is_bidirectional else (1, 2, 3)
    return Picture.from_prompt(token_ids, _IMAGE, inputs, grid, is_bidirectional=is_bidirectional)


PICTURES: Placed = (
    PlacedPicture(3, _picture([_IMAGE] * 6)),
    PlacedPicture(20, _picture([5, _IMAGE, _IMAGE, 6, _IMAGE, 5], is_bidirectional=True)),
)


def test_rows_positions_and_blocks_are_those_of_rank_0() -> None:
    numbers = array("i", [1, 2, *numbers_of(PICTURES), 99])
    told, end = pictures_in(numbers, 2)
    assert numbers[end] == 99
    assert told.blocks == blocks_of(PICTURES) == ((21, 23), (24, 25))
    for found, wanted in zip(told.pictures, PICTURES, strict=True):
        assert (found.start, found.end) == (wanted.start, wanted.end)
        assert found.picture.ids == wanted.picture.ids
        assert found.picture.grid == wanted.picture.grid
        assert found.picture.shift == wanted.picture.shift
        assert (found.picture.rows_before == wanted.picture.rows_before).all()


def test_no_picture_is_none() -> None:
    assert pictures_in(array("i", numbers_of(())), 0) == (NO_PICTURES, 1)


@pytest.mark.parametrize("cut", range(1, len([*numbers_of(PICTURES)])))
def test_numbers_that_end_early_are_refused(cut: int) -> None:
    with pytest.raises((ValueError, IndexError)):
        pictures_in(array("i", [*numbers_of(PICTURES)][:cut]), 0)


def test_a_picture_without_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="without its ids"):
        pictures_in(array("i", [1, 3, 0, 0, 0, 0, 0]), 0)

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.cache.hashing import extend_hashes
from mlxserve.images.picture import (
    MIN_ROWS,
    Picture,
    PicturePrompt,
    Placed,
    PlacedPicture,
    begin_of_block,
    blocks_of,
    end_of_block,
    marks_of,
    num_distinct,
    positions_of,
    with_pictures,
)

ROW = 900  # the token of a row


def picture(height: int, width: int, *, seed: int = 0, has_grid: bool = True) -> Picture:
    pixels = np.full((1, 4), seed, np.float32)
    ids = [ROW] * (height * width)
    return Picture.from_prompt(
        ids, ROW, {"pixel_values": pixels}, (1, height, width) if has_grid else None
    )


def place(*parts: int | Picture) -> PicturePrompt:
    """Numbers are so many tokens of text."""
    ids: list[int] = []
    placed: list[PlacedPicture] = []
    for part in parts:
        if isinstance(part, int):
            ids += range(1, part + 1)
        else:
            placed.append(PlacedPicture(len(ids), part))
            ids += part.ids
    return PicturePrompt(ids, placed)


def hashes(prompt: PicturePrompt, pictures: Placed | None = None) -> list[bytes]:
    found: list[bytes] = []
    marks = marks_of(prompt.pictures if pictures is None else pictures)
    extend_hashes(found, prompt, 4, b"", marks)
    return found


def test_rows_have_ids_that_follow_from_what_the_tower_is_given() -> None:
    one, same, other = picture(4, 5), picture(4, 5), picture(4, 5, seed=1)
    assert one.key == same.key
    assert one.ids == same.ids
    assert all(token < 0 for token in one.ids)
    assert len(set(one.ids)) == 20
    assert set(one.ids).isdisjoint(other.ids)
    assert one.num_rows == 20


def test_a_picture_of_another_key_has_another_hash() -> None:
    """So the features that were computed of it, and its pages, are found by its own key alone."""
    ids, inputs = [ROW] * 8, {"pixel_values": np.ones((1, 4), np.float32)}
    owners = ("", "good", "evil", "good\0")
    pictures = [Picture.from_prompt(ids, ROW, inputs, None, owner) for owner in owners]
    assert len({each.key for each in pictures}) == len(owners)
    assert [each.owner for each in pictures] == list(owners)
    again = Picture.from_prompt(ids, ROW, inputs, None, "good")
    assert (again.key, again.ids) == (pictures[1].key, pictures[1].ids)


def test_text_within_a_picture_stays_text() -> None:
    made = Picture.from_prompt([7, ROW, ROW, 8, ROW, 9], ROW, {}, None)
    assert [token if token > 0 else None for token in made.ids] == [7, None, None, 8, None, 9]
    assert made.num_rows == 3
    assert made.rows_before.tolist() == [0, 0, 1, 2, 2, 3, 3]


def test_pages_of_different_images_never_have_the_same_hash() -> None:
    one, other = place(3, picture(2, 3), 6), place(3, picture(2, 3, seed=1), 6)
    assert not set(hashes(one)) & set(hashes(other))
    # Also where ids are the same by chance: the hash has the whole key.
    assert not set(hashes(one)) & set(hashes(one, other.pictures))


def test_a_page_before_an_image_is_shared() -> None:
    one, other = hashes(place(4, picture(2, 3))), hashes(place(4, picture(2, 3, seed=1)))
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_few_rows_of_an_image_do_not_show_that_it_is_the_same() -> None:
    placed = place(6, picture(2, 3), 5).pictures
    assert num_distinct(placed, 4, 2) == 2
    assert num_distinct(placed, 4, 2 + MIN_ROWS - 1) == 2
    assert num_distinct(placed, 4, 2 + MIN_ROWS) == 2 + MIN_ROWS
    assert num_distinct(placed, 8, 3) == 3  # its first rows are in a page that was found
    assert num_distinct((), 4, 3) == 3


def test_placeholders_are_replaced_in_order() -> None:
    one, other = picture(1, 2), picture(2, 2)
    prompt = with_pictures([1, ROW, 2, ROW, 3], ROW, [one, other])
    assert prompt == [1, *one.ids, 2, *other.ids, 3]
    assert [placed.start for placed in prompt.pictures] == [1, 4]
    assert with_pictures([1, ROW], ROW, [one, other]) is None
    assert with_pictures([ROW, ROW], ROW, [one]) is None
    after = prompt.after([8, 9])
    assert [placed.start for placed in after.pictures] == [3, 6]


sides = st.tuples(st.integers(1, 4), st.integers(1, 5), st.booleans())
parts = st.lists(st.one_of(st.integers(1, 6), sides), min_size=1, max_size=6)


@given(parts, st.data())
def test_positions_are_those_of_the_whole_prompt_in_any_cut(
    parts: list[int | tuple[int, int, bool]], data: st.DataObject
) -> None:
    prompt = place(
        *(p if isinstance(p, int) else picture(p[0], p[1], has_grid=p[2]) for p in parts)
    )
    expected: list[tuple[int, int, int]] = []
    at = 0
    for part in parts:
        if isinstance(part, int) or not part[2]:
            count = part if isinstance(part, int) else part[0] * part[1]
            expected += [(at + i,) * 3 for i in range(count)]
            at += count
        else:
            height, width, _ = part
            expected += [(at, at + y, at + x) for y in range(height) for x in range(width)]
            at += max(height, width)
    after = 3  # an answer goes on
    expected += [(at + i,) * 3 for i in range(after)]
    end = len(prompt) + after
    cuts = sorted({0, end, *data.draw(st.lists(st.integers(0, end), max_size=4))})
    found = [positions_of(prompt.pictures, start, stop) for start, stop in pairwise(cuts)]
    assert np.concatenate(found, axis=1).T.tolist() == [list(each) for each in expected]


@pytest.mark.parametrize("count", [1, 100])
def test_ids_fit_an_int32(count: int) -> None:
    assert all(-(1 << 31) <= token < 0 for token in picture(1, count).ids)


def test_rows_that_attend_to_one_another_are_blocks_between_the_text_of_a_picture() -> None:
    ids = [7, ROW, ROW, 8, ROW, ROW, ROW]
    one_way = Picture.from_prompt(ids, ROW, {}, None)
    two_way = Picture.from_prompt(ids, ROW, {}, None, is_bidirectional=True)
    assert one_way.blocks == ()
    assert two_way.blocks == ((1, 3), (4, 7))
    assert blocks_of(place(5, two_way, 2, one_way, two_way).pictures) == (
        *((6, 8), (9, 12)),
        *((22, 24), (25, 28)),
    )


def test_pages_that_were_computed_in_one_direction_are_not_those_of_both() -> None:
    """Earlier versions have left such pages of the same images on disk."""
    made = [
        Picture.from_prompt([ROW] * 8, ROW, {}, None, is_bidirectional=both)
        for both in (False, True)
    ]
    assert made[0].key != made[1].key
    assert set(hashes(place(made[0]))).isdisjoint(hashes(place(made[1])))


def test_an_end_inside_a_block_is_moved_to_its_begin_or_end() -> None:
    blocks = ((3, 6), (6, 7), (9, 12))
    assert [begin_of_block(blocks, at) for at in range(13)] == [
        *(0, 1, 2, 3, 3, 3, 6, 7, 8, 9, 9, 9, 12)
    ]
    assert [end_of_block(blocks, at) for at in range(13)] == [
        *(1, 2, 3, 6, 6, 6, 7, 8, 9, 12, 12, 12, 13)
    ]

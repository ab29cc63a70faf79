from __future__ import annotations

import numpy as np
import pytest

from mlxserve.images.image import Image


def pixels(height: int = 2, width: int = 3, *, first: int = 0) -> np.ndarray:
    return (np.arange(height * width * 3) + first).astype(np.uint8).reshape(height, width, 3)


def test_images_are_equal_if_their_pixels_are() -> None:
    one, same, other = (
        Image.from_pixels(pixels()),
        Image.from_pixels(pixels()),
        Image.from_pixels(pixels(first=1)),
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert (one.height, one.width) == (2, 3)


def test_the_same_bytes_in_another_shape_are_another_image() -> None:
    assert Image.from_pixels(pixels(2, 3)).digest != Image.from_pixels(pixels(3, 2)).digest


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((2, 3), np.uint8),
        np.zeros((2, 3, 4), np.uint8),
        np.zeros((0, 3, 3), np.uint8),
        np.zeros((2, 3, 3), np.float32),
    ],
    ids=["grey", "transparent", "empty", "floats"],
)
def test_only_rgb_pixels_are_an_image(wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match="pixels must be"):
        Image.from_pixels(wrong)


def test_images_of_different_keys_are_different() -> None:
    one, same, other = (Image.from_pixels(pixels(), owner) for owner in ("a", "a", "b"))
    assert one == same
    assert one != other
    assert one.digest != Image.from_pixels(pixels()).digest
    # What an owner ends with is not taken for the beginning of something else.
    assert (
        len({Image.from_pixels(pixels(), owner).digest for owner in ("", "a", "a\0", "(2, 3, 3)")})
        == 4
    )

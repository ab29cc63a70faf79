"""A picture in cells."""

from __future__ import annotations

from PIL import Image

from tests.images.files import file_of
from tui.paint.preview import MAX_HEIGHT, MAX_WIDTH, preview


def test_each_cell_has_the_colours_of_two_pixels() -> None:
    image = Image.new("RGB", (2, 2), "red")
    image.putpixel((1, 1), (0, 0, 255))
    [line] = preview(file_of(image), 20)
    cells = [(segment.style.color, segment.style.bgcolor) for segment in line if segment.style]
    triplets = [[colour.triplet for colour in cell if colour is not None] for cell in cells]
    red, blue = (255, 0, 0), (0, 0, 255)
    assert triplets == [[red, red], [red, blue]]
    assert line.text == "▀▀"


def test_a_large_picture_fits_in_its_own_proportions() -> None:
    wide = preview(file_of(Image.new("L", (3_000, 1_000))), 80)
    assert {line.cell_length for line in wide} == {MAX_WIDTH}
    assert len(wide) == 6  # 11 pixels, and one more
    assert len(preview(file_of(Image.new("L", (100, 3_000))), 80)) == MAX_HEIGHT
    assert {line.cell_length for line in preview(file_of(Image.new("L", (90, 90))), 5)} == {5}


def test_what_is_no_picture_has_no_lines() -> None:
    assert preview(b"", 20) == ()
    assert preview(file_of(Image.new("1", (9_000, 9_000))), 20) == ()

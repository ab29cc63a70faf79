"""What a model gets of the files that people have, and sentences about those that cannot be read."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mlxserve.images import decode_worker
from mlxserve.images.decode_worker import MAX_PIXELS, MAX_SOURCE_PIXELS, DecodeWorker
from tests.images.files import FORMATS, file_of, picture

PNG = b"\x89PNG\r\n\x1a\n"
WHITE, RED = [255, 255, 255], [255, 0, 0]


def pixels_of(data: bytes) -> npt.NDArray[np.uint8]:
    width, height, pixels = DecodeWorker().decode(data, MAX_SOURCE_PIXELS)
    assert pixels is not None
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)


@pytest.mark.parametrize("file_format", ["PNG", "WEBP"])
def test_a_file_without_loss_gives_its_own_pixels(file_format: str) -> None:
    image = picture()
    assert (pixels_of(file_of(image, file_format, lossless=True)) == np.asarray(image)).all()


@pytest.mark.parametrize("file_format", ["JPEG", "GIF"])
def test_a_file_with_loss_gives_what_was_kept(file_format: str) -> None:
    image = Image.new("RGB", (9, 5), (200, 100, 50))
    pixels = pixels_of(file_of(image, file_format))
    assert pixels.shape == (5, 9, 3)
    assert np.abs(pixels.astype(int) - [200, 100, 50]).max() < 8


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_seen(file_format: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "green", "blue")]
    data = file_of(frames[0], file_format, save_all=True, append_images=frames[1:], lossless=True)
    assert pixels_of(data).tolist() == [[RED] * 4] * 4


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_a_picture_is_upright_as_the_camera_says(file_format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # held by a quarter turn
    image = Image.new("RGB", (16, 8), "red")
    image.paste("white", (0, 0, 8, 8))  # what is left in the file is above in the picture
    pixels = pixels_of(file_of(image, file_format, exif=exif))
    assert pixels.shape == (16, 8, 3)
    assert pixels[0, 0].min() > 240
    assert pixels[-1, 0, 1] < 16


def test_damage_of_what_the_camera_says_does_not_matter() -> None:
    data = file_of(picture(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert pixels_of(data).shape == (16, 24, 3)


def test_each_kind_of_pixel_becomes_a_colour_on_white() -> None:
    for mode, colour, seen in [
        ("1", 1, WHITE),
        ("L", 77, [77, 77, 77]),
        ("LA", (0, 0), WHITE),
        ("RGBA", (255, 0, 0, 255), RED),
        ("RGBA", (255, 0, 0, 0), WHITE),
        ("RGBA", (0, 0, 0, 128), [127, 127, 127]),
        ("I;16", 0, [0, 0, 0]),
        ("I;16", 257 * 77, [77, 77, 77]),
        ("I;16", 65535, WHITE),
    ]:
        assert pixels_of(file_of(Image.new(mode, (3, 2), colour)))[0, 0].tolist() == seen, mode


@pytest.mark.parametrize("file_format", ["PNG", "GIF"])
def test_a_transparent_colour_of_a_palette_is_white(file_format: str) -> None:
    image = Image.new("P", (4, 4))
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.putpixel((3, 3), 1)
    pixels = pixels_of(file_of(image, file_format, transparency=0))
    assert [pixels[0, 0].tolist(), pixels[3, 3].tolist()] == [WHITE, RED]


def test_the_four_colours_of_printers_become_three() -> None:
    pixels = pixels_of(file_of(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert np.abs(pixels.astype(int) - RED).max() < 8


def test_a_large_picture_is_seen_smaller_in_its_own_proportions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_worker, "MAX_PIXELS", 5_000)
    for file_format in FORMATS:
        assert pixels_of(file_of(Image.new("RGB", (400, 200)), file_format)).shape == (50, 100, 3)
    assert pixels_of(file_of(Image.new("RGBA", (20_000, 1)))).shape == (1, 5_000, 3)


def test_one_pixel_and_a_line_of_20_000_are_pictures() -> None:
    assert pixels_of(file_of(Image.new("RGB", (1, 1), "red"))).tolist() == [[RED]]
    assert pixels_of(file_of(Image.new("RGB", (20_000, 1)))).shape == (1, 20_000, 3)


def test_a_bomb_is_refused_by_its_size_and_not_decoded() -> None:
    header = struct.pack(">4sIIBBBBB", b"IHDR", 20_000, 20_000, 1, 0, 0, 0, 0)
    data = struct.pack(">I", 1_000) + b"IDAT" + bytes(1_000)
    bomb = PNG + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + data
    with pytest.raises(ValueError, match=r"has 20000 x 20000 pixels, .* make it smaller"):
        DecodeWorker().decode(bomb, MAX_SOURCE_PIXELS)


def test_a_picture_of_more_pixels_than_asked_for_is_only_measured() -> None:
    data = file_of(picture(24, 16))
    assert DecodeWorker().decode(data, 24 * 16 - 1) == (24, 16, None)


@pytest.mark.parametrize("data", [b"", b"<svg/>", b"%PDF-1.7", b"BM" + bytes(99)])
def test_other_files_are_refused_by_the_formats_that_are_read(data: bytes) -> None:
    with pytest.raises(ValueError, match="is not a PNG, JPEG, WebP or GIF file"):
        pixels_of(data)


@pytest.mark.parametrize(
    "data",
    [
        *(b"\0\0\0\x20ftyp" + brand + bytes(20) for brand in (b"isom", b"mp42", b"qt  ", b"M4V ")),
        b"\x1aE\xdf\xa3" + bytes(20),
        b"RIFF\0\0\0\0AVI LIST",
    ],
)
def test_a_video_is_refused_with_the_way_out(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"is a video, .* send some of its frames as images"):
        pixels_of(data)


@pytest.mark.parametrize("brand", [b"avif", b"heic", b"mif1"])
def test_an_image_in_a_container_of_videos_is_none(brand: bytes) -> None:
    with pytest.raises(ValueError, match="is not a PNG, JPEG, WebP or GIF file"):
        pixels_of(b"\0\0\0\x20ftyp" + brand + bytes(20))


@pytest.mark.parametrize("file_format", ["BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_of_pillow_are_not_read(file_format: str) -> None:
    with pytest.raises(ValueError, match="is not a PNG, JPEG, WebP or GIF file"):
        pixels_of(file_of(picture(), file_format))


@pytest.mark.parametrize("file_format", FORMATS)
def test_half_a_file_is_refused(file_format: str) -> None:
    data = file_of(picture(), file_format)
    with pytest.raises(ValueError, match=r"is (damaged or incomplete \(|not a PNG)"):
        pixels_of(data[: len(data) // 2])


def check(data: bytes) -> None:
    """It is a picture within the limits, or refused by a sentence."""
    sentence, width, height, pixels = "is a picture", 0, 0, None
    try:
        width, height, pixels = DecodeWorker().decode(data, 1 << 20)
    except ValueError as error:
        sentence = str(error)
    assert sentence.startswith(("is ", "has "))
    assert pixels is None or len(pixels) == 3 * width * height <= 3 * MAX_PIXELS


@given(
    st.sampled_from(FORMATS),
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=8),
    st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_is_a_picture_or_a_sentence(
    file_format: str, changes: list[tuple[int, int]], end: int
) -> None:
    data = bytearray(file_of(picture(), file_format))
    for place, value in changes:
        data[place % len(data)] = value
    check(bytes(data[: max(1, end % (2 * len(data)))]))


@given(
    st.sampled_from([b"", PNG, b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WEBP"]),
    st.binary(),
)
@settings(max_examples=60, deadline=None)
def test_random_bytes_are_a_sentence(beginning: bytes, rest: bytes) -> None:
    check(beginning + rest)

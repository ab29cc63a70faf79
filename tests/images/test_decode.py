"""Images are decoded in processes that can be ended, short work before long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest
from PIL import Image as Pillow

from mlxserve.core.errors import EngineStopped, HelperUnavailable, InvalidRequest
from mlxserve.helpers.fair_executor import THREAD_LANES, Lane, lane_of
from mlxserve.helpers.helper import Helper
from mlxserve.helpers.work import Work
from mlxserve.images import decode
from mlxserve.images.decode import ImageDecoder
from mlxserve.images.image import Image
from tests.images.files import file_of, picture

T = TypeVar("T")
WORKER = "tests.images.workers:"


@pytest.fixture
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder()
    yield decoder
    decoder.close()


class Turns:
    """Runs work at once, and keeps the lanes that it would have had."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []

    async def __call__(self, work: Work[T]) -> T:
        self.lanes.append(lane_of(work.seconds))
        result: T = work.run()
        return result


def decoded(decoder: ImageDecoder, data: bytes, turns: Turns | None = None) -> Image:
    return asyncio.run(decoder.decode(data, turns or Turns()))


def use(monkeypatch: pytest.MonkeyPatch, name: str, **options: Any) -> None:
    """Another worker in the place of the one that decodes."""

    def made(_target: str, **own: Any) -> Helper:
        return Helper(WORKER + name, **{**own, **options})

    monkeypatch.setattr(decode, "Helper", made)


def test_a_picture_is_decoded_in_its_turn_among_short_jobs(decoder: ImageDecoder) -> None:
    turns = Turns()
    image = decoded(decoder, file_of(picture(24, 16)), turns)
    assert image.pixels.shape == (16, 24, 3)
    assert image == decoded(decoder, file_of(picture(24, 16), "WEBP", lossless=True), turns)
    assert image != decoded(decoder, file_of(picture(24, 16, seed=1)), turns)
    assert turns.lanes == [Lane.SHORT] * 6  # to know the file by its content, and to decode it


def test_the_digest_covers_the_shape(decoder: ImageDecoder) -> None:
    wide, high = (Pillow.new("RGB", size) for size in ((8, 2), (2, 8)))
    assert decoded(decoder, file_of(wide)).digest != decoded(decoder, file_of(high)).digest


def test_a_picture_of_many_pixels_waits_among_longer_jobs(decoder: ImageDecoder) -> None:
    turns = Turns()
    assert (
        decoded(decoder, file_of(Pillow.new("L", (2_000, 1_500))), turns).pixels.size == 9_000_000
    )
    assert turns.lanes == [Lane.SHORT, Lane.SHORT, Lane.MEDIUM]


def test_a_large_file_does_not_disturb_short_jobs(decoder: ImageDecoder) -> None:
    turns = Turns()
    data = file_of(picture(), "JPEG") + bytes(12_000_000)  # what follows is not read
    assert decoded(decoder, data, turns).pixels.shape == (16, 24, 3)
    assert turns.lanes == [Lane.SHORT, Lane.LONG]


def test_a_picture_that_comes_again_is_not_decoded_again() -> None:
    one, other, third = (file_of(picture(seed=seed)) for seed in range(3))
    decoder, turns = ImageDecoder(max_kept=2 * 24 * 16 * 3), Turns()

    def num_turns(data: bytes) -> int:
        before = len(turns.lanes)
        decoded(decoder, data, turns)
        return len(turns.lanes) - before

    assert [num_turns(data) for data in (one, other, one, third)] == [2, 2, 1, 2]
    assert [num_turns(data) for data in (one, other)] == [1, 2]  # the one used last was kept
    assert decoded(decoder, other) == decoded(decoder, file_of(picture(seed=1)))
    decoder.close()


def test_a_picture_of_another_key_is_decoded_as_if_it_were_new(decoder: ImageDecoder) -> None:
    """Else one request tells whether another key has sent a file."""
    data, counts = file_of(picture()), []
    for owner in ("good", "evil", "", "good", "evil", ""):
        turns = Turns()
        image = asyncio.run(decoder.decode(data, turns, owner))
        assert image.owner == owner
        counts.append(len(turns.lanes))
    assert counts == [2, 2, 2, 1, 1, 1]


def test_many_pictures_of_one_key_push_out_its_own() -> None:
    files = [file_of(picture(seed=seed)) for seed in range(6)]
    decoder, turns = ImageDecoder(max_kept=3 * 24 * 16 * 3), Turns()
    asyncio.run(decoder.decode(files[0], turns, "good"))
    for data in files[1:]:
        asyncio.run(decoder.decode(data, turns, "evil"))
    before = len(turns.lanes)
    asyncio.run(decoder.decode(files[0], turns, "good"))
    assert len(turns.lanes) == before + 1, "it was kept"
    decoder.close()


def test_a_refused_picture_is_said_to_be_so(decoder: ImageDecoder) -> None:
    with pytest.raises(InvalidRequest, match=r"^is not a PNG, JPEG, WebP or GIF file$"):
        decoded(decoder, b"%PDF-1.7")


def test_a_picture_that_takes_too_long_gets_more_time_among_longer_jobs(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "Endless")
    monkeypatch.setattr(decode, "TRIES", dict.fromkeys(THREAD_LANES, (0.02, 1)))
    turns = Turns()
    with pytest.raises(InvalidRequest, match=r"^cannot be decoded: that took longer than 0\.02 s"):
        decoded(decoder, b"", turns)
    assert turns.lanes == [Lane.SHORT, Lane.SHORT, Lane.MEDIUM, Lane.LONG]


def test_a_picture_that_needs_too_much_memory_is_refused(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "Hungry", memory=64 << 20)
    with pytest.raises(InvalidRequest, match=r"^cannot be decoded: that needed more than 64 MB"):
        decoded(decoder, b"")


def test_a_process_that_others_end_is_not_the_pictures_fault(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "Ended")
    with pytest.raises(HelperUnavailable, match="process for images was ended twice; send"):
        decoded(decoder, b"")


def test_after_the_end_nothing_is_decoded(decoder: ImageDecoder) -> None:
    data = file_of(picture())
    decoded(decoder, data)
    decoder.close()
    with pytest.raises(EngineStopped):
        decoded(decoder, data)


def test_without_pillow_the_extra_is_named(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(InvalidRequest, match=r"Pillow: .* install .*\[.*vision.*\]"):
        decoded(decoder, b"")

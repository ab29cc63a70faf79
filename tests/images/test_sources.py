"""Images by their URLs."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import TypeVar

import pytest

from mlxserve.core.errors import InvalidRequest
from mlxserve.helpers.work import Work
from mlxserve.images.data_urls import data_url, file_of_data_url
from mlxserve.images.decode import ImageDecoder
from mlxserve.images.image import Image
from mlxserve.images.sources import ImageSources
from tests.images.files import file_of, picture

T = TypeVar("T")
FILE = bytes(range(256))


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder()
    yield decoder
    decoder.close()


async def at_once(work: Work[T]) -> T:
    result: T = work.run()
    return result


def image(decoder: ImageDecoder, source: str | None) -> Image:
    return asyncio.run(ImageSources(decoder=decoder).image(source, at_once))


def test_a_data_url_holds_the_file_itself(decoder: ImageDecoder) -> None:
    content = base64.b64encode(file_of(picture())).decode()
    assert image(decoder, data_url(content, "image/png")).pixels.shape == (16, 24, 3)
    assert image(decoder, data_url(content)) == image(decoder, f"DATA:image/jpeg;BASE64,{content}")


@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode(FILE).decode(),
        base64.encodebytes(FILE).decode(),  # in lines
        base64.urlsafe_b64encode(FILE).decode(),
        base64.b64encode(FILE).decode().rstrip("="),
    ],
)
def test_base64_is_read_as_clients_write_it(text: str) -> None:
    assert file_of_data_url(data_url(text, "image/png")) == FILE


@pytest.mark.parametrize("text", ["!!!!", "é", "AAAAA", "AA\0A"])
def test_what_is_not_base64_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^is not valid base64$"):
        file_of_data_url(data_url(text))


@pytest.mark.parametrize("url", ["data:", "data:image/png,AAAA", "data:;base64"])
def test_other_data_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match='without ";base64," before its content'):
        file_of_data_url(url)


@pytest.mark.parametrize("url", ["https://example.com/a.png", "HTTP://[::1]/"])
def test_the_option_that_allows_the_web_is_named(decoder: ImageDecoder, url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"\(--allow-remote-images allows it\)"):
        image(decoder, url)


@pytest.mark.parametrize(
    "source", [None, "", "file:///etc/passwd", "/etc/passwd", "ftp://a/b", "AAAA"]
)
def test_no_other_place_is_read(decoder: ImageDecoder, source: str | None) -> None:
    with pytest.raises(InvalidRequest, match='needs a URL that begins with "data:"'):
        image(decoder, source)

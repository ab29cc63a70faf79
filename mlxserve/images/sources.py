"""ImageSources: images from data URLs, and if the operator allows it, from the web."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mlxserve.core.errors import InvalidRequest
from mlxserve.helpers.work import RunFairly, RunsIn, Work
from mlxserve.images.data_urls import file_of_data_url
from mlxserve.images.decode import ImageDecoder, image_decoder
from mlxserve.images.image import Image

if TYPE_CHECKING:
    # It imports httpx, a tenth of a second.
    from mlxserve.images.remote import RemoteFiles, TakeMemory

OPTION = "--allow-remote-images"
_FETCH_SECONDS = 1.0  # until a usual server has sent a file
_BASE64_PER_SECOND = 50_000_000  # characters


class ImageSources:
    """Loads images by URL."""

    def __init__(
        self, remote: RemoteFiles | None = None, decoder: ImageDecoder | None = None
    ) -> None:
        """remote: None if nothing is fetched from the web."""
        self._remote = remote
        self._decoder = decoder or image_decoder()

    async def image(
        self,
        source: str | None,
        run_fairly: RunFairly,
        owner: str = "",
        *,
        take: TakeMemory = lambda _: None,
    ) -> Image:
        """Load an image.

        source: a data:, http: or https: URL; None for anything else
        run_fairly: does the work on it in its client's turn
        owner: id of the API key that sent it
        take: takes memory for a file from the web until its image is decoded

        Raises InvalidRequest, whose message is the end of a sentence about the image, and what
        `ImageDecoder.decode` raises.
        """
        file = await self._file(source, run_fairly, take)
        return await self._decoder.decode(file, run_fairly, owner)

    async def _file(self, source: str | None, run_fairly: RunFairly, take: TakeMemory) -> bytes:
        scheme = (source or "")[:8].partition(":")[0].lower()
        if source is None or scheme not in ("data", "http", "https"):
            raise InvalidRequest('needs a URL that begins with "data:", "https:" or "http:"')
        if scheme == "data":
            seconds = len(source) / _BASE64_PER_SECOND
            return await run_fairly(Work(seconds, partial(file_of_data_url, source)))
        if self._remote is None:
            raise InvalidRequest(
                f"is on the web, from where this server fetches nothing ({OPTION} allows it); send it "
                "as a data: URL"
            )
        fetching = partial(self._remote.fetch, source, take)
        return await run_fairly(Work(_FETCH_SECONDS, fetching, RunsIn.LOOP))

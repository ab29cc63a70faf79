"""ImageDecoder: decodes untrusted image files in processes that can be killed.

    image = await image_decoder().decode(data, partial(run_fairly, request))

A file says how many pixels it has, but not how much work they are: a JPEG file may draw each of
them a thousand times. So it is tried at first beside other short work
(`mlxserve.helpers.fair_executor`), with few pixels and little time, and what needs more waits for
its turn among longer jobs, which have a process of their own.

The newest images are kept by their files' content, because a conversation sends its images with
each turn: those of each API key for itself, so that no key learns what others have sent.
"""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from hashlib import blake2b
from typing import TypeVar

from mlxserve.core.errors import InvalidRequest
from mlxserve.helpers.errors import HelperKilled, JobFailed, KillReason
from mlxserve.helpers.fair_executor import MEDIUM_SECONDS, SHORT_SECONDS, Lane, lane_of
from mlxserve.helpers.helper import BEHIND_THE_ENGINE, Helper
from mlxserve.helpers.lane_helpers import LaneHelpers
from mlxserve.helpers.work import RunFairly, RunsIn, Work
from mlxserve.images.image import DIGEST_SIZE, Image
from mlxserve.system.extras import extra_command
from mlxserve.system.owned_cache import OwnedCache

T = TypeVar("T")

MEMORY = 1 << 30  # bytes, for one image
# The longest a job of a lane may take, and its most pixels.
TRIES = {
    Lane.SHORT: (2.0, 2 << 20),
    Lane.MEDIUM: (10.0, 12 << 20),
    Lane.LONG: (60.0, 1 << 30),
}
_MAX_KEPT = 128 << 20  # bytes of pixels
_HASHED_PER_SECOND = 500_000_000  # bytes of files
_BYTES_PER_SECOND = 10_000_000  # speed of decoding files on two cores of an x86 server
_SECONDS = {Lane.SHORT: 0.02, Lane.MEDIUM: 1.01 * SHORT_SECONDS, Lane.LONG: 1.01 * MEDIUM_SECONDS}


class ImageDecoder:
    """Decodes images in one helper process per lane of the executor, started on first use."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        """`max_kept`: bytes of the newest images' pixels."""
        self._helpers = LaneHelpers(_new_helper)
        # By hash of the file.
        self._kept = OwnedCache[bytes, Image](max_kept, lambda image: image.pixels.nbytes)

    async def decode(self, data: bytes, run_fairly: RunFairly, owner: str = "") -> Image:
        """Decode the first frame, upright and on white.

        owner: id of the API key that sent it

        Raises InvalidRequest, whose message is the end of a sentence about the image,
        HelperUnavailable, EngineStopped, and what `run_fairly` raises.
        """
        if importlib.util.find_spec("PIL") is None:
            raise InvalidRequest(f"cannot be read without Pillow: {extra_command('vision')}")
        hashing: Work[bytes] = Work(len(data) / _HASHED_PER_SECOND, partial(_key, data))
        key = await run_fairly(hashing)
        if (known := self._kept.get(owner, key)) is not None:
            return known
        image = await self._decoded(data, run_fairly, owner)
        self._kept.put(owner, key, image)
        return image

    async def _decoded(self, data: bytes, run_fairly: RunFairly, owner: str) -> Image:
        expected = len(data) / _BYTES_PER_SECOND
        for lane in TRIES:
            if lane < lane_of(expected):
                continue
            seconds = max(expected, _SECONDS[lane])
            trying: Work[Image | None] = Work(
                seconds, partial(self._try, data, lane, owner), RunsIn.PROCESS
            )
            image = await run_fairly(trying)
            if image is not None:
                return image
        raise AssertionError("the last try decides")

    def close(self) -> None:
        self._kept.clear()
        self._helpers.close()

    def _try(self, data: bytes, lane: Lane, owner: str) -> Image | None:
        """Try a lane; None if a lane of longer jobs may succeed."""
        seconds, max_pixels = TRIES[lane]
        try:
            reply = self._helpers.of(lane).call_twice("decode", data, max_pixels, seconds=seconds)
        except JobFailed as error:
            raise InvalidRequest(error.message) from error
        except HelperKilled as error:
            if error.reason is KillReason.TIME and lane is not Lane.LONG:
                return None
            blameless = error.without_blame("The process for images", was_tried_twice=True)
            raise blameless or InvalidRequest(f"cannot be decoded: that {error}") from error
        width, height, pixels = reply
        return _image(width, height, pixels, owner)


def _new_helper() -> Helper:
    target = "mlxserve.images.decode_worker:DecodeWorker"
    return Helper(target, name="images", memory=MEMORY, niceness=BEHIND_THE_ENGINE)


def _key(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE).digest()


def _image(width: int, height: int, pixels: bytes | None, owner: str) -> Image | None:
    if pixels is None:
        return None
    import numpy as np  # imported with the first image: a start need not wait for it

    return Image.from_pixels(np.frombuffer(pixels, np.uint8).reshape(height, width, 3), owner)


@cache
def image_decoder() -> ImageDecoder:
    """Return the process's decoder."""
    return ImageDecoder()

"""Image: decoded pixels, identified by their content and by whose they are."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self

# A tenth of a second, which a start without images need not wait for.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DIGEST_SIZE = 32  # bytes
MAX_PIXELS = 4096 * 4096  # pixels for a model: more than any model uses


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """Decoded pixels; equal pixels of one owner make equal images.

    pixels  (height, width, 3), RGB, not written after this
    digest  blake2b of owner, shape and pixels
    owner   id of the API key that sent it: what is computed of it is found by that key alone
    """

    pixels: npt.NDArray[np.uint8]
    digest: bytes
    owner: str = ""

    @classmethod
    def from_pixels(cls, pixels: npt.NDArray[np.uint8], owner: str = "") -> Self:
        """Wrap pixels. Raises ValueError for another shape or dtype, or no pixels."""
        if pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
            raise ValueError(f"pixels must be (height, width, 3), got {pixels.shape}")
        if pixels.dtype.name != "uint8":
            raise ValueError(f"pixels must be uint8, got {pixels.dtype}")
        hashed = blake2b(f"{owner}\0{pixels.shape}".encode(), digest_size=DIGEST_SIZE)
        hashed.update(pixels.tobytes())
        return cls(pixels, hashed.digest(), owner)

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Image) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

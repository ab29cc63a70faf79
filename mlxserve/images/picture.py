"""Picture: an image as one model takes it, and the prompt that it is part of.

An image is rows of a prompt, beside those of text. Rows that the model's image encoder computes
have ids of their own below zero, which follow from the encoder's input: so equal images have equal
ids in any process, and pages of different ones never have the same hash.

    ids of a prompt    5 17 | -812 -97 -3301 ... | 42 8
                       text    a picture's rows    text

An id has 31 bits of a hash, which is too few to tell images apart: hashes of pages have the whole
of it (`marks`), and a part of a picture is found only from `MIN_ROWS` on.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b, shake_128
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from mlxserve.images.image import Image

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

KEY_SIZE = 32  # bytes
# Rows whose ids together have as many bits as a page's hash.
MIN_ROWS = 4

Grid: TypeAlias = tuple[int, int, int]
Mark: TypeAlias = tuple[int, int, bytes]  # first position, the one after the last, key
Block: TypeAlias = tuple[int, int]  # first position, the one after the last


@dataclass(frozen=True, eq=False)
class Picture:
    """An image as one model takes it.

    key     hash of the encoder's whole input and of the image's owner
    ids     what the picture is in a prompt: text, such as separators, and rows of the encoder (below zero)
    inputs  arguments of the encoder by name
    grid    rows in time, height and width, if rows have a position of each; None if they have
            one, as text has
    owner   id of the API key that sent the image
    is_bidirectional  True if its rows attend to one another in both directions, so that one step computes them all
    """

    key: bytes
    ids: array[int]
    inputs: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    grid: Grid | None = None
    owner: str = ""
    is_bidirectional: bool = False

    @classmethod
    def from_prompt(
        cls,
        token_ids: Sequence[int],
        image_token: int,
        inputs: Mapping[str, npt.NDArray[Any]],
        grid: Grid | None,
        owner: str = "",
        *,
        is_bidirectional: bool = False,
    ) -> Picture:
        """Build a picture.

        token_ids: the picture in a prompt, with `image_token` at each row of the encoder
        """
        key = _key(token_ids, inputs, owner, is_bidirectional=is_bidirectional)
        num_rows = sum(token == image_token for token in token_ids)
        own = iter(_row_ids(key, num_rows))
        ids = array("i", [next(own) if token == image_token else token for token in token_ids])
        return cls(key, ids, inputs, grid, owner, is_bidirectional)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Runs of rows among its ids that see one another in both directions."""
        if not self.is_bidirectional:
            return ()
        edges = [0, *(at for at in range(1, len(self.ids)) if self._turns(at)), len(self.ids)]
        return tuple(run for run in pairwise(edges) if self.ids[run[0]] < 0)

    def _turns(self, at: int) -> bool:
        """True if rows begin or end at this index."""
        return (self.ids[at] < 0) != (self.ids[at - 1] < 0)

    @cached_property
    def num_rows(self) -> int:
        """Rows that the encoder computes."""
        return sum(token < 0 for token in self.ids)

    @cached_property
    def rows_before(self) -> npt.NDArray[np.int64]:
        """Number of these rows before each of its ids, and before the end."""
        import numpy as np

        counts: npt.NDArray[np.int64] = np.cumsum([0, *(token < 0 for token in self.ids)])
        return counts

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values())

    @cached_property
    def num_inputs(self) -> int:
        """Numbers that the encoder computes with, at least 1."""
        return max(1, sum(each.size for each in self.inputs.values() if each.dtype.kind == "f"))

    @property
    def shift(self) -> int:
        """Offset from index to position of what follows: it continues after the longest side."""
        return 0 if self.grid is None else max(self.grid) - len(self.ids)


def _key(
    token_ids: Sequence[int],
    inputs: Mapping[str, npt.NDArray[Any]],
    owner: str,
    *,
    is_bidirectional: bool,
) -> bytes:
    import numpy as np

    hashed = blake2b(array("i", token_ids).tobytes(), digest_size=KEY_SIZE)
    # Without an owner the key is that of earlier versions, under which pages are on disk.
    if owner:
        hashed.update(f"\0\0{owner}\0".encode())
    # Earlier versions computed such images in one direction, and pages of theirs are on disk.
    if is_bidirectional:
        hashed.update(b"\0\0bidirectional")
    for name, value in sorted(inputs.items()):
        hashed.update(f"\0{name}\0{value.shape}\0{value.dtype}\0".encode())
        hashed.update(np.ascontiguousarray(value).tobytes())
    return hashed.digest()


def _row_ids(key: bytes, num_rows: int) -> list[int]:
    drawn = array("i", shake_128(key).digest(4 * num_rows))
    return [number | -(1 << 31) for number in drawn]


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture whose first id is at `start` of a prompt."""

    start: int
    picture: Picture

    @property
    def end(self) -> int:
        return self.start + len(self.picture.ids)


Placed: TypeAlias = tuple[PlacedPicture, ...]


class PicturePrompt(list[int]):
    """A prompt's ids, and the pictures among them in order."""

    def __init__(self, token_ids: Iterable[int], pictures: Iterable[PlacedPicture]) -> None:
        super().__init__(token_ids)
        self.pictures: Placed = tuple(pictures)

    def after(self, prefix: Sequence[int]) -> PicturePrompt:
        """Prepend other ids."""
        moved = (replace(placed, start=placed.start + len(prefix)) for placed in self.pictures)
        return PicturePrompt((*prefix, *self), moved)


def pictures_of(prompt: Sequence[int]) -> Placed:
    return prompt.pictures if isinstance(prompt, PicturePrompt) else ()


def marks_of(pictures: Placed) -> tuple[Mark, ...]:
    """Marks that tell apart the hashes of pages with these pictures."""
    return tuple((placed.start, placed.end, placed.picture.key) for placed in pictures)


def blocks_of(pictures: Placed) -> tuple[Block, ...]:
    """Return the ranges of positions that are computed in one step, in order."""
    return tuple(
        (placed.start + first, placed.start + end)
        for placed in pictures
        for first, end in placed.picture.blocks
    )


def begin_of_block(blocks: Sequence[Block], position: int) -> int:
    """Return where the block begins that an end at `position` would divide; else `position`."""
    return next((first for first, end in blocks if first < position < end), position)


def end_of_block(blocks: Sequence[Block], position: int) -> int:
    """Return the end of the block that has this position; else the next position."""
    return next((end for first, end in blocks if first <= position < end), position + 1)


def num_distinct(pictures: Placed, start: int, length: int) -> int:
    """Number of ids from `start` on whose equality proves that the pictures are the same.

    Another prompt has the same `length` ids there. It is all of them, or those before a picture of
    which there are too few rows.
    """
    end = start + length
    for placed in pictures:
        if placed.start < end:
            first, last = max(0, start - placed.start), min(end, placed.end) - placed.start
            rows = placed.picture.rows_before
            # What is before `start` is known to be the same: its page's hash has the key.
            if first == 0 and 0 < rows[last] < MIN_ROWS:
                return max(0, placed.start - start)
    return length


def positions_of(pictures: Placed, start: int, end: int) -> npt.NDArray[np.int32]:
    """Return (3, end - start): positions in time, height and width of the rows `start` to `end`."""
    import numpy as np

    positions = np.empty((3, end - start), np.int32)
    positions[:] = np.arange(start, end)
    shift = 0
    for placed in pictures:
        if placed.start >= end:
            break
        if placed.picture.grid is not None and placed.end > start:
            inside = np.indices(placed.picture.grid).reshape(3, -1) + placed.start + shift
            first, last = max(start, placed.start), min(end, placed.end)
            positions[:, first - start : last - start] = inside[
                :, first - placed.start : last - placed.start
            ]
        shift += placed.picture.shift
        # Until the next picture, whose own shift is added then.
        if placed.end < end:
            positions[:, max(0, placed.end - start) :] += placed.picture.shift
    return positions


class PictureReader(Protocol):
    """Makes pictures of images for one model. Thread-safe; uses no mlx on the device."""

    placeholder: int  # the token that the chat template writes for an image

    def read(self, image: Image) -> Picture:
        """Read an image. Raises InvalidRequest if the model's processor refuses it."""


def with_pictures(
    token_ids: Sequence[int], placeholder: int, pictures: Sequence[Picture]
) -> PicturePrompt | None:
    """Replace each placeholder by its picture; None if their numbers differ."""
    ids: list[int] = []
    placed: list[PlacedPicture] = []
    for token in token_ids:
        if token != placeholder:
            ids.append(token)
            continue
        if len(placed) == len(pictures):
            return None
        placed.append(PlacedPicture(len(ids), pictures[len(placed)]))
        ids.extend(placed[-1].picture.ids)
    return PicturePrompt(ids, placed) if len(placed) == len(pictures) else None

"""PictureBatch: pictures of one shape, joined into one call of the encoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxserve.images.picture import Picture


@dataclass(frozen=True, slots=True)
class PictureBatch:
    """Joined pictures.

    ids     of the pictures, one after the other
    inputs  arguments of the encoder by name
    sizes   numbers of the pictures' ids
    """

    ids: npt.NDArray[np.int32]
    inputs: Mapping[str, Any]
    sizes: tuple[int, ...]

    @classmethod
    def join(cls, pictures: Sequence[Picture], axes: Mapping[str, int]) -> PictureBatch:
        """Join pictures.

        axes: on which the inputs of several pictures are joined; other inputs are those of the
            first one
        """
        [first, *others] = pictures
        inputs = dict(first.inputs)
        if others:
            for name, axis in axes.items():
                inputs[name] = np.concatenate([each.inputs[name] for each in pictures], axis)
        ids = np.concatenate([np.array(each.ids, np.int32) for each in pictures])
        return cls(ids, inputs, tuple(len(each.ids) for each in pictures))

    @property
    def num_pictures(self) -> int:
        return len(self.sizes)

    def rows(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield for each picture the indices of its rows among the ids, and among all rows."""
        start = num_rows = 0
        for size in self.sizes:
            indices = np.flatnonzero(self.ids[start : start + size] < 0)
            yield indices + start, np.arange(num_rows, num_rows + len(indices))
            start, num_rows = start + size, num_rows + len(indices)


def has_shape_of(picture: Picture, other: Picture) -> bool:
    """True if two pictures can be joined: inputs are alike except for the image's content."""
    if picture.grid != other.grid or len(picture.ids) != len(other.ids):
        return False
    if picture.inputs.keys() != other.inputs.keys():
        return False
    return all(_is_like(array, other.inputs[name]) for name, array in picture.inputs.items())


def _is_like(array: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Compare shapes; sizes, masks and positions, which are not floats, must be equal."""
    if array.shape != other.shape or array.dtype != other.dtype:
        return False
    return array.dtype.kind == "f" or bool(np.array_equal(array, other))


def axes_of(
    alone: Sequence[Mapping[str, Any]], together: Mapping[str, Any]
) -> Mapping[str, int] | None:
    """Axis on which a processor joins each input of several images; None if it does not.

    alone: the inputs of each image; together: of all
    """
    axes: dict[str, int] = {}
    for name, whole in together.items():
        parts = [inputs[name] for inputs in alone if name in inputs]
        if len(parts) < len(alone) or any(part.ndim != whole.ndim for part in parts):
            return None
        for axis in range(whole.ndim):
            shapes = {part.shape[:axis] + part.shape[axis + 1 :] for part in parts}
            if len(shapes) == 1 and np.array_equal(np.concatenate(parts, axis), whole):
                axes[name] = axis
                break
        else:
            if not all(np.array_equal(part, whole) for part in parts):
                return None
    return axes

"""ImageProcessor: decoded images to pictures, by the processor of one of mlx-vlm's models.

A processor turns a placeholder and an image into token ids, in which the image's rows are, and into the arrays
that the tower takes. They are numpy's and Pillow's work, done on the thread that renders the prompt; the
newest pictures are kept, because a conversation sends its images again with each turn.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.reading import read
from mlxserve.errors import InvalidParameter, in_one_line
from mlxserve.images.image import Image
from mlxserve.images.picture import Grid, Picture

_MOST_KEPT = 256 << 20  # bytes of pictures
_TEXT_OUTPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
_GRID = "image_grid_thw"
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)


class ImageProcessor:
    """A `PictureReader`."""

    def __init__(self, processor: Any, image_token: int, *, has_grid: bool) -> None:
        """has_grid: whether rows have positions in time, height and width"""
        self._processor = processor
        self._image_token = image_token
        self._has_grid = has_grid
        self.most_pixels: int | None = None  # of an image; larger ones are made smaller
        self._mark = self._placeholder()
        self.placeholder = int(processor.tokenizer.convert_tokens_to_ids(self._mark))
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()

    def read(self, image: Image) -> Picture:
        """Raises InvalidParameter for an image that the model's processor refuses."""
        with self._lock:
            picture = self._kept.pop(image.digest, None)
            if picture is None:
                try:
                    picture = self.make(image)
                except _ERRORS as error:
                    raise InvalidParameter(
                        "messages",
                        f"an image of {image.width} x {image.height} pixels cannot be shown to this "
                        f"model: {in_one_line(error)}",
                    ) from error
            self._kept[image.digest] = picture
            while len(self._kept) > 1 and self._num_bytes() > _MOST_KEPT:
                self._kept.popitem(last=False)
            return picture

    def _num_bytes(self) -> int:
        return sum(picture.nbytes for picture in self._kept.values())

    def _placeholder(self) -> str:
        """What stands for an image in a text that the processor takes. Raises ValueError."""
        found = [*_placeholders_of(self._processor)]
        for mark in found[:-1]:
            # Gemma 3 replaces what begins an image by the image; Gemma 4 only puts it there.
            with suppress(*_ERRORS):
                made = self._made(mark, [Image.of(np.zeros((64, 64, 3), np.uint8))])
                if self._image_token in _as_numpy(made["input_ids"]):
                    return mark
        if not found:
            raise ValueError("its processor names no placeholder of images")
        return found[-1]

    def _made(self, mark: str, images: Sequence[Image]) -> Any:
        pixels = [self._pixels(image) for image in images]
        return self._processor(text=[mark * len(images)], images=pixels, add_special_tokens=False)

    def _pixels(self, image: Image) -> Any:
        from PIL import Image as Pillow

        pixels = Pillow.fromarray(image.pixels)
        if self.most_pixels is not None and (num := image.width * image.height) > self.most_pixels:
            share = (self.most_pixels / num) ** 0.5
            size = max(1, int(image.width * share)), max(1, int(image.height * share))
            pixels = pixels.resize(size, Pillow.Resampling.BICUBIC, reducing_gap=2.0)
        return pixels

    def make(self, image: Image) -> Picture:
        """`read`, without keeping it. Raises what the processor raises."""
        made = self._made(self._mark, [image])
        inputs = _inputs_of(made)
        token_ids = [int(token) for token in _as_numpy(made["input_ids"])[0]]
        grid = self._grid(inputs, token_ids.count(self._image_token)) if self._has_grid else None
        return Picture.of(token_ids, self._image_token, inputs, grid)

    def inputs_of(self, images: Sequence[Image]) -> dict[str, Any]:
        """What the tower is given for several images at once. Raises what the processor raises."""
        return _inputs_of(self._made(self._mark, images))

    def _grid(self, inputs: dict[str, Any], num_rows: int) -> Grid:
        """Rows in time, height and width: the tower merges patches of a square."""
        time, height, width = (int(n) for n in inputs[_GRID][0])
        merge = round((time * height * width / num_rows) ** 0.5)
        return time, height // merge, width // merge


def _inputs_of(made: Any) -> dict[str, Any]:
    return {
        name: _as_numpy(value)
        for name, value in made.items()
        if name not in _TEXT_OUTPUTS and value is not None
    }


def _as_numpy(value: Any) -> npt.NDArray[Any]:
    """Of what a processor made, with mlx or without."""
    return read(value) if isinstance(value, mx.array) else np.array(value)


def _placeholders_of(processor: Any) -> Iterator[str]:
    """What may stand for an image in a text that the processor takes."""
    for name in ("boi_token", "image_token"):
        token = getattr(processor, name, None)
        if isinstance(token := getattr(token, "content", token), str) and token:
            yield token
    if isinstance(token_id := getattr(processor, "img_context_token_id", None), int):  # InternVL
        yield str(processor.tokenizer.convert_ids_to_tokens(token_id))


def load_processor(module: ModuleType, folder: Path) -> Any:
    """The processor that a package of mlx-vlm's models defines. Raises ValueError without one."""
    for kind in _processors_of(module):
        with warnings.catch_warnings():  # of the part for sound, which is not used
            warnings.simplefilter("ignore")
            # Code in the folder is never run, nor is the user asked about it.
            return kind.from_pretrained(str(folder), trust_remote_code=False)
    raise ValueError("mlx-vlm has no processor of its images")


def _processors_of(module: ModuleType) -> Iterator[Any]:
    """Defined in the package's own files or those that its model imports, or taken from transformers there."""
    [folder] = map(Path, module.__path__)
    own = [f"{module.__name__}.{file.stem}" for file in sorted(folder.glob("process*.py"))]
    model = sys.modules[module.Model.__module__]
    others = [each for each in vars(model).values() if inspect.ismodule(each)]
    found = []
    for each in [*map(importlib.import_module, own), *others]:
        kinds = [kind for kind in vars(each).values() if _is_processor(kind)]
        yield from (kind for kind in kinds if kind.__module__ == each.__name__)
        found += [kind for kind in kinds if kind.__module__.startswith("transformers.models.")]
    yield from found


def _is_processor(kind: Any) -> bool:
    if not inspect.isclass(kind) or not kind.__name__.endswith("Processor"):
        return False
    return any(base.__name__ == "ProcessorMixin" for base in kind.__mro__[1:])

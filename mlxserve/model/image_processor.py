"""ImageProcessor: turns decoded images into pictures with the processor of a mlx-vlm model.

A processor turns a placeholder and an image into token ids, in which the image's rows are, and into
the arrays that the tower takes. They are numpy's and Pillow's work, done on the thread that renders
the prompt; the newest pictures are kept, because a conversation sends its images again with each
turn.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.reading import read
from mlxserve.core.errors import InvalidParameter, in_one_line
from mlxserve.images.image import Image
from mlxserve.images.picture import Grid, Picture
from mlxserve.system.owned_cache import OwnedCache

_MAX_KEPT = 256 << 20  # bytes of pictures
_LARGE_PIXELS = 2_500_000  # read in more than a quarter of a second
_TEXT_OUTPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
_GRID = "image_grid_thw"
_SPECIAL_TOKENS = "add_special_tokens"
_NO_SPECIAL_TOKENS = {_SPECIAL_TOKENS: False}
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)


class ImageProcessor:
    """A `PictureReader`."""

    def __init__(
        self, processor: Any, image_token: int, *, has_grid: bool, is_bidirectional: bool = False
    ) -> None:
        """Take the processor of a model.

        has_grid: whether rows have positions in time, height and width
        is_bidirectional: as in Picture
        """
        self._processor = processor
        self._image_token = image_token
        self._has_grid = has_grid
        self._is_bidirectional = is_bidirectional
        # Bound of an image's pixels; larger ones are made smaller.
        self.max_pixels: int | None = None
        self._settings: dict[str, Any] = dict(_NO_SPECIAL_TOKENS)
        self._mark = self._placeholder()
        self.placeholder = int(processor.tokenizer.convert_tokens_to_ids(self._mark))
        self._kept = OwnedCache[bytes, Picture](_MAX_KEPT, lambda picture: picture.nbytes)
        # A processor reads one image of each size at a time: small ones never wait for large ones.
        self._locks = {is_large: threading.Lock() for is_large in (False, True)}

    def read(self, image: Image) -> Picture:
        """Raises InvalidParameter for an image that the model's processor refuses."""
        picture = self._kept.get(image.owner, image.digest)
        if picture is not None:
            return picture
        with self._locks[image.width * image.height > _LARGE_PIXELS]:
            picture = self._checked(image)
        self._kept.put(image.owner, image.digest, picture)
        return picture

    def _checked(self, image: Image) -> Picture:
        try:
            return self.make(image)
        except _ERRORS as error:
            raise InvalidParameter(
                "messages",
                f"an image of {image.width} x {image.height} pixels cannot be shown to this "
                f"model: {in_one_line(error)}",
            ) from error

    def _placeholder(self) -> str:
        """Return the image placeholder of the processor's texts. Raises ValueError."""
        candidates = [*_placeholders_of(self._processor)]
        for mark in candidates[:-1]:
            # Gemma 3 replaces what begins an image by the image; Gemma 4 only puts it there.
            with suppress(*_ERRORS):
                made = self._made(mark, [Image.from_pixels(np.zeros((64, 64, 3), np.uint8))])
                if self._image_token in _as_numpy(made["input_ids"]):
                    return mark
        if not candidates:
            raise ValueError("it names no placeholder of images")
        return candidates[-1]

    def _made(self, text: str, images: Sequence[Image]) -> Any:
        pixels = [self._pixels(image) for image in images]
        try:
            return self._processor(text=[text], images=pixels, **self._settings)
        except TypeError as error:
            # LLaVA's processors pass all settings to their image processors, which refuse those of a tokenizer.
            if not self._settings or _SPECIAL_TOKENS not in str(error):
                raise
            self._settings = {}
            return self._made(text, images)

    def _token_ids(self, made: Any) -> list[int]:
        """Return the ids of a text, without the special tokens that a tokenizer adds around it."""
        ids = [int(token) for token in _as_numpy(made["input_ids"])[0]]
        if self._settings:
            return ids
        tokenizer = self._processor.tokenizer
        bare = tokenizer(self._mark, **_NO_SPECIAL_TOKENS)["input_ids"]
        whole = tokenizer(self._mark)["input_ids"]
        start = whole.index(bare[0])
        return ids[start : len(ids) - (len(whole) - start - len(bare))]

    def _pixels(self, image: Image) -> Any:
        from PIL import Image as Pillow

        pixels = Pillow.fromarray(image.pixels)
        if self.max_pixels is not None and (num := image.width * image.height) > self.max_pixels:
            share = (self.max_pixels / num) ** 0.5
            size = max(1, int(image.width * share)), max(1, int(image.height * share))
            pixels = pixels.resize(size, Pillow.Resampling.BICUBIC, reducing_gap=2.0)
        return pixels

    def make(self, image: Image) -> Picture:
        """Like `read`, but uncached. Raises what the processor raises."""
        made = self._made(self._mark, [image])
        inputs = _inputs_of(made)
        token_ids = self._token_ids(made)
        grid = self._grid(inputs, token_ids.count(self._image_token)) if self._has_grid else None
        return Picture.from_prompt(
            token_ids,
            self._image_token,
            inputs,
            grid,
            image.owner,
            is_bidirectional=self._is_bidirectional,
        )

    def inputs_of(self, images: Sequence[Image]) -> dict[str, Any]:
        """Return the encoder's arguments for several images at once.

        Raises what the processor raises.
        """
        return _inputs_of(self._made(self._mark * len(images), images))

    def check_neighbours(self, image: Image) -> None:
        """Raises ValueError if processing an image changes the text next to the placeholder.

        A prompt is tokenised with placeholders, which pictures then replace. Idefics 2's processor
        adds a space to the text after an image, and InternVL's older one writes the images before
        the whole text.
        """
        is_written = self._writes_in_place([image])
        # Step 3.7's processor refuses a second image in a text.
        with suppress(*_ERRORS):
            is_written = is_written and self._writes_in_place([image, image])
        if not is_written:
            raise ValueError("it does not write an image in place of the placeholder alone")

    def _writes_in_place(self, images: Sequence[Image]) -> bool:
        tokenizer = self._processor.tokenizer
        text = f"a{self._mark * len(images)}b"
        written = self._token_ids(self._made(text, images))
        alone = self._token_ids(self._made(self._mark, images[:1]))
        typed = tokenizer(text, **_NO_SPECIAL_TOKENS)["input_ids"]
        replaced = chain.from_iterable(alone if t == self.placeholder else [t] for t in typed)
        decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        return bool(decode(written) == decode([*replaced]))

    def _grid(self, inputs: dict[str, Any], num_rows: int) -> Grid:
        """Grid of rows in time, height and width: the encoder merges squares of patches."""
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
    """Convert a processor's output, an mlx array or not."""
    return read(value) if isinstance(value, mx.array) else np.array(value)


def _placeholders_of(processor: Any) -> Iterator[str]:
    """Yield candidate image placeholders for this processor's texts."""
    for name in ("boi_token", "image_token"):
        token = getattr(processor, name, None)
        if isinstance(token := getattr(token, "content", token), str) and token:
            yield token
    if isinstance(token_id := getattr(processor, "img_context_token_id", None), int):  # InternVL
        yield str(processor.tokenizer.convert_ids_to_tokens(token_id))

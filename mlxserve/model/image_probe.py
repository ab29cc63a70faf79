"""The load-time probe of an image model: text, image, text over pages, against mlx-vlm.

In float32 every row must agree. In half precisions both ways round differently, by an amount that
depends on the model, and where two experts of a router score alike they may choose different ones.
The text before the image, which the text model's own probe has accepted, shows how much that is;
most rows of the image, and most rows after it, must be as near.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels.reading import read
from mlxserve.cache.kv import Backends, KVPool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.images.image import Image
from mlxserve.images.picture import Picture, PlacedPicture, blocks_of
from mlxserve.model.batch import Batch
from mlxserve.model.bidirectional import Bidirectional, MaskedCache
from mlxserve.model.image_encoder import arguments
from mlxserve.model.load import LoadedModel
from mlxserve.model.probe import MAX_ROWS, TOLERANCES, relative
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table

log = logging.getLogger("mlxserve.vision")

_NUM_BEFORE, _NUM_AFTER = 12, 12  # tokens of text around the image
_PAGE_SIZE = 16
# Height and width: 6 x 5 rows for Qwen2.5-VL and GLM-4V. With 2 x 2 rows (48 x 64 pixels) rounding to 16 bits hides
# rows that are rotated as text.
_PIXELS = (160, 128)
# Tolerance factor in half precision over the error of the rows of text before the image.
_NOISE_FACTOR = 4
_LEAST, _MOST = 0.02, 0.25  # bounds of the tolerance, relative to the length of the row


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of an image, and of texts before and after it."""

    before: list[int]
    picture: Picture
    after: list[int]

    @classmethod
    def around(cls, picture: Picture, vocab_size: int, image_token: int, config: Any) -> Sample:
        """Place the picture between texts, with the tokens by which mlx-vlm finds it (`config`)."""
        own = {image_token, *picture.ids}
        drawn = np.random.RandomState(1).randint(1, min(vocab_size, 1 << 10), 128)
        text = [token for token in map(int, drawn) if token not in own]
        before, after = text[:_NUM_BEFORE], text[_NUM_BEFORE : _NUM_BEFORE + _NUM_AFTER]
        for name, side, at in (("vision_start", before, len(before)), ("vision_end", after, 0)):
            if isinstance(token := getattr(config, f"{name}_token_id", None), int):
                side.insert(at, token)
        return cls(before, picture, after)

    @property
    def placed(self) -> PlacedPicture:
        return PlacedPicture(len(self.before), self.picture)

    @property
    def ids(self) -> list[int]:
        return [*self.before, *self.picture.ids, *self.after]


def probe_image() -> Image:
    pixels = np.random.RandomState(0).randint(0, 256, (*_PIXELS, 3))
    return Image.from_pixels(pixels.astype(np.uint8))


def dense_logits(
    whole: nn.Module,
    sample: Sample,
    image_token: int,
    bidirectional: Bidirectional | None = None,
) -> np.ndarray:
    """Return (rows, vocabulary), as mlx-vlm's `generate_step` computes a prompt at once.

    Where rows of an image attend in both directions, the masks are transformers', which mlx-vlm's are not.
    """
    ids = mx.array([[image_token if token < 0 else token for token in sample.ids]])
    merged = whole.get_input_embeddings(
        ids, mask=mx.ones_like(ids), **arguments(sample.picture.inputs)
    )
    others = {
        name: value
        for name, value in merged.to_dict().items()
        if name != "inputs_embeds" and value is not None
    }
    cache = make_prompt_cache(whole.language_model)
    if bidirectional is not None:
        cache = [MaskedCache(bidirectional, blocks_of((sample.placed,))) for _ in cache]
    else:
        # By these mlx-vlm knows which rows attend in both directions, for models that this project does not know.
        others["mm_token_type_ids"] = (ids == image_token).astype(mx.int32)
    logits = whole.language_model(
        ids, inputs_embeds=merged.inputs_embeds, cache=cache, **others
    ).logits
    return read(logits[0].astype(mx.float32))


def paged_logits(loaded: LoadedModel, backends: Backends, sample: Sample) -> np.ndarray:
    """Return the same rows in chunks, and the last token alone.

    The chunks end inside the image, or a little before and after it if it may not be divided.
    """
    ids, start = sample.ids, len(sample.before)
    num_pages = -(-len(ids) // _PAGE_SIZE)
    runner = ModelRunner(loaded, KVPool(loaded.layers, num_pages, _PAGE_SIZE, backends))
    whole_request = Request(
        "image",
        ids,
        SamplingParams(temperature=0),
        pictures=(sample.placed,),
    )
    request, table = LiveRequest(whole_request), as_page_table(range(num_pages))
    third = len(sample.picture.ids) // 3
    inside = [start + third, start + 2 * third]
    if whole_request.blocks:
        inside = [start - 3, sample.placed.end + 3]
    cuts = [0, *inside, len(ids) - 1, len(ids)]
    rows = []
    for first, end in pairwise(cuts):
        chunk = Chunk(request, first, end - first, table, samples=end == len(ids))
        batch = Batch.from_chunks([chunk], _PAGE_SIZE)
        logits = runner.logits(batch, mx.array(batch.tokens), all_rows=True)
        rows.append(read(logits.astype(mx.float32)))
    return np.concatenate(rows)


def refuse_others(dense: np.ndarray, paged: np.ndarray, sample: Sample, dtype: mx.Dtype) -> None:
    """Raises ValueError if the rows differ by more than rounding."""
    if dtype == mx.float32:
        rows, tolerance = relative(paged, dense), TOLERANCES[dtype]
        is_close = bool(np.isfinite(rows).all() and rows.max() <= tolerance)
    else:
        rows = _apart(paged, dense)
        start, end = len(sample.before), len(sample.before) + len(sample.picture.ids)
        noise = float(np.median(rows[:start]))
        tolerance = min(_MOST, max(_LEAST, _NOISE_FACTOR * noise))
        shares = [float(np.mean(part <= tolerance)) for part in (rows[start:end], rows[end:])]
        is_close = bool(np.isfinite(rows).all() and min(shares) >= MAX_ROWS)
    if not is_close:
        raise ValueError(
            f"its logits beside an image are not mlx-vlm's (they differ by {rows.max():.1e}; "
            f"{tolerance:.0e} is allowed)"
        )
    log.info("Beside an image, logits differ by %.1e (%.0e is allowed)", rows.max(), tolerance)


def _apart(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Distance of each row, relative to the row's own length around its mean."""
    excluded = np.isneginf(actual) & np.isneginf(expected)
    actual, expected = np.where(excluded, 0, actual), np.where(excluded, 0, expected)
    lengths = np.linalg.norm(expected - expected.mean(axis=1, keepdims=True), axis=1)
    rows: np.ndarray = np.linalg.norm(actual - expected, axis=1) / np.maximum(lengths, 1e-9)
    return rows

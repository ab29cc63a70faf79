"""Gives a text model that was loaded and probed its vision, or says why it has none.

A model sees only if rows of an image, over pages and in chunks that end inside it, give the logits of mlx-vlm's
own dense forward. Otherwise its images are refused by a sentence, and its text is served as before.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels.reading import read
from mlxserve.cache.kv import Backends, KVPool
from mlxserve.errors import in_one_line
from mlxserve.hub.files import ModelFiles
from mlxserve.images.image import Image
from mlxserve.images.picture import Picture, PlacedPicture
from mlxserve.model.batch import Batch
from mlxserve.model.caches import MODEL_ERRORS
from mlxserve.model.definitions import is_installed, module_of
from mlxserve.model.image_processor import ImageProcessor, load_processor
from mlxserve.model.load import LoadedModel
from mlxserve.model.probe import MOST_ROWS, TOLERANCES, relative
from mlxserve.model.runner import ModelRunner
from mlxserve.model.shown_pictures import ShownPictures, teach
from mlxserve.model.vision import Vision
from mlxserve.model.vision_tower import Tower, arguments, in_float32, load_whole
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from mlxserve.sampling_params import SamplingParams

log = logging.getLogger("mlxserve.vision")

_TEXT = "language_model."
_HEAD = ".head."  # `SelectedRowsHead`
_INSTALL = "install mlxserve[vision] (mlx-vlm and Pillow), and restart"
_ERRORS = (*MODEL_ERRORS, ImportError, AssertionError, OSError)
_NUM_BEFORE, _NUM_AFTER = 5, 7  # tokens of text around the probe's image
_PAGE_SIZE = 16


class NoVision(Exception):
    """Why a model that was trained to see does not."""


def vision_of(
    files: ModelFiles, loaded: LoadedModel, backends: Backends, *, is_metal: bool
) -> Vision | None:
    """None for a model of text only. Raises NoVision."""
    if not loaded.config.get("vision_config") or files.gguf is not None:
        return None
    if not is_installed() or importlib.util.find_spec("PIL") is None:
        raise NoVision(f"{_INSTALL}, to let this model see images")
    if loaded.group is not None:
        raise NoVision("images are not shown to a model that is divided among ranks")
    try:
        return _vision_of(files, loaded, backends, is_metal=is_metal)
    except _ERRORS as error:
        log.info("%s does not see", loaded.name, exc_info=error)
        raise NoVision(
            f"the vision of this {loaded.config.get('model_type')} model cannot be served: "
            f"{in_one_line(error)}"
        ) from error


def _vision_of(
    files: ModelFiles, loaded: LoadedModel, backends: Backends, *, is_metal: bool
) -> Vision:
    module = module_of(loaded.config)
    if module is None:
        raise ValueError("mlx-vlm does not define it")
    whole = load_whole(module, loaded.config, files.path, _text_arrays(loaded.model))
    if not is_metal:
        whole = in_float32(whole)
    axes = _axes_of(whole.language_model)
    image_token = _image_token(whole.config)
    reader = ImageProcessor(
        load_processor(module, files.path), image_token, has_grid=axes is not None
    )
    picture = reader.read(_probe_image())
    before, after = _text_around(loaded.vocab_size, picture, image_token, whole.config)
    dense = _dense(whole, before, picture, after, image_token)
    shown = ShownPictures()
    tower = Tower(whole, image_token, _hidden_size(loaded), loaded.dtype)
    vision = Vision(tower, shown, reader)
    teach(loaded.model, shown, num_deep=len(vision.see(picture).deep), axes=axes)
    seeing = loaded.in_own_dtype().that_sees(vision)
    _refuse_others(dense, _paged(seeing, backends, before, picture, after), loaded.dtype)
    mx.eval(whole.parameters())
    return Vision(tower, shown, reader)  # without the probe's image


def _text_arrays(model: nn.Module) -> dict[str, mx.array]:
    """The arrays of the language model by mlx-vlm's names."""
    return {
        name.removeprefix(_TEXT).replace(_HEAD, "."): array
        for name, array in tree_flatten(model.parameters())
    }


def _axes_of(text: nn.Module) -> Sequence[int] | None:
    """The axis of each frequency of its rotations; empty where that is not known, and None where rows have
    one position."""
    if not hasattr(text, "get_rope_index"):
        return None
    for module in text.modules():
        selector = getattr(module, "position_selector", None)
        if isinstance(selector, mx.array):
            return [int(axis) for axis in read(selector).ravel()]
    return []


def _image_token(config: Any) -> int:
    for name in ("image_token_id", "image_token_index"):
        if isinstance(token := getattr(config, name, None), int):
            return token
    raise ValueError("its configuration names no token of images")


def _hidden_size(loaded: LoadedModel) -> int:
    [embedding] = [m for p, m in loaded.model.named_modules() if p.endswith("embed_tokens")]
    embedded: mx.array = embedding(mx.array([0]))
    return int(embedded.shape[-1])


# ---- the probe


def _probe_image() -> Image:
    pixels = np.random.RandomState(0).randint(0, 256, (48, 64, 3))
    return Image.of(pixels.astype(np.uint8))


def _text_around(
    vocab_size: int, picture: Picture, image_token: int, config: Any
) -> tuple[list[int], list[int]]:
    """Tokens before and after the image, with those by which mlx-vlm finds it."""
    own = {image_token, *picture.ids}
    drawn = np.random.RandomState(1).randint(0, min(vocab_size, 1 << 10), 64)
    text = [token for token in map(int, drawn) if token not in own]
    before, after = text[:_NUM_BEFORE], text[_NUM_BEFORE : _NUM_BEFORE + _NUM_AFTER]
    for name, side, at in (("vision_start", before, len(before)), ("vision_end", after, 0)):
        if isinstance(token := getattr(config, f"{name}_token_id", None), int):
            side.insert(at, token)
    return before, after


def _dense(
    whole: nn.Module, before: list[int], picture: Picture, after: list[int], image_token: int
) -> np.ndarray:
    """(rows, vocabulary), as mlx-vlm's `generate_step` computes a prompt at once."""
    middle = [image_token if token < 0 else token for token in picture.ids]
    ids = mx.array([[*before, *middle, *after]])
    found = whole.get_input_embeddings(ids, mask=mx.ones_like(ids), **arguments(picture))
    others = {
        name: value
        for name, value in found.to_dict().items()
        if name != "inputs_embeds" and value is not None
    }
    cache = make_prompt_cache(whole.language_model)
    logits = whole.language_model(
        ids, inputs_embeds=found.inputs_embeds, cache=cache, **others
    ).logits
    return read(logits[0].astype(mx.float32))


def _paged(
    loaded: LoadedModel, backends: Backends, before: list[int], picture: Picture, after: list[int]
) -> np.ndarray:
    """The same rows, in chunks that end inside the image, and the last token alone."""
    ids = [*before, *picture.ids, *after]
    num_pages = -(-len(ids) // _PAGE_SIZE)
    runner = ModelRunner(loaded, KVPool(loaded.layers, num_pages, _PAGE_SIZE, backends))
    asked = Request(
        "image",
        ids,
        SamplingParams(temperature=0),
        pictures=(PlacedPicture(len(before), picture),),
    )
    request, table = LiveRequest(asked), as_page_table(range(num_pages))
    third = len(picture.ids) // 3
    cuts = [0, len(before) + third, len(before) + 2 * third, len(ids) - 1, len(ids)]
    rows = []
    for start, end in pairwise(cuts):
        chunk = Chunk(request, start, end - start, table, samples=end == len(ids))
        batch = Batch.of([chunk], _PAGE_SIZE)
        logits = runner.logits(batch, mx.array(batch.tokens), all_rows=True)
        rows.append(read(logits.astype(mx.float32)))
    return np.concatenate(rows)


def _refuse_others(dense: np.ndarray, paged: np.ndarray, dtype: mx.Dtype) -> None:
    """Raises ValueError where the rows differ by more than rounding does."""
    rows = relative(paged, dense)
    share = MOST_ROWS if dtype != mx.float32 else 1.0
    tolerance = TOLERANCES.get(dtype, 1e-1)
    if not (np.isfinite(rows).all() and np.mean(rows <= tolerance) >= share):
        raise ValueError(
            f"its logits beside an image are not mlx-vlm's (they differ by {rows.max():.1e} of the "
            f"largest; {tolerance:.0e} is allowed)"
        )
    log.info("Beside an image, logits differ by %.1e of the largest", rows.max())

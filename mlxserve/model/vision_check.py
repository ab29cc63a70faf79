"""Adds vision to a loaded and probed text model, or explains why it has none.

A model sees only if rows of an image, over pages and in chunks that end inside it, give the logits
of mlx-vlm's own dense forward. Otherwise its images are refused by a sentence, and its text is
served as before.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from metal_kernels.reading import read
from mlxserve.cache.kv import Backends
from mlxserve.hub.files import ModelFiles
from mlxserve.images.image import Image
from mlxserve.images.picture import Picture
from mlxserve.model.bidirectional import Bidirectional
from mlxserve.model.definitions import ModelArguments, is_installed, module_of
from mlxserve.model.image_encoder import Tower, in_float32, load_whole
from mlxserve.model.image_encoder_batches import probed_axes
from mlxserve.model.image_encoder_memory import plan_tower
from mlxserve.model.image_encoder_pieces import CPU_WORK, METAL_WORK
from mlxserve.model.image_probe import (
    Sample,
    dense_logits,
    paged_logits,
    probe_image,
    refuse_others,
)
from mlxserve.model.image_processor import ImageProcessor
from mlxserve.model.load import LoadedModel
from mlxserve.model.registered_processors import load_processor, processor_class, reason_of
from mlxserve.model.shown_pictures import ShownPictures, teach
from mlxserve.model.split_by_layers import keep_first_layers
from mlxserve.model.vision import MAX_FEATURES, Vision
from mlxserve.system.extras import extra_command

log = logging.getLogger("mlxserve.vision")

_TEXT = "language_model."
_HEAD = ".head."  # `SelectedRowsHead`
_FEATURES_SHARE = 32  # one part of the memory is for cached features
# Height and width of images whose rows are counted: a processor has a bound, to which some shapes come nearer.
_SIDES = ((1024, 1024), (720, 1280), (1280, 720))
_MARGIN = 8  # one part in so many is added for other shapes


class NoVision(Exception):
    """A model trained to see cannot; the message says why."""


def may_see(files: ModelFiles, loaded: LoadedModel) -> bool:
    """True if the model was trained to see and its vision can be loaded."""
    return bool(loaded.config.get("vision_config")) and files.gguf is None and is_installed()


def vision_of(
    files: ModelFiles,
    loaded: LoadedModel,
    backends: Backends,
    *,
    is_metal: bool,
    memory_limit: int,
) -> Vision | None:
    """Return the vision; None for a text-only model. Raises NoVision.

    memory_limit: bytes
    """
    if not loaded.config.get("vision_config") or files.gguf is not None:
        return None
    refuse_without_packages()
    with refusing(loaded):
        text = text_arrays(loaded.model)
        return check_vision(files, loaded, backends, text, is_metal, memory_limit).vision


def refuse_without_packages() -> None:
    """Raises NoVision if images need packages that are not installed."""
    if not is_installed() or importlib.util.find_spec("PIL") is None:
        raise NoVision(f"images need mlx-vlm and Pillow: {extra_command('vision')}, and restart")


@contextmanager
def refusing(loaded: LoadedModel) -> Iterator[None]:
    """Turn errors into NoVision, whose message gives the model's kind and a reason."""
    try:
        yield
    except Exception as error:
        # mlx-vlm's code has run on files that it does not check: whatever it raises, text is served.
        log.info("%s does not see", loaded.name, exc_info=error)
        raise NoVision(
            f"the vision of this {loaded.config.get('model_type')} model cannot be served: "
            f"{reason_of(error)}"
        ) from error


@dataclass(frozen=True, slots=True)
class CheckedVision:
    """A vision, and what was taught to the text model for it.

    num_deep, axes: as `teach` takes them
    dtype: of the features
    """

    vision: Vision
    shown: ShownPictures
    num_deep: int
    axes: Sequence[int] | None
    dtype: mx.Dtype


def check_vision(
    files: ModelFiles,
    loaded: LoadedModel,
    backends: Backends,
    text: Mapping[str, mx.array],
    is_metal: bool,
    memory_limit: int,
) -> CheckedVision:
    """Load the vision, teach it to a text model, and compare both with mlx-vlm's. Raises what these raise.

    loaded: all of the text model, or its first layers
    text: arrays of all of it, by mlx-vlm's names
    """
    config = loaded.config
    bidirectional = Bidirectional.from_config(config)
    if bidirectional is not None and loaded.by_sequence:
        raise ValueError(
            "its rows of an image attend in both directions, and its layers make masks of their own"
        )
    module = module_of(config)
    if module is None:
        raise ValueError("mlx-vlm does not define it")
    kind = processor_class(config)
    image_token = _image_token(ModelArguments(module).from_dict(config))
    processor = load_processor(kind, files.path)
    with _step("mlx-vlm cannot load its tower"):
        whole = load_whole(module, config, files.path, text)
        if len(loaded.model.layers) < len(whole.language_model.layers):
            keep_first_layers(whole.language_model, len(loaded.model.layers))
        if not is_metal:
            whole = in_float32(whole)
    axes = _axes_of(whole.language_model)
    with _step("its processor cannot be used"):
        reader = ImageProcessor(
            processor,
            image_token,
            has_grid=axes is not None,
            is_bidirectional=bidirectional is not None,
        )
        reader.check_neighbours(image := probe_image())
        picture = reader.make(image)
        if bidirectional is not None:
            _check_separated(picture)
    shown = ShownPictures()
    with _step("the probe of an image fails"):
        sample = Sample.around(picture, loaded.vocab_size, image_token, whole.config)
        dense = dense_logits(whole, sample, image_token, bidirectional)
        max_work = METAL_WORK if is_metal else CPU_WORK
        tower = Tower(whole, image_token, hidden_size(loaded), loaded.dtype, max_work)
        vision = Vision(tower, shown, reader, bidirectional=bidirectional)
        features = vision.see(picture)
        teach(loaded.model, shown, num_deep=len(features.deep), axes=axes)
        seeing = loaded.in_own_dtype().that_sees(vision)
        refuse_others(dense, paged_logits(seeing, backends, sample), sample, loaded.dtype)
        mx.eval(whole.parameters())
        step_nbytes = plan_tower(tower, reader, memory_limit)
        tower.axes = probed_axes(tower, reader, loaded.dtype)
    vision = Vision(  # another one, without the probe's image
        tower,
        shown,
        reader,
        max_bytes=min(MAX_FEATURES, memory_limit // _FEATURES_SHARE),
        step_nbytes=step_nbytes,
        bidirectional=bidirectional,
        longest_block=0 if bidirectional is None else _longest_block(reader),
    )
    return CheckedVision(vision, shown, len(features.deep), axes, features.rows.dtype)


@contextmanager
def _step(failure: str) -> Iterator[None]:
    """Turn mlx-vlm's errors into ValueError with a message that begins with `failure`."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{failure}: {reason_of(error)}") from error


def _check_separated(picture: Picture) -> None:
    """Raises ValueError if the rows of two images beside each other would see one another."""
    if picture.ids[0] < 0 and picture.ids[-1] < 0:
        raise ValueError(
            "no token separates images beside each other, and their rows attend in both directions"
        )


def _longest_block(reader: ImageProcessor) -> int:
    """Return the most rows of an image that one step computes."""
    images = (Image.from_pixels(np.zeros((*sides, 3), np.uint8)) for sides in _SIDES)
    blocks = [block for image in images for block in reader.make(image).blocks]
    longest = max(end - first for first, end in blocks)
    return longest + longest // _MARGIN


def text_arrays(model: nn.Module) -> dict[str, mx.array]:
    """Arrays of the language model by mlx-vlm's names."""
    return {
        name.removeprefix(_TEXT).replace(_HEAD, "."): array
        for name, array in tree_flatten(model.parameters())
    }


def _axes_of(text: nn.Module) -> Sequence[int] | None:
    """Axis of each frequency of its rotations; empty if unknown.

    None if rows have one position.
    """
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
    raise ValueError("its configuration names no token of images (image_token_id)")


def hidden_size(loaded: LoadedModel) -> int:
    """Numbers of a row's embedding."""
    [embedding] = [m for p, m in loaded.model.named_modules() if p.endswith("embed_tokens")]
    embedded: mx.array = embedding(mx.array([0]))
    return int(embedded.shape[-1])

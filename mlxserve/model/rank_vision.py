"""Vision of a model that is divided among ranks: rank 0 has the image encoder, and checks it alone.

The check of one process compares with mlx-vlm's whole language model, which fits into no rank. What it finds is
how the two definitions fit together: which module reads what of an image, and that pages give the same. For that rank 0
loads the first layers of the undivided model, at least one of each kind, and all that is before and after them, once
more, and checks the vision with these. Every rank then teaches its own part what the check has found.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlxserve.cache.kv import Backends
from mlxserve.hub.files import ModelFiles
from mlxserve.model.bidirectional import Bidirectional
from mlxserve.model.load import LoadedModel, in_float32, prepare, read_model
from mlxserve.model.rank_group import RankGroup, Split
from mlxserve.model.shared_features import RemoteVision, SharedFeatures
from mlxserve.model.shown_pictures import ShownPictures, teach
from mlxserve.model.split_by_layers import keep_first_layers
from mlxserve.model.vision import Vision
from mlxserve.model.vision_check import (
    CheckedVision,
    NoVision,
    check_vision,
    hidden_size,
    refuse_without_packages,
    refusing,
    text_arrays,
)

_DTYPES = (mx.float32, mx.float16, mx.bfloat16)  # of features, numbered by their place


class _Choice(Protocol):
    """A model with backends that its probe has accepted."""

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def backends(self) -> Backends: ...


Choose = Callable[[LoadedModel], _Choice]


class _Facts(NamedTuple):
    """Describes the vision of rank 0 to the other ranks."""

    sees: int
    num_deep: int = 0
    dtype: int = 0
    longest_block: int = 0
    num_axes: int = -1  # of frequencies; -1 where rows have one position

    @classmethod
    def of(cls, checked: CheckedVision | None) -> _Facts:
        if checked is None:
            return cls(sees=0)
        return cls(
            1,
            checked.num_deep,
            _DTYPES.index(checked.dtype),
            checked.vision.longest_block,
            -1 if checked.axes is None else len(checked.axes),
        )


def vision_of_ranks(
    files: ModelFiles, loaded: LoadedModel, choose: Choose, *, is_metal: bool, memory_limit: int
) -> Vision | RemoteVision | None:
    """Return this rank's vision; None for a text-only model. All ranks call it. Raises NoVision.

    choose: `choose_attention` for a model that is not divided
    memory_limit: bytes that this rank may use
    """
    group = loaded.group
    assert group is not None, "the model is divided"
    if not loaded.config.get("vision_config") or files.gguf is not None:
        return None
    checked, reason = None, "rank 0 does not see"
    if group.is_lead:
        try:
            refuse_without_packages()
            with refusing(loaded):
                checked = _checked(files, loaded, choose, is_metal, memory_limit)
        except NoVision as error:
            reason = str(error)
        # The first layers, before memory is measured: what refers to one another is not freed at once.
        gc.collect()
        mx.clear_cache()
    facts = _Facts(*group.from_lead(_Facts.of(checked)))
    if not facts.sees:
        raise NoVision(reason)
    return _taught(loaded, group, facts, checked)


def _taught(
    loaded: LoadedModel, group: RankGroup, facts: _Facts, checked: CheckedVision | None
) -> Vision | RemoteVision:
    """Teach this rank's part of the model. Raises NoVision on all ranks if one cannot."""
    axes = None if checked is None else checked.axes
    if facts.num_axes > 0:
        axes = group.from_lead(axes or [0] * facts.num_axes)
    elif facts.num_axes == 0:
        axes = []
    shown = ShownPictures() if checked is None else checked.shown
    reason = "another rank's part of the model cannot read images"
    is_taught = 1
    try:
        is_stage = group.split is Split.LAYERS
        teach(loaded.model, shown, num_deep=facts.num_deep, axes=axes, is_stage=is_stage)
    except ValueError as error:
        is_taught, reason = 0, str(error)
    if not group.all_min(is_taught):
        raise NoVision(reason)
    shared = SharedFeatures(group, hidden_size(loaded), _DTYPES[facts.dtype], facts.num_deep)
    if checked is None:
        bidirectional = Bidirectional.from_config(loaded.config)
        return RemoteVision(shown, shared, bidirectional, facts.longest_block)
    checked.vision.share_by(shared)
    return checked.vision


def _checked(
    files: ModelFiles, loaded: LoadedModel, choose: Choose, is_metal: bool, memory_limit: int
) -> CheckedVision:
    """Check the vision with the first layers of the undivided model. Raises what the check raises."""
    num_ranks = 1 if loaded.group is None else loaded.group.size
    model, config = read_model(files, is_metal=is_metal)
    if not is_metal:
        model = in_float32(model, files.name, memory_limit * num_ranks)
    text = text_arrays(model)
    keep_first_layers(model, num_first_layers(model, config))
    _refuse_too_large(model, memory_limit - loaded.weight_size)
    mx.eval(model.parameters())
    choice = choose(prepare(model, config, files.name))
    if choice.loaded.by_sequence:
        raise ValueError("its attention needs whole sequences")
    return check_vision(files, choice.loaded, choice.backends, text, is_metal, memory_limit)


def num_first_layers(model: nn.Module, config: Mapping[str, object]) -> int:
    """Return how many first layers have one of each kind, and all after which features are added.

    Raises ValueError if layers share caches, so that the first ones do not compute alone.
    """
    layers, caches = list(model.layers), make_prompt_cache(model)
    if len(layers) != len(caches):
        raise ValueError(
            "its layers share keys, and rank 0 checks images with the first layers alone"
        )
    first: dict[Hashable, int] = {}
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True), 1):
        shapes = tuple((name, array.shape) for name, array in tree_flatten(layer.parameters()))
        first.setdefault((shapes, type(cache), getattr(cache, "max_size", None)), number)
    vision = config.get("vision_config")
    deep = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    return min(len(layers), max(*first.values(), len(deep or ()) + 1))


def _refuse_too_large(model: nn.Module, left: int) -> None:
    """Raises ValueError if the layers need more than the `left` bytes."""
    size = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    if size > left:
        raise ValueError(
            f"rank 0 checks images with {len(model.layers)} whole layers, which need "
            f"{size / (1 << 30):.1f} GiB beside its part, and {max(0, left) / (1 << 30):.1f} GiB are left"
        )

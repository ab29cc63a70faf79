"""Chooses the attention backend of each layer of a model and probes them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from metal_kernels.choice import select_backends
from metal_kernels.ops import Backend, LayerShape
from mlxserve.cache.kv import Backends
from mlxserve.core.errors import InvalidConfig, UnsupportedModel
from mlxserve.hub.adapter_files import AdapterFiles
from mlxserve.hub.files import ModelFiles
from mlxserve.model.chunk_choice import choose_chunks
from mlxserve.model.few_row_products import use_few_rows
from mlxserve.model.fused_layers import FusedLayers, can_fuse
from mlxserve.model.load import LoadedModel, load
from mlxserve.model.probe import probe, probe_adapters
from mlxserve.model.rank_group import RankGroup, Split
from mlxserve.model.rank_vision import vision_of_ranks
from mlxserve.model.vision_check import NoVision, may_see, vision_of

log = logging.getLogger("mlxserve.attention")


class AttentionChoice(NamedTuple):
    """The chosen attention: how a model is run."""

    loaded: LoadedModel
    backends: tuple[Backend, ...]  # backend of each layer
    difference: float  # the probe's largest


def load_probed(
    files: ModelFiles,
    *,
    is_metal: bool,
    memory_limit: int,
    kv_cache_dtype: str,
    attention_backend: str,
    group: RankGroup | None = None,
    adapters: Sequence[AdapterFiles] = (),
) -> AttentionChoice:
    """Load a model and choose its attention.

    Raises what `load` and `choose_attention` raise, and UnsupportedModel for adapters that are not
    the model's.
    """
    loaded = load(files, is_metal=is_metal, memory_limit=memory_limit, group=group)
    if kv_cache_dtype == "q8":
        loaded = loaded.in_8_bits()
    # Joined layers have other names than mlx-vlm's, and are not told an image's positions.
    may_fuse = not adapters and not may_see(files, loaded)
    choice = choose_attention(attention_backend, loaded, may_fuse=may_fuse)
    use_few_rows(choice.loaded, choice.backends)
    choose_chunks(choice.loaded, choice.backends)
    loaded = _with_vision(files, choice, is_metal, memory_limit, attention_backend)
    if adapters:
        loaded = loaded.with_adapters(adapters)
        probe_adapters(loaded.in_own_dtype(), choice.backends)
    return choice._replace(loaded=loaded)


def _with_vision(
    files: ModelFiles,
    choice: AttentionChoice,
    is_metal: bool,
    memory_limit: int,
    attention_backend: str,
) -> LoadedModel:
    """Add the image encoder to the chosen model, or the reason that it has none."""
    loaded = choice.loaded
    try:
        if loaded.group is not None:
            choose = partial(choose_attention, attention_backend, may_fuse=False)
            return loaded.that_sees(
                vision_of_ranks(files, loaded, choose, is_metal=is_metal, memory_limit=memory_limit)
            )
        vision = vision_of(
            files, loaded, choice.backends, is_metal=is_metal, memory_limit=memory_limit
        )
        return loaded.that_sees(vision)
    except NoVision as error:
        log.warning("%s: images are refused: %s", loaded.name, error)
        return loaded.that_sees(None, no_vision_reason=str(error))


def choose_attention(name: str, loaded: LoadedModel, *, may_fuse: bool = True) -> AttentionChoice:
    """Return the fastest attention that the probe accepts.

    Tries the requested backends, on Metal first with fused layers (`fused_layers.py`; not with
    adapters); with "auto" then plain mlx in all layers; and last one sequence at a time in plain
    mlx, for models whose attention needs whole sequences. The log says what is slower and why.
    Raises InvalidConfig, and UnsupportedModel for a model that cannot be paged.

    Several ranks choose the same, by the largest difference of all of them. They do not try one
    sequence at a
    time: its forwards are several chains of collectives.
    """
    shapes = [
        LayerShape(spec.key_dim, spec.value_dim, spec.dtype, spec.is_latent, spec.is_quantised)
        for spec in loaded.layers
    ]
    try:
        backends = select_backends(name, shapes)
    except ValueError as error:
        raise InvalidConfig(f"attention_backend: {error}", option="attention_backend") from error
    plain = select_backends("cpu", shapes)
    attempts = [(loaded, backends)]
    if name == "auto" and any(backend.name != "cpu" for backend in backends):
        attempts.append((loaded, plain))
    if name in ("auto", "cpu") and loaded.group is None:
        attempts.append((replace(loaded, by_sequence=True), plain))
    if may_fuse and can_fuse(loaded, backends):
        fused = FusedLayers.fuse(loaded.model, loaded.dtype, loaded.context.longest)
        difference, reason = _probed_twice(loaded, backends)
        if reason is None:
            log.info("%s: %s", loaded.name, fused)
            return AttentionChoice(loaded, backends, difference)
        fused.undo()
        log.info("%s keeps its layers as they are. With fewer kernels: %s", loaded.name, reason)
    reasons: list[UnsupportedModel] = []
    for model, tried in attempts:
        difference, reason = _probed_twice(model, tried)
        if reason is not None:
            reasons.append(reason)
            continue
        if model.by_sequence:
            log.warning(
                "%s is served one sequence at a time, because its attention needs whole sequences: "
                "a step reads the weights once for every answer, so several at once are slower.",
                loaded.name,
            )
        elif reasons:
            log.warning("Attention runs in plain mlx, which is slower: %s", reasons[0])
        return AttentionChoice(model, tried, difference)
    raise reasons[-1]


def _probed_twice(loaded: LoadedModel, backends: Backends) -> tuple[float, UnsupportedModel | None]:
    """Probe with keys and values in the model's dtype, then as they are stored."""
    difference, reason = _probed(loaded.in_own_dtype(), backends)
    if reason is None and loaded.is_quantised:
        return _probed(loaded, backends)
    return difference, reason


def _probed(loaded: LoadedModel, backends: Backends) -> tuple[float, UnsupportedModel | None]:
    """Return (largest difference, refusal), agreed by all ranks."""
    difference, reason = math.inf, None
    try:
        difference = probe(loaded, backends)
    except UnsupportedModel as error:
        reason = error if loaded.group is None else _refused_by_ranks(loaded, error)
    if loaded.group is None:
        return difference, reason
    if reason is not None and loaded.group.split is Split.LAYERS:
        # It may have left the others in the middle of a forward.
        raise reason
    worst = loaded.group.all_max_float(difference)
    if reason is None and worst == math.inf:
        reason = UnsupportedModel(f"{loaded.name}: its attention is wrong on another rank.")
    return worst, reason


def _refused_by_ranks(loaded: LoadedModel, reason: UnsupportedModel) -> UnsupportedModel:
    log.info("%s", reason)
    return UnsupportedModel(
        f"{loaded.name}: the attention of this {loaded.config.get('model_type')} model does not work "
        "over pages when it is split among ranks, which do not try one sequence at a time. It may work "
        "in one process."
    )


def backend_names(backends: Sequence[Backend]) -> str:
    """Describe the layers' backends, with counts if they differ."""
    counts = Counter(backend.name for backend in backends)
    if len(counts) == 1:
        return next(iter(counts))
    if not counts:
        return "no layer"
    return " and ".join(f"{name} ({count} layers)" for name, count in counts.items())

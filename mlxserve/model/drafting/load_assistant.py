"""Loads an assistant beside the model whose keys and values it reads, or refuses it with a sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import load_model

from metal_kernels.reading import read
from mlxserve.cache.kv import KVPool, LayerSpec
from mlxserve.cache.window_kv import WindowKV
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig, UnsupportedModel, in_one_line
from mlxserve.hub.assistants import why_not_for
from mlxserve.hub.files import ModelFiles
from mlxserve.model.drafting.assistant import FULL, SLIDING, Assistant, last_layers
from mlxserve.model.drafting.assistant_model import AssistantArgs, AssistantModel
from mlxserve.model.drafting.assistant_probe import share_accepted
from mlxserve.model.drafting.head_probe import MIN_SHARE, NUM_GUESSES
from mlxserve.model.load import (
    READ_ERRORS,
    LoadedModel,
    in_float32,
    refuse_packed,
    refuse_too_large,
)
from mlxserve.model.paged import use_paged_attention

log = logging.getLogger("mlxserve.model.drafting")

# 10.4 -> 2.7 ms a call of a head of another family, as many guesses accepted (mlxcel #1203).
_BITS, _GROUP_SIZE = 4, 64
_FLOAT_SIZE = 4  # bytes of a logit that is sampled from


@dataclass(frozen=True, slots=True)
class LoadedAssistant:
    """An assistant ready to draft for the model that it was loaded beside."""

    files: ModelFiles
    model: AssistantModel

    @property
    def loaded(self) -> LoadedAssistant:
        """Itself: there is no attention to choose."""
        return self

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Shapes of keys and values of its own: none."""
        return ()

    @property
    def weight_size(self) -> int:
        """Bytes of the weights."""
        total: int = sum(array.nbytes for _, array in tree_flatten(self.model.parameters()))
        return total

    def step_size(self, config: EngineConfig, *, is_metal: bool, memory_limit: int) -> int:  # noqa: ARG002
        """Estimate a call with a row of each request: logits as computed and as filtered."""
        args, num_rows = self.model.args, config.scheduler.max_num_seqs
        num_chosen = 0
        if args.num_clusters:
            size = args.text.vocab_size // args.num_clusters
            num_chosen = args.num_chosen * size * args.text.hidden_size
        nbytes: int = num_rows * _FLOAT_SIZE * (2 * args.text.vocab_size + num_chosen)
        return nbytes

    def drafter(
        self,
        config: EngineConfig,
        target: LoadedModel,
        kv: KVPool,
        windows: WindowKV | None,
        first_pages: int | None,  # noqa: ARG002 (it has none)
    ) -> Assistant:
        """Make a drafter that reads the pools of the target."""
        return Assistant(self.model, target, kv, windows, seed=config.seed)


def load_assistant(
    files: ModelFiles,
    target: LoadedModel,
    text: Callable[[], Sequence[int]],
    *,
    is_metal: bool,
    memory_limit: int,
) -> LoadedAssistant:
    """Load the assistant in `files` for `target`, whose weights have been loaded.

    text: returns the token ids of a fixed text, at which it guesses first
    memory_limit: bytes for both. Raises InvalidConfig for an assistant of another model, UnsupportedModel,
        OutOfMemory.
    """
    reason = why_not_for(files.config, files.name, target.config, target.name)
    if reason is not None:
        raise InvalidConfig(reason, option="draft_model")
    memory_limit -= target.weight_size
    refuse_too_large(files.weight_size, files.name, memory_limit)
    model = _read(files)
    _refuse_other_layers(model, files.name, target)
    if is_metal:
        _quantise(model)
        model.update(tree_map(_as(target.dtype), model.parameters()))
    else:
        model = in_float32(model, files.name, memory_limit)
    use_paged_attention(model)
    mx.eval(model.parameters())
    share = share_accepted(model, target, text())
    if share < MIN_SHARE:
        raise InvalidConfig(
            f"draft_model={files.name}: {100 * share:.0f} % of its guesses at {NUM_GUESSES} tokens of a text are right "
            f"and {100 * MIN_SHARE:.0f} % are required. It may be the assistant of another model.",
            option="draft_model",
        )
    loaded = LoadedAssistant(files, model)
    log.info(
        "%s drafts for %s: %.2f GiB of weights, no pages, and %.0f %% of a text's tokens guessed",
        files.name,
        target.name,
        loaded.weight_size / (1 << 30),
        100 * share,
    )
    return loaded


def _read(files: ModelFiles) -> AssistantModel:
    """Return the model as the files have it. Raises UnsupportedModel."""
    try:
        model, _ = load_model(
            files.path,
            lazy=True,
            model_config={"model_file": None},
            get_model_classes=lambda **_: (AssistantModel, AssistantArgs),
        )
    except READ_ERRORS as error:
        raise UnsupportedModel(
            f"{files.name} cannot be loaded as an assistant of Gemma 4: {in_one_line(error)}"
        ) from error
    assert isinstance(model, AssistantModel)
    refuse_packed(model, files)
    if model.args.num_clusters and not _is_order(model.masked_embedding.token_ordering):
        raise UnsupportedModel(
            f"{files.name}: its order of tokens has some twice, or some that do not exist. Download it again."
        )
    return model


def _is_order(ids: mx.array) -> bool:
    """Return True if these are the numbers from 0 on, each once, in any order."""
    return bool(read(mx.all(mx.sort(ids) == mx.arange(ids.size))).item())


def _refuse_other_layers(model: AssistantModel, name: str, target: LoadedModel) -> None:
    """Raises InvalidConfig if the layers cannot read those of the target, UnsupportedModel for unknown ones."""
    if target.by_sequence:
        raise InvalidConfig(
            f"draft_model={name}: {target.name} is served one sequence at a time, because its attention needs "
            "whole sequences, and an assistant reads pages. Leave draft_model out.",
            option="draft_model",
        )
    last = last_layers(target.layers)
    if unknown := model.layer_types - {FULL, SLIDING}:
        raise UnsupportedModel(
            f"{name}: layers of the type {min(unknown)!r} are not known of an assistant."
        )
    for layer in model.model.layers:
        kind, heads, dim = layer.layer_type, layer.self_attn.n_heads, layer.self_attn.head_dim
        what = f"its {kind} layers have {heads} heads of {dim} numbers"
        if kind not in last:
            raise _without_layer(name, kind, target)
        spec = target.layers[last[kind]]
        if spec.key_dim != dim or heads % spec.kv_heads:
            has = f"{target.name} has {spec.kv_heads} of {spec.key_dim} there"
            raise _misfit(name, f"{what}, and {has}")


def _without_layer(name: str, kind: str, target: LoadedModel) -> InvalidConfig:
    if target.group is not None:
        return InvalidConfig(
            f"draft_model={name} reads the keys of the last {kind} layer of {target.name}, which rank 0 does not "
            "have. Divide the model among fewer ranks, choose a draft model, or leave draft_model out.",
            option="draft_model",
        )
    which = "sliding window" if kind == SLIDING else "layer that sees all positions"
    return _misfit(name, f"{target.name} has no {which}")


def _misfit(name: str, reason: str) -> InvalidConfig:
    return InvalidConfig(
        f"draft_model={name} reads keys and values of another model: {reason}. Choose the model's own assistant, or "
        "leave draft_model out.",
        option="draft_model",
    )


def _quantise(model: AssistantModel) -> None:
    """Quantise the weights to 4 bits, unless some are quantised already."""
    if any(hasattr(module, "bits") for module in model.modules()):
        return

    def can_be(_: str, module: nn.Module) -> bool:
        weight: Mapping[str, Any] = module
        return hasattr(module, "to_quantized") and weight["weight"].shape[-1] % _GROUP_SIZE == 0

    nn.quantize(model, _GROUP_SIZE, _BITS, class_predicate=can_be)


def _as(dtype: mx.Dtype) -> Any:
    """Return a function that converts floats to `dtype`."""

    def convert(array: mx.array) -> mx.array:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array

    return convert

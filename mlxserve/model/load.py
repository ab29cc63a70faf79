"""Loads a checked folder as a model that attends over pages, or refuses it with a reason.

Every decoder-only mlx-lm architecture can be served whose layers keep keys and values, latent
vectors or recurrent states (`caches.py`). The probe tests that its paged answers are equal
(`probe.py`).

On a CPU projections stay separate, as in the weights: fusing q, k, v into one product and gate, up
into another took 0.97, 1.03 and 1.13 of the time for 1, 16 and 256 rows (768 wide, 2-core x86),
with identical bits. On Metal `fused_layers.py` joins them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from metal_kernels.replay import ReplayOps
from mlxserve.cache.kv import LayerSpec
from mlxserve.core.errors import InvalidConfig, OutOfMemory, UnsupportedModel
from mlxserve.hub.adapter_files import AdapterFiles
from mlxserve.hub.class_defaults import with_class_defaults
from mlxserve.hub.context import CONTEXT_KEYS, Context, context_of
from mlxserve.hub.files import ModelFiles, text_config, unserved_weights
from mlxserve.hub.gguf.weights import load_gguf
from mlxserve.hub.head_families import family_of, head_tensors
from mlxserve.hub.headers import read_shapes
from mlxserve.hub.unsupported_formats import explain_quantisation
from mlxserve.model.adapters import Adapters, attach
from mlxserve.model.caches import CacheTree, look_at
from mlxserve.model.definitions import VlmLanguageModel, definition_of
from mlxserve.model.float32 import cast_to_float32, dequantised_in_float32
from mlxserve.model.packed_states import StateSpec
from mlxserve.model.paged import RowSelector, select_rows, use_paged_attention
from mlxserve.model.rank_group import RankGroup, Split
from mlxserve.model.refusals import why_not_loaded
from mlxserve.model.shared_features import RemoteVision
from mlxserve.model.split_by_heads import drop_head, split_by_heads
from mlxserve.model.split_by_layers import split_by_layers
from mlxserve.model.vision import Vision

log = logging.getLogger("mlxserve.load")

_TIED = "tie_word_embeddings"
READ_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    AttributeError,
    ImportError,
    NameError,  # raised by mlx-lm's conversion of AWQ if no layer is quantised
    ArithmeticError,  # sizes that overflow an array's shape
    AssertionError,
)


class LoadedDrafter(Protocol):
    """Describes what is loaded beside a model to make its drafts."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Shapes of the keys and values that it keeps of each position."""

    @property
    def weight_size(self) -> int:
        """Bytes of the weights."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for the paged path.

    caches       kinds and shapes of the layers' caches
    selector     which rows the head turns into logits
    vocab_size   number of logits per row
    context      positions by default, and at most
    by_sequence  the model is called once for each sequence of a step, not once for all rows
    group        the ranks that it is divided among; None if all of it is here
    vision       its image encoder, or what stands for rank 0's; None if it reads text only
    no_vision_reason    why a model trained to see has none
    adapters     of its layers; None if they are as they were loaded
    drafter      makes its drafts; weights and pages are counted with its own
    no_drafts_reason    why a head that it has makes none
    replay       computes all rows of drafts in one call of each recurrent layer; None for a call for each row
    """

    name: str
    model: nn.Module
    config: Mapping[str, Any]
    caches: CacheTree
    selector: RowSelector
    vocab_size: int
    context: Context
    by_sequence: bool = False
    group: RankGroup | None = None
    vision: Vision | RemoteVision | None = None
    no_vision_reason: str = ""
    adapters: Adapters | None = None
    drafter: LoadedDrafter | None = None
    no_drafts_reason: str = ""
    replay: ReplayOps | None = None

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Shapes of the layers' keys and values."""
        return self.caches.layers

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Shapes of the layers' recurrent states."""
        return self.caches.states

    @property
    def max_length(self) -> int:
        """Default context in positions."""
        return self.context.length

    @property
    def has_states(self) -> bool:
        """True if it has recurrent states, here or on another rank."""
        return self.caches.has_states

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype that the layers compute in."""
        return self.layers[0].dtype if self.layers else self.states[0].arrays[0][1]

    def all_min(self, number: int) -> int:
        """Minimum over all ranks; a collective call."""
        return number if self.group is None else self.group.all_min(number)

    def all_max(self, number: int) -> int:
        """Maximum over all ranks; a collective call."""
        return number if self.group is None else self.group.all_max(number)

    @property
    def is_quantised(self) -> bool:
        """True if keys and values are stored in 8 bits."""
        return any(spec.is_quantised for spec in self.layers)

    def that_sees(
        self, vision: Vision | RemoteVision | None, *, no_vision_reason: str = ""
    ) -> LoadedModel:
        """Return the model with its vision, or with the reason that it has none."""
        return replace(self, vision=vision, no_vision_reason=no_vision_reason)

    @property
    def keeps_latents(self) -> bool:
        """True if a layer keeps latents, whether it attends over them by pages or a whole sequence at a time."""
        rank = text_config(self.config).get("kv_lora_rank")
        return any(
            spec.is_latent or (spec.kv_heads == 1 and spec.key_dim == rank) for spec in self.layers
        )

    def in_8_bits(self) -> LoadedModel:
        """Return the model with quantised keys and values.

        Raises InvalidConfig if they are latents.
        """
        if self.keeps_latents:
            raise InvalidConfig(
                f"kv_cache_dtype=q8: {self.name} keeps latents instead of keys and values, which are "
                "smaller already and are not stored in 8 bits; leave kv_cache_dtype at auto.",
                option="kv_cache_dtype",
            )
        return self._stored(is_quantised=True)

    def in_own_dtype(self) -> LoadedModel:
        """Return the model with keys and values in its own dtype."""
        return self._stored(is_quantised=False)

    def with_adapters(self, folders: Sequence[AdapterFiles]) -> LoadedModel:
        """Return the model after attaching adapters to its layers. Raises UnsupportedModel."""
        adapters = attach(self.model, self.selector, self.name, folders, self.dtype, self.group)
        return replace(self, adapters=adapters)

    def _stored(self, *, is_quantised: bool) -> LoadedModel:
        layers = tuple(replace(spec, is_quantised=is_quantised) for spec in self.layers)
        return replace(self, caches=replace(self.caches, layers=layers))

    @property
    def state_nbytes(self) -> int:
        """Bytes of one sequence's recurrent state."""
        return sum(spec.nbytes for spec in self.states)

    @property
    def weight_size(self) -> int:
        """Bytes of the weights, including the image encoder's and the drafter's."""
        text: int = sum(array.nbytes for _, array in tree_flatten(self.model.parameters()))
        others = 0 if self.drafter is None else self.drafter.weight_size
        return text + others + (0 if self.vision is None else self.vision.nbytes)

    @property
    def draft_bytes_per_token(self) -> int:
        """Bytes of a position in the drafter's pages."""
        layers = () if self.drafter is None else self.drafter.layers
        return sum(spec.bytes_per_token() for spec in layers)


def load(
    files: ModelFiles, *, is_metal: bool, memory_limit: int, group: RankGroup | None = None
) -> LoadedModel:
    """Load the weights and prepare the model. `memory_limit` is in bytes.

    With a `group`, whose other ranks load theirs now, only this rank's part is read from disk: what is
    never evaluated is never read.

    On Metal weights stay as stored. On a CPU they are converted to float32, quantised ones only if
    they fit: half-precision and 4-bit matmuls run at 1-3 GFLOP/s there, float32 at 145.

    Raises UnsupportedModel, OutOfMemory.
    """
    # A GGUF file is read whole before it is divided.
    if group is None or files.gguf is not None:
        refuse_too_large(files.weight_size, files.name, memory_limit)
    if unserved := unserved_weights(files.place):
        log.info("%s: %s beside its weights are not served", files.name, ", ".join(unserved))
    model, config = read_model(files, is_metal=is_metal)
    if group is not None and isinstance(model, VlmLanguageModel):
        raise UnsupportedModel(
            f"{files.name}: {config.get('model_type')} models are defined by mlx-vlm, and such models are not "
            "divided among ranks. It may work in one process."
        )
    if not is_metal:
        model = in_float32(model, files.name, memory_limit * (1 if group is None else group.size))
    if group is None:
        mx.eval(model.parameters())
    else:
        keep_part(model, group, files.name, str(config.get("model_type")), memory_limit)
    return prepare(model, config, files.name, group)


def read_model(files: ModelFiles, *, is_metal: bool) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return the model and its configuration as the files have them. Raises UnsupportedModel."""
    try:
        if files.gguf is not None:
            return load_gguf(files.gguf, files.config, is_metal=is_metal), files.config
        names = {name for file in files.weights for name in read_shapes(file, files.name)}
        definition = definition_of(files.config)
        family = family_of(files.config)
        head = frozenset(head_tensors(names, files.config, family) if family else ())
        model, config = load_model(
            files.path,
            lazy=True,
            model_config={
                **definition.changes,
                **_tie_or_not(files.config, definition.arguments, names),
            },
            get_model_classes=lambda **_: (
                partial(_without_head, definition.model, head),
                definition.arguments,
            ),
        )
    except (*READ_ERRORS, SystemExit) as error:
        # mlx-lm's olmo exits where its package is missing.
        raise UnsupportedModel(why_not_loaded(files, error)) from error
    refuse_packed(model, files)
    return model, config


def _without_head(
    build: Callable[[Any], nn.Module], head: Collection[str], arguments: Any
) -> nn.Module:
    """Build a model that passes the weights of a head by, which some definitions do only before their conversion."""
    model = build(arguments)
    sanitize = getattr(model, "sanitize", dict)
    if head:
        model.sanitize = lambda weights: sanitize(
            {name: array for name, array in weights.items() if name not in head}
        )
    return model


def _tie_or_not(
    config: Mapping[str, Any], arguments: object, names: Iterable[str]
) -> dict[str, bool]:
    """Say whether the head is the embedding, where config.json does not: the weights show it.

    A key that is absent is left to the default of mlx-lm's class, if it has one.
    """
    parameters: Mapping[str, Parameter] = {}
    if isinstance(arguments, type):
        parameters = signature(arguments).parameters
    is_required = _TIED in parameters and parameters[_TIED].default is Parameter.empty
    if config.get(_TIED) is not None or not (_TIED in config or is_required):
        return {}
    return {_TIED: not any(name.split(".")[-2:-1] == ["lm_head"] for name in names)}


def refuse_packed(model: nn.Module, files: ModelFiles) -> None:
    """Raises UnsupportedModel for integer weights where floats are expected.

    These are FP8 without scales, which mlx reads as bytes and would compute with as such.
    """
    for path, module in model.named_modules():
        weight = module.get("weight")
        if (
            isinstance(module, (nn.Linear, nn.Embedding))
            and isinstance(weight, mx.array)
            and not mx.issubdtype(weight.dtype, mx.floating)
        ):
            raise UnsupportedModel(
                f"{files.name}: {path}.weight is in {weight.dtype} and not quantised as MLX does it. "
                f"The model {explain_quantisation('fp8')}"
            )


def keep_part(model: nn.Module, group: RankGroup, name: str, kind: str, memory_limit: int) -> None:
    """Reduce `model` to this rank's part, and evaluate it for the first time.

    Raises UnsupportedModel, OutOfMemory.
    """
    if group.split is Split.HEADS:
        split_by_heads(model, group, name, kind)
    else:
        split_by_layers(model, group, name)
    if not group.is_lead:
        drop_head(model)
    arrays = [array for _, array in tree_flatten(model.parameters())]
    refuse_too_large(sum(array.nbytes for array in arrays), name, memory_limit)
    # One by one: a tensor is read whole, and cut.
    for array in arrays:
        mx.eval(array)
        mx.clear_cache()


def refuse_too_large(size: int, name: str, memory_limit: int) -> None:
    """Raises OutOfMemory."""
    if size > memory_limit:
        raise OutOfMemory(
            f"{name}: the weights need {_gib(size)}, but only {_gib(memory_limit)} of memory may be "
            "used. Choose a smaller or more strongly quantised model, or raise "
            "gpu_memory_utilization."
        )


def prepare(
    model: nn.Module, config: Mapping[str, Any], name: str, group: RankGroup | None = None
) -> LoadedModel:
    """Prepare a model in memory for the paged path. Raises UnsupportedModel."""
    use_paged_attention(model)
    caches, vocab_size = look_at(model, name, str(config.get("model_type")), group)
    selector = RowSelector()
    select_rows(model, selector)
    context = _context(model, config)
    return LoadedModel(name, model, config, caches, selector, vocab_size, context, group=group)


def _context(model: nn.Module, config: Mapping[str, Any]) -> Context:
    """Context from config.json, its class in transformers, or mlx-lm's; else 4,096."""
    text = with_class_defaults(text_config(config))
    args = [getattr(module, "args", None) for module in model.modules()]
    lengths = [getattr(each, CONTEXT_KEYS[0], None) for each in args]
    by_definition = next(filter(None, lengths), 4096)
    context = context_of(text) or context_of({**text, CONTEXT_KEYS[0]: by_definition})
    return context or Context(4096, 4096)


def in_float32(model: nn.Module, name: str, memory_limit: int) -> nn.Module:
    quantised = any(hasattr(module, "bits") for module in model.modules())
    needed = _float32_bytes(model)
    if needed > memory_limit:
        if quantised:
            # Slow, but it works; the doctor and the log show the device.
            return model
        raise OutOfMemory(
            f"{name}: on a CPU the weights are converted to float32 and need {_gib(needed)}, but "
            f"only {_gib(memory_limit)} of memory may be used. Choose a smaller model."
        )
    return dequantised_in_float32(model) if quantised else cast_to_float32(model)


def _float32_bytes(model: nn.Module) -> int:
    total = 0
    for _, module in model.named_modules():
        bits: int = getattr(module, "bits", 0)
        for name, value in module.items():
            if isinstance(value, mx.array):
                is_packed = bits and name == "weight"
                total += 4 * (value.nbytes * 8 // bits if is_packed else value.size)
    return total


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"

"""Names the tensors that each parameter of an mlx-lm model is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve.hub.gguf.actions import Action
from mlxserve.hub.gguf.config import architecture, family
from mlxserve.hub.gguf.family import COMMON_MODULES, Family
from mlxserve.hub.gguf.reader import Header

_LAYER = re.compile(r"(?:layers|h|blocks)\.(\d+)\.(.*)")
_BLOCK = re.compile(r"blk\.(\d+)\.(.*)")
# Parts of a layer that are parameters, not modules, and the end of their tensors' names.
_BIASES = ("exp_probs_b",)


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter of the model.

    names     of the tensors that it is made of
    can_pack  if its module has a quantised form, and the actions keep one
    wanted    name of a tensor that is computed from `names` (`latents.py`)
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    actions: tuple[Action, ...] = ()
    can_pack: bool = False
    wanted: str | None = None


def slots_of(model: nn.Module, header: Header) -> list[Slot]:
    """Return the model's parameters with llama.cpp's names of their tensors."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    [kind] = [arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == architecture(header)]
    known = get_tensor_name_map(kind, len(model.layers))
    modules, rules = dict(model.named_modules()), family(header)
    slots = []
    for path, array in tree_flatten(model.parameters()):
        module, _, leaf = path.rpartition(".")
        actions = rules.actions_of(path)
        is_packable = leaf == "weight" and hasattr(modules[module], "to_quantized")
        can_pack = is_packable and all(action.moves_only for action in actions)
        names = _own_names(path, rules) or (_known_name(path, known),)
        slots.append(Slot(path, array.shape, names, actions, can_pack))
    return slots


def is_dropped(name: str, rules: Family, config: Mapping[str, Any]) -> bool:
    """True for a tensor that the definition leaves out: of a row's list, or of a head that drafts (MTP)."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return False
    number, stem = int(match[1]), match[2]
    return stem.partition(".")[0] in rules.drops or number >= int(config["num_hidden_layers"])


def _known_name(path: str, known: Any) -> str:
    """Return the name in gguf's table, which has modules and bare parameters of transformers."""
    path = path.replace("language_model.", "")
    module, _, leaf = path.rpartition(".")
    if (name := known.get_name(path)) is not None:
        return f"{name}.bias" if name.endswith(_BIASES) else str(name)
    return f"{known.get_name(module)}.{leaf}"


def _own_names(path: str, rules: Family) -> tuple[str, ...] | None:
    """Return llama.cpp's names of a part that gguf's table lacks under mlx-lm's name."""
    layer = _LAYER.search(path)
    before, inner = (f"blk.{layer[1]}.", layer[2]) if layer else ("", path)
    module, _, leaf = inner.rpartition(".")
    ends = {**rules.modules, **COMMON_MODULES}
    # A name of a parameter has precedence over one of its module.
    for name, suffix in ((inner, ""), (module, f".{leaf}")):
        for end, stems in ends.items():
            if name == end or name.endswith(f".{end}"):
                each = (stems,) if isinstance(stems, str) else stems
                return tuple(f"{before}{stem}{suffix}" for stem in each)
    return None

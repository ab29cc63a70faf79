"""Chooses a model's definition: mlx-lm's, else mlx-vlm's.

    definition_of(config) --> mlx-lm's Model and ModelArgs                --> mlx_lm.utils.load_model
                          --> VlmLanguageModel of a package of mlx-vlm -->

A model of mlx-vlm is a language model with parts for images and sound, or a language model alone.
The language model is taken out and called as mlx-lm's are; weights of other parts are never read.

mlx-vlm is an extra. Importing it would import its server, its generation, data sets and OpenCV, of
which a definition needs nothing: its packages are deferred, so that only the definition's own
imports run.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.utils import _get_classes

from mlxserve.hub.definition_config import changes_for_definition
from mlxserve.hub.unsupported_formats import foreign_quantisation
from mlxserve.system.deferred_packages import defer

PACKAGE = "mlx_vlm"
_MODELS, _CACHES = f"{PACKAGE}.models", f"{PACKAGE}.models.cache"
_PARTS = ("text", "vision", "perceiver", "projector", "audio")
# Caches of mlx-vlm that keep what mlx-lm's of the same names do.
_SAME = frozenset({"KVCache", "RotatingKVCache", "ChunkedKVCache", "ArraysCache", "CacheList"})
_NONE = "it has no language model of its own"
Weights = dict[str, mx.array]


class NotText(ValueError):
    """mlx-vlm defines the model, but it does not generate text autoregressively."""


class Definition(NamedTuple):
    """The classes that `mlx_lm.utils.load_model` builds a model with.

    model      builds it from arguments
    arguments  builds these with `from_dict`
    changes    applied to config.json first
    """

    model: Callable[[Any], nn.Module]
    arguments: Any
    changes: Mapping[str, Any]


def definition_of(config: Mapping[str, Any]) -> Definition:
    """Return the definition. Raises mlx-lm's ValueError for an unknown kind, and ImportError."""
    try:
        model, arguments = _get_classes(dict(config))
    except ValueError as error:
        if not _is_unknown(error) or (module := module_of(config)) is None:
            raise
        method = foreign_quantisation(config)
        if method is not None and "quantization" not in config:
            # mlx-vlm's loader converts some; weights that are read otherwise than meant pass the probe.
            raise ValueError(f"weights quantised by {method!r}") from None
        return Definition(
            partial(VlmLanguageModel, module), ModelArguments(module), {"model_file": None}
        )
    return Definition(model, arguments, changes_for_definition(config))


def _is_unknown(error: ValueError) -> bool:
    """True if mlx-lm lacks the module, rather than failing to import it."""
    cause = error.__cause__
    return isinstance(cause, ModuleNotFoundError) and str(cause.name).startswith("mlx_lm.models.")


def is_installed() -> bool:
    """True if mlx-vlm is installed; does not import it."""
    return importlib.util.find_spec(PACKAGE) is not None


def module_of(config: Mapping[str, Any]) -> ModuleType | None:
    """Return mlx-vlm's package of this kind; None if missing or not installed.

    Raises ImportError.
    """
    if not is_installed():
        return None
    kinds = defer_mlx_vlm()
    kind = importlib.import_module(f"{PACKAGE}.utils").get_model_type(config)
    return importlib.import_module(f"{_MODELS}.{kind}") if kind in kinds else None


@cache
def defer_mlx_vlm() -> frozenset[str]:
    """Defer mlx-vlm's packages of models, and return their names."""
    defer(PACKAGE)
    [folder] = map(Path, importlib.import_module(PACKAGE).__path__)
    for init in sorted(folder.rglob("*/__init__.py")):
        name = ".".join((PACKAGE, *init.parent.relative_to(folder).parts))
        defer(name, _sources(init))
    return frozenset(init.parent.name for init in folder.glob("models/*/__init__.py"))


def _sources(init: Path) -> dict[str, str | None]:
    """Map submodules to None, and each name that `__init__` imports to its submodule."""
    statements = ast.parse(init.read_text(encoding="utf-8")).body
    taken = {
        name.name: node.module
        for node in statements
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
        for name in node.names
        if name.asname in (None, name.name)
    }
    return {**{file.stem: None for file in init.parent.iterdir()}, **taken}


@dataclass(frozen=True, slots=True)
class ModelArguments:
    """Takes the place of mlx-lm's class of arguments."""

    module: ModuleType

    def from_dict(self, config: Mapping[str, Any]) -> Any:
        """Return mlx-vlm's configuration, as its `load_model` builds it. Raises NotText."""
        if not hasattr(self.module, "ModelConfig") or not hasattr(self.module, "Model"):
            raise NotText(_NONE)
        whole = {**config}
        whole.setdefault("text_config", whole.pop("llm_config", {}))
        whole.setdefault("vision_config", {})
        whole.setdefault("audio_config", {})
        built = self.module.ModelConfig.from_dict(whole)
        for part in _PARTS:
            name = f"{part}_config"
            if hasattr(built, name) and whole.get(name) is not None:
                kind = getattr(self.module, f"{part.title()}Config")
                setattr(built, name, kind.from_dict(whole[name]))
        return built


class VlmLanguageModel(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
    """The language model of one of mlx-vlm's models, called as mlx-lm's: ids in, logits out."""

    def __init__(self, module: ModuleType, config: Any) -> None:
        """Build the language model of mlx-vlm's `module`. Raises NotText."""
        super().__init__()
        whole = module.Model(config)
        text: Any = getattr(whole, "language_model", None)
        if _writes_by_diffusion(config, text):
            raise NotText("it writes by diffusion, many tokens at once")
        paths = [path for path, part in whole.named_modules() if part is text and path]
        if not paths or not hasattr(text, "layers"):
            raise NotText(_NONE)
        self.language_model = text
        self._positions = MappingProxyType(
            {"_position_ids": None, "_rope_deltas": mx.zeros((1, 1), mx.int32)}
        )
        self._sanitizes = partial(
            _sanitize, whole, text, f"{paths[0]}.", hasattr(module, "LanguageModel")
        )

    @property
    def layers(self) -> Any:
        return self.language_model.layers

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """Map (batch, tokens) to (batch, tokens, vocabulary)."""
        self._forget()
        logits: mx.array = self.language_model(inputs, cache=cache).logits
        return logits

    def _forget(self) -> None:
        """Reset the positions that it keeps of the last prompt, which may be another sequence's.

        Without images the position of a token is the number of tokens before it.
        """
        for name, value in self._positions.items():
            if hasattr(self.language_model, name):
                setattr(self.language_model, name, value)

    def make_cache(self) -> list[Any]:
        made: list[Any] = importlib.import_module(_CACHES).make_prompt_cache(self.language_model)
        return made

    def sanitize(self, weights: Weights) -> Weights:
        """Return the language model's weights under the names used here."""
        return self._sanitizes(weights)


def _writes_by_diffusion(config: Any, text: object) -> bool:
    """True if the model generates by diffusion, decided as mlx-vlm does."""
    if getattr(config, "canvas_length", None) is not None:
        return True
    is_masked = getattr(config, "mask_token_id", None) is not None
    is_default = getattr(config, "default_generation_mode", None) != "ar"
    return is_masked and is_default and callable(getattr(text, "generate", None))


def _sanitize(
    whole: nn.Module, text: nn.Module, prefix: str, has_text_class: bool, weights: Weights
) -> Weights:
    """Rename the weights in the order of mlx-vlm's `load_model`."""
    if hasattr(whole, "sanitize"):
        weights = whole.sanitize(weights)
    if has_text_class and hasattr(whole.config, "text_config") and hasattr(text, "sanitize"):
        weights = text.sanitize(weights)
    return {
        f"language_model.{name.removeprefix(prefix)}": array
        for name, array in weights.items()
        if name.startswith(prefix)
    }


def stands_for(kind: type) -> type:
    """Return mlx-lm's equivalent of a cache class; `kind` itself if there is none."""
    if kind.__module__ == _CACHES and kind.__name__ in _SAME:
        same: type = getattr(mlx_lm_caches, kind.__name__)
        return same
    return kind

"""Packages whose `__init__` runs only when something needs it.

Importing `mlx_lm.utils` runs `mlx_lm/__init__.py` first, which imports all of mlx-lm, and that imports
transformers, which reads the source of each of its 1,700 model files, twice, to find their names: 0.75 s
of CPU on a 2-core x86, more than half of a start. What loads a model and its tokenizer needs neither:
0.32 s without.

A deferred package finds its submodules as usual. Of its other names, a few are taken from the submodule
that defines them; any other imports the whole package, which takes its place.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib.metadata import version
from types import MappingProxyType, ModuleType
from typing import Any

# Package -> names that do not need all of it, and the submodules that define them.
_PACKAGES: Mapping[str, Mapping[str, str]] = {
    "mlx_lm": {"convert": "convert", "generate": "generate"},  # functions, as in the whole package
    "transformers": {
        "AutoTokenizer": "models.auto.tokenization_auto",
        "PreTrainedTokenizer": "tokenization_python",
        "PreTrainedTokenizerFast": "tokenization_utils_tokenizers",
        # The classes of most models' tokenizers, which AutoTokenizer looks for here.
        "GPT2Tokenizer": "models.gpt2.tokenization_gpt2",
        "GemmaTokenizer": "models.gemma.tokenization_gemma",
        "LlamaTokenizer": "models.llama.tokenization_llama",
        "Qwen2Tokenizer": "models.qwen2.tokenization_qwen2",
    },
    "transformers.models": {},
}
_NO_NAMES: Mapping[str, str | None] = MappingProxyType({})


def defer_packages() -> None:
    """Defer mlx-lm and transformers, unless they have been imported."""
    for name, members in _PACKAGES.items():
        defer(name, members)


def defer(name: str, members: Mapping[str, str | None] = _NO_NAMES) -> None:
    """Put a deferred package into `sys.modules`, unless the package is there or is not installed.

    members: names of the package, and the submodules that define them; None for a submodule itself
    """
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None or spec.submodule_search_locations is None:
        # The import says what is wrong.
        return
    package = _DeferredPackage(name)
    package.__dict__.update(
        __file__=spec.origin,
        __loader__=spec.loader,
        __package__=name,
        __path__=spec.submodule_search_locations,
        __spec__=spec,
        _members=members,
    )
    sys.modules[name] = package


class _DeferredPackage(ModuleType):
    """A placeholder for a package until all of it is needed."""

    _members: Mapping[str, str | None]

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "__version__" and "." not in self.__name__:
            return version(self.__name__)
        if attribute.startswith("__") and attribute != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {attribute!r}")
        if attribute in self._members:
            source = self._members[attribute]
            try:
                module = importlib.import_module(f"{self.__name__}.{source or attribute}")
                return module if source is None else getattr(module, attribute)
            except (ModuleNotFoundError, AttributeError):
                # Another version of the package, which defines it elsewhere.
                pass
        return getattr(self._whole(), attribute)

    def __setattr__(self, attribute: str, value: object) -> None:
        """Set an attribute; a submodule does not hide a member of the same name."""
        if self._members.get(attribute) is None:
            super().__setattr__(attribute, value)

    def __dir__(self) -> list[str]:
        return dir(self._whole())

    def _whole(self) -> ModuleType:
        """Import the whole package, which replaces this one.

        The import system does it, whose locks know what other threads import meanwhile.
        """
        name = self.__name__
        if sys.modules.get(name) is self:
            del sys.modules[name]
            try:
                importlib.import_module(name)
            except BaseException:
                sys.modules[name] = self
                raise
            _add_submodules(sys.modules[name])
        return sys.modules[name]


def _add_submodules(package: ModuleType) -> None:
    """Add loaded submodules as attributes of the deferred package."""
    for name, module in list(sys.modules.items()):
        parent, _, attribute = name.rpartition(".")
        if parent == package.__name__ and attribute not in package.__dict__:
            setattr(package, attribute, module)

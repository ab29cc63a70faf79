"""Finds and loads the image processor that mlx-vlm registers for a `model_type`.

A package of mlx-vlm's models calls `install_auto_processor_patch(model_types, class)` in its
`__init__` or in a module that `__init__` imports. This module reads these calls from the package's
source. To run `__init__` would import parts that no image needs, with requirements of their own
(Inkling's needs mlx-audio).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mlxserve.core.errors import in_one_line
from mlxserve.model.definitions import module_of
from mlxserve.system.extras import package_command

_REGISTERS = "install_auto_processor_patch"
_PARAMETERS = ("target_model_types", "processor_cls")
# Molmo 2 replaces `AutoProcessor.from_pretrained` by itself; its `__init__` binds the class to this name.
_BOUND = "Processor"
_TRUST = "trust_remote_code=True"
_CODE = "it needs code in the model's folder (auto_map), which is never run"
# The messages of other errors are no sentences: a KeyError's is the key.
_WITH_SENTENCES = (ValueError, RuntimeError, ImportError, OSError)
_DISTRIBUTIONS = {
    "cv2": "opencv-python",
    "PIL": "pillow",
}  # modules named otherwise than their packages


class Registration(NamedTuple):
    """`model_types` are in lower case; the class is `name` in `module`."""

    model_types: frozenset[str]
    module: str
    name: str


def processor_class(config: Mapping[str, Any]) -> Any:
    """Return mlx-vlm's class for a model's images. Raises ValueError with the reason if none."""
    registration = registration_of(config)
    if registration is None:
        raise ValueError(f"mlx-vlm registers no processor of images for {_model_type(config)!r}")
    try:
        return getattr(importlib.import_module(registration.module), registration.name)
    except Exception as error:
        raise ValueError(f"its processor cannot be imported: {reason_of(error)}") from error


def load_processor(kind: Any, folder: Path) -> Any:
    """Load a processor with a folder's settings, without running its code. Raises ValueError."""
    try:
        with _code_refused(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the part for sound, which is not used
            return kind.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"its processor cannot be loaded: {reason_of(error)}") from error


def registration_of(config: Mapping[str, Any]) -> Registration | None:
    """Return the registration of the config's `model_type`.

    The package that defines the model goes first, then the package of that name: `d1` defines
    models of LFM2-VL's `model_type`, and has LFM2-VL's processor.
    """
    model_type = _model_type(config)
    packages = [module_of(config), module_of({"model_type": model_type})]
    candidates = (each for package in packages if package for each in registrations(package))
    return next((each for each in candidates if model_type in each.model_types), None)


def _model_type(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type")).lower()


def reason_of(error: BaseException) -> str:
    """Return an error of mlx-vlm or transformers as a sentence that names a missing package."""
    name = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    package = str(name or "").partition(".")[0]
    if package and importlib.util.find_spec(package) is None:
        distribution = _DISTRIBUTIONS.get(package, package.replace("_", "-"))
        return f"the package {package} is missing ({package_command(distribution)}, and restart)"
    message = in_one_line(error)
    # transformers advises to trust the folder.
    if _TRUST in message:
        return _CODE
    return message if isinstance(error, _WITH_SENTENCES) else f"{type(error).__name__}: {message}"


# ---- code in a folder

_refuses_code: ContextVar[bool] = ContextVar("refuses_code", default=False)


@contextmanager
def _code_refused() -> Iterator[None]:
    """Refuse code: some processors pass trust_remote_code=True to their tokenizer (Inkling's)."""
    _watch_for_code()
    before = _refuses_code.set(True)
    try:
        yield
    finally:
        _refuses_code.reset(before)


@cache
def _watch_for_code() -> None:
    """Wrap the function by which transformers fetches every file of code that it runs."""
    module: Any = importlib.import_module("transformers.dynamic_module_utils")
    get_file = module.get_cached_module_file

    def get_file_if_allowed(*args: Any, **kwargs: Any) -> str:
        if _refuses_code.get():
            raise ValueError(_CODE)
        return str(get_file(*args, **kwargs))

    module.get_cached_module_file = get_file_if_allowed


# ---- the source of a package


def registrations(package: ModuleType) -> tuple[Registration, ...]:
    """All registrations of one of mlx-vlm's packages."""
    [folder] = package.__path__
    return _registrations(package.__name__, Path(folder))


@cache
def _registrations(package: str, folder: Path) -> tuple[Registration, ...]:
    files = sorted(folder.rglob("*.py"))
    calls = tuple(each for file in files for each in _calls(package, folder, file))
    return calls or tuple(_bound(package, folder / "__init__.py"))


def _calls(package: str, folder: Path, file: Path) -> Iterator[Registration]:
    source = file.read_text(encoding="utf-8")
    if _REGISTERS not in source:
        return
    parts = file.relative_to(folder).with_suffix("").parts
    module = ".".join((package, *(part for part in parts if part != "__init__")))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == _REGISTERS:
            model_types, name = _arguments(node)
            yield Registration(frozenset(map(str.lower, model_types)), module, name)


def _arguments(call: ast.Call) -> tuple[list[str], str]:
    values = dict(zip(_PARAMETERS, call.args, strict=False))
    values |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    types, name = (values[parameter] for parameter in _PARAMETERS)
    model_types = ast.literal_eval(types)
    return [model_types] if isinstance(model_types, str) else [*model_types], ast.unparse(name)


def _bound(package: str, init: Path) -> Iterator[Registration]:
    model_types = frozenset({package.rpartition(".")[2]})
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                if name.asname == _BOUND:
                    yield Registration(model_types, f"{package}.{node.module}", name.name)

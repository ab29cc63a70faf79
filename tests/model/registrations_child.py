"""A process that imports mlx-vlm's packages, and prints what they register and what we find.

    python -m tests.model.registrations_child

read        by package, the model types and the class of each call that `registrations` reads in its source
found       by model type, the class that `processor_class` finds, or its error
imported    what mlx-vlm requires and `processor_class` has imported
registered  by package, as `read`, the calls as they run
errors      of packages that cannot be imported
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from mlxserve.model.definitions import defer_mlx_vlm
from mlxserve.model.registered_processors import processor_class, registrations
from mlxserve.system import machine

MODELS = "mlx_vlm.models"
REQUIREMENTS = {"cv2", "datasets", "fastapi", "miniaudio", "mlx_audio", "torch", "torchvision"}

Calls = dict[str, list[tuple[list[str], str]]]


def record() -> Calls:
    """Has each call of mlx-vlm's function write into the result."""
    calls: Calls = defaultdict(list)
    base: Any = importlib.import_module(f"{MODELS}.base")

    def install(target_model_types: Any, processor_cls: type) -> None:
        types = [target_model_types] if isinstance(target_model_types, str) else target_model_types
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        caller = frame.f_back.f_globals["__name__"]
        package = caller.removeprefix(f"{MODELS}.").partition(".")[0]
        calls[package].append((sorted(map(str.lower, types)), full_name(processor_cls)))

    base.install_auto_processor_patch = install
    return calls


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def read(packages: Iterable[str]) -> Calls:
    return {
        name: [
            (
                sorted(each.model_types),
                full_name(getattr(importlib.import_module(each.module), each.name)),
            )
            for each in calls
        ]
        for name in packages
        if (calls := registrations(importlib.import_module(f"{MODELS}.{name}")))
    }


def found(model_types: Iterable[str]) -> dict[str, str]:
    classes = {}
    for model_type in sorted(model_types):
        try:
            classes[model_type] = full_name(processor_class({"model_type": model_type}))
        except ValueError as error:
            classes[model_type] = str(error)
    return classes


def import_all(packages: Iterable[str]) -> dict[str, str]:
    """Runs the `__init__` of every package: errors of those that fail."""
    errors = {}
    for name in packages:
        try:
            dir(
                importlib.import_module(f"{MODELS}.{name}")
            )  # which a deferred package cannot answer
        except ImportError as error:
            errors[name] = str(error)
    return errors


def main() -> None:
    machine.import_mlx_lm()
    packages = sorted(defer_mlx_vlm())
    calls = record()
    sources = read(packages)
    classes = found(
        {each for package in sources.values() for types, _ in package for each in types}
    )
    imported = sorted(REQUIREMENTS & sys.modules.keys())
    errors = import_all(packages)
    report = {
        "read": sources,
        "found": classes,
        "imported": imported,
        "registered": calls,
        "errors": errors,
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()

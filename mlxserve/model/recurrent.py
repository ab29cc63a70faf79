"""Finds the modules that keep a recurrent state, and calls them with a LayerState.

The module that is given an ArraysCache and passes it on to no other module computes with it. Its
class's `__call__` is wrapped once; any other cache gets the original, so a dense reference still
runs in the same process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn

from mlxserve.model.layer_state import LayerState

_CALL, _MARK = "__call__", "_mlxserve_plain_call"
_finding = threading.Lock()  # the classes are changed meanwhile, for all models


def use_groups(kinds: Iterable[type]) -> None:
    """Make these classes of modules accept a LayerState. Idempotent."""
    for kind in kinds:
        if _MARK not in vars(kind):
            plain: Any = getattr(kind, _CALL)
            setattr(kind, _MARK, plain)
            setattr(kind, _CALL, _in_groups(plain))


def is_in_groups(kind: type) -> bool:
    """True if modules of this class accept a LayerState."""
    return hasattr(kind, _MARK)


def _in_groups(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in args if not kwargs else (*args, *kwargs.values()):
            if type(value) is LayerState:
                return value.run(plain, args, kwargs)
        return plain(*args, **kwargs)

    return call


@contextmanager
def finding_modules(model: nn.Module, caches: set[int]) -> Iterator[set[type]]:
    """Collect the module classes that compute with these caches, while the model is called.

    `caches`: their ids
    """
    modules: set[type] = set()
    if not caches:
        yield modules
        return
    stack: list[tuple[set[int], set[int]]] = []  # caches a module was given, those it passed on

    def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            caches_passed = {
                id(value) for value in (*args, *kwargs.values()) if id(value) in caches
            }
            for outer, passed_on in stack:
                passed_on |= outer & caches_passed
            frame: tuple[set[int], set[int]] = (caches_passed, set())
            stack.append(frame)
            try:
                return plain(self, *args, **kwargs)
            finally:
                stack.pop()
                if caches_passed - frame[1]:
                    modules.add(type(self))

        return call

    bases = {base for module in model.modules() for base in type(module).__mro__}
    kinds = [k for k in bases if issubclass(k, nn.Module) and _CALL in vars(k)]
    with _finding:
        plain = {kind: vars(kind)[_CALL] for kind in kinds}
        try:
            for kind, call in plain.items():
                setattr(kind, _CALL, watched(call))
            yield modules
        finally:
            for kind, call in plain.items():
                setattr(kind, _CALL, call)

"""Owners of keys: a layer may attend over the keys that another one has written.

Some models hand a layer's keys to later layers, together with their own cache or with none. So
every write to the pool remembers which cache returned these keys, for the forward being built.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import mlx.core as mx


class Owner(Protocol):
    """A layer's cache that keys were written to."""

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: object = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array: ...


class _Forward(threading.local):
    def __init__(self) -> None:
        # By id. The keys are held so that no other array gets their id.
        self.owners: dict[int, tuple[Owner, mx.array]] = {}


_forward = _Forward()


def remember(keys: mx.array, owner: Owner) -> None:
    """Record that `owner` has written these keys, in the array that the model got."""
    _forward.owners[id(keys)] = owner, keys


def owner_of(keys: mx.array) -> Owner | None:
    """Return the cache that wrote these keys; None for keys of a dense layer, or changed by the model."""
    entry = _forward.owners.get(id(keys))
    return entry[0] if entry is not None else None


@contextmanager
def one_forward() -> Iterator[None]:
    """Forget the owners at the end of a forward: they hold caches, and through them a step's arrays."""
    try:
        yield
    finally:
        _forward.owners.clear()

"""Whose keys an attention is given: a layer may attend over what another one has written.

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
    """These keys, as the model was given them, are what `owner` has written."""
    _forward.owners[id(keys)] = owner, keys


def owner_of(keys: mx.array) -> Owner | None:
    """None for keys that no layer wrote in this forward: a dense one, or the model changed them."""
    found = _forward.owners.get(id(keys))
    return found[0] if found is not None else None


@contextmanager
def one_forward() -> Iterator[None]:
    """Forget the owners at its end: they hold caches, and through them a step's arrays."""
    try:
        yield
    finally:
        _forward.owners.clear()

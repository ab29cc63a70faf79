"""Objects of an ended engine are freed, also where a server has exempted them from collections."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from mlxserve.engine import gc_freeze


class Layer:
    """Refers to itself: only a collection frees it."""

    def __init__(self) -> None:
        self.owner = self


def forgotten() -> weakref.ref[Layer]:
    return weakref.ref(Layer())


@pytest.fixture(autouse=True)
def nothing_of_earlier_tests() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.mark.slow
def test_what_nobody_froze_is_collected_without_a_look_at_the_rest() -> None:
    since = gc_freeze.frozen()
    layer = forgotten()
    num_frozen = gc.get_freeze_count()
    gc_freeze.collect(since)
    assert layer() is None
    assert 0 < gc.get_freeze_count() <= num_frozen


@pytest.mark.slow
def test_what_was_frozen_since_is_collected_and_the_rest_is_frozen_again() -> None:
    since = gc_freeze.frozen()
    layer = forgotten()
    gc.freeze()
    gc.collect()
    assert layer() is not None
    gc_freeze.collect(since)
    assert layer() is None
    assert gc.get_freeze_count() > 0


@pytest.mark.slow
def test_an_engine_that_is_frozen_when_another_ends_is_freed_as_well() -> None:
    first = gc_freeze.frozen()
    many = [[Layer()] for _ in range(1_000)]
    gc.freeze()
    second = gc_freeze.frozen()
    layer = Layer()
    of_second = weakref.ref(layer)
    del many
    gc_freeze.collect(first)
    assert gc.get_freeze_count() < second.num_objects, "fewer are frozen, and the second engine is"
    del layer
    gc_freeze.collect(second)
    assert of_second() is None

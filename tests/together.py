"""Requests that run beside one another, however busy the machine is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from mlxserve.engine.engine import Engine
from mlxserve.request import LiveRequest, Request


@contextmanager
def begun_together(number: int) -> Iterator[None]:
    """No engine takes a step until `number` requests were queued: the first one might have ended by then."""
    num_queued = 0
    add_all, has_work = Engine.add_all, Engine.has_work

    def counted(engine: Engine, requests: Sequence[Request]) -> list[LiveRequest]:
        nonlocal num_queued
        added = add_all(engine, requests)
        num_queued += len(added)
        return added

    def has_all(engine: Engine) -> bool:
        return num_queued >= number and has_work.__get__(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "add_all", counted)
        patch.setattr(Engine, "has_work", property(has_all))
        yield

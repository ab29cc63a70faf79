"""Models that load and close when a test lets them, with sizes as it says."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from mlxserve.chat.registry.entries import RegisteredModel
from mlxserve.core.errors import MlxServeError, OutOfMemory
from mlxserve.core.stats import PlannedMemory, PoolStats, Stats
from mlxserve.request import Resized

PAGE = 10  # bytes


class FakeModel:
    """A model, its engine, and what loads it: one object for each name, loaded again and again.

    weights: bytes. The pool takes what it is given, up to `most` pages
    """

    def __init__(
        self, name: str, log: list[str], *, weights: int = 100, most: int = 1000, needs: int = 0
    ) -> None:
        self.model_name = name
        self.weights = weights
        self.num_pages = 0
        self.most = most
        self.needs = needs  # bytes that nobody knows before it is loaded
        self.log = log
        self.loads = threading.Event()  # when cleared, loading waits
        self.closes = threading.Event()  # when cleared, closing waits
        self.loads.set()
        self.closes.set()
        self.error: MlxServeError | None = None
        self.resize_error: MlxServeError | None = None
        self.has_ended = False  # by itself
        self.silence = 0.0

    def load(self, room: int) -> Any:
        self.log.append(f"load {self.model_name}")
        assert self.loads.wait(60)
        if self.error is not None:
            raise self.error
        if room < self.weights + self.needs + 2 * PAGE:
            raise OutOfMemory(f"{self.model_name} does not fit")
        self.num_pages = min(self.most, (room - self.weights - self.needs) // PAGE)
        self.has_ended = False
        return self

    @property
    def engine(self) -> FakeModel:
        return self

    def stats(self) -> Stats:
        return Stats(
            pool=PoolStats(num_pages=self.num_pages),
            planned=PlannedMemory(
                weights=self.weights, step=self.needs, pool=self.num_pages * PAGE, page=PAGE
            ),
        )

    async def resize_cache(self, num_pages: int) -> Resized:
        if self.resize_error is not None:
            raise self.resize_error
        self.log.append(f"{self.model_name} has {num_pages} pages")
        self.num_pages = num_pages
        return Resized(num_pages, num_pages, 0, 0)

    def has_failed(self) -> bool:
        return self.has_ended

    def seconds_since_beat(self) -> float:
        return self.silence

    def close(self) -> None:
        assert self.closes.wait(60)
        self.log.append(f"close {self.model_name}")

    def on_shelf(self, **options: Any) -> RegisteredModel:
        options = {"min_bytes": self.weights + 2 * PAGE, "weight_size": self.weights, **options}
        return RegisteredModel(name=self.model_name, load=self.load, **options)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run

"""A model in the registry: how to load it, and its current state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel
    from mlxserve.core.stats import PlannedMemory
    from mlxserve.hub.facts import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredAdapter:
    """An adapter of a model, which is loaded and unloaded with it.

    name: in the API after the model's and a colon
    size: in bytes
    """

    name: str
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    """A model that can be loaded.

    name: in the API
    load: loads it within this many bytes, on any thread. Raises MlxServeError
    aliases: its other names
    unlisted: names that are accepted but not listed
    weight_size: in bytes
    context: the context length it was made for, or may have; 0 if unknown
    min_bytes: minimum memory, as far as it is known before loading
    min_pages: minimum pages of its pool, which shrinks while the model is idle
    max_pages: maximum pages of its pool, if memory allows; 0 for as many as at loading
    keep_alive: seconds of idleness before it is unloaded
    preload: load it at the start
    purpose: "completion", "embedding" or "rerank"
    facts: the contents of its files for clients, before it is loaded; None if unknown
    adapters: the adapters that it is served with
    """

    name: str
    load: Callable[[int], TextModel]
    aliases: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    weight_size: int = 0
    context: int = 0
    min_bytes: int = 0
    min_pages: int = 2
    max_pages: int = 0
    keep_alive: float = math.inf
    preload: bool = False
    purpose: str = "completion"
    facts: ModelFacts | None = None
    adapters: tuple[RegisteredAdapter, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name, and its names with its adapters."""
        return (self.name, *(f"{self.name}:{adapter.name}" for adapter in self.adapters))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """The state of a model.

    state: "unloaded", "loading", "loaded" or "unloading"
    memory: in bytes
    num_requests: requests that use it or wait for it
    seconds_left: until it is unloaded if it stays unused; None for never
    is_pinned: it stays loaded, unused or not, also while another model needs memory
    """

    state: str
    memory: int = 0
    num_requests: int = 0
    seconds_left: float | None = None
    is_pinned: bool = False


class Place:
    """A model and its state in the registry."""

    def __init__(self, model: RegisteredModel, now: float) -> None:
        self.model = model
        # Also while it is being closed, and still holds memory.
        self.text_model: TextModel | None = None
        self.users = 0
        self.num_waiting = 0  # requests that wait for it to be loaded
        self.loading: asyncio.Task[None] | None = None
        self.is_read = False  # it is being read from disk
        self.closes = False  # it accepts no users, and is unloaded once it has none
        self.closing: asyncio.Task[None] | None = None
        self.keep_alive = model.keep_alive
        self.is_pinned = False  # it is unloaded by name only
        self.loaded_at = self.used_at = now
        self.max_pages = 0  # maximum pages of its pool
        self.set_pages = 0  # pages set by the registry; others may resize it, too
        self._known_min_bytes: int | None = None  # known since the first loading

    def put(self, text_model: TextModel, now: float) -> None:
        """Store the loaded model."""
        self.text_model = text_model
        self.loaded_at = self.used_at = now
        fewer = max(0, self.num_pages - self.model.min_pages)
        self._known_min_bytes = self.planned.total - fewer * self.planned.page
        self.max_pages = max(self.num_pages, self.model.max_pages)
        self.set_pages = self.num_pages

    @property
    def is_idle(self) -> bool:
        return not (self.users or self.num_waiting or self.closes)

    @property
    def planned(self) -> PlannedMemory:
        """The planned memory of the loaded model."""
        assert self.text_model is not None
        return self.text_model.engine.stats().planned

    @property
    def num_pages(self) -> int:
        """Number of pages of the loaded model's pool."""
        assert self.text_model is not None
        return self.text_model.engine.stats().pool.num_pages

    @property
    def floor(self) -> int:
        """Bytes below which it can never be loaded."""
        return self.model.weight_size if self._known_min_bytes is None else self._known_min_bytes

    @property
    def min_bytes(self) -> int:
        """Bytes with the smallest pool, estimated before it was loaded once."""
        return (
            max(self.floor, self.model.min_bytes)
            if self._known_min_bytes is None
            else self._known_min_bytes
        )

    @property
    def smaller(self) -> int:
        """Bytes with its pool as small as is possible now."""
        return min(self.planned.total, self.min_bytes) if self.is_idle else self.planned.total

    def state(self, now: float) -> ModelUse:
        num_requests = self.users + self.num_waiting
        if self.text_model is None:
            state = "unloaded" if self.loading is None else "loading"
            return ModelUse(state=state, num_requests=num_requests, is_pinned=self.is_pinned)
        may_end = self.is_idle and not self.is_pinned
        seconds = max(0.0, self.used_at + self.keep_alive - now) if may_end else math.inf
        return ModelUse(
            state="unloading" if self.closes else "loaded",
            memory=self.planned.total,
            num_requests=num_requests,
            seconds_left=None if math.isinf(seconds) else seconds,
            is_pinned=self.is_pinned,
        )

    def describe(self) -> str:
        """Describe the loaded model's memory and use."""
        users = f"{self.users} request{'s' * (self.users > 1)}" if self.users else "idle"
        return f"{self.model.name} ({gib(self.planned.total)}, {users})"


def gib(size: float) -> str:
    return f"{size / (1 << 30):.2f} GiB"

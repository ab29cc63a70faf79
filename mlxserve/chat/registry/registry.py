"""ModelRegistry: the loaded models of a server, within one memory budget.

    async with registry.use(name) as text_model: ...      loads it if necessary, and counts its users

                 load              users              none for `keep_alive`, or memory is needed
    on disk ───────────▶ loaded ─────────▶ in use ──▶ idle ──────────▶ closing ──▶ on disk

One model is loaded at a time; the others wait in the order of their requests. If memory is short,
the pools of idle models are shrunk first, then the least recently used idle model is unloaded. If
all are in use, the model that was loaded first takes no further requests until it has been
unloaded: they wait for their turn, so that no model starves. A pinned model is unloaded by its name
only: what does not fit beside it is refused.

A model that is unloaded writes its pages to disk (`AsyncEngine.close`), and finds them when it is
loaded again. Used in one event loop; models are loaded and closed on threads. Imports no mlx.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from mlxserve.chat.registry.changes import BackgroundTasks, Changes
from mlxserve.chat.registry.entries import ModelUse, Place, RegisteredAdapter, RegisteredModel, gib
from mlxserve.chat.registry.memory import NO_LIMIT, SharedMemory
from mlxserve.chat.registry.threads import in_thread
from mlxserve.core.errors import EngineStopped, OutOfMemory, QueueFull

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

log = logging.getLogger("mlxserve.chat.registry")

T = TypeVar("T")

LOOK_SECONDS = 1.0  # between two looks for models that have been idle for long
MAX_WAIT_SECONDS = 600.0  # for room, before a request is refused


class ModelRegistry:
    """Owns every TextModel. Nothing else holds one for longer than a request."""

    def __init__(
        self,
        models: Sequence[RegisteredModel],
        *,
        budget: float = math.inf,
        shared_budget: int = NO_LIMIT,
        close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Register models. The first one answers requests that name none.

        budget: bytes of all loaded models together
        shared_budget: the same once another model was added
        close: closes what the models share
        """
        self.models = tuple(models)
        self._places = {model.name: Place(model, clock()) for model in self.models}
        assert len(self._places) == len(self.models), "names of models are unique"
        self._memory = SharedMemory(self._places, budget)
        self._shared_budget = shared_budget
        self._close = close
        self._clock = clock
        self._turn = asyncio.Lock()  # held while a model is loaded
        self.on_unloaded: Callable[[str], None] = lambda _: None
        self._changes = Changes()  # changes of users and models
        self._tasks = BackgroundTasks()
        self._lock = threading.Lock()
        self._is_closed = False

    @classmethod
    def from_model(
        cls, text_model: TextModel, aliases: Sequence[str] = (), unlisted: Sequence[str] = ()
    ) -> ModelRegistry:
        """Build a registry of one loaded model, which stays loaded."""
        model = RegisteredModel(
            name=text_model.model_name,
            load=lambda _: text_model,
            aliases=tuple(aliases),
            unlisted=tuple(unlisted),
            adapters=tuple(RegisteredAdapter(name=name) for name in text_model.adapters),
        )
        registry = cls([model])
        registry._put(registry._places[model.name], text_model)
        return registry

    def add(self, model: RegisteredModel) -> None:
        """Register another model, to be loaded at its first request."""
        self._places[model.name] = Place(model, self._clock())
        self.models = (*self.models, model)
        self._memory.budget = min(self._memory.budget, self._shared_budget)

    def loaded(self, name: str) -> TextModel | None:
        """Return the model, or None if it is not loaded or about to be unloaded; not counted as a use."""
        place = self._places[name]
        return None if place.closes else place.text_model

    def state(self, name: str) -> ModelUse:
        """The state of a model, for display."""
        return self._places[name].state(self._clock())

    @property
    def budget(self) -> int | None:
        """Bytes of all loaded models together; None for no limit."""
        return None if self._memory.budget == NO_LIMIT else self._memory.budget

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[TextModel]:
        """Yield the model, loaded first if necessary. It stays loaded until the end of the block.

        Raises OutOfMemory, QueueFull, EngineStopped, and the errors of loading. Cancelling a
        request leaves the others waiting.
        """
        place = self._places[name]
        text_model = await self._usable_soon(place)
        place.users += 1
        try:
            yield text_model
        finally:
            place.users -= 1
            place.used_at = self._clock()
            self._changes.tell()
            if place.keep_alive == 0:
                self.look()

    async def preload(self) -> None:
        """Load the first model, and those marked `preload` in their order, as far as they fit."""
        for number, model in enumerate(self.models):
            if number and not model.preload:
                continue
            place = self._places[model.name]
            if number and place.min_bytes > self._memory.left(shrunk=True):
                log.warning(
                    "%s does not fit beside the models before it; it is loaded when it is asked for.",
                    model.name,
                )
                continue
            await self._usable_soon(place)
        # Again, if another needed more than was known.
        await self._usable_soon(self._places[self.models[0].name])

    def keep(
        self, name: str, seconds: float | None = None, *, is_pinned: bool | None = None
    ) -> None:
        """Change how long a model stays loaded; None leaves either as it is.

        seconds: of idleness before it is unloaded, until it is loaded again
        is_pinned: it stays until it is unloaded by its name
        """
        place = self._places[name]
        place.keep_alive = place.keep_alive if seconds is None else seconds
        place.is_pinned = place.is_pinned if is_pinned is None else is_pinned
        self._changes.tell()  # another may wait for its memory

    async def unload(self, name: str, *, force: bool = False) -> bool:
        """Unload a model, pinned or not; False if it is in use. `force` ends its running answers."""
        place = self._places[name]
        if place.text_model is not None:
            if place.users and not force:
                return False
            await self._unload(place)
        place.is_pinned = False
        return True

    def look(self) -> None:
        """Start to unload models that were idle for their time, and those whose engine failed."""
        now = self._clock()
        for place in self._places.values():
            if place.text_model is None or place.closing is not None:
                continue
            if self._has_failed(place) or (
                place.is_idle and not place.is_pinned and now - place.used_at >= place.keep_alive
            ):
                self._begin_closing(place)
        if not self._turn.locked() and self._memory.growing() is not None:
            self._tasks.begin(self._grow())

    async def run(self) -> None:
        """Call `look` periodically, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self.look()
            except Exception:
                log.exception("Looking for idle models failed")

    def close(self) -> None:
        """Close every model, from any thread. Idempotent.

        Models close in parallel, as each takes seconds to write its pages.
        """
        with self._lock:
            self._is_closed = True
            loaded = [
                place.text_model for place in self._places.values() if place.text_model is not None
            ]
        closing = [
            threading.Thread(target=text_model.close, name="mlxserve-close")
            for text_model in loaded
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self._close()

    # ---- what the watchdog asks

    def has_failed(self) -> bool:
        """True if the only model's engine has ended by itself. One of several is loaded again."""
        loaded = [place.text_model for place in self._places.values()]
        return len(loaded) == 1 and loaded[0] is not None and loaded[0].engine.has_failed()

    def seconds_since_beat(self) -> float:
        """Seconds since a sign of life of the engine that has been silent for the longest."""
        loaded = (place.text_model for place in self._places.values())
        return max(
            (text_model.engine.seconds_since_beat() for text_model in loaded if text_model),
            default=0.0,
        )

    # ---- loading

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise EngineStopped("The server is stopping.")

    def _usable(self, place: Place) -> TextModel | None:
        self._refuse_if_closed()
        if place.text_model is not None and not place.closes and self._has_failed(place):
            self._begin_closing(place)
        return None if place.closes else place.text_model

    async def _usable_soon(self, place: Place) -> TextModel:
        while (text_model := self._usable(place)) is None:
            await self._wait_until_loaded(place)
        return text_model

    def _has_failed(self, place: Place) -> bool:
        """True if a model failed and is to be loaded again. A single one is left to the watchdog."""
        text_model = place.text_model
        return len(self.models) > 1 and text_model is not None and text_model.engine.has_failed()

    async def _wait_until_loaded(self, place: Place) -> None:
        if place.loading is None:
            place.loading = self._tasks.begin(self._load(place))
        loading = place.loading
        place.num_waiting += 1
        try:
            await asyncio.shield(loading)
        finally:
            place.num_waiting -= 1
            if not place.num_waiting and not place.is_read and not loading.done():
                loading.cancel()
                place.loading = None

    async def _load(self, place: Place) -> None:
        try:
            async with self._turn:
                while place.text_model is not None and place.closes:
                    await self._changes.wait()
                if place.text_model is None:
                    await self._read(place)
        finally:
            if place.loading is asyncio.current_task():
                place.loading = None
            self._changes.tell()

    async def _read(self, place: Place) -> None:
        """Load a model within the memory that others leave. Raises the errors of loading."""
        min_bytes = place.min_bytes
        while True:
            room = await self._room_for(place, min_bytes)
            place.is_read = True
            try:
                await in_thread(partial(self._read_and_put, place, room))
            except OutOfMemory:
                if self.budget is None or room >= self.budget or not self._memory.loaded():
                    raise
                # It needs more than was known before it was read.
                min_bytes = room + 1
            else:
                return
            finally:
                place.is_read = False

    def _read_and_put(self, place: Place, room: int) -> None:
        self._put(place, place.model.load(room))

    def _put(self, place: Place, text_model: TextModel) -> None:
        """Store the loaded model. Runs on the thread that has loaded it."""
        with self._lock:
            if not self._is_closed:
                place.put(text_model, self._clock())
                return
        text_model.close()
        raise EngineStopped("The server is stopping.")

    async def _room_for(self, place: Place, min_bytes: int) -> int:
        """Wait for at least `min_bytes`, and return the unused bytes. Raises OutOfMemory, QueueFull."""
        if place.floor > self._memory.budget:
            raise OutOfMemory(
                f"{place.model.name} needs {gib(place.floor)}, and all models of this server may "
                f"have {gib(self._memory.budget)} together. Raise gpu_memory_utilization, or choose a "
                "smaller model. Nothing was unloaded for it."
            )
        min_bytes, deadline = min(min_bytes, self._memory.budget), self._clock() + MAX_WAIT_SECONDS
        try:
            while (left := self._memory.left()) < min_bytes:
                self._refuse_if_closed()
                self._memory.refuse_beside_pinned(place.model.name, min_bytes)
                if await self._freed(min_bytes):
                    continue
                if self._clock() > deadline:
                    raise QueueFull(
                        f"There is no room for {place.model.name}. {self._memory.describe()} Try again "
                        "later, or unload one."
                    )
                self._memory.drain_oldest(self._clock())
                await self._changes.wait(LOOK_SECONDS)
            return left
        finally:
            for other in self._places.values():
                other.closes = other.closing is not None
            self._changes.tell()

    async def _freed(self, min_bytes: int) -> bool:
        """True if memory was freed, or is about to be."""
        loaded = self._memory.loaded()
        if closing := [place.closing for place in loaded if place.closing is not None]:
            await asyncio.wait(closing, return_when=asyncio.FIRST_COMPLETED)
            return True
        idle = sorted((place for place in loaded if place.is_idle), key=lambda place: place.used_at)
        if min_bytes <= self._memory.left(shrunk=True) and await self._memory.shrink(
            idle, min_bytes
        ):
            return True
        drained = [place for place in loaded if place.closes and not place.users]
        for place in (*drained, *(place for place in idle if not place.is_pinned)):
            await self._unload(place)
            return True
        return False

    async def _grow(self) -> None:
        async with self._turn:
            # No model is loaded meanwhile.
            if (growing := self._memory.growing()) is not None:
                await self._memory.resize(*growing)

    # ---- unloading

    async def _unload(self, place: Place) -> None:
        """Unload a model, waiting until its memory is free."""
        await asyncio.shield(self._begin_closing(place))

    def _begin_closing(self, place: Place) -> asyncio.Task[None]:
        if place.closing is None:
            place.closes = True
            place.closing = self._tasks.begin(self._close_one(place))
        return place.closing

    async def _close_one(self, place: Place) -> None:
        assert place.text_model is not None
        began = self._clock()
        try:
            await in_thread(place.text_model.close)
        finally:
            place.text_model, place.closing, place.closes = None, None, False
            place.keep_alive = place.model.keep_alive
            self._changes.tell()
            self.on_unloaded(place.model.name)
        log.info("%s was unloaded in %.1f s", place.model.name, self._clock() - began)

"""SharedMemory: the memory budget that the models of a registry share, and how to free some.

Weights, the peak of a step and the pool count as planned: pages of a pool may be unused yet.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from mlxserve.chat.registry.entries import Place, gib
from mlxserve.core.errors import MlxServeError, OutOfMemory

log = logging.getLogger("mlxserve.chat.registry")

NO_LIMIT = 1 << 62
MIN_SECONDS = 5.0  # minimum residency of a model in use that another one needs the memory of


class SharedMemory:
    """The memory of the models in `places`."""

    def __init__(self, places: Mapping[str, Place], budget: float) -> None:
        """budget: bytes; inf for no limit."""
        self.budget = int(min(budget, NO_LIMIT))
        self._places = places

    def loaded(self) -> list[Place]:
        """The models that hold memory, including those that are being closed."""
        return [place for place in self._places.values() if place.text_model is not None]

    def left(self, *, shrunk: bool = False) -> int:
        """Unused bytes of the budget. `shrunk`: as if idle models had their smallest pools."""
        return self.budget - sum(
            place.smaller if shrunk else place.planned.total for place in self.loaded()
        )

    def pinned(self) -> list[Place]:
        """The loaded models that are not unloaded for others."""
        return [place for place in self.loaded() if place.is_pinned and not place.closes]

    def refuse_beside_pinned(self, name: str, min_bytes: int) -> None:
        """Raises OutOfMemory if a model does not fit beside the pinned ones with their smallest pools."""
        pinned = self.pinned()
        held = sum(min(place.planned.total, place.min_bytes) for place in pinned)
        if pinned and held + min_bytes > self.budget:
            names = ", ".join(place.model.name for place in pinned)
            raise OutOfMemory(
                f"{name} needs {gib(min_bytes)}, and pinned models keep {gib(held)} of the "
                f"{gib(self.budget)} that all models may have together. Unpin or unload one of them: "
                f"{names}. Nothing was unloaded for it."
            )

    def describe(self) -> str:
        """Describe the loaded models and their use."""
        return f"Loaded: {', '.join(place.describe() for place in self.loaded()) or 'none'}."

    async def shrink(self, idle: Sequence[Place], min_bytes: int) -> bool:
        """Shrink the pools of idle models; True if any became smaller.

        Each gets an equal share of what weights and steps leave, or else what it needs.
        """
        loaded = self.loaded()
        fixed = min_bytes + sum(
            place.planned.total - place.num_pages * place.planned.page for place in loaded
        )
        share = max(0.0, self.budget - fixed) / (len(loaded) + 1)
        has_shrunk = False
        for pool in (share, 0.0):
            for place in idle:
                if self.left() >= min_bytes and pool == 0.0:
                    return True
                pages = max(place.model.min_pages, int(pool // max(1, place.planned.page)))
                has_shrunk |= await self.resize(place, pages) if pages < place.num_pages else False
        return has_shrunk

    def drain_oldest(self, now: float) -> None:
        """Stop new requests to the model that was loaded first and is not pinned.

        Without effect while a model is draining already.
        """
        loaded = self.loaded()
        movable = [place for place in loaded if not place.is_pinned]
        if movable and not any(place.closes for place in loaded):
            oldest = min(movable, key=lambda place: place.loaded_at)
            oldest.closes = now - oldest.loaded_at >= MIN_SECONDS

    def growing(self) -> tuple[Place, int] | None:
        """Return a model whose pool was shrunk, and the number of pages that fit again."""
        for place in self.loaded():
            is_ours = place.num_pages == place.set_pages
            if place.closes or not place.planned.page or not is_ours or self.budget == NO_LIMIT:
                continue
            more = max(0, self.left()) // place.planned.page
            num_pages = min(place.max_pages, place.num_pages + more)
            # A resize is not worth a few pages.
            if num_pages - place.num_pages > place.num_pages // 8:
                return place, num_pages
        return None

    async def resize(self, place: Place, num_pages: int) -> bool:
        """Resize a model's pool; False if running requests or named prefixes need its pages."""
        assert place.text_model is not None
        try:
            await place.text_model.engine.resize_cache(num_pages)
        except MlxServeError as error:
            log.info("The pool of %s stays as it is: %s", place.model.name, error)
            return False
        place.set_pages = place.num_pages
        return True

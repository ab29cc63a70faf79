"""Drafting: what was loaded to draft for a model, before there are pages."""

from __future__ import annotations

from typing import Protocol

from mlxserve.cache.kv import KVPool
from mlxserve.cache.window_kv import WindowKV
from mlxserve.core.config import EngineConfig
from mlxserve.hub.files import ModelFiles
from mlxserve.model.drafting.drafter import Drafter
from mlxserve.model.load import LoadedDrafter, LoadedModel


class Drafting(Protocol):
    """A source of drafts that has been loaded beside its target."""

    @property
    def loaded(self) -> LoadedDrafter:
        """Return what is counted with the target's weights and pages."""

    @property
    def files(self) -> ModelFiles:
        """The files that it comes from."""

    def step_size(self, config: EngineConfig, *, is_metal: bool, memory_limit: int) -> int:
        """Return the bytes that a step plans for it, beside weights and pages."""

    def drafter(
        self,
        config: EngineConfig,
        target: LoadedModel,
        kv: KVPool,
        windows: WindowKV | None,
        first_pages: int | None,
    ) -> Drafter:
        """Make the drafter.

        kv, windows: the target's pools; a pool of the drafter has as many pages as `kv`
        first_pages: with memory at the start; None for all
        """

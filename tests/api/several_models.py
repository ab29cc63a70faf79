"""A server of several scripted models, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from mlxserve.chat.registry.entries import RegisteredModel
from mlxserve.chat.registry.registry import ModelRegistry
from mlxserve.core.errors import OutOfMemory
from tests.api.fake_chat import FakeChat
from tests.api.serving import Running, serving


@dataclass
class SeveralModels:
    """Scripted models by their names, each made anew when it is loaded.

    scripts: what a model answers, from its next loading on
    chats: the models that are or were loaded, the newest of each name
    """

    scripts: Mapping[str, list[Any] | None]
    chats: dict[str, FakeChat] = field(default_factory=dict)

    def registry(self) -> ModelRegistry:
        """With the first model loaded."""
        registry = ModelRegistry(
            [
                RegisteredModel(name=name, load=self._loader(name), weight_size=1 << 20)
                for name in self.scripts
            ]
        )
        # On a thread of its own: playwright's event loop runs on the test's.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, registry.preload()).result(60)
        return registry

    def _loader(self, name: str) -> Callable[[int], Any]:
        def load(_room: int) -> Any:
            if name == "broken":
                raise OutOfMemory("broken needs 9.00 GiB, and 1.00 GiB are left.")
            self.chats[name] = FakeChat(model_name=name, script=self.scripts[name])
            return self.chats[name]

        return load


@contextlib.contextmanager
def serving_several(
    scripts: Mapping[str, list[Any] | None], **options: Any
) -> Iterator[tuple[Running, SeveralModels]]:
    """A server of models that answer from these scripts; "broken" cannot be loaded."""
    models = SeveralModels(scripts)
    registry = models.registry()
    first = models.chats[next(iter(scripts))]
    with serving(first, registry=registry, stop_engine=registry.close, **options) as server:
        try:
            yield server, models
        finally:
            for chat in models.chats.values():
                chat.release()

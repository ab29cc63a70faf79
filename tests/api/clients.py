"""The official clients, imported by the first test that uses one.

Those of Anthropic and OpenAI take 2.5 s of CPU, which each worker of each suite would spend to collect the tests.
"""

from __future__ import annotations

import importlib
from typing import Any


class Deferred:
    """A package that is imported when it is first asked for a name."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # as pytest asks of all that a module of tests holds
            raise AttributeError(name)
        return getattr(importlib.import_module(self._package), name)


anthropic = Deferred("anthropic")
ollama = Deferred("ollama")
openai = Deferred("openai")

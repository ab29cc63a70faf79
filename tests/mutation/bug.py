"""A bug that is planted into the product for one test."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import pytest


@dataclass(frozen=True)
class Bug:
    """`line` of a method or function, which must occur once, is replaced by `mistake`."""

    owner: type | ModuleType
    method: str
    line: str
    mistake: str
    claim: Callable[..., object] | None = None  # the test that fails
    options: dict[str, object] = field(default_factory=dict)  # of the claim, or of the machine

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        function = getattr(self.owner, self.method)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.line) == 1, f"{self.line!r} is not one place in {self.method}"
        namespace: dict[str, object] = {}
        exec(source.replace(self.line, self.mistake), function.__globals__, namespace)
        monkeypatch.setattr(self.owner, self.method, namespace[self.method])

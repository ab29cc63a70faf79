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
    """`line` of a method, property or function, which must occur once, is replaced by `mistake`."""

    owner: type | ModuleType
    method: str
    line: str
    mistake: str
    claim: Callable[..., object] | None = None  # the test that fails
    options: dict[str, object] = field(default_factory=dict)  # of the claim, or of the machine

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        member = getattr(self.owner, self.method)
        function = member.fget if isinstance(member, property) else member
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.line) == 1, f"{self.line!r} is not one place in {self.method}"
        namespace: dict[str, object] = {}
        exec(source.replace(self.line, self.mistake), function.__globals__, namespace)
        monkeypatch.setattr(self.owner, self.method, namespace[self.method])

    def check_found(
        self, request: pytest.FixtureRequest, errors: tuple[type[BaseException], ...]
    ) -> None:
        """Plant it and run the claim, with the fixtures that it names or uses: it must fail with one of `errors`."""
        assert self.claim is not None
        # Without them a claim may fail whatever was planted.
        for mark in getattr(self.claim, "pytestmark", ()):
            for fixture in mark.args if mark.name == "usefixtures" else ():
                request.getfixturevalue(fixture)
        fixtures = {
            parameter: request.getfixturevalue(parameter)
            for parameter in inspect.signature(self.claim).parameters
            if parameter not in self.options
        }
        self.plant(request.getfixturevalue("monkeypatch"))
        with pytest.raises(errors):
            self.claim(**fixtures, **self.options)

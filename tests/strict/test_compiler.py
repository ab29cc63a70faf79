"""The strict reader's precompiled preamble belongs to one checkout, and is no fault of a text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.emulator.cache import VARIABLE
from tests.strict import compiler


def test_each_checkout_has_a_preamble_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compiled form names the headers, and the other checkout may be gone."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv(VARIABLE, str(cache))
    monkeypatch.setattr(compiler, "emit", lambda _which, _header, target: target.touch())
    own = compiler.preamble.__wrapped__("types")
    assert compiler.preamble.__wrapped__("types") == own
    shutil.copytree(compiler.INCLUDE, tmp_path / "include")
    monkeypatch.setattr(compiler, "INCLUDE", tmp_path / "include")
    assert compiler.preamble.__wrapped__("types") != own


def test_an_unusable_preamble_is_not_reported_as_an_error_of_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a report would be kept, and the text refused from then on."""
    broken = tmp_path / "broken.pch"
    broken.write_bytes(b"CPCH")
    monkeypatch.setattr(compiler, "preamble", lambda _which: broken)
    with pytest.raises(RuntimeError, match="is not usable"):
        compiler.compile_text("", "types")

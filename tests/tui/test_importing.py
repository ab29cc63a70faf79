"""Threads that import a package and its submodule do not wait for each other."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from tui.importing import import_in_turn


class SlowLoader(SourceFileLoader):
    """Gives another thread time to begin with the package's submodule."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self.has_begun = threading.Event()

    def create_module(self, _spec: ModuleSpec) -> ModuleType | None:
        self.has_begun.set()
        threading.Event().wait(0.3)
        return None  # one as usual


class Finder:
    """Finds the package only."""

    def __init__(self, loader: SlowLoader) -> None:
        self._loader = loader

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != self._loader.name:
            return None
        return spec_from_file_location(name, self._loader.path, loader=self._loader)


def test_a_package_and_its_submodule_are_imported_by_two_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package_file = tmp_path / "tangled" / "__init__.py"
    package_file.parent.mkdir()
    package_file.write_text("import tangled.part")
    (tmp_path / "tangled" / "part.py").write_text("")
    loader = SlowLoader("tangled", str(package_file))
    monkeypatch.setattr(sys, "meta_path", [Finder(loader), *sys.meta_path])
    with ThreadPoolExecutor(2) as threads:
        package = threads.submit(import_in_turn, "tangled")
        assert loader.has_begun.wait(30)
        part = threads.submit(import_in_turn, "tangled.part")
        package.result(30)
        part.result(30)

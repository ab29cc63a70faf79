"""The tests themselves: what suites that nobody ran today import is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("mlxserve", "metal_kernels", "tui", "tests")


@cache
def names_of(module: str) -> frozenset[str] | None:
    """What a module defines or imports at its top level; None if there is no such module."""
    path = ROOT.joinpath(*module.split("."))
    if path.is_dir():
        folders = {child.stem for child in path.iterdir()}
        own = path / "__init__.py"
        return frozenset(folders | (_defined(own) if own.exists() else set()))
    file = path.with_suffix(".py")
    return frozenset(_defined(file)) if file.exists() else None


def _defined(file: Path) -> set[str]:
    """The names of any statement outside functions and classes, also of those under a condition."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(file.read_text("utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return names


def _imports(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            yield from ((str(node.module), alias.name) for alias in node.names)


def missing(file: Path) -> list[str]:
    """What a file imports of this project and is not there, except what a package computes when it is asked."""
    return [
        f"{module}.{name}"
        for module, name in _imports(file)
        if name != "*" and name not in (names_of(module) or ()) and not _is_lazy(module)
    ]


def _is_lazy(module: str) -> bool:
    return "__getattr__" in (names_of(module) or ())


@pytest.mark.slow
def test_whatever_a_test_imports_is_there() -> None:
    """A suite that `.ci/run` leaves out is not imported there either, and its imports go out of date unseen."""
    files = [*ROOT.glob("tests/**/*.py")]
    assert len(files) > 400
    assert [f"{file.relative_to(ROOT)}: {name}" for file in files for name in missing(file)] == []


def test_a_name_that_moved_is_found(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(
        "from tests.suites import pytest_ignore_collect, moved\n"
        "from tests.nowhere import one\n"
        "from mlxserve import LLM\n"
        "def late():\n"
        "    from mlxserve.request import Chunk, Moved\n"
    )
    assert missing(file) == ["tests.suites.moved", "tests.nowhere.one", "mlxserve.request.Moved"]

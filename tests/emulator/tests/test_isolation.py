"""The emulator and the product do not import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EMULATOR = ROOT / "tests" / "emulator"
PRODUCT = ("mlxserve", "metal_kernels", "tui")


def imports(folder: Path) -> Iterator[tuple[Path, str]]:
    """(file, dotted name) of every import in a folder, those inside functions included."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield path, node.module or ""


@pytest.mark.parametrize("package", PRODUCT)
def test_the_product_imports_no_test_code(package: str) -> None:
    assert [found for found in imports(ROOT / package) if found[1].startswith("tests")] == []


def test_the_emulator_imports_nothing_of_the_product() -> None:
    assert [found for found in imports(EMULATOR) if found[1].startswith(PRODUCT)] == []


def test_an_import_inside_a_function_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("def f():\n    from mlxserve import LLM\nimport tui.app")
    names = [name for _, name in imports(tmp_path)]
    assert sorted(names) == ["mlxserve", "tui.app"]

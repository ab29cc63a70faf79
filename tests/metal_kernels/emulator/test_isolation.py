"""The emulator is for tests: the product never imports it unasked."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = "metal_kernels.emulator"


def product_files() -> Iterator[Path]:
    for package in ("mlxserve", "metal_kernels", "tui"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if ROOT / "metal_kernels" / "emulator" not in path.parents:
                yield path


def imported_when_loaded(tree: ast.Module) -> Iterator[str]:
    """What a module imports without any of its functions being called."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def test_no_module_of_the_product_imports_the_emulator_when_it_is_loaded() -> None:
    found = [
        (str(path.relative_to(ROOT)), name)
        for path in product_files()
        for name in imported_when_loaded(ast.parse(path.read_text()))
        if f"{name}.".startswith(f"{PACKAGE}.")
    ]
    assert found == []


def test_such_an_import_would_be_noticed() -> None:
    tree = ast.parse(f"if True:\n    from {PACKAGE} import Library\nimport {PACKAGE}.kernel")
    assert set(imported_when_loaded(tree)) == {f"{PACKAGE}.Library", f"{PACKAGE}.kernel"}
    assert list(imported_when_loaded(ast.parse(f"def f():\n    import {PACKAGE}"))) == []

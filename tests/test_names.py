"""Names: a class name has one meaning in the tree, and tests use what is public."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Names of other packages that have no public equivalent, and the methods of named tuples.
FOREIGN = {
    "_replace",
    "_http_vsn_str",  # http.client: sends a request line of another HTTP version
    "_maybe_draw_constant",  # hypothesis: turned off where constants of the source are no examples
    "_compositor",  # textual: what is on the screen, cell by cell
}
PRODUCT = ("metal_kernels", "mlxserve", "tui")
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def test_no_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in re.findall(r"^class ([a-zA-Z]\w*)", path.read_text("utf-8"), re.MULTILINE):
                places[name].append(path.relative_to(ROOT).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def _is_private(name: object) -> bool:
    return (
        isinstance(name, str)
        and name not in FOREIGN
        and name.startswith("_")
        and not name.endswith("__")
    )


# What may be a private name of another: parsing 100,000 lines to see that most have none took 12 s.
SUSPECT = re.compile(
    r"""(?<!\bself)(?<!\bcls)\._[a-zA-Z]|["']_[a-zA-Z]|\bimport\b[^\n]*\b_[a-z]|^\s+_\w+,$""",
    re.MULTILINE,
)


def _private_names(path: Path) -> list[str]:
    """What a test file takes from product code by a private name: imports, attributes, patches."""
    text = path.read_text(encoding="utf-8")
    if not SUSPECT.search(text):
        return []
    nodes = list(ast.walk(ast.parse(text)))
    own = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    }
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found = []
    for node in nodes:
        names: list[object] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PRODUCT:
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr not in own:
            names = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
            "setattr",
            "delattr",
        ):
            target, *rest = [a.value for a in node.args if isinstance(a, ast.Constant)] or [None]
            names = [str(target).rpartition(".")[2], *rest[:1]]
        found += [f"{node.lineno}: {name}" for name in names if _is_private(name)]
    return found


def test_tests_reach_no_private_name() -> None:
    found = {path.relative_to(ROOT).as_posix(): _private_names(path) for path in TESTS}
    assert {path: names for path, names in found.items() if names} == {}


MAX_METHODS = 30


def test_no_class_has_more_than_30_methods() -> None:
    """But Textual's own kind of App, whose actions and handlers are methods."""
    larger = set()
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.ClassDef):
                    continue
                num_methods = sum(
                    isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body
                )
                is_app = any(re.match(r"App\b", ast.unparse(base)) for base in node.bases)
                if num_methods > MAX_METHODS and not is_app:
                    larger.add(node.name)
    assert not larger

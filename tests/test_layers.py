"""The arrows of the house, as data: who may import whom. A new arrow fails here first."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("mlxserve", "metal_kernels", "tui")

# A file or folder of ours -> the files and folders of ours it may import, beside itself.
ALLOWED: dict[str, set[str]] = {
    "metal_kernels": set(),
    "tui": set(),
    "mlxserve/errors": set(),
    "mlxserve/stats": set(),
    "mlxserve/snapshot": {"mlxserve/cache/pages", "mlxserve/request", "mlxserve/stats"},
    "mlxserve/config": {"mlxserve/errors"},
    "mlxserve/settings": {"mlxserve/errors"},
    "mlxserve/template_limits": set(),
    "mlxserve/allocator": set(),
    "mlxserve/platform": {"mlxserve/allocator", "mlxserve/errors"},
    "mlxserve/request": {"mlxserve/errors"},
    "mlxserve/spans": {"mlxserve/errors"},
    "mlxserve/worker": set(),
    "mlxserve/cache/__init__": set(),
    "mlxserve/cache/hashing": set(),
    "mlxserve/cache/runs": set(),
    "mlxserve/cache/children": set(),
    "mlxserve/cache/pages": {
        "mlxserve/cache/children",
        "mlxserve/cache/hashing",
        "mlxserve/cache/runs",
    },
    "mlxserve/cache/store": {"mlxserve/errors"},
    "mlxserve/cache/layout": {"metal_kernels"},
    "mlxserve/cache/kv": {"metal_kernels", "mlxserve/cache/layout"},
    "mlxserve/scheduler": {
        "mlxserve/cache/hashing",
        "mlxserve/cache/pages",
        "mlxserve/errors",
        "mlxserve/request",
    },
    "mlxserve/model": {
        "metal_kernels",
        "mlxserve/cache/kv",
        "mlxserve/cache/layout",
        "mlxserve/errors",
        "mlxserve/mini",  # where the embedded model's folder is
        "mlxserve/platform",
        "mlxserve/request",
        "mlxserve/stats",  # how much memory is taken
    },
    "mlxserve/doctor_kernels": {"metal_kernels", "mlxserve/platform"},
    "mlxserve/swapper": {
        "mlxserve/cache/store",
        "mlxserve/model",
        "mlxserve/scheduler",
    },
    "mlxserve/engine": {
        "mlxserve/errors",
        "mlxserve/swapper",
        "mlxserve/model",
        "mlxserve/request",
        "mlxserve/scheduler",
        "mlxserve/snapshot",
        "mlxserve/spans",
        "mlxserve/stats",
    },
    "mlxserve/async_engine": {
        "mlxserve/engine",
        "mlxserve/errors",
        "mlxserve/request",
        "mlxserve/snapshot",
        "mlxserve/stats",
        "mlxserve/worker",
    },
    "mlxserve/tokenizer": {"mlxserve/errors", "mlxserve/parsing", "mlxserve/template_limits"},
    "mlxserve/parsing": set(),
    "mlxserve/guidance": {
        "mlxserve/errors",
        "mlxserve/parsing",
        "mlxserve/request",
        "mlxserve/tokenizer",
    },
    "mlxserve/answer_terms": {"mlxserve/parsing"},
    "mlxserve/answer_text": {"mlxserve/parsing", "mlxserve/request", "mlxserve/tokenizer"},
    "mlxserve/chat": {
        "mlxserve/answer_terms",
        "mlxserve/answer_text",
        "mlxserve/async_engine",
        "mlxserve/errors",
        "mlxserve/guidance",
        "mlxserve/parsing",
        "mlxserve/request",
        "mlxserve/snapshot",
        "mlxserve/stats",
        "mlxserve/tokenizer",
    },
    "mlxserve/llm": {
        "mlxserve/build",
        "mlxserve/chat",
        "mlxserve/config",
        "mlxserve/errors",
        "mlxserve/parsing",
        "mlxserve/request",
        "mlxserve/stats",
    },
    "mlxserve/api": {
        "mlxserve/__init__",
        "mlxserve/answer_terms",
        "mlxserve/build",
        "mlxserve/chat",
        "mlxserve/config",
        "mlxserve/errors",
        "mlxserve/parsing",
        "mlxserve/request",
        "mlxserve/settings",  # where the configuration folder is
        "mlxserve/snapshot",
        "mlxserve/stats",
    },
    "mlxserve/catalog": {"mlxserve/mini"},  # where the embedded model's folder is
    "mlxserve/mini": set(),
    "mlxserve/mini/training": {
        "mlxserve/__init__",
        "mlxserve/config",  # the options of the engine that it is evaluated with
        "mlxserve/mini",
        "mlxserve/platform",
        "mlxserve/stats",  # of that engine
    },
}
# Where everything meets: they may import anything of ours but one another's insides.
WIRING = (
    "mlxserve/__init__",
    "mlxserve/__main__",
    "mlxserve/bench",
    "mlxserve/build",
    "mlxserve/cli",
    "mlxserve/doctor",
)


def unit_of(module: str) -> str:
    """The entry of the table that a module belongs to: the longest that fits."""
    path = module.replace(".", "/")
    known = [name for name in (*ALLOWED, *WIRING) if f"{path}/".startswith(f"{name}/")]
    if known:
        return max(known, key=len)
    return f"{path}/__init__" if (ROOT / path).is_dir() else path


def imports_of(file: Path) -> set[str]:
    """Every module of ours that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {n for n in names if exists(n)}
            found |= modules or {node.module}
    return {name for name in found if name.split(".")[0] in OURS}


def exists(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def files() -> list[Path]:
    return [file for name in OURS for file in sorted((ROOT / name).rglob("*.py"))]


def unit_of_file(file: Path) -> str:
    return unit_of(".".join(file.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_follow_the_table(file: Path) -> None:
    unit = unit_of_file(file)
    if unit in WIRING:
        return
    assert unit in ALLOWED, f"{unit} has no entry in the table"
    for module in imports_of(file):
        target = unit_of(module)
        assert target == unit or target in ALLOWED[unit], f"{unit} may not import {module}"


def test_the_scheduler_and_the_pool_need_nothing_but_the_standard_library() -> None:
    heavy = {"mlx", "mlx_lm", "numpy", "transformers", "time", "random"}
    for pattern in (
        "mlxserve/scheduler/*.py",
        "mlxserve/cache/pages.py",
        "mlxserve/cache/hashing.py",
    ):
        for file in ROOT.glob(pattern):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                assert not heavy & {name.split(".")[0] for name in names}, file

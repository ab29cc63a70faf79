"""The house as a graph: which room may import which. Computed from the source, held against a table.

A room is a package or a folder of `mlxserve/`, or a file that lies beside these folders. The rows run from the
ground up: a room imports only rooms above its own row. A new arrow fails, and so does an entry that the source no
longer needs. `python -m tests.test_layers` prints the counts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("metal_kernels", "mlxserve", "tui")

ARROWS: dict[str, str] = {
    "mini": "",
    "metal_kernels": "",
    "core": "metal_kernels",
    "system": "core",
    "helpers": "core system",
    "images": "core system helpers",
    "request": "core images",
    "cache": "metal_kernels core request",
    "disk": "core system",
    "hub": "metal_kernels core system cache",
    "text": "core system helpers images request",
    "history": "system",
    "mcp": "system",
    "scheduler": "core images request cache",
    "model": "metal_kernels core system helpers images request cache hub",
    "engine": "core system helpers images request cache disk scheduler model",
    "chat": (
        "metal_kernels core system helpers images request cache hub text scheduler model engine"
    ),
    "engine_part": "core system cache hub text model",
    "build": "core system helpers cache disk hub text scheduler model engine engine_part chat",
    "ranks": "metal_kernels core system helpers request cache hub model engine_part chat build",
    "llm": "core system helpers request text engine chat ranks",
    "__init__": "core request text chat llm",
    "api": "core system helpers images request hub text history mcp engine chat",
    "doctor": "metal_kernels core system request cache hub model engine chat build",
    "bench": "core system request hub model engine build __init__",
    "service": "core",
    "tui": "system hub history mcp",
    "cli": (
        "core system helpers images disk hub text chat build ranks api doctor bench service tui"
    ),
    "__main__": "cli",
}
# What decides without computing needs the standard library alone.
PLAIN = (
    "mlxserve/core/option",
    "mlxserve/core/config",
    "mlxserve/core/stats",
    "mlxserve/cache/pages",
    "mlxserve/cache/hashing",
    "mlxserve/scheduler",
)


MAX_ROOMS = 30
MAX_ARROWS = 150
# Each client's dialect has schemas, replies and routes of its own.
DIALECTS = ("openai", "responses", "anthropic", "ollama")


def room_of(file: str) -> str:
    """Return the room of a file, whose path comes without its suffix."""
    package, _, rest = file.partition("/")
    return rest.split("/")[0] if package == "mlxserve" else package


@cache
def imports() -> dict[str, frozenset[str]]:
    """Each file of ours and the files of ours that it imports, wherever in its text."""
    paths = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    return {_name(path): frozenset(_imported(path)) for path in paths}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def _imported(path: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            if module.split(".")[0] in PACKAGES and (file := _file_of(module)):
                yield file


def _file_of(module: str) -> str | None:
    """The file of a module, or of the module that a name is taken from."""
    path = ROOT / module.replace(".", "/")
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return _name(candidate)
    parent = module.rpartition(".")[0]
    return _file_of(parent) if parent else None


@cache
def arrows() -> dict[str, set[str]]:
    """Map each room to the rooms that its files import."""
    rooms: dict[str, set[str]] = {}
    for file, targets in imports().items():
        rooms.setdefault(room_of(file), set()).update(room_of(target) for target in targets)
    return {room: targets - {room} for room, targets in rooms.items()}


def backward_arrows() -> list[str]:
    floor = {room: number for number, room in enumerate(ARROWS)}
    return [
        f"{room} -> {target}"
        for room, targets in arrows().items()
        for target in targets
        if floor[target] > floor[room]
    ]


def test_a_room_imports_what_its_row_lists_and_nothing_else() -> None:
    assert arrows() == {room: set(row.split()) for room, row in ARROWS.items()}


def test_every_arrow_runs_down() -> None:
    assert backward_arrows() == []


def test_the_house_stays_small_enough_to_draw() -> None:
    assert len(arrows()) <= MAX_ROOMS
    assert sum(map(len, arrows().values())) <= MAX_ARROWS


def test_only_the_command_line_imports_the_terminal() -> None:
    assert [room for room, targets in arrows().items() if "tui" in targets] == ["cli"]


def test_no_dialect_imports_another() -> None:
    for file, targets in imports().items():
        for dialect in DIALECTS:
            if file.startswith(f"mlxserve/api/{dialect}/"):
                others = [f"mlxserve/api/{other}/" for other in DIALECTS if other != dialect]
                assert not [target for target in targets if target.startswith(tuple(others))], file


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = imports()
    done: set[str] = set()

    def visit(file: str, path: tuple[str, ...]) -> None:
        assert file not in path, " -> ".join((*path[path.index(file) :], file))
        if file not in done:
            for target in sorted(graph[file] - {file}):
                visit(target, (*path, file))
            done.add(file)

    for file in graph:
        visit(file, ())
    assert done == set(graph)


def test_the_scheduler_and_the_pool_need_nothing_but_the_standard_library() -> None:
    for room in PLAIN:
        heavy = {"mlx", "mlx_lm", "numpy", "transformers", "time", "random"}
        files = [file for file in imports() if f"{file}/".startswith(f"{room}/")]
        assert files, room
        for file in files:
            for node in ast.walk(ast.parse((ROOT / f"{file}.py").read_text(encoding="utf-8"))):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                assert not heavy & {name.split(".")[0] for name in names}, file


if __name__ == "__main__":
    for room, targets in arrows().items():
        print(f"{room}: {' '.join(sorted(targets))}")
    num_arrows = sum(map(len, arrows().values()))
    print(f"{len(arrows())} rooms, {num_arrows} arrows, {len(backward_arrows())} backward")

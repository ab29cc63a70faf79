"""No route hands work to a thread of its own choice: `FairExecutor` gives each client its turn.

The default executor of asyncio, and starlette's for functions that are no coroutines, serve whoever
comes first, and nobody ends what they have begun.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Names whose use hands work to threads, as a call or imported.
NAMES = {
    *(
        "to_thread",
        "run_in_executor",
        "run_in_threadpool",
        "run_sync",
        "getaddrinfo",
        "getnameinfo",
    ),
    *("ThreadPoolExecutor", "ProcessPoolExecutor", "Executor", "ThreadPool"),
    *("FileResponse", "StaticFiles"),
}
# file: (names, why no client waits there for another)
REVIEWED = {
    "mlxserve/helpers/fair_executor.py": ({"ThreadPoolExecutor"}, "the turns themselves"),
    "mlxserve/images/remote.py": ({"getaddrinfo"}, "within a fetch, which is Work"),
    "mlxserve/doctor/report.py": ({"to_thread"}, "a command with one user"),
    "mlxserve/cli/run.py": ({"to_thread"}, "a command with one user"),
    "mlxserve/mcp/toolbox.py": ({"to_thread"}, "at the end of the program"),
    "mlxserve/text/guidance/matcher_host.py": ({"ThreadPoolExecutor"}, "in a helper, by Work"),
    "mlxserve/hub/gguf/weights.py": ({"ThreadPoolExecutor"}, "within a load, which is Work"),
}


def names_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def found_in(file: Path) -> set[str]:
    return NAMES & set(names_in(file.read_text(encoding="utf-8")))


def test_threads_are_used_where_it_was_reviewed() -> None:
    found = {
        str(file.relative_to(ROOT)): names
        for file in sorted((ROOT / "mlxserve").rglob("*.py"))
        if (names := found_in(file))
    }
    assert found == {file: names for file, (names, _) in REVIEWED.items()}


@pytest.mark.parametrize(
    "source",
    [
        "async def f():\n    await asyncio.to_thread(g)",
        "from asyncio import to_thread as t",
        "loop.run_in_executor(None, g)",
        "from starlette.concurrency import run_in_threadpool",
        "import concurrent.futures as c\nc.ThreadPoolExecutor()",
    ],
)
def test_every_way_is_seen(source: str) -> None:
    assert NAMES & set(names_in(source))

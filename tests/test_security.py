"""Every promise of SECURITY.md names the tests that fail once it is not true, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
# Lines that say what nobody defends, and promise nothing.
_PROMISE_NOTHING = (
    "A person who can run programs",
    "API keys share one machine",
    "A model can say anything",
)


def _sections() -> dict[str, str]:
    _, *parts = _SECTION.split(SECURITY)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _rows(section: str) -> list[list[str]]:
    lines = [line for line in _sections()[section].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def _named() -> dict[str, list[tuple[str, str]]]:
    """(file, test) by line."""
    named: dict[str, list[tuple[str, str]]] = {}
    for line, tests in _rows("The test of each line"):
        assert line not in named, f"{line!r} is there twice"
        for part in tests.split("; "):
            file, _, names = part.partition(": ")
            named.setdefault(line, []).extend(
                (file.strip("`"), name.strip("`")) for name in names.split(", ")
            )
    return named


def _promises() -> list[str]:
    """What each line begins with: the first cells of tables, headings, and bullets."""
    tables = [row[0] for section in ("What is defended", "Limits") for row in _rows(section)]
    bullets = re.findall(r"^- (.+)$", _sections()["What is not defended"], re.MULTILINE)
    return [
        *tables,
        "Stopping",
        "Failures",
        *(b for b in bullets if not b.startswith(_PROMISE_NOTHING)),
    ]


@cache
def _tests_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions)


def _has_tests(promise: str, lines: list[str]) -> bool:
    return any(promise == line or promise.startswith((f"{line} ", f"{line}:")) for line in lines)


def test_every_promise_names_its_tests() -> None:
    lines = list(_named())
    assert [promise for promise in _promises() if not _has_tests(promise, lines)] == []


def test_no_line_has_tests_without_a_promise() -> None:
    promises = _promises()
    assert [line for line in _named() if not any(p.startswith(line) for p in promises)] == []


def test_the_named_tests_exist() -> None:
    named = [each for tests in _named().values() for each in tests]
    assert len(named) > 100
    assert [(file, name) for file, name in named if name not in _tests_of(file)] == []

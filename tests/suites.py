"""Which files hold tests of which suite, and in which order they run. `tests/conftest.py` imports these hooks."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

# Folders whose tests are a suite of their own: they test no part of the product.
_FOLDERS = {
    "tests/emulator/tests": "emulator",
    "tests/perf/simulation": "instruments",
    "tests/perf/simulation/fleet": "instruments",
    "tests/training/tests": "instruments",
}
# Files that take longest come first, so that no worker ends with one of them while the others idle.
_FIRST = (
    "tests/metal_kernels/test_msl_attention.py",
    "tests/real/test_long_prompts.py",
    "tests/reliability/test_side_by_side.py",
    "tests/model/test_every_architecture.py",
    "tests/reliability/test_faults.py",
    "tests/ranks/test_equality.py",
    "tests/ranks/test_failures.py",
    "tests/test_architectures.py",
    "tests/test_stateful_requests.py",
    "tests/test_wheel.py",
    "tests/tui/test_app.py",
    "tests/engine/test_recovery.py",
    "tests/api/server/test_restart.py",
    "tests/api/server/test_signals.py",
    "tests/test_emulated_engine.py",
)
_EACH_OF = {"slow", "long"}  # marks that `conftest.each_of` gives
# A mark that parameters of fixtures have, which no file of these folders names.
_OF_FIXTURES = {"tests/metal_kernels": "metal"}


def _folder_suite(path: Path, config: pytest.Config) -> str | None:
    return _FOLDERS.get(path.parent.relative_to(config.rootpath).as_posix())


def _suites(config: pytest.Config) -> frozenset[str]:
    return frozenset(line.partition(":")[0].strip() for line in config.getini("markers"))


def _of_fixtures(path: Path, config: pytest.Config) -> set[str]:
    """Suites that some tests of a file may be in by their fixtures."""
    return {
        mark
        for folder, mark in _OF_FIXTURES.items()
        if path.is_relative_to(config.rootpath / folder)
    }


def _marks(path: Path, config: pytest.Config) -> tuple[set[str], bool]:
    """(the suites that a file's text names, whether each of its tests has a mark of them)."""
    text, folder = path.read_text(encoding="utf-8"), _folder_suite(path, config)
    names = set(re.findall(r"pytest\.mark\.(\w+)", text)) & _suites(config)
    whole = re.search(r"^pytestmark = pytest\.mark\.(\w+)", text, re.MULTILINE)
    names |= _EACH_OF if "each_of" in text else set()
    return names | ({folder} if folder else set()), bool(folder or (whole and whole[1] in names))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test that `-m` selects: every worker would import all of them."""
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    names, is_whole = _marks(collection_path, config)
    suites, possible = _suites(config), names | _of_fixtures(collection_path, config)
    try:
        selects = compile(config.option.markexpr or "True", "-m", "eval")
        for size in range(len(possible) + 1):
            for marks in combinations(possible, size):
                is_possible = not is_whole or names.intersection(marks)
                if is_possible and eval(selects, {}, {name: name in marks for name in suites}):
                    return None
    except (SyntaxError, NameError):
        return None  # pytest says what is wrong with the expression
    return True


def _keep_out_of_slow(items: list[pytest.Item]) -> None:
    """A slow file or test may have a test or a parameter for another suite."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    for item in slow:
        for node in item.listchain():
            node.own_markers = [mark for mark in node.own_markers if mark.name != "slow"]
    for item in slow:
        if not (item.get_closest_marker("long") or item.get_closest_marker("ranks")):
            item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = dict.fromkeys(item.path for item in items)
    order = {config.rootpath / name: place for place, name in enumerate(_FIRST, -len(_FIRST))}
    order |= {path: place for place, path in enumerate(places) if path not in order}
    items.sort(key=lambda item: order[item.path])
    _keep_out_of_slow(items)
    known = {path: _marks(path, config)[0] | _of_fixtures(path, config) for path in places}
    folders = {path: _folder_suite(path, config) for path in places}
    suites = _suites(config)
    for item in items:
        folder = folders[item.path]
        if folder and not item.get_closest_marker("train"):
            item.add_marker(folder)
        if unknown := suites.intersection(m.name for m in item.iter_markers()) - known[item.path]:
            raise pytest.UsageError(f"{item.nodeid}: write pytest.mark.{unknown.pop()} in its file")

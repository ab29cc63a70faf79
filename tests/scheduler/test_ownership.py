"""Which files change the page pool and a request's progress, computed from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

from mlxserve.cache.blank_pages import BlankPages
from mlxserve.cache.eviction import EvictionLog, EvictionOrder
from mlxserve.cache.page_index import PageIndex
from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest

ROOT = Path(__file__).parent.parent.parent
OWNER = "mlxserve/scheduler/page_tables.py"
KINDS = "mlxserve/cache/kinds/"  # each owns the pool of its own units
# Public methods of PagePool and its parts that only look; any other one counts as changing it.
READS: dict[type, frozenset[str]] = {
    PagePool: frozenset(
        {
            "check",
            "is_exclusive",
            "is_pinned",
            "num_idle",
            "pinned",
            "ref_count",
            "renewed",  # makes another one
            "states",
        }
    ),
    BlankPages: frozenset({"audited_ids"}),
    PageIndex: frozenset(
        {
            "check",
            "find",
            "find_tail",
            "hash_of",
            "is_full",
            "is_known",
            "match",
            "num_common",
            "num_unchanged",
            "page_of",
            "with_following",
        }
    ),
    EvictionOrder: frozenset({"check", "first", "is_kept", "is_kept_free"}),
    EvictionLog: frozenset({"has", "is_disjoint", "since"}),
}
PARTS = ("blank", "index", "order", "evictions")  # attributes of a pool


@cache
def tree_of(text: str) -> ast.Module:
    return ast.parse(text)


def product(word: str, *folders: str) -> Iterator[tuple[str, ast.Module]]:
    """(path, syntax tree) of every file that users run and in which the word is; of `folders`, if given."""
    for folder in folders or ("metal_kernels", "mlxserve", "tui"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if word in text:
                yield path.relative_to(ROOT).as_posix(), tree_of(text)


def imported(tree: ast.Module) -> set[str | None]:
    """Modules that names are imported from."""
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def last_name(node: ast.expr) -> str:
    """`pool` of `self._scheduler.pool`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_of_pool(node: ast.expr) -> bool:
    """Whether it names a pool, or a part of one."""
    if isinstance(node, ast.Attribute) and node.attr in PARTS:
        node = node.value
    return last_name(node).endswith("pool")


def test_only_its_owner_changes_a_pool() -> None:
    changes: set[str] = set()
    for owner, reads in READS.items():
        methods = {name for name, value in vars(owner).items() if callable(value)}
        assert methods >= reads
        changes |= {name for name in methods if not name.startswith("_")} - reads
    assert {"allocate", "retain", "release", "publish", "pin", "grow", "keep_until"} <= changes
    callers = {
        (path, ast.unparse(node.func.value))
        for path, tree in product("pool.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in changes
        and is_of_pool(node.func.value)
    }
    assert callers == {
        *((OWNER, place) for place in ("self.pool", "self.pool.order")),
        *((f"{KINDS}window_pages.py", place) for place in ("self.pool", "self.pool.order")),
        # Which cached pages are evicted first, and how many pages there may be.
        *(
            (f"{KINDS}{name}.py", "self.pool.order")
            for name in ("reclaim", "state_ends", "window_ends")
        ),
        (f"{KINDS}state_slots.py", "self._pool.order"),
        (f"{KINDS}reclaim.py", "self.pool"),
    }


def test_every_pool_is_called_pool() -> None:
    """So that the test above sees it."""
    for path, tree in product("PagePool"):
        for node in ast.walk(tree):
            named = None
            if isinstance(node, ast.arg):
                named, annotation = node.arg, node.annotation
            elif isinstance(node, ast.AnnAssign):
                named, annotation = last_name(node.target), node.annotation
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                named, annotation = last_name(node.targets[0]), node.value.func
            if named and annotation is not None and last_name(annotation) == "PagePool":
                assert named.endswith("pool"), f"{path}: {named}"


def test_only_the_schedulers_package_changes_a_requests_progress() -> None:
    progress = {one.name for one in fields(LiveRequest)}
    writers = {
        path
        for path, tree in product("mlxserve.request")
        if "mlxserve.request" in imported(tree)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and node.attr in progress
        and last_name(node.value) in {"request", "fork", "leader", "live", "victim", "other"}
    }
    assert writers
    assert {
        path for path in writers if not path.startswith(("mlxserve/scheduler/", KINDS))
    } == set()


def test_only_the_roster_says_what_state_a_request_is_in() -> None:
    writers = {
        path
        for path, tree in product("mlxserve.request")
        if "mlxserve.request" in imported(tree)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and node.attr in {"state", "finish_reason"}
        and last_name(node.value) != "self"
    }
    assert writers == {"mlxserve/scheduler/roster.py"}


def test_no_class_of_the_schedulers_package_has_more_than_30_methods() -> None:
    sizes = {
        f"{path} {node.name}": sum(isinstance(each, ast.FunctionDef) for each in node.body)
        for path, tree in product("class ", "mlxserve/scheduler")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert max(sizes.values()) <= 30, {name: size for name, size in sizes.items() if size > 30}
    assert sizes["mlxserve/scheduler/scheduler.py Scheduler"] <= 25

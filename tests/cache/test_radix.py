from __future__ import annotations

import random

import pytest

from mlxserve.cache.radix import Children


def test_children_are_found_newest_first() -> None:
    children = Children(5)
    for page in (2, 0, 4):
        children.add(b"a", page)
    children.add(b"b", 1)
    assert list(children.children_of(b"a")) == [4, 0, 2]
    assert list(children.children_of(b"b")) == [1]
    assert list(children.children_of(b"c")) == []


@pytest.mark.parametrize("removed", [2, 0, 4])
def test_any_child_can_be_removed(removed: int) -> None:
    children = Children(5)
    for page in (2, 0, 4):
        children.add(b"a", page)
    children.remove(b"a", removed)
    children.check()
    assert list(children.children_of(b"a")) == [page for page in (4, 0, 2) if page != removed]


def test_a_parent_without_children_is_forgotten() -> None:
    children = Children(1)
    children.add(b"a", 0)
    children.remove(b"a", 0)
    children.check()
    assert children.filed() == []
    assert not children.has(b"a")


def test_children_agree_with_lists_after_any_changes() -> None:
    draw, children = random.Random(0), Children(12)
    expected: dict[bytes, list[int]] = {b"a": [], b"b": [], b"c": []}
    for _ in range(500):
        parent, page = draw.choice(sorted(expected)), draw.randrange(12)
        if page in expected[parent]:
            expected[parent].remove(page)
            children.remove(parent, page)
        elif not any(page in pages for pages in expected.values()):
            expected[parent].insert(0, page)
            children.add(parent, page)
        children.check()
        assert {parent: list(children.children_of(parent)) for parent in expected} == expected


def test_more_ids_keep_the_order() -> None:
    children = Children(5)
    for page in (2, 0, 4):
        children.add(b"a", page)
    children.grow(9)
    children.add(b"a", 8)
    children.check()
    assert list(children.children_of(b"a")) == [8, 4, 0, 2]


def test_the_audit_finds_a_page_that_was_added_twice() -> None:
    children = Children(2)
    children.add(b"a", 0)
    children.add(b"b", 0)
    with pytest.raises(AssertionError, match="filed twice"):
        children.check()


def test_the_audit_finds_links_of_a_page_that_was_removed_from_another_parent() -> None:
    children = Children(4)
    for parent, page in ((b"a", 0), (b"a", 1), (b"b", 2), (b"b", 3)):
        children.add(parent, page)
    children.remove(b"b", 1)
    with pytest.raises(AssertionError, match="linked, but not filed"):
        children.check()

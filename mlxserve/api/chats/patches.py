"""Patches: how a tree of blocks became another one, in as few bytes as a growing text needs.

    {"path": [3, 0], "keep": 2, "grow": " words", "add": [["strong", {}, "more"]]}

`path` leads from the list of blocks to an element, by its child's number at each step. Of that
element's children the first `keep` stay, the text that is the last of them grows, and `add` follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from mlxserve.api.page.highlighting import Node

Patch: TypeAlias = dict[str, Any]
_HEAD = 2  # an element's tag and attributes come before its children


def patches(before: Sequence[Node], after: Sequence[Node]) -> list[Patch]:
    """Return the patches that turn `before` into `after`, in the order in which they apply."""
    found: list[Patch] = []
    _compare(before, after, (), found)
    return found


def _compare(
    before: Sequence[Node], after: Sequence[Node], path: tuple[int, ...], found: list[Patch]
) -> None:
    shorter = min(len(before), len(after))
    same = next((at for at in range(shorter) if before[at] != after[at]), shorter)
    if same < shorter and _go_on(before[same], after[same], (*path, same), found):
        same += 1
    if same < max(len(before), len(after)):
        found.append({"path": list(path), "keep": same, "add": list(after[same:])})


def _go_on(old: Node, new: Node, path: tuple[int, ...], found: list[Patch]) -> bool:
    """Add the patches of one node; False if it must be made anew."""
    if isinstance(old, str) and isinstance(new, str):
        if not new.startswith(old):
            return False
        *above, at = path
        found.append({"path": above, "keep": at + 1, "grow": new[len(old) :]})
        return True
    if isinstance(old, str) or isinstance(new, str) or old[:_HEAD] != new[:_HEAD]:
        return False
    _compare(old[_HEAD:], new[_HEAD:], path, found)
    return True

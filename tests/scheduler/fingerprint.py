"""Everything that an object holds, as plain data: two fingerprints differ where anything in it has changed."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

# Hashes that were computed when they were first needed.
MEMORIES = {"page_hashes"}
LEAVES = (int, float, str, bytes, bool, type(None), Enum, range)


def fingerprint(subject: object) -> object:
    """Objects that occur twice are the same ones in both places, as the number of their first occurrence says."""
    return _walk(subject, {})


def _walk(subject: Any, seen: dict[int, tuple[int, object]]) -> object:
    if isinstance(subject, LEAVES) or callable(subject) or isinstance(subject, WeakKeyDictionary):
        return subject if isinstance(subject, LEAVES) else type(subject).__name__
    if id(subject) in seen:
        return ("seen", seen[id(subject)][0])
    seen[id(subject)] = len(seen), subject  # kept: another object could get its id
    if isinstance(subject, Mapping):
        return [(_walk(key, seen), _walk(value, seen)) for key, value in subject.items()]
    if isinstance(subject, (set, frozenset)):
        return sorted(repr(_walk(one, seen)) for one in subject)
    if isinstance(subject, (list, tuple, deque, array)):
        return [_walk(one, seen) for one in subject]
    return (type(subject).__name__, [(name, _walk(value, seen)) for name, value in _parts(subject)])


def _parts(subject: object) -> Iterator[tuple[str, object]]:
    slots = [name for kind in type(subject).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*slots, *getattr(subject, "__dict__", ())]
    return (
        (name, getattr(subject, name)) for name in names if name not in MEMORIES | {"__weakref__"}
    )

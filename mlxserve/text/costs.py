"""Estimates of the time that work on texts takes, which decide its lane at the executor.

Measured on two cores of an x86 server, busy with other work; the actual time is charged to the
client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CHARACTERS_PER_SECOND = 1_000_000  # rendered, and made into tokens
MESSAGES_PER_SECOND = 10_000
_BYTES_PER_SECOND = 8_000_000  # speed of parsing JSON
_OBJECTS_PER_SECOND = 20_000  # speed of parsing and validating JSON
# Objects of a larger body are not counted: its size says enough.
_COUNTED_BYTES = 1 << 20


def render_seconds(messages: Sequence[object], *others: object) -> float:
    """Seconds to render messages, and other texts beside them, such as tools."""
    size = text_size(messages, others)
    return size / CHARACTERS_PER_SECOND + len(messages) / MESSAGES_PER_SECOND


def encode_seconds(num_characters: int) -> float:
    return num_characters / CHARACTERS_PER_SECOND


def parse_seconds(body: bytes) -> float:
    """Seconds to parse and validate JSON."""
    num_objects = body.count(b"{") if len(body) <= _COUNTED_BYTES else 0
    return len(body) / _BYTES_PER_SECOND + num_objects / _OBJECTS_PER_SECOND


def text_size(*values: object) -> int:
    """Characters of all texts in nested lists and mappings, without keys."""
    size = 0
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
    return size

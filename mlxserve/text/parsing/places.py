"""Edges: which markers have a meaning where, as a table of (part, place).

    place         BEGIN             INSIDE       AFTER_CALL        END
    text so far   none              some         none since then   some, and a marker that ends it
    thinking      opens here        is text      opens here        opens here
    a call        opens everywhere

Elsewhere a marker is text, so that an answer may speak of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from mlxserve.text.parsing.formats import UNLABELLED, CallFormat, Channels, Syntax
from mlxserve.text.parsing.markup import Markup, Part


class MarkerPlace(Enum):
    """The place of the next character in a part. White space changes no place."""

    BEGIN = auto()
    INSIDE = auto()
    AFTER_CALL = auto()
    END = auto()


class Edge(NamedTuple):
    """The effect of a marker.

    to: the part that follows; None for a marker that is dropped and changes nothing
    is_kept: the marker is also the beginning of what follows
    is_end: the marker ends a text; if the text goes on after it, it is a part of the text
    """

    marker: str
    to: Part | None = None
    is_kept: bool = False
    is_end: bool = False


# The edges of a part and a place, by their markers.
Edges: TypeAlias = Mapping[tuple[Part, MarkerPlace], Mapping[str, Edge]]

_CONTROL = "<|"  # begins the markers that occur in no prose
# What may begin a call without a marker, and what may where the whole text is one.
_BARE = {
    Syntax.JSON: ('{"name"', '[{"name"'),
    Syntax.PYTHON: ("[",),
    Syntax.OBJECT: ("call:",),
}
_WHOLE = {Syntax.JSON: ("{", "[")}
_NO_FORMAT = CallFormat("", Syntax.JSON, call="", starts=())


@lru_cache(maxsize=64)
def edges_of(markup: Markup, *, may_call: bool) -> Edges:
    """Return the edges by place. If several have one marker, the first counts.

    Cached: a server parses every answer of a model with one of two tables.
    """
    row = markup.format or _NO_FORMAT
    may_call = may_call and markup.can_call
    calls = _calls(row) if may_call else []
    messages = _messages(row.channels)
    thinks = _openers(markup)
    after_thinking = [Edge(end, Part.TEXT) for end in (markup.thinking or ())[1:]]
    starts = [Edge(marker, Part.TEXT) for marker in row.text_starts]
    ends = [Edge(marker, is_end=True) for marker in row.text_ends]
    others = [*messages, *calls, *ends]
    between = [*thinks, *after_thinking, *starts, *others]
    whole = _kept(_WHOLE.get(row.syntax, ())) if row.is_bare and may_call else []
    # Markers that end a section of calls, and mean nothing elsewhere.
    left_over = [Edge(end) for end in row.ends if may_call and end != "```"]
    table: dict[tuple[Part, MarkerPlace], list[Edge]] = {
        (Part.TEXT, MarkerPlace.BEGIN): [*between, *whole],
        (Part.TEXT, MarkerPlace.INSIDE): others,
        (Part.TEXT, MarkerPlace.AFTER_CALL): [*between, *left_over],
        (Part.TEXT, MarkerPlace.END): [*thinks, *starts, *others],
    }
    if markup.thinking is not None or markup.first is Part.HEADER:
        control = [edge for edge in starts if edge.marker.startswith(_CONTROL)]
        marked = [edge for edge in calls if not edge.is_kept and markup.thinking is not None]
        ways_out = [*messages, *after_thinking, *control, *marked]
        again = [Edge(edge.marker) for edge in thinks]
        table[Part.THINKING, MarkerPlace.BEGIN] = [*again, *ways_out]
        table[Part.THINKING, MarkerPlace.INSIDE] = ways_out
    return {key: {e.marker: e for e in reversed(edges)} for key, edges in table.items()}


def _openers(markup: Markup) -> list[Edge]:
    if markup.thinking is None:
        return []
    opener = markup.thinking[0]
    short = [UNLABELLED[opener]] if opener in UNLABELLED else []
    return [Edge(marker, Part.THINKING) for marker in (opener, *short)]


def _messages(channels: Channels | None) -> list[Edge]:
    """Markers that end a message, and those that begin another anywhere."""
    if channels is None:
        return []
    ends = [Edge(marker, Part.HEADER) for marker in channels.ends]
    return ends + [Edge(marker, Part.HEADER, is_kept=True) for marker in channels.begins]


def _calls(row: CallFormat) -> list[Edge]:
    begins = ("<function=", *(_BARE[row.syntax] if row.is_bare else ()))
    return [*(Edge(start, Part.CALL) for start in row.starts), *_kept(begins)]


def _kept(begins: Iterable[str]) -> list[Edge]:
    return [Edge(begin, Part.CALL, is_kept=True) for begin in begins]

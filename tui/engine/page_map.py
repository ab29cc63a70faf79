"""A replica of the server's page map, and its folding into the cells of a picture.

The events are those of `/api/v1/kv/map`: a snapshot, then deltas. Page states are its letters:
f free, a held by one request, s shared by several, c cached, d cached and on disk as well, p pinned.

The last page table of a finished request is kept, so that the pages of a chat are still shown
while they are only cached. A page is dropped from it when it becomes free, or when another request
holds it at another index of its page table: a page's hash covers all tokens before it, so its
contents must have changed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tui.talk.errors import ChatError

# Weakest to strongest: a cell of a folded map shows the strongest.
STATES = "fdcasp"
MAX_PAGES = 1 << 24
_MAX_PAST = 64  # finished requests whose page tables are kept
_RUNS = re.compile(r"([fascpd])([0-9]{1,9})")
_RANKS = bytes.maketrans(STATES.encode(), bytes(range(len(STATES))))


class UnreadableMap(ChatError):
    """The server's events are not a valid page map."""


class PageMapReplica:
    """The page map after the last event."""

    def __init__(self) -> None:
        self.page_size = 0
        # Events; the map is the same as long as this is.
        self.num_applied = 0
        self._num_drawn = 1
        self._states = bytearray()
        self._window_states = bytearray()  # states of sliding-window pages, if separate
        self._tables: dict[str, list[int]] = {}  # page tables of live requests
        self._past: OrderedDict[str, dict[int, int]] = OrderedDict()  # page -> index in its table

    @property
    def num_pages(self) -> int:
        return len(self._states)

    @property
    def num_window_pages(self) -> int:
        return len(self._window_states)

    def count(self, state: str) -> int:
        return self._states.count(state.encode())

    def count_windows(self, state: str) -> int:
        return self._window_states.count(state.encode())

    def pages_of(self, request_id: str | None) -> Collection[int]:
        """Return the pages that a request holds, or held and that still contain its tokens."""
        if request_id is None:
            return ()
        return self._tables.get(request_id) or self._past.get(request_id, {}).keys()

    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        """Apply an event. Raises UnreadableMap for an invalid one."""
        self.num_applied += 1
        try:
            if kind == "snapshot":
                self._begin(data)
            elif kind == "delta":
                for start, runs in data["pages"]:
                    self._set_states(start, _decoded(runs))
                for start, runs in data.get("window_pages", ()):
                    _replace(self._window_states, start, _decoded(runs))
            else:
                return
            for name in data["gone"]:
                self._end(name)
            for request in data["requests"]:
                self._extend(request["id"], request["from"], request["pages"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UnreadableMap(
                f"Cannot read the server's page map ({type(error).__name__}: {error}). "
                "The server may be newer than this terminal."
            ) from error

    def _begin(self, data: Mapping[str, Any]) -> None:
        states = _decoded(data["pages"])
        if len(states) != data["num_pages"]:
            raise ValueError(f"{len(states)} pages instead of {data['num_pages']}")
        self.page_size = int(data["page_size"])
        self._states = bytearray(states)
        self._window_states = bytearray(_decoded(data.get("window_pages", "")))
        self._num_drawn = 1
        self._tables = {}
        self._past.clear()

    def _set_states(self, start: int, states: bytes) -> None:
        _replace(self._states, start, states)
        if b"f" in states:
            free = {start + at for at, state in enumerate(states) if state == ord("f")}
            for past in self._past.values():
                for page in free & past.keys():
                    del past[page]

    def _end(self, name: str) -> None:
        table = self._tables.pop(name, [])
        free = ord("f")
        self._past[name] = {p: at for at, p in enumerate(table) if self._states[p] != free}
        if len(self._past) > _MAX_PAST:
            self._past.popitem(last=False)

    def _extend(self, name: str, start: int, runs: Sequence[Sequence[int]]) -> None:
        table = self._tables.get(name, [])[:start]
        for first, length in runs:
            if first < 0 or first + length > self.num_pages or len(table) > self.num_pages:
                raise ValueError(f"a request holds pages {first} to {first + length}")
            table.extend(range(first, first + length))
        self._tables[name] = table
        for at, page in enumerate(table[start:], start):
            for past in self._past.values():
                if past.get(page, at) != at:
                    del past[page]

    def fold(
        self, num_cells: int, own: Collection[int], colour: Callable[[str], int] = lambda _: 0
    ) -> FoldedMap:
        """Fold the map into at most `num_cells` cells. `colour`: of a request's own pages.

        Only the used part of a large, almost empty pool is shown: a few pages would be one cell.
        """
        used = len(self._states.rstrip(b"f"))
        while self._num_drawn < used:  # doublings: the map seldom changes its scale
            self._num_drawn *= 2
        drawn = self._states[: max(num_cells, self._num_drawn)]
        per_cell, cells = _fold(drawn, num_cells)
        return FoldedMap(
            cells,
            frozenset(page // per_cell for page in own),
            per_cell,
            self._owners(per_cell, colour),
            self.num_pages - len(drawn),
        )

    def fold_windows(self, num_cells: int) -> FoldedMap:
        """Fold the pages of sliding-window layers, whose owners are unknown."""
        per_cell, cells = _fold(self._window_states, num_cells)
        return FoldedMap(cells, frozenset(), per_cell)

    def _owners(self, per_cell: int, colour: Callable[[str], int]) -> dict[int, int]:
        active = ord("a")
        return {
            page // per_cell: colour(name)
            for name, table in self._tables.items()
            for page in table
            if self._states[page] == active
        }


@dataclass(frozen=True, slots=True)
class FoldedMap:
    """A page map to draw: one letter per cell, the strongest state of its pages."""

    cells: str
    own: frozenset[int]  # cells that contain a page of the open chat
    pages_per_cell: int
    owners: Mapping[int, int] = field(default_factory=dict)  # colour of cells that a request holds
    num_left_out: int = 0  # pages at the end, never used yet


def _fold(states: bytearray, num_cells: int) -> tuple[int, str]:
    """Return (pages per cell, the strongest state in each)."""
    per_cell = max(1, -(-len(states) // max(1, num_cells)))
    ranks = bytes(states).translate(_RANKS)
    strongest = [max(ranks[at : at + per_cell]) for at in range(0, len(ranks), per_cell)]
    return per_cell, "".join(STATES[rank] for rank in strongest)


def _replace(known: bytearray, start: int, states: bytes) -> None:
    """Replace states from page `start` on. Raises ValueError beyond the end."""
    end = start + len(states)
    if not 0 <= start <= end <= len(known):
        raise ValueError(f"pages {start} to {end} of {len(known)}")
    known[start:end] = states


def _decoded(runs: str) -> bytes:
    """Decode run lengths: `"p2a1"` becomes `b"ppa"`."""
    runs_of_states = _RUNS.findall(runs)
    if "".join(letter + count for letter, count in runs_of_states) != runs:
        raise ValueError(f"{runs[:40]!r} is not a list of runs")
    if sum(int(count) for _, count in runs_of_states) > MAX_PAGES:
        raise ValueError(f"more than {MAX_PAGES} pages")
    return b"".join(letter.encode() * int(count) for letter, count in runs_of_states)

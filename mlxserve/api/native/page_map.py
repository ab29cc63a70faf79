"""The page map as server-sent events: a snapshot, then changes.

    event: snapshot
    data: {"seq":0,"page_size":32,"num_pages":8,"pages":"p2a3f3",
           "requests":[{"id":"8f…","from":0,"pages":[[2,3]]}],"gone":[]}

    event: delta
    data: {"seq":1,"pages":[[5,"a1"]],
           "requests":[{"id":"8f…","from":3,"pages":[[5,1]]}],"gone":["77…"]}

`pages` is run-length encoded: a letter and the length of its run.

    f free      a held by one request      s shared by several      c cached, held by none
    p pinned for a named prefix

In a delta `pages` is a list of [first page, runs]; other pages are unchanged. `requests` lists the
requests that the listener's key may see and whose page tables changed: from entry `from` of its
table on, the request holds these runs of [first page, length], which replace all known entries from
there on. The requests in `gone` have ended or lost their pages. `id` is the `x-request-id` of the
request's reply (with `-N` for the N-th of several answers).

Where layers with a window have pages of their own, an event has them as `window_pages`, in the form of its
`pages`. Who holds them is not told.

`seq` rises by one. Another `snapshot` starts over, for example after the number of pages changed. An
`error` ends the stream. While nothing changes, only a comment is sent every ten seconds. An event
contains at most `MAX_RUNS` runs of requests; the next event contains the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxserve.api.server.sse import named_event
from mlxserve.engine.snapshot import RequestView, Snapshot

LETTERS = "fascpd"  # by PageState
MAX_RUNS = 10_000

States = NDArray[np.uint8]


class PageMapFeed:
    """The state that one listener has received, and the next event for it."""

    def __init__(self, sees: Callable[[RequestView], bool]) -> None:
        self._sees = sees
        self._seq = 0
        self._states: States | None = None
        self._window_states: States | None = None
        self._tables: dict[str, tuple[int, ...]] = {}  # the part that was sent

    def next_event(self, snapshot: Snapshot) -> bytes | None:
        """Return the event that updates the listener to this snapshot; None if nothing changed for it."""
        states = np.frombuffer(snapshot.pages, dtype=np.uint8)
        windows = np.frombuffer(snapshot.window_pages, dtype=np.uint8)
        old, self._states = self._states, states
        old_windows, self._window_states = self._window_states, windows
        if old is not None and len(old) != len(states):
            # A resize also moves pages: start over.
            old = None
            self._tables.clear()
        content = self._requests(snapshot)
        if old is None or old_windows is None:
            if len(windows):
                content["window_pages"] = encode_runs(windows)
            return self._event(
                "snapshot",
                page_size=snapshot.page_size,
                num_pages=len(states),
                pages=encode_runs(states),
                **content,
            )
        if window_changes := changed_runs(old_windows, windows):
            content["window_pages"] = window_changes
        changes = changed_runs(old, states)
        if not changes and not any(content.values()):
            return None
        return self._event("delta", pages=changes, **content)

    def _event(self, kind: str, **data: Any) -> bytes:
        number = self._seq
        self._seq += 1
        return named_event(kind, {"seq": number, **data})

    def _requests(self, snapshot: Snapshot) -> dict[str, Any]:
        holders = {
            live.id: live.page_table
            for live in snapshot.requests
            if live.page_table and self._sees(live)
        }
        gone = [name for name in self._tables if name not in holders]
        for name in gone:
            del self._tables[name]
        changed = []
        room = MAX_RUNS
        for name, table in holders.items():
            known = self._tables.get(name, ())
            start = num_common(known, table)
            if room > 0 and (start < len(table) or start < len(known)):
                runs = page_runs(table[start:])[:room]
                room -= len(runs)
                changed.append({"id": name, "from": start, "pages": runs})
                self._tables[name] = table[: start + sum(length for _, length in runs)]
        return {"requests": changed, "gone": gone}


def encode_runs(states: States) -> str:
    """Encode states by runs: `"p2a1f5"` is two pinned pages, an active one and five free ones."""
    starts = np.flatnonzero(np.diff(states, prepend=np.uint8(255)))
    lengths = np.diff(starts, append=len(states))
    return "".join(
        f"{LETTERS[state]}{length}"
        for state, length in zip(states[starts].tolist(), lengths.tolist(), strict=True)
    )


def changed_runs(old: States, new: States) -> list[tuple[int, str]]:
    """Return (first page, runs) of each range that changed."""
    changed = np.flatnonzero(old != new)
    if not len(changed):
        return []
    stretches = np.split(changed, np.flatnonzero(np.diff(changed) > 1) + 1)
    return [(int(s[0]), encode_runs(new[s[0] : s[-1] + 1])) for s in stretches]


def page_runs(pages: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (first page, length) of each run of consecutive ids, in the table's order."""
    if not pages:
        return []
    table = np.asarray(pages)
    starts = np.flatnonzero(np.diff(table, prepend=table[0] - 2) != 1)
    lengths = np.diff(starts, append=len(table))
    return list(zip(table[starts].tolist(), lengths.tolist(), strict=True))


def num_common(known: tuple[int, ...], table: tuple[int, ...]) -> int:
    """Length of the common beginning of two tables. Most tables only grow."""
    if known is table or table[: len(known)] == known:
        return len(known)
    return next(n for n, (a, b) in enumerate(zip(known, (*table, None), strict=False)) if a != b)

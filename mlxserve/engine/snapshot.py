"""Snapshot: the state of the engine between two steps, for screens and the API.

Taken on the engine's thread and read on others: it shares no mutable state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mlxserve.cache.pages import PageState
from mlxserve.core.stats import MemoryUse, Stats
from mlxserve.request import LiveRequest, RequestState

__all__ = ["PageState", "Phase", "RequestView", "Snapshot", "view"]


class Phase(StrEnum):
    """The phase of a request."""

    QUEUED = "queued"  # holds no pages
    LOADING = "loading"  # its pages are being read from disk
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """A live request. It decodes once `num_computed` has reached `num_to_compute`."""

    id: str
    client: str
    phase: Phase
    position: int | None  # position in the queue, 1 is the next; None if it is not queued
    num_prompt: int
    num_cached: int  # tokens of the prompt that were cached when it was admitted
    num_computed: int
    num_to_compute: int
    num_outputs: int
    num_preemptions: int
    priority: int
    age: float  # seconds since it arrived
    page_table: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The engine at one moment.

    pages: one byte per page, its `PageState`
    window_pages: the same of window pages; empty if layers with a window have no own pool
    no_draft_reason: why the last step drafted nothing, or the model's head never does; empty otherwise
    """

    stats: Stats
    memory: MemoryUse
    page_size: int
    pages: bytes
    requests: tuple[RequestView, ...]  # running ones by admission, then waiting ones in order
    prefill_rate: float  # prompt tokens computed per second, over the last seconds
    generation_rate: float  # tokens of answers per second
    window_pages: bytes = b""
    no_draft_reason: str = ""

    def num_pages(self, state: PageState) -> int:
        return self.pages.count(state)


def view(request: LiveRequest, *, age: float, position: int | None) -> RequestView:
    """Return a request's part of a snapshot."""
    num_to_compute = request.prefill_end or len(request.token_ids)
    return RequestView(
        id=request.id,
        client=request.asked.client,
        phase=_phase(request),
        position=position,
        num_prompt=request.num_prompt,
        num_cached=request.num_cached,
        num_computed=min(request.num_computed, num_to_compute),
        num_to_compute=num_to_compute,
        num_outputs=request.num_outputs,
        num_preemptions=request.num_preemptions,
        priority=request.asked.priority,
        age=age,
        page_table=tuple(request.page_table),
    )


def _phase(request: LiveRequest) -> Phase:
    if request.state is RequestState.WAITING:
        return Phase.QUEUED
    if request.loading is not None:
        return Phase.LOADING
    return Phase.PREFILLING if request.num_computed < request.prefill_end else Phase.DECODING

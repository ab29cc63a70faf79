"""SchedulerStats: what the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Now, and in total since the start. Prefix counts are tokens, once per request."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    prefix_queries: int  # prompt tokens looked up, of requests admitted for the first time
    prefix_hits: int  # of these found in the cache
    resumed_queries: int  # the same of requests that come back from a preemption
    resumed_hits: int
    recomputed_tokens: int  # computed, lost to a preemption, not found again
    swapped_tokens: int  # written to disk in preemptions
    restored_tokens: int  # read back instead of computed again
    align_deferrals: int  # a prompt left out of a step that had less than a page left
    overtakes: int
    prefix_follow_waits: int  # requests that waited for another one to compute their prefix
    immune_requests: int  # that were preempted so often that others go first from then on
    rebound_pages: int  # given back for another request's with the same content
    tail_copies: int  # pages that began as a copy of another one
    evicted_pages: int
    pages_free: int
    pages_used: int
    pages_cached: int  # findable by hash, free or in use
    pages_pinned: int  # kept for named prefixes
    pages_hot: int  # found often, and so evicted after others
    pages_reserved: int  # kept from new requests for running ones, when one of them last waited


@dataclass(slots=True)
class Counts:
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    restored_tokens: int = 0
    align_deferrals: int = 0
    overtakes: int = 0
    immune_requests: int = 0
    rebound_pages: int = 0
    reserved_pages: int = 0  # of the last admission

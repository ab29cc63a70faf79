"""Stats: all counters, each declared in one field with its name and help text on /metrics.

Each group is owned by the object that counts in it. The owner changes its group in place and hands
out copies; a copy is never changed. `Stats` is one copy of every group.

    scheduler ─ SchedulerStats ─┐
    pool ────── PoolStats ──────┤
    windows ─── WindowStats ────┤
    engine ──── StepStats ──────┼─ Stats ── /metrics, the log line, `LLM.stats()`
    disk ────── DiskStats ──────┤
    store ───── StoreStats ─────┤
    workers ─── RankStats ──────┤
    vision ──── VisionStats ────┤
    snapshots ─ StateStats ─────┘

To add a number: add a field here and count it where it happens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self, get_type_hints

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
# Of a request, in vLLM's steps of 1, 2 and 5.
REQUEST_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class Histogram:
    """Counts values by the bound they fall under, and their sum.

    `counts` has one entry per bound and one more for values above all of them; an entry does not
    include those before it.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        return Histogram(self.bounds, self.counts.copy(), self.total)


class Rate:
    """Events per second, over those of the last `SPAN` seconds that had any.

    The second under way counts only while there is no other, because it is not over yet.
    """

    SPAN = 5

    def __init__(self) -> None:
        self._counts: deque[list[int]] = deque(maxlen=self.SPAN)  # [second, count]

    def add(self, now: float, count: int) -> None:
        second = int(now)
        if not self._counts or self._counts[-1][0] != second:
            self._counts.append([second, 0])
        self._counts[-1][1] += count

    def per_second(self, now: float) -> float:
        current = int(now)
        busy = [each for each in self._counts if each[1] and each[0] > current - self.SPAN]
        over = [count for second, count in busy if second < current]
        counts = over or [count for _, count in busy]
        return sum(counts) / len(counts) if counts else 0.0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of the device's memory. `reserved` is mlx's cache for its next arrays.

    kv_cache_dtype: dtypes of keys and values (float32, bfloat16, q8), joined if several
    """

    kv_cache: int
    active: int
    reserved: int
    peak: int
    kv_cache_dtype: str


@dataclass(frozen=True, slots=True)
class Exported:
    """How /metrics exports a field: under `name`, or under the field's own name."""

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    name: str = ""
    label: str = ""  # fields of one name differ in this label; a mapping's keys are its values
    value: str = ""


def gauge(help: str, name: str = "", *, label: str = "", value: str = "") -> Exported:  # noqa: A002
    return Exported("gauge", help, name, label, value)


def counter(help: str, name: str = "", *, label: str = "") -> Exported:  # noqa: A002
    return Exported("counter", help, name, label)


def histogram(help: str, name: str = "") -> Exported:  # noqa: A002
    return Exported("histogram", help, name)


class StatsGroup:
    """A dataclass of numbers, histograms and counters by name."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]  # the fields' names, in order, by `dataclass`

    @classmethod
    def from_owner(cls, owner: object) -> Self:
        """Copy the owner's attributes of these names."""
        values = [getattr(owner, name) for name in cls.__match_args__]
        return cls(*[v if type(v) in (int, float) else v.copy() for v in values])

    def copy(self) -> Self:
        return self.from_owner(self)


def exports_of(group: type[StatsGroup]) -> tuple[tuple[str, Exported], ...]:
    """List (attribute, export) of the fields and properties on /metrics."""
    hints = get_type_hints(group, include_extras=True)
    for name, attribute in vars(group).items():
        if isinstance(attribute, property):
            hints[name] = get_type_hints(attribute.fget, include_extras=True)["return"]
    return tuple(
        (name, extra)
        for name, hint in hints.items()
        for extra in getattr(hint, "__metadata__", ())
        if isinstance(extra, Exported)
    )


@dataclass(slots=True)
class SchedulerStats(StatsGroup):
    """Counted by the scheduler, in total since the start unless a comment says otherwise."""

    num_running: Annotated[int, gauge("Requests that hold pages.", "num_requests_running")] = 0
    num_waiting: Annotated[int, gauge("Requests in the queue.", "num_requests_waiting")] = 0
    num_preemptions: Annotated[
        int, counter("Times a running request lost its pages to another.")
    ] = 0
    priority_preemptions: Annotated[
        int, counter("Times a running request made way for one of a higher priority.")
    ] = 0
    sched_budget_tokens: Annotated[int, gauge("Tokens the last step was allowed to compute.")] = 0
    # Tokens, once per request: when it is admitted for the first time.
    prompt_tokens: Annotated[int, counter("Prompt tokens of admitted requests.")] = 0
    prefix_queries: Annotated[
        int, counter("Prompt tokens looked up in the prefix cache.", "prefix_cache_queries")
    ] = 0
    prefix_hits: Annotated[
        int, counter("Prompt tokens found in the prefix cache.", "prefix_cache_hits")
    ] = 0
    # The same of requests that resume after a preemption.
    resumed_queries: int = 0
    resumed_hits: int = 0
    recomputed_tokens: Annotated[int, counter("Tokens computed again after a preemption.")] = 0
    swapped_tokens: Annotated[int, counter("Tokens whose pages the disk took in a preemption.")] = 0
    restored_tokens: Annotated[
        int, counter("Tokens whose pages were read from disk or store instead of computed.")
    ] = 0
    align_deferrals: Annotated[
        int,
        counter(
            "Times a prompt had to wait for a step with at least a page of budget left for it."
        ),
    ] = 0
    overtakes: Annotated[
        int, counter("Times a request was admitted before an older one that did not fit.")
    ] = 0
    prefix_follow_waits: Annotated[
        int, counter("Requests that waited for another to compute the prefix they share.")
    ] = 0
    immune_requests: Annotated[
        int,
        counter(
            "Requests preempted so often that others of their priority are preempted first from then on."
        ),
    ] = 0
    num_drafts: Annotated[
        int, counter("Drafts that the model has verified.", "spec_decode_num_drafts")
    ] = 0
    drafted_tokens: Annotated[
        int,
        counter("Tokens guessed for the model to verify.", "spec_decode_num_draft_tokens"),
    ] = 0
    accepted_tokens: Annotated[
        int, counter("Of these, tokens that were right.", "spec_decode_num_accepted_tokens")
    ] = 0
    accepted_at: Annotated[
        Counter[str],
        counter(
            "Of these, by their position in a draft.",
            "spec_decode_num_accepted_tokens_per_pos",
            label="position",
        ),
    ] = field(default_factory=Counter)
    rebound_pages: Annotated[
        int, counter("Pages released in favour of another request's page with the same content.")
    ] = 0
    tail_copies: Annotated[int, counter("Pages that began as a copy of another page.")] = 0
    pages_reserved: Annotated[
        int, gauge("Pages kept free for running requests when a request last waited.")
    ] = 0


_PAGES = "Pages of the KV pool: free, active (held or pinned), cached (findable by hash)."


@dataclass(slots=True)
class PoolStats(StatsGroup):
    """Current pages of the pool. A page is free or used; either kind can also be cached."""

    num_pages: int = 0
    num_free: Annotated[int, gauge(_PAGES, "pages", label="state", value="free")] = 0
    num_used: Annotated[int, gauge(_PAGES, "pages", label="state", value="active")] = 0
    num_cached: Annotated[int, gauge(_PAGES, "pages", label="state", value="cached")] = 0
    num_pinned: Annotated[int, gauge("Pages that named prefixes keep.", "pages_pinned")] = 0
    num_hot: Annotated[
        int, gauge("Free pages that were found often and are evicted after others.", "pages_hot")
    ] = 0
    num_evicted: Annotated[
        int, counter("Cached pages evicted to make room for new ones.", "evicted_pages")
    ] = 0

    @property
    def usage(
        self,
    ) -> Annotated[
        float, gauge("Share of the pages that are held or pinned, 0 to 1.", "kv_cache_usage_perc")
    ]:
        return self.num_used / self.num_pages if self.num_pages else 0.0


_WINDOW_PAGES = "Pages of layers with a window: free, active (held), cached (findable by hash)."


@dataclass(slots=True)
class WindowStats(StatsGroup):
    """Current pages of the sliding-window pool; zeros without a separate one."""

    num_pages: int = 0
    num_free: Annotated[int, gauge(_WINDOW_PAGES, "window_pages", label="state", value="free")] = 0
    num_used: Annotated[
        int, gauge(_WINDOW_PAGES, "window_pages", label="state", value="active")
    ] = 0
    num_cached: Annotated[
        int, gauge(_WINDOW_PAGES, "window_pages", label="state", value="cached")
    ] = 0
    num_evicted: Annotated[
        int, counter("Cached pages of windows evicted for new ones.", "evicted_window_pages")
    ] = 0


@dataclass(slots=True)
class StateStats(StatsGroup):
    """Recurrent states: counted by the scheduler, zeros for models without them."""

    num_slots: Annotated[
        int, gauge("States that fit into memory, running and kept.", "state_slots")
    ] = 0
    num_snapshots: Annotated[
        int, gauge("States kept after cached pages, to continue from.", "state_snapshots")
    ] = 0
    num_restored: Annotated[
        int, counter("Requests that began with a kept state.", "state_snapshots_restored")
    ] = 0
    num_evicted: Annotated[
        int, counter("Kept states evicted to make room for others.", "state_snapshots_evicted")
    ] = 0
    missed_tokens: Annotated[
        int,
        counter(
            "Tokens of cached pages that were computed again, because no state was kept there.",
            "state_snapshot_missed_tokens",
        ),
    ] = 0


@dataclass(slots=True)
class StepStats(StatsGroup):
    """Counted by the engine, in total since the start unless a comment says otherwise."""

    num_steps: int = 0
    prefill_tokens: Annotated[
        int, counter("Prompt tokens computed, including those computed again.")
    ] = 0
    generation_tokens: Annotated[int, counter("Tokens generated.")] = 0
    request_success: Annotated[
        Counter[str], counter("Requests that ended, by reason.", label="finished_reason")
    ] = field(default_factory=Counter)
    queue_seconds: Annotated[
        Histogram,
        histogram("From a request's arrival to its first step.", "request_queue_time_seconds"),
    ] = field(default_factory=lambda: Histogram(SECONDS))
    prefill_seconds: Annotated[
        Histogram,
        histogram(
            "From a request's first step to its first token.", "request_prefill_time_seconds"
        ),
    ] = field(default_factory=lambda: Histogram(SECONDS))
    engine_failures: Annotated[
        int, counter("Times the engine failed and began again with an empty cache.")
    ] = 0
    memory_used: Annotated[
        float, gauge("Share of the memory that this process uses, 0 to 1.", "memory_used_perc")
    ] = 0.0
    memory_level: Annotated[
        int,
        gauge("0: memory is sufficient, 1: new requests wait, 2: one request runs at a time."),
    ] = 0
    memory_alarms: Annotated[
        int, counter("Times that memory became so short that the level rose.")
    ] = 0
    lost_requests: Annotated[int, counter("Requests that ended with such a failure.")] = 0
    iteration_tokens: Annotated[
        Histogram, histogram("Tokens computed in a step.", "iteration_tokens_total")
    ] = field(default_factory=lambda: Histogram(TOKENS))
    request_prompt_tokens: Annotated[
        Histogram, histogram("Tokens of the prompt of a request that ended.")
    ] = field(default_factory=lambda: Histogram(REQUEST_TOKENS))
    request_generation_tokens: Annotated[
        Histogram, histogram("Tokens of the answer to a request that ended.")
    ] = field(default_factory=lambda: Histogram(REQUEST_TOKENS))


@dataclass(slots=True)
class DiskStats(StatsGroup):
    """The disk cache: this model's pages now, and reads and writes since the start."""

    num_pages: Annotated[int, gauge("Pages on disk.", "disk_cache_pages")] = 0
    num_bytes: Annotated[int, gauge("Bytes of pages on disk.", "disk_cache_bytes")] = 0
    limit: Annotated[
        int, gauge("Most bytes on disk, of all models; 0 without.", "disk_cache_limit_bytes")
    ] = 0
    num_read: Annotated[int, counter("Pages read from disk.", "disk_cache_hits")] = 0
    num_lost: Annotated[
        int,
        counter("Pages that were to be read, and were missing or damaged.", "disk_cache_lost"),
    ] = 0
    num_written: Annotated[int, counter("Pages written to disk.", "disk_cache_written")] = 0
    bytes_read: Annotated[int, counter("Bytes read from disk.", "disk_cache_read_bytes")] = 0
    bytes_written: Annotated[int, counter("Bytes written to disk.", "disk_cache_written_bytes")] = 0
    written_today: Annotated[
        int, gauge("Bytes written today (UTC), by every server.", "disk_cache_written_today_bytes")
    ] = 0
    read_rate: Annotated[
        float,
        gauge("Bytes per second of recent reads; 0 before the first.", "disk_cache_read_rate"),
    ] = 0.0
    state: Annotated[
        int,
        gauge(
            "0: no disk cache, 1: it works, 2: pages are read only, 3: the disk does not answer, "
            "4: it has failed until a restart.",
            "disk_cache_state",
        ),
    ] = 0


@dataclass(slots=True)
class StoreStats(StatsGroup):
    """The page store: this model's pages there as far as is known, and reads and writes since the start."""

    num_pages: Annotated[int, gauge("Pages in the page store.", "page_store_pages")] = 0
    num_bytes: Annotated[int, gauge("Bytes of these pages.", "page_store_bytes")] = 0
    num_read: Annotated[int, counter("Pages read from the page store.", "page_store_hits")] = 0
    num_lost: Annotated[
        int,
        counter(
            "Pages that were to be read from the store, and were evicted or damaged.",
            "page_store_lost",
        ),
    ] = 0
    num_written: Annotated[
        int, counter("Pages written to the page store.", "page_store_written")
    ] = 0
    bytes_read: Annotated[
        int, counter("Bytes read from the page store.", "page_store_read_bytes")
    ] = 0
    bytes_written: Annotated[
        int, counter("Bytes written to the page store.", "page_store_written_bytes")
    ] = 0
    written_today: Annotated[
        int,
        gauge(
            "Bytes written to the page store today (UTC), by every server.",
            "page_store_written_today_bytes",
        ),
    ] = 0
    read_rate: Annotated[
        float,
        gauge(
            "Bytes per second of recent reads from the page store; 0 before the first.",
            "page_store_read_rate",
        ),
    ] = 0.0
    state: Annotated[
        int,
        gauge(
            "0: no page store, 1: it works, 2: pages are read only, 3: it does not answer, "
            "4: it has failed until a restart.",
            "page_store_state",
        ),
    ] = 0


@dataclass(slots=True)
class VisionStats(StatsGroup):
    """Counters of the image encoder; zeros for models that read text only."""

    num_computed: Annotated[
        int,
        counter("Images that the vision tower computed, some of them again.", "images_computed"),
    ] = 0
    num_kept: Annotated[int, gauge("Images whose features are kept.", "images_kept")] = 0
    num_bytes: Annotated[int, gauge("Bytes of these features.", "images_kept_bytes")] = 0


@dataclass(slots=True)
class RankStats(StatsGroup):
    """Memory of the other ranks, as of their last heartbeats."""

    num_frames: Annotated[
        Counter[str], gauge("What a rank has been told and has done.", "rank_frames", label="rank")
    ] = field(default_factory=Counter)
    memory_active: Annotated[
        Counter[str], gauge("Bytes that a rank's arrays take.", "rank_memory_bytes", label="rank")
    ] = field(default_factory=Counter)
    memory_peak: Annotated[
        Counter[str],
        gauge("Most bytes that they have taken.", "rank_memory_peak_bytes", label="rank"),
    ] = field(default_factory=Counter)


@dataclass(slots=True)
class PlannedMemory(StatsGroup):
    """Bytes planned for the model when it was loaded, and its pool's bytes now."""

    weights: Annotated[int, gauge("Bytes of the model's weights.", "weights_bytes")] = 0
    step: Annotated[
        int,
        gauge(
            "Bytes planned for a step beside weights and cache; 0 where they were not measured.",
            "step_peak_bytes",
        ),
    ] = 0
    pool: Annotated[
        int, gauge("Bytes that pages and recurrent states may take.", "kv_cache_bytes")
    ] = 0
    page: int = 0  # bytes of one

    @property
    def total(self) -> int:
        return self.weights + self.step + self.pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A copy of every group, taken between two steps."""

    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    pool: PoolStats = field(default_factory=PoolStats)
    engine: StepStats = field(default_factory=StepStats)
    disk: DiskStats = field(default_factory=DiskStats)
    store: StoreStats = field(default_factory=StoreStats)
    states: StateStats = field(default_factory=StateStats)
    windows: WindowStats = field(default_factory=WindowStats)
    ranks: RankStats = field(default_factory=RankStats)
    vision: VisionStats = field(default_factory=VisionStats)
    planned: PlannedMemory = field(default_factory=PlannedMemory)

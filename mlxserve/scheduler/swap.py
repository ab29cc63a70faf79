"""What is to be moved between the pool and the disk: plans of moves, and where they stand.

    preempted ── Save ──▶ on disk ── admitted again, holding pages ── Load ──▶ computed
                                         a Load that fails: computed in the usual way

A request whose pages are being read holds the pages they go to, and is skipped until they are
there. So nobody with pages waits behind somebody without (vllm#44560).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest, PageRun

LOAD_PAGES = 32  # read at once for one request; bounds the memory that pages pass through


@dataclass(frozen=True, slots=True)
class Save:
    """Write these pages of the pool, before anything else is written to them."""

    run: PageRun
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Read `run`, a part of what was saved under its key, into these pages of the pool."""

    request_id: str
    run: PageRun
    pages: tuple[int, ...]


@dataclass(slots=True)
class Transfers:
    """What the engine has to do before it launches the step that was planned."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)  # keys of runs that nobody wants any more

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads or self.drops)


class Swap:
    """Knows of each preempted request which of its pages are on disk."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._transfers = Transfers()

    def take_transfers(self) -> Transfers:
        transfers, self._transfers = self._transfers, Transfers()
        return transfers

    def save(self, request: LiveRequest) -> int:
        """Have its full pages written, from the first one on that only it has: tokens in them."""
        end = request.num_computed // self._pool.page_size
        pages = request.page_table[:end]
        first = next((i for i, page in enumerate(pages) if self._pool.is_exclusive(page)), end)
        if (saved := request.saved) and saved.first <= first and end <= saved.end:
            return 0  # they are on disk already
        self.drop(request)
        if first == end:
            return 0
        key = f"{request.arrival}.{request.num_preemptions}"
        request.saved = PageRun(key, first, tuple(request.page_hashes[first:end]))
        self._transfers.saves.append(Save(request.saved, tuple(pages[first:])))
        return (end - first) * self._pool.page_size

    def load(self, request: LiveRequest, end: int) -> None:
        """Have its saved pages read, from what is computed to page `end`, into its page table."""
        saved, first = request.saved, request.num_computed // self._pool.page_size
        assert saved is not None, "nothing is saved"
        request.loading = PageRun(
            saved.key, first, saved.hashes[first - saved.first : end - saved.first]
        )
        pages = tuple(request.page_table[first:end])
        self._transfers.loads.append(Load(request.id, request.loading, pages))

    def drop(self, request: LiveRequest) -> None:
        """Nobody wants its saved pages any more."""
        if request.saved is not None:
            self._transfers.drops.append(request.saved.key)
            request.saved = None

    def num_tokens(self, request: LiveRequest, start: int) -> int:
        """How many tokens, from this one on, could be read instead of computed."""
        page, offset = divmod(start, self._pool.page_size)
        saved = request.saved
        if saved is None or offset or not saved.first <= page < saved.end:
            return 0
        return saved.end * self._pool.page_size - start

    def stop(self, request: LiveRequest, start: int) -> int:
        """Where a chunk from `start` on has to end: where saved pages begin, or with the tokens."""
        saved_start = request.saved.first * self._pool.page_size if request.saved else 0
        return saved_start if start < saved_start else len(request.token_ids)

"""Swap: which pages of preempted requests are on disk, and what is to be moved there and back.

    preempted ── Save ──▶ on disk ── admitted again, holding pages ── Load ──▶ computed
                                     if the Load fails: computed in the usual way

A request whose pages are being read holds the pages that they are read to, and the plan skips it
until they are there. So no request that holds pages waits for one that holds none (vllm#44560).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest, PageRun

LOAD_PAGES = 32  # read at once for one request; bounds the memory of pages on their way


@dataclass(frozen=True, slots=True)
class Save:
    """Write these pages of the pool to disk, before anything else is written to them."""

    request_id: str
    run: PageRun
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Read `run`, a part of what was saved under its key, into these pages of the pool."""

    request_id: str
    run: PageRun
    pages: tuple[int, ...]


@dataclass(slots=True)
class SwapPlan:
    """What the engine has to do before it launches the step that was planned."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)  # keys of runs that are not needed any more

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads or self.drops)


class Swap:
    """Plans the moves. What a request has on disk is in the request: `saved`, `loading`."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._plan = SwapPlan()

    def pop_plan(self) -> SwapPlan:
        """What was planned since the last call."""
        plan, self._plan = self._plan, SwapPlan()
        return plan

    def save(self, request: LiveRequest) -> Save | None:
        """Have its full pages written, from the first one that no other request holds.

        None if there are none, or if they are on disk already.
        """
        end = request.num_computed // self._pool.page_size
        pages = request.page_table[:end]
        first = next((i for i, page in enumerate(pages) if self._pool.is_exclusive(page)), end)
        if (saved := request.saved) and saved.first <= first and end <= saved.end:
            return None
        self.drop(request)
        if first == end:
            return None
        key = f"{request.arrival}.{request.num_preemptions}"
        request.saved = PageRun(key, first, tuple(request.page_hashes[first:end]))
        save = Save(request.id, request.saved, tuple(pages[first:]))
        self._plan.saves.append(save)
        return save

    def finish_save(self, request: LiveRequest, save: Save, num_pages: int) -> None:
        """The disk took only the first `num_pages` pages of the run."""
        if request.saved is not save.run or num_pages == len(save.run.hashes):
            return
        if num_pages:
            request.saved = replace(save.run, hashes=save.run.hashes[:num_pages])
        else:
            self.drop(request)

    def load(self, request: LiveRequest, end: int) -> None:
        """Have its saved pages up to page `end` read into its page table, after what is computed."""
        saved, first = request.saved, request.num_computed // self._pool.page_size
        assert saved is not None, "nothing is saved"
        request.loading = PageRun(
            saved.key, first, saved.hashes[first - saved.first : end - saved.first]
        )
        pages = tuple(request.page_table[first:end])
        self._plan.loads.append(Load(request.id, request.loading, pages))

    def drop(self, request: LiveRequest) -> None:
        """Forget its saved pages; no-op if there are none."""
        if request.saved is not None:
            self._plan.drops.append(request.saved.key)
            request.saved = None

    def num_restorable(self, request: LiveRequest, start: int) -> int:
        """Tokens from this one on that could be read instead of computed."""
        page, offset = divmod(start, self._pool.page_size)
        saved = request.saved
        if saved is None or offset or not saved.first <= page < saved.end:
            return 0
        return saved.end * self._pool.page_size - start

    def end_of_chunk(self, request: LiveRequest, start: int) -> int:
        """Where a chunk from `start` on has to end: at the first saved page, or at the last token."""
        saved_start = request.saved.first * self._pool.page_size if request.saved else 0
        return saved_start if start < saved_start else len(request.token_ids)

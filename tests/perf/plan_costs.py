"""What a step's plan costs beside what does not run: kept pages, named prefixes, waiting clients; and with
windows.

Nothing that a step does looks at all of these, so each column is flat. Times are CPU times of the thread, so
that other load does not count; sizes are measured in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count

from mlxserve.bench.report import Figure, Report
from mlxserve.cache.groups import Window
from mlxserve.cache.kinds.kind import EndKind
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import Chunk, Request, Sampled
from mlxserve.scheduler.scheduler import Scheduler
from tests.perf.growth import interleaved

PAGE_SIZE, WINDOW = 32, 1024
KEPT, PREFIXES, CLIENTS = (0, 10_000, 100_000), (0, 100, 1_000), (0, 1_000, 10_000)
WITHOUT_MEMORY = (0, 100, 1_000)  # clients, each with a long prompt
RUNNING = (16, 256)
_PROMPT = 2 * WINDOW  # tokens of a request that runs
_CHAT_PAGES = 100  # of a chat that is kept
_SAMPLED = Sampled(0)
STEPS = 2 * PAGE_SIZE  # of a run: each request opens two pages


def bench_plan_costs(*, rounds: int) -> Report:
    costs = PlanCosts(rounds)
    figures = [
        *costs.by_size("step of 16, {} pages are kept", KEPT, costs.beside_kept_pages),
        *costs.by_size("... and the time of a chat ends", KEPT, costs.beside_a_chat_that_expires),
        *costs.by_size("step of 64, {} named prefixes", PREFIXES, costs.beside_prefixes),
        *costs.by_size("... of a model with windows", PREFIXES, costs.beside_prefixes_of_windows),
        *costs.by_size("step of 64, {} clients wait for a place", CLIENTS, costs.beside_clients),
        *costs.by_size(
            "step of 16, {} clients wait for memory",
            WITHOUT_MEMORY,
            costs.beside_clients_without_memory,
        ),
        *costs.windows_beside_full_pages(),
        *costs.windows_beside_full_pages(is_full=True),
        *costs.windows_beside_full_pages(num_waiting=16),
        *costs.by_size("add a named prefix after {}", PREFIXES, costs.adding_a_prefix),
    ]
    settings = {"page_size": PAGE_SIZE, "window": WINDOW, "rounds": rounds, "steps a round": STEPS}
    return Report("plan-costs", settings, tuple(figures))


class PlanCosts:
    """Each method returns a function that makes steps, and returns the CPU seconds of one."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def by_size(
        self, name: str, sizes: Sequence[int], make: Callable[[int], Callable[[], float]]
    ) -> list[Figure]:
        ready = {size: make(size) for size in sizes}
        runs = interleaved(sizes, lambda size: 1e6 * ready[size](), self._rounds)
        return [
            Figure(name.format(f"{size:,}") if "{}" in name else f"{name} ({size:,})", "us", values)
            for size, values in zip(sizes, runs, strict=True)
        ]

    def windows_beside_full_pages(
        self, *, num_waiting: int = 0, is_full: bool = False
    ) -> list[Figure]:
        """is_full: no page is blank, and one has to be evicted for each that is opened"""
        figures: list[Figure] = []
        for number in RUNNING:
            full = self.of_steps(number, num_waiting, has_windows=False, is_full=is_full)
            windows = self.of_steps(number, num_waiting, has_windows=True, is_full=is_full)
            pairs = [(1e6 * full(), 1e6 * windows()) for _ in range(self._rounds + 1)][1:]
            name = f"step of {number}"
            name += f", {num_waiting} wait for memory" if num_waiting else ""
            name += ", full cache" if is_full else ""
            figures += [
                Figure(f"{name}: full pages", "us", tuple(one for one, _ in pairs)),
                Figure(f"{name}: windows", "us", tuple(other for _, other in pairs)),
                Figure("  windows / full pages", "", tuple(other / one for one, other in pairs)),
            ]
        return figures

    # ---- schedulers with something beside what runs

    def beside_kept_pages(self, number: int) -> Callable[[], float]:
        return self._beside_kept_pages(number).run

    def beside_a_chat_that_expires(self, number: int) -> Callable[[], float]:
        """In the first step of a run."""
        steps = self._beside_kept_pages(number)

        def run() -> float:
            steps.now += 1
            steps.keep(100_000 + int(steps.now), 4, steps.now + 0.5)
            steps.now += 1
            return steps.run()

        return run

    def _beside_kept_pages(self, number: int) -> Steps:
        steps = self._steps(16, spare_pages=number + 8 * (self._rounds + 2))
        for chat in range(number // _CHAT_PAGES):
            steps.keep(chat, _CHAT_PAGES, 1e9)
        return steps.begin()

    def beside_prefixes(self, number: int) -> Callable[[], float]:
        return self._beside_prefixes(number, has_windows=False).run

    def beside_prefixes_of_windows(self, number: int) -> Callable[[], float]:
        return self._beside_prefixes(number, has_windows=True).run

    def _beside_prefixes(self, number: int, *, has_windows: bool) -> Steps:
        num_pages = 3 * number
        spare_windows = num_pages + 1 if has_windows else None
        steps = self._steps(64, spare_pages=num_pages, spare_windows=spare_windows)
        for index in range(number):
            steps.add_prefix(index)
        return steps.begin()

    def beside_clients(self, number: int) -> Callable[[], float]:
        steps = self._steps(64, seats=64).begin()
        steps.queue(number, _PROMPT)
        return steps.run

    def beside_clients_without_memory(self, number: int) -> Callable[[], float]:
        return self.of_steps(16, number, has_windows=False)

    def of_steps(
        self, number: int, num_waiting: int = 0, *, has_windows: bool, is_full: bool = False
    ) -> Callable[[], float]:
        """Steps of `number` requests beside others that wait for memory, of full pages or of windows."""
        spare_windows = int(not num_waiting) if has_windows else None
        steps = self._steps(number, spare_windows=spare_windows)
        steps = (steps.fill() if is_full else steps).begin()
        num_pages = 2 * WINDOW // PAGE_SIZE if has_windows else steps.num_free + 1
        steps.queue(num_waiting, num_pages * PAGE_SIZE)
        return steps.run

    def adding_a_prefix(self, number: int) -> Callable[[], float]:
        """Of a model with windows, and of a key that may have a share of the pages."""
        num_pages = 3 * (number + self._rounds + 1)
        steps = self._steps(0, spare_pages=num_pages, spare_windows=num_pages)
        for index in range(number):
            steps.add_prefix(index)

        def run() -> float:
            began = time.thread_time()
            steps.add_prefix(next(indices))
            return time.thread_time() - began

        indices = count(number)
        return run

    def _steps(
        self,
        number: int,
        *,
        spare_pages: int = 0,
        spare_windows: int | None = None,
        seats: int | None = None,
    ) -> Steps:
        return Steps(number, (STEPS + 1) * (self._rounds + 2), spare_pages, spare_windows, seats)


class Steps:
    """A scheduler in which `number` requests decode once they have begun, with pages for `max_tokens` of each.

    spare_pages: for others than these
    spare_windows: the same of windows, with which no page of those that run has to be evicted; 0 for what they
        hold and no more; None for a model without windows
    seats: for requests that run; None for any number
    """

    def __init__(
        self,
        number: int,
        max_tokens: int,
        spare_pages: int,
        spare_windows: int | None,
        seats: int | None,
    ) -> None:
        self.now = 0.0
        self._number, self._max_tokens = number, max_tokens + number
        longest = _PROMPT + self._max_tokens
        num_pages = number * -(-longest // PAGE_SIZE) + spare_pages + 64
        config = SchedulerConfig(
            max_num_batched_tokens=1 << 24,
            max_num_seqs=seats or number + 64,
            max_num_waiting=1 << 20,
            max_model_len=1 << 24,
            max_pinned_fraction=1.0,
            long_prefill_token_threshold=0,
        )
        ends: list[EndKind] = []
        if spare_windows is not None:
            window = Window(WINDOW, PAGE_SIZE)
            num_growing = number * -(-self._max_tokens // PAGE_SIZE) if spare_windows else 0
            num_window_pages = max(1, number) * window.num_held + num_growing + spare_windows
            ends.append(WindowPages(PagePool(num_window_pages, PAGE_SIZE), window))
        self._scheduler = Scheduler(config, PagePool(num_pages, PAGE_SIZE), ends=ends)

    def fill(self) -> Steps:
        """Cache conversations until no page is blank, as it is in a server that has run for a while."""
        num_pages = min(_CHAT_PAGES, self._scheduler.pool.num_pages // 4)
        for chat in range(-(-self._scheduler.pool.num_pages // num_pages)):
            self._add(_chat(chat, num_pages))
            self._step()
        return self

    def begin(self) -> Steps:
        """Start the requests that decode."""
        for index in range(self._number):
            # Different lengths, so that their pages do not fill in the same step.
            prompt = [index] * (_PROMPT - index % PAGE_SIZE)
            self._add(Request(f"running {index}", prompt, _params(self._max_tokens)))
            self._step()
        while self._scheduler.roster.num_waiting:  # for the last page of a window
            self._step()
        return self

    @property
    def num_free(self) -> int:
        return self._scheduler.pool.num_free

    def run(self) -> float:
        began = time.thread_time()
        for _ in range(STEPS):
            chunks = self._step()
            assert len(chunks) == self._number, "each decodes, and no other one starts"
        return (time.thread_time() - began) / STEPS

    def _step(self) -> list[Chunk]:
        """As the engine: one is unread while the next one is planned, but here it is read at once."""
        scheduler = self._scheduler
        scheduler.page_tables.expire(self.now)
        scheduler.must_read()
        chunks = scheduler.schedule()
        scheduler.update(chunks, [_SAMPLED if chunk.samples else None for chunk in chunks])
        return chunks

    def _add(self, request: Request) -> None:
        self._scheduler.add(request, self.now)

    def keep(self, chat: int, num_pages: int, until: float) -> None:
        """Have a conversation of so many pages, which was just computed, protected until then."""
        request = _chat(chat, num_pages)
        self._add(request)
        self._step()
        self._scheduler.keep_pages(request, until)

    def add_prefix(self, index: int) -> None:
        prompt = [3_000_000 + index] * (2 * PAGE_SIZE)
        self._add(
            Request(f"prefix {index}", prompt, _params(1), pins=True, pin_share=0.99, client="key")
        )
        self._step()

    def queue(self, number: int, num_tokens: int) -> None:
        """Requests of different clients that do not start."""
        for index in range(number):
            prompt = [1_000_000 + index] * num_tokens
            self._add(Request(f"waiting {index}", prompt, _params(8), client=f"client {index}"))


def _chat(number: int, num_pages: int) -> Request:
    prompt = [2_000_000 + number] * (num_pages * PAGE_SIZE + 1)
    return Request(f"chat {number}", prompt, _params(1))


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)

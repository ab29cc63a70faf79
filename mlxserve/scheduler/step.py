"""Step: a plan in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxserve.forward_work import WorkBudget
from mlxserve.request import LiveRequest
from mlxserve.scheduler.limit import DECODE, Limit, LimitContext


@dataclass(slots=True)
class Step:
    """The tokens each request gets, in the order of their chunks, and what is left of the budget."""

    ctx: LimitContext
    budget: int
    may_preempt: bool
    work: WorkBudget | None = None
    has_preempted: bool = False
    allowed: int = field(init=False)  # tokens that it may compute at most
    plan: dict[LiveRequest, Limit] = field(default_factory=dict)
    drafts: dict[LiveRequest, tuple[int, ...]] = field(default_factory=dict)  # of decodes
    _work_of: dict[LiveRequest, int] = field(default_factory=dict)  # filled where it is asked for
    _has_prefill: bool = False

    def __post_init__(self) -> None:
        self.allowed = self.budget

    def restrict(self, budget: int) -> None:
        """Leave at most `budget` tokens for what is not planned yet."""
        self.allowed -= max(0, self.budget - budget)
        self.budget = min(self.budget, budget)

    def budget_at(self, start: int) -> int:
        """Tokens left for a chunk that begins at `start`.

        Where the work of a step is limited, the first chunk may have a page at any rate: a decode
        and a page always go on. A prompt that may not be split is not held back.
        """
        if self.work is None or not self.ctx.is_chunked:
            return self.budget
        rows = self.work.rows(start, self.budget, self._used_work(self.work))
        return min(self.budget, max(rows, 0 if self._has_prefill else self.ctx.page_size))

    def add(self, request: LiveRequest, share: Limit) -> None:
        self.plan[request] = share
        self.budget -= share.charge
        self._has_prefill |= share is not DECODE

    def _used_work(self, work: WorkBudget) -> int:
        """Multiply-adds of the plan. Its tokens are not counted as computed yet."""
        for request, share in self.plan.items():
            if request not in self._work_of:
                self._work_of[request] = work.forward.of_chunk(
                    request.num_computed, share.num_tokens
                )
        return sum(self._work_of.values())

    def add_draft(self, request: LiveRequest, draft: tuple[int, ...]) -> None:
        """Make a decode verify these tokens as well. Nothing may be refunded afterwards."""
        self.budget -= len(draft)
        self.drafts[request] = draft

    def requests(self) -> list[LiveRequest]:
        """Those in the plan, in the order of their rows: single decodes, drafts, prompts."""
        if not self.drafts:
            return list(self.plan)
        return sorted(
            self.plan,
            key=lambda request: (self.plan[request] is not DECODE, request in self.drafts),
        )

    def refund(self, request: LiveRequest) -> None:
        """Take the request out of the plan; no-op if it is not in it."""
        if share := self.plan.pop(request, None):
            self.budget += share.charge
            self._work_of.pop(request, None)

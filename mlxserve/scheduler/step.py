"""Step: the plan of one step while it is being made."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxserve.core.forward_work import WorkBudget
from mlxserve.request import LiveRequest
from mlxserve.scheduler.limit import Limit, LimitContext


@dataclass(slots=True)
class Step:
    """The requests that decode, the tokens that each prompt gets, and the budget that is left."""

    ctx: LimitContext
    budget: int
    may_preempt: bool
    work: WorkBudget | None = None
    has_preempted: bool = False
    allowed: int = field(init=False)  # maximum number of tokens
    left: int = field(init=False)  # tokens for images, which may not be divided: not restricted
    decodes: list[LiveRequest] = field(default_factory=list)
    prompts: list[LiveRequest] = field(default_factory=list)  # running ones, to be planned
    plan: dict[LiveRequest, Limit] = field(default_factory=dict)  # of prompts
    drafts: dict[LiveRequest, tuple[int, ...]] = field(default_factory=dict)  # of decodes
    _work_of: dict[LiveRequest, int] = field(default_factory=dict)  # filled on demand

    def __post_init__(self) -> None:
        self.allowed = self.left = self.budget

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.plan

    def decode(self, requests: list[LiveRequest]) -> None:
        """Plan a token for each of these requests.

        They are never trimmed: max_num_batched_tokens has a token for each of max_num_seqs.
        """
        self.decodes = requests
        self.budget -= len(requests)
        self.left -= len(requests)

    def restrict(self, budget: int) -> None:
        """Limit the rest of the plan to `budget` tokens."""
        self.allowed -= max(0, self.budget - budget)
        self.budget = min(self.budget, budget)

    def budget_at(self, start: int) -> int:
        """Return the tokens left for a chunk that begins at `start`.

        If the work of a step is limited, the first chunk still gets a page, so that a prompt always makes
        progress. A prompt that may not be split is not limited.
        """
        rules = self.ctx.rules
        if self.work is None or not rules.is_chunked:
            return self.budget
        rows = self.work.rows(start, self.budget, self._used_work(self.work))
        return min(self.budget, max(rows, 0 if self.plan else rules.page_size))

    def add(self, request: LiveRequest, share: Limit) -> None:
        """Plan a chunk of the request's prompt."""
        self.plan[request] = share
        self.budget = max(0, self.budget - share.charge)
        self.left -= share.charge

    def _used_work(self, work: WorkBudget) -> int:
        """Return the multiply-adds of the plan, whose tokens do not count as computed yet."""
        shares = [(request, 1) for request in self.decodes]
        shares += [(request, share.num_tokens) for request, share in self.plan.items()]
        for request, num_tokens in shares:
            if request not in self._work_of:
                self._work_of[request] = work.forward.of_chunk(request.num_computed, num_tokens)
        return sum(self._work_of.values())

    def add_draft(self, request: LiveRequest, draft: tuple[int, ...]) -> None:
        """Let a decode verify the tokens of a draft as well."""
        self.budget -= len(draft)
        self.left -= len(draft)
        self.drafts[request] = draft

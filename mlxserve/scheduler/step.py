"""Step: a plan in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxserve.request import LiveRequest
from mlxserve.scheduler.limit import Limit, LimitContext


@dataclass(slots=True)
class Step:
    """The tokens each request gets, in the order of their chunks, and what is left of the budget."""

    ctx: LimitContext
    budget: int
    may_preempt: bool
    has_preempted: bool = False
    allowed: int = field(init=False)  # tokens that it may compute at most
    plan: dict[LiveRequest, Limit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allowed = self.budget

    def restrict(self, budget: int) -> None:
        """Leave at most `budget` tokens for what is not planned yet."""
        self.allowed -= max(0, self.budget - budget)
        self.budget = min(self.budget, budget)

    def add(self, request: LiveRequest, share: Limit) -> None:
        self.plan[request] = share
        self.budget -= share.charge

    def refund(self, request: LiveRequest) -> None:
        """Take the request out of the plan; no-op if it is not in it."""
        if share := self.plan.pop(request, None):
            self.budget += share.charge

"""Step: a plan in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxserve.request import Request
from mlxserve.scheduler.limit import Limit, LimitContext


@dataclass(slots=True)
class Step:
    """The tokens each request gets, in the order of their chunks, and what is left of the budget."""

    ctx: LimitContext
    budget: int
    may_preempt: bool
    has_preempted: bool = False
    plan: dict[Request, Limit] = field(default_factory=dict)

    def take(self, request: Request, share: Limit) -> None:
        self.plan[request] = share
        self.budget -= share.charge

    def refund(self, request: Request) -> None:
        if share := self.plan.pop(request, None):
            self.budget += share.charge

"""Adding to a plan charges the budget, and a refund returns the charge."""

from __future__ import annotations

from mlxserve.request import LiveRequest, Request
from mlxserve.sampling_params import SamplingParams
from mlxserve.scheduler.limit import DECODE, Limit, LimitContext
from mlxserve.scheduler.step import Step


def test_a_refund_returns_the_charge_once() -> None:
    step = Step(LimitContext(page_size=4, max_model_len=64, step_budget=10), 10, may_preempt=True)
    decode, prompt = (LiveRequest(Request(name, [1], SamplingParams())) for name in "ab")
    step.add(decode, DECODE)
    step.add(prompt, Limit(5, 8))
    assert (list(step.plan), step.budget) == ([decode, prompt], 1)
    step.refund(prompt)
    step.refund(prompt)
    assert (list(step.plan), step.budget) == ([decode], 9)

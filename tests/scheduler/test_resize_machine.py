"""Resizes in any order among named prefixes of clients with shares, answers, failures and preemptions.

`GhostEngine.resize` judges each: it is refused if and only if it has to be. A refused one leaves everything
as it was; after another one every request and every named prefix is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mlxserve.core.config import PageTail, PreemptionMode
from mlxserve.core.errors import InvalidRequest, PromptTooLong, QueueFull
from mlxserve.request import STATE_SLOTS
from tests.scheduler.test_scheduler_machine import run_machine

PAGE_SIZE = 4
CLIENTS = st.sampled_from(["a", "a", "b"])


def prompt_of(branch: int, num_tokens: int) -> list[int]:
    """Prompts of one branch begin alike; those of branch 0 are the beginning of all."""
    return [5] * min(num_tokens, PAGE_SIZE) + [branch] * max(0, num_tokens - PAGE_SIZE)


prompts = st.builds(prompt_of, st.integers(1, 4), st.integers(1, 5 * PAGE_SIZE))


class ResizeMachine(RuleBasedStateMachine):
    def __init__(self, make_engine: Callable) -> None:
        super().__init__()
        self.make_engine = make_engine

    @initialize(
        num_pages=st.integers(8, 30),
        fraction=st.sampled_from([0.5, 1.0]),
        seats=st.integers(1, 4),
        budget=st.sampled_from([5, 16]),
        mode=st.sampled_from(PreemptionMode),
        tail=st.sampled_from(PageTail),
        kind=st.sampled_from(["attention", "attention", "windows", "states", "drafts over states"]),
    )
    def build(
        self,
        num_pages: int,
        fraction: float,
        seats: int,
        budget: int,
        mode: PreemptionMode,
        tail: PageTail,
        kind: str,
    ) -> None:
        kinds: dict[str, dict] = {
            "attention": {"speculative_tokens": 5},
            "windows": {"window": 6, "num_window_pages": 8},
            "states": {"num_state_slots": STATE_SLOTS * seats + 2},
            "drafts over states": {
                "num_state_slots": STATE_SLOTS * seats + 8,
                "speculative_tokens": 5,
            },
        }
        self.engine = self.make_engine(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_model_len=48,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            max_pinned_fraction=fraction,
            preemption_mode=mode,
            page_tail=tail,
            **kinds[kind],
        )

    @rule(prompt=prompts, max_tokens=st.sampled_from([1, 9, None]), client=CLIENTS)
    def add(self, prompt: list[int], max_tokens: int | None, client: str) -> None:
        with suppress(PromptTooLong):
            self.engine.add(prompt, max_tokens, client=client)

    @rule(prompt=prompts, client=CLIENTS, share=st.sampled_from([0.5, 0.5, 0.75, 1.0]))
    def add_prefix(self, prompt: list[int], client: str, share: float) -> None:
        with suppress(InvalidRequest, QueueFull):
            self.engine.add(prompt, 1, pins=True, client=client, pin_share=share)
        self.engine.audit()

    @precondition(lambda self: self.engine.pinned)
    @rule(data=st.data())
    def drop_prefix(self, data: st.DataObject) -> None:
        self.engine.unpin(data.draw(st.sampled_from(self.engine.pinned)))

    @precondition(lambda self: self.engine.scheduler.roster.ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Those that compute a named prefix again as well."""
        live = sorted(self.engine.scheduler.roster.ids)
        self.engine.abort(data.draw(st.sampled_from(live)))

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.step()

    @rule(num_pages=st.integers(2, 30))
    def resize(self, num_pages: int) -> None:
        with suppress(InvalidRequest, QueueFull):
            self.engine.resize(num_pages)

    @rule(num_fewer=st.integers(0, 3))
    def shrink(self, num_fewer: int) -> None:
        with suppress(InvalidRequest, QueueFull):
            self.engine.resize(max(2, self.engine.scheduler.pool.num_pages - num_fewer))

    @rule()
    def fail(self) -> None:
        self.engine.fail()

    def teardown(self) -> None:
        if engine := getattr(self, "engine", None):
            engine.drain()


def test_no_resize_loses_an_answer_or_a_prefix(make_engine: Callable) -> None:
    run_machine(make_engine, examples=40, steps=20, machine=ResizeMachine)


@pytest.mark.long
def test_no_resize_loses_an_answer_or_a_prefix_however_long(make_engine: Callable) -> None:
    """With MLXSERVE_MACHINE_EXAMPLES, as many examples, new in every run."""
    examples = os.environ.get("MLXSERVE_MACHINE_EXAMPLES")
    number = int(examples or 1000)
    run_machine(make_engine, number, 40, machine=ResizeMachine, derandomize=examples is None)

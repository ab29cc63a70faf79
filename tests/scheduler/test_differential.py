"""Whatever the scheduler does, every request gets the answer it would get alone.

The ghost engine compares each token as it is read; here the configurations are compared.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

MAX_MODEL_LEN = 64
SHARED = [n % 7 for n in range(30)]


def prompts(seed: int, count: int = 8) -> list[list[int]]:
    """Half of them with a common prefix, of different lengths."""
    draw = random.Random(seed)
    return [
        SHARED[: draw.choice([0, 0, 9, 16, 30])] + draw.choices(range(11), k=draw.randrange(1, 20))
        for _ in range(count)
    ]


def answers(engine: object, seed: int) -> dict[str, list[int]]:
    for index, prompt in enumerate(prompts(seed)):
        engine.add(prompt, max_tokens=4 + index, ignore_eos=index % 2 == 0)
    engine.drain()
    return engine.answers


@pytest.mark.parametrize("seed", range(4))
def test_answers_do_not_depend_on_cache_chunks_pages_or_preemptions(
    make_engine: Callable, seed: int
) -> None:
    alone = answers(make_engine(num_pages=400, max_model_len=MAX_MODEL_LEN, max_num_seqs=1), seed)
    preemptions = 0
    for cached, aligned, budget, num_pages, page_size in itertools.product(
        (True, False), (True, False), (8, 21, 512), (16, 400), (4, 8)
    ):
        engine = make_engine(
            num_pages=num_pages * 4 // page_size,
            page_size=page_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            enable_prefix_caching=cached,
            page_aligned_scheduling=aligned,
            long_prefill_token_threshold=8,
        )
        assert answers(engine, seed) == alone
        preemptions += engine.scheduler.stats().num_preemptions
    assert preemptions > 0, "no pool was small enough to tell anything"


@pytest.mark.parametrize("seed", range(4))
def test_the_cache_saves_computing(make_engine: Callable, seed: int) -> None:
    computed = {}
    for cached in (True, False):
        engine = make_engine(num_pages=400, enable_prefix_caching=cached, max_num_seqs=1)
        answers(engine, seed)
        computed[cached] = engine.num_computed
    assert computed[True] < computed[False]


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 7)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 7)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(events=events, num_pages=st.integers(16, 40))
def test_the_plan_is_a_function_of_the_calls_made_so_far(
    events: list, num_pages: int, make_engine: Callable
) -> None:
    traces = []
    for _ in range(2):
        engine = make_engine(num_pages=num_pages, max_num_batched_tokens=16)
        for what, number in events:
            if what == "add":
                engine.add(prompts(1)[number], max_tokens=9)
            elif what == "abort":
                engine.abort(f"r{number}")
            else:
                for _ in range(number):
                    engine.step()
        engine.drain()
        traces.append(engine.trace)
    assert traces[0] == traces[1]

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxserve.scheduler.limit import Limit, LimitContext, LimitReason, LimitRules, limit

RULES = LimitRules(page_size=32, step_budget=2048)
BASE = LimitContext(RULES, max_model_len=4096)


def with_rules(ctx: LimitContext, **rules: object) -> LimitContext:
    return ctx._replace(rules=replace(ctx.rules, **rules))


ALIGNED = with_rules(BASE, is_aligned=True)

contexts = st.builds(
    LimitContext,
    rules=st.builds(
        LimitRules,
        page_size=st.sampled_from([1, 2, 4, 8]),
        step_budget=st.integers(1, 100),
        long_prefill_token_threshold=st.integers(0, 40),
        is_chunked=st.booleans(),
        is_aligned=st.booleans(),
        charges_pages=st.booleans(),
    ),
    max_model_len=st.integers(2, 100),
    num_eligible=st.integers(1, 5),
)
chunks = st.tuples(st.integers(0, 90), st.integers(1, 90), st.integers(0, 120)).map(
    lambda t: (t[0], t[0] + t[1], t[2])
)
budgets = st.integers(0, 100)


@given(chunks, budgets, contexts)
def test_tokens_never_exceed_their_charge_nor_the_charge_the_budget(
    chunk: tuple, budget: int, ctx: LimitContext
) -> None:
    share = limit(*chunk, budget, ctx)
    assert 0 <= share.num_tokens <= share.charge <= budget


@given(chunks, budgets, contexts)
def test_no_tokens_always_have_a_reason_and_some_never(
    chunk: tuple, budget: int, ctx: LimitContext
) -> None:
    share = limit(*chunk, budget, ctx)
    assert (share.num_tokens == 0) == (share.reason is not None)


@given(chunks, budgets, contexts)
def test_a_chunk_ends_within_the_context_and_what_is_known(
    chunk: tuple, budget: int, ctx: LimitContext
) -> None:
    start, known_end, _ = chunk
    share = limit(*chunk, budget, ctx)
    if share.num_tokens:
        assert start + share.num_tokens <= min(known_end, ctx.max_model_len)


@given(chunks, budgets, budgets, contexts)
def test_more_budget_never_means_fewer_tokens(
    chunk: tuple, budget: int, more: int, ctx: LimitContext
) -> None:
    tokens = limit(*chunk, budget, ctx).num_tokens
    assert tokens <= limit(*chunk, budget + more, ctx).num_tokens


@given(chunks, budgets, contexts)
def test_an_aligned_prefill_ends_on_a_page_or_at_its_end_for_any_start(
    chunk: tuple, budget: int, ctx: LimitContext
) -> None:
    ctx = with_rules(ctx, is_aligned=True, is_chunked=True)
    start, known_end, prefill_end = chunk
    share = limit(*chunk, budget, ctx)
    if share.num_tokens and start < prefill_end:
        end = start + share.num_tokens
        assert end % ctx.rules.page_size == 0 or end == min(known_end, ctx.max_model_len)


@given(chunks, budgets, contexts)
def test_an_unaligned_chunk_costs_its_tokens(chunk: tuple, budget: int, ctx: LimitContext) -> None:
    for way in ({"is_aligned": False}, {"charges_pages": False}):
        share = limit(*chunk, budget, with_rules(ctx, **way))
        assert share.charge == share.num_tokens


@given(chunks, budgets, contexts)
def test_without_chunking_a_prompt_is_taken_whole_or_not_at_all(
    chunk: tuple, budget: int, ctx: LimitContext
) -> None:
    start, known_end, prefill_end = chunk
    share = limit(*chunk, budget, with_rules(ctx, is_chunked=False))
    if start < prefill_end:
        assert share.num_tokens in (0, min(known_end, ctx.max_model_len) - start)


@given(chunks, st.integers(1, 100), contexts)
@example((8, 10, 9), 2, LimitContext(LimitRules(page_size=2, step_budget=1, is_aligned=True), 9))
def test_a_page_of_budget_always_yields_tokens(
    chunk: tuple, budget: int, ctx: LimitContext
) -> None:
    ctx = with_rules(ctx, is_chunked=True)
    threshold = ctx.rules.long_prefill_token_threshold
    if chunk[0] < ctx.max_model_len and min(budget, threshold or budget) >= ctx.rules.page_size:
        ctx = with_rules(ctx, step_budget=max(budget, ctx.rules.step_budget))
        assert limit(*chunk, budget, ctx).num_tokens > 0


@given(st.integers(0, 90), budgets, contexts)
def test_a_decode_is_not_trimmed_by_what_trims_prompts(
    start: int, budget: int, ctx: LimitContext
) -> None:
    share = limit(start, start + 1, start, budget, ctx)
    if start < ctx.max_model_len and budget:
        assert share == Limit(1, 1)


def test_a_last_prefill_that_does_not_fit_is_chunked() -> None:
    assert limit(0, 3000, 3000, 2045, BASE) == Limit(2045, 2045)
    assert limit(2045, 3000, 3000, 2045, BASE) == Limit(955, 955)


def test_the_end_is_aligned_and_not_the_count() -> None:
    for start in range(64):
        share = limit(start, 4000, 4000, 100, ALIGNED)
        assert (start + share.num_tokens) % 32 == 0, start
        assert 68 < share.num_tokens <= 100, start


def test_133_tokens_of_budget_are_four_pages_of_32() -> None:
    assert limit(0, 4000, 4000, 133, ALIGNED) == Limit(128, 128)


def test_less_than_a_page_of_budget_defers_an_aligned_prompt() -> None:
    assert limit(64, 4000, 4000, 31, ALIGNED) == Limit(0, 0, LimitReason.ALIGNMENT)
    assert limit(65, 4000, 4000, 31, ALIGNED).num_tokens == 31


def test_a_short_tail_never_starves_on_a_whole_pages_charge() -> None:
    assert limit(64, 104, 104, 40, ALIGNED) == Limit(40, 40)
    assert limit(64, 104, 104, 2048, ALIGNED) == Limit(40, 64)


def test_the_long_prefill_threshold_is_ignored_when_alone() -> None:
    ctx = with_rules(BASE, long_prefill_token_threshold=512)
    assert limit(0, 4000, 4000, 2048, ctx).num_tokens == 2048
    assert limit(0, 4000, 4000, 2048, ctx._replace(num_eligible=8)).num_tokens == 512


def test_the_fair_share_raises_the_long_prefill_threshold() -> None:
    ctx = with_rules(BASE, long_prefill_token_threshold=512)._replace(num_eligible=2)
    assert limit(0, 4000, 4000, 2048, ctx).num_tokens == 1024


def test_a_prompt_that_ends_in_one_token_is_still_a_prefill() -> None:
    assert limit(64, 65, 65, 2048, ALIGNED) == Limit(1, 32)
    assert limit(65, 66, 65, 2048, ALIGNED) == Limit(1, 1)


def test_an_empty_budget_and_a_full_context_have_different_reasons() -> None:
    assert limit(0, 9, 9, 0, BASE).reason is LimitReason.BUDGET
    assert limit(4096, 4097, 9, 9, BASE).reason is LimitReason.CONTEXT
    whole = with_rules(BASE, is_chunked=False)
    assert limit(0, 9, 9, 8, whole).reason is LimitReason.WHOLE_PROMPT


def test_alignment_that_could_starve_a_prompt_is_turned_off_with_a_warning(
    make_engine: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(page_size=16, max_num_batched_tokens=20, max_num_seqs=8)
    assert "page_aligned_scheduling is off" in caplog.text
    engine.add([1] * 40, max_tokens=1)
    assert engine.spans(engine.launch()) == [("r0", 0, 20)]
    engine.drain()


@st.composite
def block_lists(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    edges = sorted(draw(st.sets(st.integers(0, 90), max_size=8)))
    return tuple(zip(edges[::2], edges[1::2], strict=False))


@given(chunks, budgets, st.integers(0, 100), contexts, block_lists())
def test_a_chunk_divides_no_image_that_one_step_computes(
    chunk: tuple, budget: int, more: int, ctx: LimitContext, blocks: tuple
) -> None:
    start, known_end, prefill_end = chunk
    ctx = with_rules(ctx, is_chunked=True)
    # As the scheduler has it: images lie within the prompt, which lies within the context.
    ctx = ctx._replace(max_model_len=max(ctx.max_model_len, known_end))
    blocks = tuple(block for block in blocks if block[1] <= known_end)
    share = limit(start, known_end, prefill_end, budget, ctx, blocks, budget + more)
    assert (share.num_tokens == 0) == (share.reason is not None)
    assert share.num_tokens <= share.charge <= budget + more
    assert start + share.num_tokens <= known_end
    if start >= prefill_end or not share.num_tokens:
        return
    end = start + share.num_tokens
    assert not any(first < end < last for first, last in blocks)
    begun = any(first <= start and last == end for first, last in blocks)
    assert begun or share.num_tokens <= budget, "only an image takes more than the budget"
    edges = {edge for block in blocks for edge in block}
    if ctx.rules.is_aligned:
        assert end % ctx.rules.page_size == 0 or end == known_end or end in edges


@given(chunks, budgets, budgets, contexts, block_lists())
def test_more_budget_never_means_fewer_tokens_beside_images(
    chunk: tuple, budget: int, more: int, ctx: LimitContext, blocks: tuple
) -> None:
    ctx = with_rules(ctx, is_chunked=True)
    tokens = [
        limit(*chunk, given, ctx, blocks, 100).num_tokens for given in (budget, budget + more)
    ]
    assert tokens[0] <= tokens[1]


def test_a_chunk_ends_before_an_image_or_after_it() -> None:
    blocks = ((50, 90), (92, 120))
    assert limit(0, 200, 200, 80, BASE, blocks, 80) == Limit(50, 50)
    assert limit(0, 200, 200, 91, BASE, blocks, 91) == Limit(91, 91)
    assert limit(0, 200, 200, 91, ALIGNED, blocks, 91) == Limit(90, 91)
    assert limit(0, 200, 200, 100, BASE, blocks, 100) == Limit(92, 92)


def test_an_image_takes_more_than_its_budget_if_the_step_has_it() -> None:
    blocks = ((50, 90),)
    assert limit(50, 200, 200, 8, BASE, blocks, 40) == Limit(40, 40)
    assert limit(50, 200, 200, 8, ALIGNED, blocks, 40) == Limit(40, 40)
    assert limit(50, 200, 200, 8, BASE, blocks, 39) == Limit(0, 0, LimitReason.IMAGE)
    assert limit(70, 200, 200, 8, BASE, blocks, 20) == Limit(20, 20)

"""Drafts: what is guessed, and that a scheduler with guesses right and wrong keeps its invariants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mlxserve.cache.pages import PagePool
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import GUESS, FinishReason, Request, Sampled, as_token_ids
from mlxserve.scheduler.drafts import Lookup, LookupDrafts
from mlxserve.scheduler.fairness import DECODE_WEIGHT, PREFILL_WEIGHT
from mlxserve.scheduler.row_times import RowTimes
from mlxserve.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import GuideThatWaits

TEXT = [*range(100, 140)]


def draft(tokens: list[int], max_tokens: int = 8) -> list[int]:
    return list(Lookup().draft(as_token_ids(tokens), max_tokens))


def test_a_draft_is_what_followed_the_last_three_tokens_before() -> None:
    assert draft([*TEXT, 1, 2, *TEXT[10:13]]) == TEXT[13:17]


def test_the_last_of_several_places_counts() -> None:
    assert draft([1, 2, 3, 50, 1, 2, 3, 60, 61, 62, 63, 1, 2, 3]) == [60, 61, 62, 63]


def test_text_without_repetition_has_no_draft() -> None:
    assert draft(TEXT) == []
    assert draft([]) == draft([1]) == draft([1, 2, 3]) == []


def test_a_draft_goes_on_with_a_loop_that_is_shorter_than_itself() -> None:
    assert draft([7, 7, 7, 7]) == [7, 7, 7, 7]
    assert draft([9, 1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1]


def test_no_draft_is_longer_than_asked() -> None:
    assert draft([*TEXT, *TEXT[:3]], max_tokens=2) == TEXT[3:5]
    assert draft([*TEXT, *TEXT[:3]], max_tokens=0) == []


def test_accepted_drafts_become_longer_and_rejected_ones_shorter() -> None:
    lookup, tokens = Lookup(), as_token_ids([*TEXT, *TEXT[:3]])
    sizes = []
    for num_accepted in (4, 8, 5, 4):
        sizes.append(len(lookup.draft(tokens, 32)))
        lookup.learn(sizes[-1], num_accepted)
    assert sizes == [4, 8, 16, 8]


def test_a_draft_that_was_cut_short_and_is_right_grows_all_the_same() -> None:
    """Else one of whose tokens few are worth their rows would never get to where many are."""
    lookup, tokens = Lookup(), as_token_ids([*TEXT, *TEXT[:3]])
    sizes = []
    for _ in range(4):
        sizes.append(len(lookup.draft(tokens, 32)))
        lookup.learn(4, 4)
    assert sizes == [4, 8, 16, 32]


def test_after_a_failure_a_longer_match_is_needed() -> None:
    lookup = Lookup()
    lookup.learn(4, 0)
    assert not lookup.draft(as_token_ids([*TEXT, *TEXT[:5]]), 8)
    assert lookup.draft(as_token_ids([*TEXT, *TEXT[:6]]), 8)
    lookup.learn(2, 1)
    assert lookup.draft(as_token_ids([*TEXT, *TEXT[:6], 1, *TEXT[20:23]]), 8)


def test_a_draft_that_was_in_sight_and_did_not_come_is_a_failure() -> None:
    lookup, tokens = Lookup(), as_token_ids([*TEXT, *TEXT[:3]])
    assert lookup.expects_draft(tokens)
    tokens.append(1)
    assert not lookup.draft(tokens, 8)
    tokens.extend(TEXT[20:24])
    assert not lookup.expects_draft(tokens)


def test_a_long_text_is_indexed_over_several_calls() -> None:
    tokens = as_token_ids([*range(10_000), *range(5, 8)])
    lookup = Lookup()
    found = [lookup.draft(tokens, 1) for _ in range(3)]
    assert found == [(), (), (8,)]


def test_a_draft_is_verified_in_one_step_and_only_its_right_tokens_count(
    make_engine: Callable,
) -> None:
    engine = make_engine(speculative_tokens=8)
    request = engine.add([1, 2, 3], 60)
    engine.drain()
    stats = engine.scheduler.stats()
    assert len(engine.answers[request.id]) == 60
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert len(engine.trace) < 60
    assert request.num_accepted == stats.accepted_tokens


def make_priced(make_engine: Callable, table: dict[int, float], num_requests: int) -> Any:
    """An engine whose steps take the time of this table, with requests that run together."""
    engine = make_engine(speculative_tokens=16, max_num_seqs=8, num_pages=400)
    engine.scheduler.drafts.controller.times = RowTimes(table)
    for index in range(num_requests):
        engine.add([index, 2, 3], 40)
    return engine


def rows_of_decodes(engine: Any) -> set[tuple[int, int]]:
    """(decodes, rows) of the steps without prompts."""
    decodes = [step for step in engine.trace if step and all(start >= 3 for _, start, _ in step)]
    return {(len(step), sum(length for _, _, length in step)) for step in decodes}


def test_no_draft_is_made_where_every_row_is_dear(make_engine: Callable) -> None:
    engine = make_priced(make_engine, {1: 1, 2: 2, 32: 32}, 3)
    for _ in range(10):  # also where no step is unread
        assert not any(chunk.draft for chunk in engine.launch())
        engine.read()
    engine.drain()
    assert all(rows == num_decodes for num_decodes, rows in rows_of_decodes(engine))


def test_all_answers_share_the_rows_that_are_cheap(make_engine: Callable) -> None:
    """A sixth row takes as long as eight others."""
    engine = make_priced(make_engine, {1: 1, 5: 1.05, 6: 9, 32: 9.1}, 4)
    engine.drain()
    several = {rows for num_decodes, rows in rows_of_decodes(engine) if num_decodes > 1}
    assert several
    assert max(several) == 5


def test_a_draft_takes_no_page_of_a_prompt_or_of_other_decodes(make_engine: Callable) -> None:
    """The judge of plans counts what others need next."""
    drafted = 0
    for num_pages in range(14, 30):
        engine = make_engine(
            speculative_tokens=16, num_pages=num_pages, max_num_batched_tokens=9, max_num_seqs=3
        )
        engine.add([1, 2, 3], 30)
        engine.add([4, 5], 30)
        for _ in range(6):
            engine.step()
        engine.add([9] * 33, 3)
        engine.drain()
        drafted += engine.scheduler.stats().drafted_tokens
    assert drafted > 100


def test_accepted_drafts_are_charged_to_their_client(make_engine: Callable) -> None:
    engine = make_engine(speculative_tokens=8, max_num_seqs=1)
    request = engine.add([1, 2, 3], 60, client="me")
    engine.add([4, 5], 2, client="me")  # keeps the counter
    while not request.is_finished:
        engine.step()
    assert engine.scheduler.stats().accepted_tokens > 20
    spent = engine.scheduler.roster.fair_share.tokens_of("me")
    own = 3 * PREFILL_WEIGHT + 59 * DECODE_WEIGHT
    assert own <= spent <= own + 2 * PREFILL_WEIGHT + 2 * DECODE_WEIGHT  # the other may have begun
    engine.drain()


def test_what_is_accepted_reaches_the_controller(make_engine: Callable) -> None:
    engine = make_engine(speculative_tokens=8)
    request = engine.add([1, 2, 3], 60)
    while request.num_drafted < 9:
        engine.step()
    controller = engine.scheduler.drafts.controller
    assert controller.num_kept == 1
    engine.drain()
    assert controller.num_kept == 0


def test_accepted_tokens_are_counted_by_their_position(make_engine: Callable) -> None:
    engine = make_engine(speculative_tokens=8)
    request = engine.add([1, 2, 3], 90)
    engine.drain()
    stats = engine.scheduler.stats()
    counts = request.accepted_at
    assert sum(counts) == request.num_accepted == stats.accepted_tokens
    assert counts == sorted(counts, reverse=True)
    assert len(counts) > 1
    assert dict(stats.accepted_at) == {str(at): count for at, count in enumerate(counts)}
    assert counts[0] <= stats.num_drafts <= stats.drafted_tokens


def test_nothing_is_kept_of_requests_that_ended() -> None:
    drafts = LookupDrafts(8)
    scheduler = Scheduler(SchedulerConfig(max_model_len=128), PagePool(64, 4), drafts=drafts)
    for number in range(3):
        request = scheduler.add(Request(f"r{number}", [1, 2, 3], SamplingParams(max_tokens=9)))
        while not request.is_finished:
            chunks = scheduler.schedule()
            scheduler.update(
                chunks, [Sampled(7, more=(Sampled(7),) * len(c.draft)) for c in chunks]
            )
        assert drafts.num_kept == 0
    assert scheduler.stats().drafted_tokens > 0


class GuideThatAllows(GuideThatWaits):
    """Has the masks of the first three tokens that may follow."""

    def expect(self, likely: Sequence[int], /) -> None:
        self.foreseen = tuple(likely[:3])

    def read(self, token_ids: list[int], /) -> None:
        super().read(token_ids)
        self.foreseen = () if token_ids else self.foreseen


def test_tokens_of_its_text_are_drafts_of_a_guided_answer_that_has_their_masks(
    make_engine: Callable,
) -> None:
    engine = make_engine(speculative_tokens=8)
    guided = engine.add([1, 2, 3], 40, guide=GuideThatAllows())
    lengths = []
    while chunks := engine.launch():
        lengths += [len(chunk.draft) for chunk in chunks]
        engine.read()
    assert max(lengths) == 3
    assert 0 < guided.num_accepted <= guided.num_drafted
    assert len(engine.answers[guided.id]) == 40


def test_a_guided_answer_is_drafted_while_no_grammar_limits_it(make_engine: Callable) -> None:
    """Its steps are read for drafts, and no mask is waited for."""
    engine = make_engine(speculative_tokens=8)
    guide = GuideThatAllows()
    guide.is_free, guide.must_wait = True, False
    guided = engine.add([1, 2, 3], 60, guide=guide)
    engine.drain()
    assert len(engine.answers[guided.id]) == 60
    assert 0 < guided.num_accepted <= guided.num_drafted
    assert len(engine.trace) < 60


def test_a_guided_answer_has_no_drafts_without_masks(make_engine: Callable) -> None:
    engine = make_engine(speculative_tokens=8)
    guide = GuideThatWaits()
    guide.must_wait = False
    guided = engine.add([1, 2, 3], 40, guide=guide)
    plain = engine.add([4, 5, 6], 40)
    engine.drain()
    assert guided.num_drafted == 0 < plain.num_drafted
    assert guide.num_foreseen == 8


def test_forced_tokens_of_a_guided_answer_are_drafts(make_engine: Callable) -> None:
    engine = make_engine(speculative_tokens=2)
    guide = GuideThatWaits()
    guide.foreseen = (3, 3, 3, 3)
    guided = engine.add([1, 2, 3], 40, guide=guide)
    engine.drain()
    assert guided.num_drafted > 0
    assert len(engine.answers[guided.id]) == 40


def test_a_guide_is_not_asked_for_forced_tokens_where_there_are_no_drafts(
    make_engine: Callable,
) -> None:
    engine = make_engine()
    guide = GuideThatWaits()
    guide.foreseen = (3, 3)
    guided = engine.add([1, 2, 3], 10, guide=guide)
    engine.drain()
    assert (guide.num_foreseen, guided.num_drafted) == (0, 0)


def test_an_abort_while_a_draft_is_unread_publishes_nothing_of_it(make_engine: Callable) -> None:
    engine = make_engine(speculative_tokens=8)
    request = engine.add([1, 2, 3, 4, 5], 60)
    while not any(chunk.draft for step, _ in engine.unread for chunk in step):
        engine.step()
    num_known = len(request.token_ids)
    engine.abort(request.id, FinishReason.ABORT)
    engine.drain()
    assert len(request.token_ids) == num_known
    assert len(engine.scheduler.pool.order.first()) <= num_known // 4


def test_placeholders_are_no_tokens_whatever_becomes_of_their_step(make_engine: Callable) -> None:
    """An aborted answer, and one whose drafter had no guess."""
    engine = make_engine(speculative_tokens=8, on_device=True)
    request, other = engine.add([1, 2, 3, 4, 5], 60), engine.add([6, 7], 30)
    while not any(chunk.draft for step, _ in engine.unread for chunk in step):
        engine.step()
    assert {token for step, _ in engine.unread for chunk in step for token in chunk.draft} == {
        GUESS
    }
    num_known = len(request.token_ids)
    engine.abort(request.id, FinishReason.ABORT)
    engine.drain()
    assert len(request.token_ids) == num_known
    assert len(engine.answers[other.id]) == 30
    assert min([*request.token_ids, *other.token_ids]) >= 0
    assert 0 < other.num_accepted < other.num_drafted


def test_what_was_not_guessed_is_neither_counted_nor_learnt(make_engine: Callable) -> None:
    engine = make_engine(speculative_tokens=8, on_device=True)
    learnt: list[int] = []
    engine.guesses.learn = lambda _request, num_drafted, _num_accepted: learnt.append(num_drafted)
    engine.add([1, 2, 3], 60)
    num_planned = 0
    while engine.scheduler.has_work:
        engine.step()
        num_planned += sum(len(chunk.draft) for step, _ in engine.unread for chunk in step)
    drafted = engine.scheduler.stats().drafted_tokens
    assert sum(learnt) == drafted > 0
    assert min(learnt) > 0
    assert drafted < num_planned


def play(engine: Any, draw: random.Random) -> None:
    """Add, fork, abort, launch, read and reset at random; later requests find what earlier ones have left."""
    for _ in range(60):
        event = draw.random()
        live = sorted(engine.requests.keys() - engine.ends.keys())
        if event < 0.15:
            before = [*engine.requests.values()]
            prompt = draw.choice([[1, 2, 3], [1] * 9, [2] * 13])
            if before and event < 0.1:  # it continues an earlier answer
                prompt = [*draw.choice(before).token_ids][: draw.randint(3, 40)]
            engine.add(prompt, draw.choice([None, 5, 30]), ignore_eos=draw.random() < 0.8)
        elif event < 0.17:
            engine.fork([3, 1, 2, 3, 1], 20, 3)
        elif event < 0.19 and live:
            engine.abort(draw.choice(live))
        elif event < 0.25 and len(engine.unread) < 2:
            engine.launch()
        elif event < 0.3 and engine.unread:
            engine.read()
        elif event < 0.32:
            engine.reset(force=True)
        else:
            engine.step()
    engine.drain()


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_events_breaks_an_invariant_with_drafts(
    make_engine: Callable, seed: int
) -> None:
    """Steps with rejected tokens at every place of a page, in pools small and large; later requests
    find what earlier ones have left."""
    draw = random.Random(seed)
    engine = make_engine(
        on_device=seed % 2 == 1,
        speculative_tokens=draw.choice([2, 8, 16]),
        num_pages=draw.choice([12, 20, 64]),
        max_num_seqs=draw.choice([1, 2, 4, 8]),
        max_model_len=48,
        max_num_batched_tokens=draw.choice([8, 13, 64]),
    )
    play(engine, draw)
    assert engine.scheduler.stats().drafted_tokens > 0

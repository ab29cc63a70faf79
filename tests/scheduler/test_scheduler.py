from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from mlxserve.core.config import BudgetMode
from mlxserve.core.errors import InvalidParameter, PromptTooLong, QueueFull
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.images.picture import Picture, Placed, PlacedPicture
from mlxserve.request import FinishReason, Request, RequestState, Sampled, TokenLogprob

PAGE = 32
LARGE = {"page_size": PAGE, "max_num_batched_tokens": 2048, "max_model_len": 4096}


# ---- the order of a step


def test_decodes_are_never_delayed_by_a_waiting_prefill(make_engine: Callable) -> None:
    engine = make_engine(
        num_pages=512, max_num_batched_tokens=64, page_size=PAGE, max_model_len=4096
    )
    engine.add([1] * 5, max_tokens=20)
    engine.launch()
    engine.add([2] * 1000, max_tokens=1)
    for turn in range(15):
        chunks = engine.step()
        assert engine.spans(chunks)[0] == ("r0", 5 + turn, 1)
        assert len(chunks) == 2
    engine.drain()


def test_decodes_come_first_then_unfinished_prompts_then_new_ones(make_engine: Callable) -> None:
    engine = make_engine(
        num_pages=512, max_num_batched_tokens=128, page_size=PAGE, max_model_len=4096
    )
    engine.add([1] * 200, max_tokens=4)
    engine.launch()
    engine.add([2] * 20, max_tokens=4)
    assert engine.spans(engine.launch()) == [("r0", 128, 72), ("r1", 0, 20)]
    engine.read()
    engine.add([3] * 150, max_tokens=4)
    engine.add([4] * 100, max_tokens=4)
    assert engine.spans(engine.launch()) == [("r0", 200, 1), ("r1", 20, 1), ("r2", 0, 96)]
    engine.read()
    assert engine.spans(engine.launch())[2:] == [("r2", 96, 54), ("r3", 0, 32)]
    engine.drain()


def test_a_prefill_budget_holds_only_beside_decodes_and_never_below_a_page(
    make_engine: Callable,
) -> None:
    engine = make_engine(
        num_pages=512, max_num_batched_tokens=256, page_size=PAGE, max_model_len=4096
    )
    scheduler = engine.scheduler
    engine.add([1] * 300, max_tokens=9)
    first = scheduler.schedule(prefill_budget=64)
    assert engine.spans(first) == [("r0", 0, 256)]
    second = scheduler.schedule(prefill_budget=64)
    assert engine.spans(second) == [("r0", 256, 44)]
    scheduler.update(first, [None])
    engine.add([2] * 1000, max_tokens=1)
    third = scheduler.schedule(prefill_budget=70)
    assert engine.spans(third) == [("r0", 300, 1), ("r1", 0, 64)]
    scheduler.update(second, [Sampled(1)])
    assert engine.spans(scheduler.schedule(prefill_budget=0)) == [("r0", 301, 1), ("r1", 64, 32)]


def test_every_chunk_but_the_last_ends_on_a_page(make_engine: Callable) -> None:
    engine = make_engine(
        num_pages=512, max_num_batched_tokens=100, page_size=PAGE, max_model_len=4096
    )
    engine.add([1] * 150, max_tokens=40)
    for _ in range(3):
        engine.step()
    engine.add([2] * 301, max_tokens=1)
    ends = [c.end for _ in range(6) for c in engine.step() if c.request.id == "r1"]
    assert ends[:4] == [96, 192, 288, 301]
    engine.drain()


def test_an_aligned_chunk_is_charged_whole_pages(make_engine: Callable) -> None:
    engine = make_engine(
        num_pages=512, max_num_batched_tokens=96, page_size=PAGE, max_model_len=4096, max_num_seqs=8
    )
    engine.add([1] * 80, max_tokens=1)
    engine.add([2] * 10, max_tokens=1)
    assert engine.spans(engine.launch()) == [("r0", 0, 80)]
    assert engine.spans(engine.launch()) == [("r1", 0, 10)]
    engine.drain()


@pytest.mark.parametrize(
    ("mode", "lengths"), [(BudgetMode.ALIGNED, [33, 33]), (BudgetMode.UNALIGNED, [33, 33, 33, 29])]
)
def test_the_budget_counts_pages_or_tokens(
    make_engine: Callable, mode: BudgetMode, lengths: list[int]
) -> None:
    engine = make_engine(
        num_pages=512,
        max_num_batched_tokens=128,
        page_size=PAGE,
        max_model_len=4096,
        budget_mode=mode,
    )
    for number in range(3):
        engine.add([number] * 33, max_tokens=1)
    engine.add([4] * 29, max_tokens=1)
    assert [length for _, _, length in engine.spans(engine.launch())] == lengths
    engine.drain()


def test_a_long_prompt_is_capped_only_while_others_could_use_the_step(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=256, **{**LARGE, "long_prefill_token_threshold": 512})
    engine.add([1] * 4000, max_tokens=1)
    assert engine.spans(engine.launch()) == [("r0", 0, 2048)]
    for number in (2, 3, 4):
        engine.add([number] * 40, max_tokens=1)
    assert engine.spans(engine.launch())[0] == ("r0", 2048, 512)
    engine.drain()


def test_without_chunking_a_prompt_waits_until_it_fits_whole(make_engine: Callable) -> None:
    engine = make_engine(
        num_pages=256,
        page_size=PAGE,
        enable_chunked_prefill=False,
        max_num_batched_tokens=512,
        max_model_len=512,
    )
    engine.add([1] * 300, max_tokens=3)
    engine.add([2] * 300, max_tokens=3)
    assert engine.spans(engine.launch()) == [("r0", 0, 300)]
    assert engine.spans(engine.launch()) == [("r0", 300, 1), ("r1", 0, 300)]
    engine.drain()


# ---- refusals


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused(make_engine: Callable) -> None:
    engine = make_engine(num_pages=256, max_model_len=100)
    with pytest.raises(PromptTooLong, match=r"100 tokens.*context has 100.*max_model_len") as error:
        engine.add([1] * 100)
    assert (error.value.num_tokens, error.value.max_model_len) == (100, 100)
    engine.add([1] * 99)
    engine.drain()


def test_a_prompt_that_can_never_fit_in_the_cache_is_refused(make_engine: Callable) -> None:
    engine = make_engine(num_pages=4, page_size=4, max_model_len=100)
    with pytest.raises(PromptTooLong, match=r"17 tokens.*4 pages hold 16.*gpu_memory_utilization"):
        engine.add([1] * 17)
    engine.add([1] * 15)
    engine.drain()


def test_an_answer_that_outgrows_the_cache_ends_with_length(make_engine: Callable) -> None:
    engine = make_engine(num_pages=4, page_size=4, max_model_len=100)
    request = engine.add([1] * 5, max_tokens=None)
    engine.drain()
    assert len(request.token_ids) == 16
    assert engine.ends["r0"] is FinishReason.LENGTH


def test_a_full_queue_refuses_and_names_its_limit(make_engine: Callable) -> None:
    engine = make_engine(max_num_waiting=2)
    engine.add([1])
    engine.add([2])
    with pytest.raises(QueueFull, match="max_num_waiting=2"):
        engine.add([3])
    engine.launch()
    engine.add([3])
    engine.drain()


def test_an_id_in_use_is_refused_and_free_again_after_the_end(make_engine: Callable) -> None:
    engine = make_engine()
    request = engine.add([1, 2, 3], request_id="x")
    with pytest.raises(InvalidParameter, match="'x' is in use"):
        engine.scheduler.add(request.asked)
    engine.drain()
    again = engine.scheduler.add(request.asked)
    assert engine.scheduler.requests() == ([], [again])
    assert [output.request_id for output in engine.scheduler.abort("x")] == ["x"]


def test_an_empty_prompt_is_refused(make_engine: Callable) -> None:
    with pytest.raises(InvalidParameter, match="at least one token"):
        make_engine().add([])


# ---- memory


def test_a_preemption_is_logged_in_full_and_counted(
    make_engine: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(num_pages=4, page_size=4, max_model_len=16)
    engine.add([1] * 5, request_id="6", max_tokens=10)
    engine.add([2] * 5, request_id="7", max_tokens=10)
    with caplog.at_level(logging.WARNING, "mlxserve.scheduler"):
        engine.drain()
    assert caplog.messages == [
        "Request 7 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV "
        "cache space. This can affect the end-to-end performance. Increase gpu_memory_utilization "
        "or tensor_parallel_size, or decrease max_num_seqs or max_num_batched_tokens. "
        "total_cumulative_preemption_cnt=1"
    ]
    stats = engine.scheduler.stats()
    assert stats.num_preemptions == 1
    assert (stats.prefix_queries, stats.resumed_queries) == (5 + 5, 9)
    assert stats.recomputed_tokens == 8


def test_a_preempted_request_goes_before_later_ones_and_keeps_its_outputs(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=4, page_size=4, max_model_len=16, max_num_seqs=2)
    engine.add([1] * 5, max_tokens=10)
    victim = engine.add([2] * 5, max_tokens=10)
    engine.add([3] * 2, max_tokens=1)
    while victim.num_preemptions == 0:
        engine.step()
    assert victim.state is RequestState.WAITING
    assert victim.num_outputs > 0
    engine.drain()
    assert engine.scheduler.stats().overtakes <= 1


def test_a_step_that_preempts_admits_no_request(make_engine: Callable) -> None:
    engine = make_engine(num_pages=4, page_size=4, max_model_len=16)
    engine.add([1] * 5, max_tokens=10)
    engine.add([2] * 5, max_tokens=10)
    while not engine.scheduler.preemption.might_preempt():
        engine.step()
    engine.add([3], max_tokens=1)
    while engine.unread:
        engine.read()
    assert [chunk.request.id for chunk in engine.launch()] == ["r0"]
    engine.drain()


def test_nothing_is_preempted_while_a_step_is_unread(make_engine: Callable) -> None:
    engine = make_engine(num_pages=4, page_size=4, max_model_len=16)
    engine.add([1] * 8, max_tokens=4)
    engine.add([2] * 8, max_tokens=4)
    engine.launch()
    assert engine.scheduler.preemption.might_preempt()
    assert engine.launch() == []
    engine.read()
    assert [chunk.request.id for chunk in engine.launch()] == ["r0"]
    assert engine.scheduler.stats().num_preemptions == 1
    engine.drain()


# ---- ends


def test_a_stop_token_ends_a_request(make_engine: Callable) -> None:
    engine = make_engine()
    scheduler = engine.scheduler
    request = engine.add([1, 2], max_tokens=9, ignore_eos=False)
    [output] = scheduler.update(scheduler.schedule(), [Sampled(5)])
    assert (output.token_ids, output.finish_reason) == ((5,), None)
    [output] = scheduler.update(scheduler.schedule(), [Sampled(0)])
    assert (output.token_ids, output.finish_reason) == ((0,), FinishReason.STOP)
    assert (output.num_prompt, output.num_cached) == (2, 0)
    assert request.is_finished
    assert not scheduler.has_work


def test_an_answer_that_repeats_itself_ends_where_that_was_asked(make_engine: Callable) -> None:
    def length(**params: Any) -> tuple[int, FinishReason | None]:
        scheduler = make_engine(num_pages=128, max_model_len=400).scheduler
        scheduler.add(Request("x", [1], SamplingParams(max_tokens=300, **params)))
        for count in range(1, 301):
            [output] = scheduler.update(scheduler.schedule(), [Sampled(count % 2)])
            if output.finish_reason is not None:
                return count, output.finish_reason
        return 0, None

    assert length() == (300, FinishReason.LENGTH)
    assert length(stop_on_repetition=True) == (208, FinishReason.REPETITION)
    assert length(stop_on_repetition=True, min_tokens=230) == (240, FinishReason.REPETITION)


def test_ignoring_the_models_end_does_not_ignore_the_callers_stop_tokens(
    make_engine: Callable,
) -> None:
    scheduler = make_engine().scheduler
    params = SamplingParams(ignore_eos=True, stop_token_ids=[7])
    scheduler.add(Request("x", [1], params, stop_ids=frozenset({0, 7})))
    [output] = scheduler.update(scheduler.schedule(), [Sampled(0)])
    assert output.finish_reason is None
    [output] = scheduler.update(scheduler.schedule(), [Sampled(7)])
    assert output.finish_reason is FinishReason.STOP


def test_an_output_carries_the_logprob_of_its_token(make_engine: Callable) -> None:
    engine = make_engine()
    engine.add([1, 2], max_tokens=9)
    logprob = TokenLogprob(5, -0.5)
    [output] = engine.scheduler.update(engine.scheduler.schedule(), [Sampled(5, logprob)])
    assert output.logprobs == (logprob,)


def test_the_step_after_a_certain_end_is_not_launched(make_engine: Callable) -> None:
    engine = make_engine()
    engine.add([1, 2, 3], max_tokens=2)
    assert len(engine.launch()) == 1
    [lazy] = engine.launch()
    assert lazy.is_lazy
    engine.read()
    assert engine.launch() == []
    engine.drain()


def test_pages_of_an_ended_request_stay_until_its_last_step_is_read(make_engine: Callable) -> None:
    engine = make_engine()
    scheduler = engine.scheduler
    engine.add([1, 2, 3], max_tokens=9)
    engine.launch()
    engine.launch()
    engine.abort("r0")
    assert scheduler.pool.num_used == 1
    assert scheduler.has_work
    assert engine.read() == []
    assert scheduler.pool.num_used == 1
    assert engine.read() == []
    assert scheduler.pool.num_used == 0
    assert not scheduler.has_work


def test_an_abort_between_steps_frees_at_once(make_engine: Callable) -> None:
    engine = make_engine()
    engine.add([1] * 50, max_tokens=9)
    engine.launch()
    engine.read()
    engine.abort("r0")
    assert engine.scheduler.pool.num_used == 0
    assert not engine.scheduler.has_work


def test_an_abort_of_a_waiting_request_leaves_no_trace(make_engine: Callable) -> None:
    engine = make_engine()
    engine.add([1] * 50, max_tokens=9)
    engine.abort("r0")
    assert not engine.scheduler.has_work
    assert engine.launch() == []


def test_an_abort_of_an_unknown_or_ended_request_does_nothing(make_engine: Callable) -> None:
    engine = make_engine()
    assert engine.scheduler.abort("unknown") == []
    engine.add([1], max_tokens=1)
    engine.drain()
    assert engine.scheduler.abort("r0") == []


def test_a_stop_string_is_reported_as_stop(make_engine: Callable) -> None:
    engine = make_engine()
    engine.add([1, 2, 3], max_tokens=9)
    engine.launch()
    [output] = engine.scheduler.abort("r0", FinishReason.STOP)
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.STOP)


def test_the_cache_is_reset_only_between_requests(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **LARGE)
    engine.add(engine.pages(1, 2, 3), max_tokens=2)
    engine.launch()
    assert not engine.scheduler.reset_prefix_cache()
    engine.drain()
    assert engine.scheduler.pool.num_cached == 3
    assert engine.scheduler.reset_prefix_cache()
    engine.add(engine.pages(1, 2, 3))
    engine.drain()
    assert engine.requests["r1"].num_cached == 0


# ---- pipelining


def test_a_decode_is_planned_before_its_token_is_read(make_engine: Callable) -> None:
    engine = make_engine()
    request = engine.add([1, 2, 3], max_tokens=9)
    [prompt] = engine.launch()
    [lazy] = engine.launch()
    assert (prompt.samples, prompt.is_lazy) == (True, False)
    assert (lazy.start, lazy.length, lazy.samples, lazy.is_lazy) == (3, 1, True, True)
    assert (request.num_computed, request.num_in_flight, len(request.token_ids)) == (4, 2, 3)
    engine.read()
    assert (request.num_in_flight, len(request.token_ids)) == (1, 4)
    engine.read()
    [plain] = engine.launch()
    assert (plain.start, plain.is_lazy) == (4, False)
    engine.drain()


class GuideThatWaits:
    def __init__(self) -> None:
        self.num_read = 0
        self.error = None
        self.must_wait = True
        self.is_ready = True
        self.can_follow = self.is_free = False
        self.num_asked = 0
        self.num_foreseen = 0
        self.foreseen: tuple[int, ...] = ()
        self.seen: list[int] = []

    def expect(self, likely: Sequence[int], /) -> None:
        """Foresees nothing of them."""

    def ask(self) -> None:
        self.num_asked += 1

    def wait(self, seconds: float, /) -> None:
        raise NotImplementedError

    def read(self, token_ids: list[int], /) -> None:
        self.num_read += len(token_ids)
        self.seen += token_ids

    def foresee(self, num_tokens: int, /) -> None:
        self.num_foreseen = num_tokens

    def mask(self, num_foreseen: int = 0, /) -> bytes | None:
        return None


def test_a_guided_request_waits_for_its_token_and_others_do_not(make_engine: Callable) -> None:
    engine = make_engine()
    guide = GuideThatWaits()
    guided = engine.add([1, 2, 3], max_tokens=6, guide=guide)
    plain = engine.add([7, 2, 3], max_tokens=6)
    assert [chunk.request for chunk in engine.launch()] == [guided, plain]
    [chunk] = engine.launch()
    assert (chunk.request, chunk.is_lazy) == (plain, True)
    engine.read()
    lazy = {chunk.request: chunk.is_lazy for chunk in engine.launch()}
    assert lazy == {guided: False, plain: True}
    guide.must_wait = False
    engine.read()
    assert {chunk.request: chunk.is_lazy for chunk in engine.launch()}[guided]
    engine.drain()
    # The scheduler fed it every known token, in order and once.
    assert guide.seen == [*guided.token_ids[3 : 3 + guide.num_read]]


def test_a_guided_request_whose_mask_is_missing_is_left_out_and_others_are_not(
    make_engine: Callable,
) -> None:
    engine = make_engine()
    guide = GuideThatWaits()
    guided = engine.add([1, 2, 3], max_tokens=6, guide=guide)
    plain = engine.add([7, 2, 3], max_tokens=9)
    engine.step()
    guide.is_ready = False
    for _ in range(3):
        assert [chunk.request for chunk in engine.step()] == [plain]
    assert engine.scheduler.roster.awaited_guide() is guide
    guide.is_ready = True
    assert engine.scheduler.roster.awaited_guide() is None
    assert {chunk.request for chunk in engine.step()} == {guided, plain}
    engine.drain()


def test_a_prompt_is_computed_up_to_its_last_chunk_while_its_mask_is_missing(
    make_engine: Callable,
) -> None:
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=4)
    guide = GuideThatWaits()
    guide.is_ready = False
    guided = engine.add(list(range(1, 21)), max_tokens=3, guide=guide)
    while engine.step():
        pass
    assert 0 < guided.num_computed < 20
    guide.is_ready = True
    [chunk] = engine.step()
    assert (chunk.end, chunk.samples) == (20, True)
    engine.drain()


def test_a_short_prompt_whose_mask_is_missing_lets_others_in(make_engine: Callable) -> None:
    engine = make_engine()
    guide = GuideThatWaits()
    guide.is_ready = False
    guided = engine.add([1, 2, 3], max_tokens=3, guide=guide)
    plain = engine.add([7, 2, 3], max_tokens=3)
    assert [chunk.request for chunk in engine.step()] == [plain]
    guide.is_ready = True
    assert guided in [chunk.request for chunk in engine.step()]
    engine.drain()


def test_masks_are_asked_for_on_arrival_and_after_each_token(make_engine: Callable) -> None:
    engine = make_engine()
    guide = GuideThatWaits()
    engine.add([1, 2, 3], max_tokens=4, guide=guide)
    assert guide.num_asked == 1
    engine.launch()
    engine.read()
    assert (guide.num_asked, guide.num_read) == (2, 1)
    engine.drain()
    assert guide.num_asked == 4  # none after its end


def test_a_table_that_did_not_grow_is_the_same_object(make_engine: Callable) -> None:
    engine = make_engine(page_size=4)
    engine.add([1, 2], max_tokens=9)
    first, second, third, fourth = [engine.step()[0].page_table for _ in range(4)]
    assert first is second is third
    assert fourth[:1] == first
    assert len(fourth) == 2
    engine.drain()


def test_three_unread_steps_are_refused(make_engine: Callable) -> None:
    engine = make_engine()
    engine.add([1, 2, 3], max_tokens=9)
    engine.launch()
    engine.launch()
    with pytest.raises(AssertionError, match="two steps are unread"):
        engine.scheduler.schedule()
    engine.drain()


def test_an_empty_plan_is_not_a_step(make_engine: Callable) -> None:
    scheduler = make_engine().scheduler
    assert scheduler.schedule() == []
    assert scheduler.update([], []) == []
    assert not scheduler.has_work


# ---- reset


def test_a_forced_reset_requeues_running_requests_and_changes_no_answer(
    make_engine: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    requests = [engine.add([number] * 20, 8) for number in range(3)]
    for _ in range(4):
        engine.step()
    assert not engine.reset()
    assert engine.reset(force=True)
    assert engine.scheduler.pool.num_cached == 0
    assert all(r.state is RequestState.WAITING for r in requests)
    engine.drain()
    stats = engine.scheduler.stats()
    assert (stats.num_preemptions, stats.resumed_queries > 0) == (0, True)
    assert not caplog.records  # it is no lack of memory


def test_a_prompt_without_a_page_waits_while_others_are_computed(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, max_num_batched_tokens=5, max_num_seqs=2, max_model_len=32)
    decoding = engine.add([1] * 4, 8)  # grows to three pages
    prompt = engine.add([2] * 24, 1)  # six
    num_waits = 0
    while engine.scheduler.has_work:
        chunks = engine.launch()
        num_waits += prompt.state is RequestState.RUNNING and prompt.num_in_flight == 0
        if chunks:
            engine.read()
    assert num_waits > 0
    assert (decoding.num_preemptions, prompt.num_preemptions) == (0, 0)


def test_tables_that_grow_in_turns_stay_in_runs(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, max_num_seqs=2)
    requests = [engine.add([number] * 9, 60) for number in range(2)]
    for _ in range(40):
        engine.step()
    tables = [request.page_table for request in requests]
    for table in tables:
        assert len(table) > 10
        breaks = sum(after != page + 1 for page, after in pairwise(table))
        assert breaks <= 2, f"{table} is in {breaks + 1} runs"
    engine.drain()


def seen_whole(num_rows: int) -> tuple[list[int], Placed]:
    """A prompt of an image whose rows attend to one another, between tokens of text."""
    ids = [3, *([900] * num_rows), 3]
    made = Picture.from_prompt(ids, 900, {}, None, is_bidirectional=True)
    return [1, 2, *made.ids, 4, 5], (PlacedPicture(2, made),)


def test_an_image_takes_more_than_prompts_get_beside_answers(make_engine: Callable) -> None:
    """It waits for a step in which decodes leave it room, and for no other prompt."""
    engine = make_engine(page_size=4, max_num_batched_tokens=32, max_num_seqs=3)
    engine.add([6, 7], max_tokens=40)
    engine.launch()
    engine.read()
    prompt, pictures = seen_whole(24)
    engine.add(prompt, max_tokens=1, pictures=pictures)
    engine.add([8] * 30, max_tokens=1)
    spans = []
    for _ in range(4):
        spans.append(engine.spans(engine.launch(prefill_budget=4)))
        engine.read()
    assert [[span for span in step if span[0] == "r1"] for step in spans] == [
        [("r1", 0, 3)],
        [("r1", 3, 24)],
        [("r1", 27, 3)],
        [],
    ]
    engine.drain()


def test_an_image_that_steps_may_have_no_room_for_is_refused(make_engine: Callable) -> None:
    engine = make_engine(page_size=4, max_num_batched_tokens=32, max_num_seqs=9)
    prompt, pictures = seen_whole(25)
    with pytest.raises(InvalidParameter, match=r"has 25 rows, .* a step has room for 24 beside"):
        engine.add(prompt, pictures=pictures)
    engine = make_engine(page_size=4, window=8, num_window_pages=40, longest_block=24)
    with pytest.raises(InvalidParameter, match=r"has 25 rows, .* pages are reserved for 24"):
        engine.add(prompt, pictures=pictures)
    prompt, pictures = seen_whole(24)
    engine.add(prompt, pictures=pictures)
    engine.drain()

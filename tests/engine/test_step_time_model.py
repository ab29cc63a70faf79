"""The budget as time, from measured steps."""

from __future__ import annotations

import pytest

from mlxserve.core.forward_work import ForwardWork
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.step_time_model import EmbeddingTimeModel, StepTimeModel, StepTimer
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from mlxserve.scheduler.row_times import RowTimes


def decode(start: int = 100) -> Chunk:
    request = LiveRequest(Request("d", [1] * (start + 1), SamplingParams()))
    request.prefill_end = start
    return Chunk(request, start, 1, as_page_table(), samples=True)


def prefill(start: int, length: int) -> Chunk:
    return prefill_of(10_000, start, length)


def prefill_of(num_prompt: int, start: int, length: int) -> Chunk:
    request = LiveRequest(Request("p", [1] * num_prompt, SamplingParams()))
    request.prefill_end = num_prompt
    return Chunk(request, start, length, as_page_table(), samples=False)


def test_nothing_is_limited_without_a_target_or_a_measurement_or_a_decode() -> None:
    assert StepTimeModel(None).budget(num_decodes=3, context=0) is None
    pace = StepTimeModel(0.1)
    assert pace.budget(num_decodes=3, context=0) is None
    pace.observe([prefill(0, 512)], 1.0)
    assert pace.budget(num_decodes=0, context=0) is None
    unlimited = StepTimeModel(None)
    unlimited.observe([prefill(0, 512)], 1.0)
    assert unlimited.budget(num_decodes=1, context=0) is None


def test_the_budget_is_what_fits_between_a_decode_step_and_the_target() -> None:
    pace = StepTimeModel(0.1)
    pace.observe([prefill(0, 512)], 1.0)  # 512 tokens a second
    pace.observe([decode()], 0.03)
    assert pace.budget(num_decodes=1, context=0) == pytest.approx(0.07 * 512, abs=1)


def test_a_mixed_step_yields_the_rate_of_its_prompt_tokens() -> None:
    pace = StepTimeModel(0.1)
    pace.observe([decode()], 0.02)
    pace.observe([decode(), prefill(0, 80)], 0.1)  # 80 tokens in the other 80 ms
    assert pace.budget(num_decodes=1, context=0) == pytest.approx(80, abs=1)


def test_a_target_below_a_decode_step_leaves_nothing() -> None:
    pace = StepTimeModel(0.01)
    pace.observe([prefill(0, 512)], 1.0)
    pace.observe([decode()], 0.03)
    assert pace.budget(num_decodes=1, context=0) == 0


def test_long_contexts_have_a_rate_of_their_own() -> None:
    pace = StepTimeModel(0.1)
    pace.observe([prefill(0, 512)], 0.5)
    pace.observe([prefill(8000, 512)], 2.0)
    near, far = pace.budget(1, context=300), pace.budget(1, context=8400)
    assert near is not None
    assert far is not None
    assert near == pytest.approx(4 * far, rel=0.05)


def test_more_decodes_take_more_of_the_target() -> None:
    pace = StepTimeModel(0.1)
    pace.observe([prefill(0, 512)], 0.5)
    pace.observe([decode()], 0.02)
    pace.observe([decode() for _ in range(32)], 0.08)
    one, many = pace.budget(1, context=0), pace.budget(32, context=0)
    assert one is not None
    assert many is not None
    assert one > many


def test_a_slow_step_counts_by_its_time() -> None:
    pace = StepTimeModel(0.1)
    pace.observe([prefill(0, 512)], 1.0)
    before = pace.budget(1, context=0)
    pace.observe([prefill(0, 512)], 100.0)
    after = pace.budget(1, context=0)
    assert before is not None
    assert after is not None
    assert after == pytest.approx(before / (1 + 0.3 * 99), abs=1)


def test_a_mixed_step_as_quick_as_its_decodes_does_not_make_the_rate_endless() -> None:
    pace = StepTimeModel(0.1)
    pace.observe([decode()], 0.05)
    pace.observe([decode(), prefill(0, 32)], 0.09)  # 32 tokens in 40 ms
    before = pace.budget(1, context=0)
    pace.observe([decode(), prefill(0, 32)], 0.0501)
    pace.observe([decode(), prefill(0, 32)], 0.04)
    after = pace.budget(1, context=0)
    assert before is not None
    assert after is not None
    assert before < after < 2 * before


def test_a_piece_of_a_text_takes_at_most_half_of_the_target() -> None:
    pace = EmbeddingTimeModel(target=0.1, max_piece=512)
    assert pace.size(is_busy=True) == 16  # nothing was measured
    pace.observe(16, 0.016)
    assert pace.size(is_busy=True) == 50
    for _ in range(30):
        pace.observe(50, 0.5)
    assert pace.size(is_busy=True) == 16  # and no fewer
    for _ in range(60):
        pace.observe(16, 1e-6)
    assert pace.size(is_busy=True) == 512
    assert pace.size(is_busy=False) == 512
    assert EmbeddingTimeModel(target=None, max_piece=512).size(is_busy=True) == 512
    assert pace.seconds(is_busy=True) == 0.05
    assert pace.seconds(is_busy=False) == EmbeddingTimeModel(None).seconds(is_busy=True) == 0.1


def test_a_step_is_measured_from_its_launch_or_from_the_read_of_the_one_before() -> None:
    timer = StepTimer()
    timer.launched(1.0)
    assert timer.read(1.5) == 0.5
    timer.launched(2.0)  # while nothing is unread
    assert timer.read(2.25) == 0.25
    timer.launched(3.0)
    timer.launched(3.5)  # before the one launched at 3.0 is read
    assert timer.read(4.0) == 0.5
    assert timer.read(4.75) == 0.75


def test_a_step_beside_which_a_text_was_embedded_is_not_measured() -> None:
    timer = StepTimer()
    timer.launched(1.0)
    timer.disturb()
    assert timer.read(2.0) is None
    timer.launched(2.0)
    assert timer.read(2.5) == 0.5


def test_a_step_in_which_the_process_was_paused_is_not_measured() -> None:
    pauses: list[float] = []
    timer = StepTimer(lambda seconds: any(seconds >= pause for pause in pauses))
    timer.launched(1.0)
    assert timer.read(41.0) == 40.0  # a slow machine
    pauses.append(40.0)
    timer.launched(50.0)
    assert timer.read(91.0) is None
    timer.launched(91.0)
    assert timer.read(91.5) == 0.5


def test_a_step_measured_as_no_time_at_all_does_not_divide_by_zero() -> None:
    pace = StepTimeModel(0.1)
    pace.observe([decode()], 0.0)
    pace.observe([prefill(0, 512)], 0.0)
    assert (pace.budget(num_decodes=1, context=0) or 0) > 1_000_000
    embedding = EmbeddingTimeModel(0.1)
    embedding.observe(16, 0.0)
    assert embedding.size(is_busy=True) == 256


# ---- the work of a step, where the device has a watchdog

FORWARD = ForwardWork(1_000_000, ((100, None),))


def test_no_work_is_limited_without_a_model_or_a_measurement() -> None:
    pace = StepTimeModel(0.1)
    pace.observe([prefill(0, 512)], 5.0)
    assert pace.work_budget() is None
    assert StepTimeModel(0.1, FORWARD).work_budget() is None


def amount(pace: StepTimeModel) -> float:
    found = pace.work_budget()
    assert found is not None
    return found.amount


def test_a_step_may_take_a_second_at_the_measured_speed() -> None:
    pace = StepTimeModel(None, FORWARD)
    pace.learn_speed(512_000_000, 2.0)
    assert amount(pace) == pytest.approx(256_000_000)


def test_a_long_step_is_learnt_from_and_a_short_one_only_if_it_is_faster() -> None:
    pace = StepTimeModel(None, FORWARD)
    pace.learn_speed(10**9, 1.0)
    pace.observe([prefill(0, 16)], 0.2)  # 80 million a second, as it waits for the weights
    assert amount(pace) == pytest.approx(10**9)
    pace.observe([prefill(0, 16)], 0.3)
    slower = amount(pace)
    assert slower < 10**9
    pace.observe([prefill(0, 500)], 0.05)
    assert amount(pace) > slower


def test_decodes_alone_tell_nothing_of_the_speed() -> None:
    pace = StepTimeModel(None, FORWARD)
    pace.learn_speed(10**9, 1.0)
    pace.observe([decode()], 3.0)
    assert amount(pace) == pytest.approx(10**9)


def test_steps_come_close_to_a_second_where_attention_is_slower_than_believed() -> None:
    pace = StepTimeModel(None, FORWARD)
    pace.learn_speed(10**9, 1.0)
    start, seconds = 60_000, []
    for _ in range(20):
        budget = pace.work_budget()
        assert budget is not None
        rows = budget.rows(start, 2048, 0)
        seconds.append(4 * FORWARD.of_chunk(start, rows) / 1e9)  # a quarter of the speed
        pace.observe([prefill_of(70_000, start, rows)], seconds[-1])
        start += rows
    assert max(seconds[:1]) < 4.1
    assert 0.8 < seconds[-1] < 1.2


def drafted(num_tokens: int) -> Chunk:
    chunk = decode()
    return chunk._replace(length=1 + num_tokens, draft=(7,) * num_tokens)


def test_steps_of_decodes_tell_what_their_rows_take() -> None:
    times = RowTimes()
    pace = StepTimeModel(0.1, row_times=times)
    for _ in range(3):
        pace.observe([decode(), decode()], 0.02)
        pace.observe([decode(), drafted(3)], 0.03)
        pace.observe([drafted(9), prefill(0, 64)], 0.5)  # a prompt's time is not that of rows
    assert times.seconds(2) == pytest.approx(0.02, rel=0.1)
    assert times.seconds(5) == pytest.approx(0.03, rel=0.1)
    assert not times.is_known(74)
    assert not times.is_known(10)
    assert times.num_drafted == 1


def test_the_wait_for_a_plan_is_part_of_the_price_of_drafts_alone() -> None:
    """Without a draft the next plan is made while the step runs."""
    times = RowTimes()
    pace = StepTimeModel(0.1, row_times=times)
    for _ in range(3):
        pace.observe([decode()], 0.02, 0.01)
        pace.observe([drafted(3)], 0.02, 0.01)
    assert times.shape(4) / times.shape(1) == pytest.approx(1.5, rel=0.1)


def test_the_budget_of_prompts_knows_the_rows_of_drafts() -> None:
    """Five rows take longer than six decodes of the same bit length did on average."""
    times = RowTimes()
    pace = StepTimeModel(0.1, row_times=times)
    pace.observe([prefill(0, 512)], 1.0)  # 512 tokens a second
    for _ in range(4):
        pace.observe([decode()] * 6, 0.02)
        pace.observe([drafted(4)], 0.04)
    assert pace.budget(num_decodes=5, context=0) == pytest.approx(0.06 * 512, rel=0.1)
    assert pace.budget(num_decodes=6, context=0) == pytest.approx(0.08 * 512, rel=0.1)
    assert pace.budget(num_decodes=7, context=0) == pytest.approx(0.07 * 512, rel=0.2)


def test_the_wait_for_a_launch_is_measured_since_the_last_read_unless_nothing_could_be_planned() -> (
    None
):
    timer = StepTimer()
    timer.launched(1.0)  # the first one: nothing was read before
    assert timer.waited == 0
    timer.read(2.0)
    timer.launched(2.5)
    assert timer.waited == 0.5
    timer.read(3.0)
    timer.idle()
    timer.launched(9.0)
    assert timer.waited == 0
    timer.read(9.5)
    timer.launched(9.75)
    assert timer.waited == 0.25

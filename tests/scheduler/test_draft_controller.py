"""DraftController: which drafts pay, that one bad moment decides nothing for good, and that plans are repeatable."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from mlxserve.scheduler import draft_controller
from mlxserve.scheduler.draft_controller import LAST_WAIT, RECHECK, DraftController
from mlxserve.scheduler.row_times import RowTimes

M5 = {1: 1.0, 2: 1.08, 3: 1.16, 5: 1.32, 6: 2.2, 8: 2.5, 12: 3.5, 13: 3.4, 32: 3.4, 33: 6.8}
M1 = {rows: 1 + 0.85 * (rows - 1) for rows in range(1, 6)} | {6: 5.0, 32: 5.0}
FLAT = {1: 1.0, 32: 1.0}
DEAR = {1: 1.0, 2: 2.0, 32: 32.0}
HOPELESS = {1: 1.0, 2: 2.2, 32: 40.0}  # though every guess is right
DEPTH = 4


def controller(table: dict[int, float] = M5) -> DraftController[int]:
    return DraftController(RowTimes(table))


def taught(table: dict[int, float], *accepted: int, drafted: int = DEPTH) -> DraftController[int]:
    """One whose answers, by number, have had so many tokens of each of 40 drafts accepted."""
    made = controller(table)
    for _ in range(40):
        for answer, count in enumerate(accepted):
            made.learn(answer, drafted, count)
    return made


def plan(made: DraftController[int], num_answers: int, most: int = DEPTH) -> dict[int, int]:
    return made.plan(num_answers, dict.fromkeys(range(num_answers), most), 1000)


def play(
    made: DraftController[int],
    table: dict[int, float],
    accepts: Callable[[int], int],
    num_steps: int,
    num_answers: int = 1,
    stalls: Callable[[int], float] = lambda _: 1.0,
) -> list[int]:
    """The rows of each step, of which the controller is told times and accepted tokens."""
    rows = []
    for step in range(num_steps):
        lengths = plan(made, num_answers)
        rows.append(num_answers + sum(lengths.values()))
        longest = max(lengths.values(), default=0)
        seconds = RowTimes(table).shape(rows[-1]) * stalls(step)
        made.times.observe(rows[-1], seconds, longest)
        for answer, length in lengths.items():
            made.learn(answer, length, min(length, accepts(step)))
    return rows


def test_one_answer_fills_the_pass_of_weights_that_five_rows_share() -> None:
    assert plan(taught(M5, 4), 1, most=8) == {0: 4}


def test_the_matrix_kernel_is_worth_many_rows_and_never_six() -> None:
    made = taught(M5, 16, drafted=16)
    [length] = plan(made, 1, most=16).values()
    assert length >= 12


@pytest.mark.parametrize("num_answers", [1, 2, 3, 4])
def test_rows_beyond_five_are_left_out_where_few_drafts_are_right(num_answers: int) -> None:
    made = taught(M5, *[1] * num_answers)
    assert num_answers + sum(plan(made, num_answers).values()) <= 5


def test_rows_go_to_the_answers_whose_drafts_are_right() -> None:
    assert plan(taught(M5, 4, 0), 2) == {0: 3}
    assert plan(taught(M5, 0, 4), 2) == {1: 3}


def test_a_chip_that_reads_the_weights_for_every_row_drafts_nothing() -> None:
    made = taught(M1, 0)
    assert plan(made, 1) == {}
    assert str(made.refusal) == "plain is faster here: 2 rows take 1.9 steps and yield 1.0"


def test_drafts_that_would_gain_less_than_the_margin_are_left_out() -> None:
    gain = taught({1: 1.0, 2: 1.9, 32: 30.0}, 4)
    assert plan(gain, 1, most=1) == {}
    more = taught({1: 1.0, 2: 1.7, 32: 30.0}, 4)
    assert plan(more, 1, most=1) == {0: 1}


def test_a_plan_stays_within_the_rest_of_the_budget() -> None:
    made = taught(FLAT, 4, 4)
    assert sum(made.plan(2, {0: 4, 1: 4}, 3).values()) == 3
    assert made.plan(2, {0: 4, 1: 4}, 0) == {}


def test_no_answer_drafts_more_than_it_can() -> None:
    made = taught(FLAT, 4, 4)
    assert made.plan(2, {0: 1, 1: 3}, 100) == {0: 1, 1: 3}
    assert made.plan(2, {}, 100) == {}


def test_whether_it_pays_is_answered_as_the_plan_decides_and_changes_nothing() -> None:
    made, draw = controller(), random.Random(3)
    for _ in range(300):
        longest = {answer: draw.randint(1, 6) for answer in range(draw.randint(0, 3))}
        expected = made.pays(3, longest)
        assert made.pays(3, longest) == expected
        lengths = made.plan(3, longest, 100)
        assert bool(lengths) == expected
        made.times.observe(3 + sum(lengths.values()), draw.random(), max([0, *lengths.values()]))
        for answer, length in lengths.items():
            made.learn(answer, length, draw.randint(0, length))


def test_a_chance_is_that_of_a_token_whose_predecessors_are_right() -> None:
    """Every second draft is wrong from its first token on; the others are right to their ends."""
    made = controller(FLAT)
    for _ in range(40):
        made.learn(0, DEPTH, 0)
        made.learn(0, DEPTH, DEPTH)
    made.times = RowTimes({1: 1.0, 2: 1.1, 5: 1.75, 32: 30.0})
    assert plan(made, 1) == {0: DEPTH}


def test_a_new_answer_begins_with_what_others_have_shown() -> None:
    assert plan(taught(M5, 0, 0, 0), 1) != plan(taught(M5, 4, 4, 4), 1)
    made = taught(DEAR, 4)
    made.forget(0)
    assert made.num_kept == 0


# ---- never slower


def test_plain_decode_is_timed_first_and_again_after_steps_with_drafts() -> None:
    rows = play(controller(), M5, lambda _: 4, 300)
    assert rows[0] > 1  # by the table
    assert rows[1:4] == [1, 1, 1]
    plain = [step for step, count in enumerate(rows) if count == 1 and step > 3]
    assert plain
    gaps = [after - before for before, after in pairwise(plain)]
    assert set(gaps) == {RECHECK + 1}


def test_a_table_that_was_wrong_is_found_out() -> None:
    """Every row takes a whole step, whatever the table says."""
    made = controller(FLAT)
    rows = play(made, DEAR, lambda _: 1, 200)
    assert rows[20:].count(1) > 170


def test_where_no_draft_is_right_few_rows_are_wasted() -> None:
    rows = play(controller(), M5, lambda _: 0, 2000)
    assert sum(rows[100:]) - len(rows[100:]) <= 0.03 * len(rows)


def test_nothing_is_tried_where_no_step_would_pay_though_every_guess_were_right() -> None:
    """A call of a draft model reads 0.28 of the weights, and each row 0.85 of them again."""
    made = DraftController[int](RowTimes(M1, has_calls=True, call=0.28))
    assert play(made, M1, lambda _: 4, 1000) == [1] * 1000
    # Rows of several answers share a pass of the matrix kernel.
    assert max(play(made, M1, lambda _: 4, 300, num_answers=2)) > 6


# ---- never silent for good


def test_a_table_that_was_measured_beside_other_work_is_doubted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_controller, "HOPELESS_WAIT", 1500)
    rows = play(controller(HOPELESS), M5, lambda _: 4, 2000)
    assert rows[:1500] == [1] * 1500
    assert sum(rows[-100:]) > 450
    # Three trials find that it was right.
    rows = play(controller(HOPELESS), HOPELESS, lambda _: 4, 2900)
    assert (rows.count(1), rows.count(2)) == (2897, 3)


def test_trials_go_on_where_steps_take_longer_than_the_table_says() -> None:
    """Half of a step reads a context, which the table's steps had not, and which two rows may share."""
    longer = {rows: seconds + 1 for rows, seconds in HOPELESS.items()}
    made = controller(HOPELESS)
    made.times.observe(1, 1.0)
    rows = play(made, longer, lambda _: 4, 1500)
    assert sum(rows[-100:]) > 450


def test_a_burst_of_requests_does_not_turn_drafts_off_for_good() -> None:
    """Two requests at once whose drafts are all wrong, on steps that stall."""
    made = controller()
    play(made, M5, lambda _: 4, 60)
    play(made, M5, lambda _: 0, 300, num_answers=2, stalls=lambda step: 9.0 if step % 3 else 1.0)
    for answer in (0, 1):
        made.forget(answer)
    rows = play(made, M5, lambda _: 4, 1500)
    assert max(rows[-100:]) == 5
    assert sum(rows[-100:]) >= 400


def test_drafts_that_become_right_are_found_after_a_silence() -> None:
    made = controller()
    silent = play(made, M5, lambda _: 0, 1500)
    assert silent[-200:].count(1) >= 195
    again = play(made, M5, lambda _: 4, 1500)
    assert again[-40:].count(5) >= 39


def test_trials_become_rarer_and_never_end() -> None:
    rows = play(controller(DEAR), DEAR, lambda _: 0, 4000)
    trials = [step for step, count in enumerate(rows) if count > 1]
    gaps = [after - before for before, after in pairwise(trials)]
    assert len(trials) > 5
    assert max(gaps) >= LAST_WAIT
    assert all(rows[step] == 2 for step in trials)
    assert all(number <= 0.012 * step for number, step in enumerate(trials))  # each loses a step


def test_a_trial_asks_one_answer_after_the_other() -> None:
    made = controller(DEAR)
    asked: list[int] = []
    for _ in range(6000):
        lengths = plan(made, 3)
        asked += lengths
        made.times.observe(3 + len(lengths), RowTimes(DEAR).shape(3 + len(lengths)), len(lengths))
        for answer in lengths:
            made.learn(answer, 1, 0)
    assert set(asked) == {0, 1, 2}


@pytest.mark.parametrize("every", [3, 5, 17])
def test_stalls_do_not_turn_drafts_off(every: int) -> None:
    """Of steps with drafts, of those without, or of both."""
    rows = play(
        controller(), M5, lambda _: 4, 600, stalls=lambda step: 6.0 if step % every == 0 else 1.0
    )
    assert sum(rows[300:]) / len(rows[300:]) > 4.5


def test_a_step_of_a_new_size_is_tried_though_the_table_calls_it_dear() -> None:
    """The table has 4 rows at 3.3 steps; they take 1.1."""
    wrong = {1: 1.0, 3: 1.2, 4: 3.3, 5: 3.4, 32: 9.0}
    rows = play(controller(wrong), {1: 1.0, 32: 1.2}, lambda _: 4, 1500)
    assert max(rows) == 5
    assert rows[-100:].count(5) > 90


# ---- repeatable


def test_a_plan_is_a_function_of_calls_and_times() -> None:
    def played() -> list[int]:
        draw = random.Random(7)
        return play(controller(), M5, lambda _: draw.randint(0, 4), 400, 3, lambda _: draw.random())

    assert played() == played()


def test_without_times_the_table_decides() -> None:
    made = taught(M5, 4)
    assert [plan(made, 1) for _ in range(200)] == [{0: 4}] * 200

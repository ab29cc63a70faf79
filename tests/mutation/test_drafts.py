"""Mistakes in choosing drafts: each makes answers slower or drafts silent, and is found by a test."""

from __future__ import annotations

import pytest

from mlxserve.engine.step_time_model import StepTimeModel, StepTimer
from mlxserve.ranks.wire import PlanDecoder, PlanEncoder
from mlxserve.scheduler import commit
from mlxserve.scheduler.draft_controller import Acceptance, DraftController
from mlxserve.scheduler.drafts import Drafts, Lookup
from mlxserve.scheduler.row_times import RowTimes
from tests.engine import test_step_time_model
from tests.mutation.bug import Bug
from tests.ranks import test_wire
from tests.scheduler import test_draft_controller, test_drafts, test_row_times
from tests.scheduler.conftest import make_engine as make_engine

pytestmark = pytest.mark.mutation


def stalls() -> None:
    for stalled in ((3,), (4, 5), (0, 4, 8)):
        test_row_times.test_steps_that_stalled_do_not_count(stalled)


FOUND: dict[str, Bug] = {
    "time plain decode once and never again": Bug(
        DraftController,
        "_choose",
        "times.num_drafted >= RECHECK",
        "False",
        test_draft_controller.test_plain_decode_is_timed_first_and_again_after_steps_with_drafts,
    ),
    "draft before plain decode was timed": Bug(
        DraftController,
        "_choose",
        "not times.is_known(num_decodes) or",
        "",
        test_draft_controller.test_plain_decode_is_timed_first_and_again_after_steps_with_drafts,
    ),
    "draft where nothing is gained": Bug(
        DraftController,
        "_best",
        "(1 + MARGIN)",
        "1",
        test_draft_controller.test_drafts_that_would_gain_less_than_the_margin_are_left_out,
    ),
    "no trial after a silence": Bug(
        DraftController,
        "_trial",
        "self._num_plain >= self._wait and",
        "False and",
        test_draft_controller.test_drafts_that_become_right_are_found_after_a_silence,
    ),
    "trials without a budget": Bug(
        DraftController,
        "_trial",
        "and self._saved >= _SAVED_FOR_TRIAL * plain",
        "",
        test_draft_controller.test_trials_become_rarer_and_never_end,
    ),
    "trials as often as before": Bug(
        DraftController,
        "plan",
        "min(LAST_WAIT, 2 * self._wait)",
        "self._wait",
        test_draft_controller.test_trials_become_rarer_and_never_end,
    ),
    "try what could not pay though all of it were right": Bug(
        DraftController,
        "_trial",
        "or self._is_hopeless(num_decodes, ranked)",
        "",
        test_draft_controller.test_nothing_is_tried_where_no_step_would_pay_though_every_guess_were_right,
    ),
    "give up what would pay for several answers": Bug(
        DraftController,
        "_is_hopeless",
        "for size, (_, at, _) in enumerate(ranked, num_decodes + 1):",
        "for size, (_, at, _) in enumerate(ranked[:1], num_decodes + 1):",
        test_draft_controller.test_nothing_is_tried_where_no_step_would_pay_though_every_guess_were_right,
    ),
    "never doubt the table": Bug(
        DraftController,
        "_is_hopeless",
        "self._num_plain >= HOPELESS_WAIT or",
        "",
        test_draft_controller.test_a_table_that_was_measured_beside_other_work_is_doubted,
    ),
    "doubt the table for one trial": Bug(
        DraftController,
        "_is_hopeless",
        "or times.is_partly_known(num_decodes + 1, 1)",
        "",
        test_draft_controller.test_a_table_that_was_measured_beside_other_work_is_doubted,
    ),
    "trust the table in a long context": Bug(
        DraftController,
        "_is_hopeless",
        "or not times.is_as_in_table(num_decodes)",
        "",
        test_draft_controller.test_trials_go_on_where_steps_take_longer_than_the_table_says,
    ),
    "try the worst answer": Bug(
        DraftController,
        "_trial",
        "ranked[0]",
        "ranked[-1]",
        test_draft_controller.test_a_trial_asks_one_answer_after_the_other,
    ),
    "the first answers' drafts instead of the best": Bug(
        DraftController,
        "_ranked",
        "ranked.sort(key=lambda candidate: (-candidate[0], candidate[1]))",
        "pass",
        test_draft_controller.test_rows_go_to_the_answers_whose_drafts_are_right,
    ),
    "stop at the first step that does not pay": Bug(
        DraftController,
        "_best",
        "if most <= best_value * seconds:",
        "if value < best_value:",
        test_draft_controller.test_the_matrix_kernel_is_worth_many_rows_and_never_six,
    ),
    "never a size that has not run": Bug(
        DraftController,
        "_extended",
        "size == len(ranked)",
        "True",
        test_draft_controller.test_a_step_of_a_new_size_is_tried_though_the_table_calls_it_dear,
    ),
    "a question whether drafts pay counts as a plan": Bug(
        DraftController,
        "pays",
        "self._choose(num_decodes, longest, sum(longest.values())).lengths",
        "self.plan(num_decodes, longest, sum(longest.values()))",
        test_draft_controller.test_whether_it_pays_is_answered_as_the_plan_decides_and_changes_nothing,
    ),
    "keep the acceptance of answers that have ended": Bug(
        DraftController,
        "forget",
        "self._of.pop(answer, None)",
        "pass",
        test_draft_controller.test_a_new_answer_begins_with_what_others_have_shown,
    ),
    "count tokens after a wrong one as wrong": Bug(
        Acceptance,
        "learn",
        "min(num_accepted + 1, num_drafted)",
        "num_drafted",
        test_draft_controller.test_a_chance_is_that_of_a_token_whose_predecessors_are_right,
    ),
    "the mean of a size's steps": Bug(
        RowTimes,
        "observe",
        "self._medians[size] = median(shapes)",
        "self._medians[size] = sum(shapes) / len(shapes)",
        stalls,
    ),
    "a stall is heat": Bug(
        RowTimes,
        "observe",
        "min(_MAX_CHANGE, max(1 / _MAX_CHANGE, change))",
        "change",
        test_row_times.test_a_step_that_stalls_changes_the_heat_little_and_not_for_long,
    ),
    "no heat": Bug(
        RowTimes,
        "observe",
        "1 + _FOLLOWS",
        "1 + 0",
        test_row_times.test_heat_is_common_to_all_sizes_and_follows_within_a_few_steps,
    ),
    "a size is known for good": Bug(
        RowTimes,
        "_forget",
        "last < before",
        "False",
        test_row_times.test_sizes_that_have_not_run_for_long_are_read_off_the_table_again,
    ),
    "a draft model's calls are free": Bug(
        RowTimes,
        "shape",
        "longest * median(self._calls)",
        "0",
        test_row_times.test_a_draft_model_adds_its_calls_and_prompt_lookup_none,
    ),
    "the wait for a plan is nobody's": Bug(
        StepTimeModel,
        "observe",
        "waited = waited if longest else 0.0",
        "waited = 0.0",
        test_step_time_model.test_the_wait_for_a_plan_is_part_of_the_price_of_drafts_alone,
    ),
    "an idle engine makes drafts dear": Bug(
        StepTimer,
        "launched",
        "0.0 if self._was_idle else now",
        "now",
        test_step_time_model.test_the_wait_for_a_launch_is_measured_since_the_last_read_unless_nothing_could_be_planned,
    ),
    "learn nothing from drafts": Bug(
        Drafts,
        "learn",
        "self.controller.learn(request, num_drafted, num_accepted)",
        "pass",
        test_drafts.test_what_is_accepted_reaches_the_controller,
    ),
    "a whole draft though its beginning was chosen": Bug(
        Drafts,
        "choose",
        "drafts[request][:length]",
        "drafts[request]",
        test_drafts.test_all_answers_share_the_rows_that_are_cheap,
    ),
    "drafts that were cut short do not grow": Bug(
        Lookup,
        "learn",
        "2 * max(self.size, num_drafted)",
        "2 * num_drafted",
        test_drafts.test_a_draft_that_was_cut_short_and_is_right_grows_all_the_same,
    ),
    "send other ranks no lengths of drafts": Bug(
        PlanEncoder,
        "encode",
        "rows.append(len(chunk.draft))",
        "rows.append(0)",
        test_wire.test_any_sequence_of_plans_decodes_to_equal_batches,
    ),
    "send other ranks the tokens of a request in place of a draft's": Bug(
        PlanEncoder,
        "encode",
        "tokens.extend(chunk.draft)",
        "tokens.extend(chunk.request.token_ids[chunk.end - len(chunk.draft) : chunk.end])",
        test_wire.test_any_sequence_of_plans_decodes_to_equal_batches,
    ),
    "take a draft without a known token from rank 0": Bug(
        PlanDecoder,
        "_decoded",
        "if not 0 <= num_drafted < max(1, length):",
        "if False:",
        test_wire.test_a_plan_that_does_not_fit_is_refused,
        {
            "numbers": [1, 0, 0, 0, 1, 0, 0, *(0, 1, 0, -1, 5, 0, 0, 0, 0, 1), 7],
            "why": "a draft without a known",
        },
    ),
    "count accepted tokens at the first position": Bug(
        commit,
        "_count_by_position",
        "counts[position] += 1",
        "counts[0] += 1",
        test_drafts.test_accepted_tokens_are_counted_by_their_position,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_test_finds_the_bug_of_drafts(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(
        request, (AssertionError, LookupError, ZeroDivisionError, pytest.fail.Exception)
    )

"""Planted bugs of rows of drafts that recurrent layers compute together, each found by a test."""

from __future__ import annotations

import pytest

from metal_kernels.replay import PlainReplay
from mlxserve.model import draft_rows, replay_choice
from mlxserve.model.draft_rows import DraftRows, ModuleCall
from mlxserve.model.state_groups import Group
from mlxserve.model.states import StateStore
from tests.metal_kernels import test_replay
from tests.model import test_draft_rows, test_replay_choice
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

BUGS = {
    "the state after all rows of a draft is taken, and not after the accepted ones": Bug(
        DraftRows,
        "at",
        "row - self.firsts[sequence] + 1",
        "self.lengths[sequence]",
        test_replay_choice.test_rows_together_are_taken_where_they_are_the_same_and_faster,
    ),
    "the row after the accepted one is replayed as well": Bug(
        DraftRows,
        "at",
        "row - self.firsts[sequence] + 1",
        "row - self.firsts[sequence] + 2",
        test_replay_choice.test_rows_together_are_taken_where_they_are_the_same_and_faster,
    ),
    "a convolution begins with the inputs before another sequence": Bug(
        DraftRows,
        "_inputs_seen",
        "sequence * kept + at",
        "at",
        test_draft_rows.test_windows_begin_with_the_inputs_before_each_sequence,
    ),
    "a convolution's state is the one before its row": Bug(
        ModuleCall,
        "inputs_of_rows",
        "windows[:, 1:]",
        "windows[:, :-1]",
        test_draft_rows.test_a_step_begins_after_the_accepted_rows,
        {"accepted": 1},
    ),
    "a state that nothing computes is overlooked": Bug(
        ModuleCall,
        "run",
        "if self._left:",
        "if False:",
        test_draft_rows.test_a_state_that_nothing_computes_is_refused,
    ),
    "a convolution that mixes channels takes rows of drafts": Bug(
        draft_rows,
        "use_draft_rows",
        " and module.weight.shape[-1] == 1",
        "",
        test_draft_rows.test_outside_of_a_call_modules_are_as_they_were,
    ),
    "a draft's rows are those of sequences of their own": Bug(
        Group,
        "continues",
        "row not in self.drafts.firsts",
        "False",
        test_draft_rows.test_a_group_of_drafts_continues_its_own_sequences_alone,
    ),
    "a snapshot within a draft is that of its first row": Bug(
        StateStore,
        "_commit_drafts",
        "drafts.at([row])",
        "drafts.at([0])",
        test_draft_rows.test_a_snapshot_within_a_draft_is_the_state_after_its_row,
    ),
    "bits are not compared": Bug(
        replay_choice,
        "why_not_together",
        "if not all(bool(read(each)) for each in compared):",
        "if False:",
        test_replay_choice.test_other_bits_and_errors_are_not_taken,
        {"ops": test_replay_choice.Shifted(), "why": "a row has other bits than alone"},
    ),
    "logits are not compared": Bug(
        replay_choice,
        "why_not_together",
        "share < needed",
        "False",
        test_replay_choice.test_other_logits_are_not_taken,
    ),
    "rows together are taken where they are slower": Bug(
        replay_choice,
        "with_replay",
        "all_rows >= alone",
        "False",
        test_replay_choice.test_a_slower_step_is_not_taken,
    ),
    "a definition's error ends the load": Bug(
        replay_choice,
        "with_replay",
        "except MODEL_ERRORS as",
        "except KeyError as",
        test_replay_choice.test_a_state_of_another_kind_is_not_taken,
    ),
    "the specification replays a row too few": Bug(
        PlainReplay,
        "states",
        "range(first, first + count)",
        "range(first, first + count - 1)",
        test_replay.test_states_are_replayed_from_where_they_were,
        {"make": test_replay.delta_case},
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, request: pytest.FixtureRequest) -> None:
    BUGS[name].check_found(request, (AssertionError, ValueError, pytest.fail.Exception))

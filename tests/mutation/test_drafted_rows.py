"""Every rule of drafts over recurrent states, penalties and structures is needed: without it a test fails."""

from __future__ import annotations

from functools import partial

import pytest

from mlxserve.cache.kinds import draft_states
from mlxserve.cache.kinds.draft_states import DraftStates
from mlxserve.cache.kinds.state_ends import StateEnds
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.model import row_speeds, sampler, state_groups
from mlxserve.model.drafting.guided_guesses import REFUSED
from mlxserve.model.state_groups import Group
from mlxserve.model.states import StateStore
from mlxserve.scheduler.balance import Balance
from mlxserve.text.guidance.guide import AnswerGuide
from mlxserve.text.guidance.matcher_host import MatcherHost
from mlxserve.text.guidance.matchers import Matchers
from tests.model import test_row_speeds, test_sampler, test_states
from tests.model.drafting import test_guided_guesses
from tests.mutation.bug import Bug
from tests.scheduler import test_drafts_over_states
from tests.scheduler.conftest import make_engine as make_engine
from tests.text.guidance import conftest, test_guide, test_matchers

pytestmark = pytest.mark.mutation

hybrid = test_row_speeds.hybrid
masks, tokenizer, grammars = test_matchers.masks, conftest.tokenizer, conftest.grammars

_ACCEPTED = partial(
    test_states.test_the_step_after_a_draft_begins_where_it_was_accepted_up_to, accepted=(0, 2)
)

FOUND = {
    "continue the state after the whole draft": Bug(
        StateStore, "_before", "held[chunk.start - first]", "held[-1]", lambda: _ACCEPTED()
    ),
    "continue the state before the draft": Bug(
        StateStore, "_before", "held[chunk.start - first]", "held[0]", lambda: _ACCEPTED()
    ),
    "keep the last row of a draft only": Bug(
        StateStore,
        "_hold",
        "self._held[chunk.request].append(held)",
        "self._held[chunk.request] = [held]",
        lambda: _ACCEPTED(),
    ),
    "give the rows of a draft the states of other sequences": Bug(
        Group, "begin", "array[-self.batch :]", "array[: self.batch]", lambda: _ACCEPTED()
    ),
    "mix up the rows of several drafts": Bug(
        state_groups,
        "order_of_rows",
        "order[row] = index",
        "order[index] = row",
        lambda: test_states.test_outputs_of_groups_go_back_to_the_rows_of_the_step(),
    ),
    "take the snapshot of a boundary after a later row": Bug(
        state_groups,
        "_kept_at_ends",
        "position == part.end",
        "position <= part.end",
        lambda: test_states.test_a_snapshot_within_a_draft_is_that_of_its_row(),
    ),
    "keep the snapshot of a rejected token": Bug(
        StateSlots,
        "commit",
        "chunk.draft and position > chunk.request.num_computed",
        "False",
        test_drafts_over_states.test_every_boundary_within_a_draft_is_kept_up_to_the_last_accepted_token,
    ),
    "take no snapshot where a draft goes past a boundary": Bug(
        StateSlots,
        "plan",
        "chunk.end % self._pool.page_size >= chunk.length",
        "chunk.end % self._pool.page_size > 0",
        test_drafts_over_states.test_every_boundary_within_a_draft_is_kept_up_to_the_last_accepted_token,
    ),
    "draft without slots": Bug(
        StateSlots,
        "_num_held",
        "+ self._drafts.num_slots",
        "+ 0",
        test_drafts_over_states.test_a_draft_is_cut_to_the_slots_that_no_one_needs,
    ),
    "forget the states that a step begins with": Bug(
        DraftStates,
        "advance",
        "self._passed[request] = self._kept.pop(request)",
        "self.num_slots -= self._kept.pop(request)",
        lambda: (
            test_drafts_over_states.test_states_of_a_draft_have_slots_until_the_step_after_it_is_read()
        ),
    ),
    "count no snapshot but one": Bug(
        draft_states,
        "num_needed",
        "max(0, num_boundaries - 1)",
        "0",
        lambda: (
            test_drafts_over_states.test_a_draft_needs_a_slot_for_each_token_and_for_all_boundaries_but_one()
        ),
    ),
    "keep the slots of an ended request's draft": Bug(
        StateSlots,
        "stop",
        "self._drafts.end(request)",
        "pass",
        test_drafts_over_states.test_slots_are_given_back_with_the_request,
    ),
    "drop the states of running conversations for drafts": Bug(
        StateSlots,
        "take_draft",
        "PROMPT_STATES * len(self._running)",
        "0",
        test_drafts_over_states.test_a_draft_is_cut_to_the_slots_that_no_one_needs,
    ),
    "leave the tokens of a draft out of penalties": Bug(
        sampler,
        "_with_penalties",
        "range(draws[row].num_drafted)",
        "range(0)",
        lambda: test_sampler.test_penalties_count_the_tokens_of_a_draft_before_a_row(0),
    ),
    "give all rows of a draft the first mask": Bug(
        sampler,
        "_guided",
        "guide.mask(draw.num_drafted)",
        "guide.mask(0)",
        lambda: test_sampler.test_each_row_of_a_draft_has_the_mask_after_the_tokens_before_it(),
    ),
    "give drafts no memory of pages": Bug(
        Balance,
        "_num_wanted",
        "+ kind.num_for_drafts",
        "+ 0",
        test_drafts_over_states.test_drafts_get_memory_that_pages_do_not_need,
    ),
    "complete a grammar with a forced token": Bug(
        MatcherHost,
        "_foreseen",
        "copy.is_stopped() or copy.is_error()",
        "copy.is_error()",
        test_matchers.test_no_forced_token_completes_its_grammar,
    ),
    "foresee only what a grammar forces": Bug(
        Matchers,
        "_send",
        "[list(matcher.likely) for matcher in chosen]",
        "[[] for _ in chosen]",
        test_matchers.test_likely_tokens_are_foreseen_as_far_as_the_grammar_allows_them,
    ),
    "draft beyond the marker of a call": Bug(
        AnswerGuide,
        "walk",
        "if not self.is_free:",
        "if False:",
        test_guide.test_likely_tokens_have_masks_where_no_grammar_is_followed_yet,
    ),
    "keep guesses that a grammar refuses": Bug(
        test_guided_guesses,
        "allowed_guesses",
        "sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))",
        "len(draft) + 0 * len([*pairs])",
        test_guided_guesses.test_guesses_are_kept_up_to_the_first_that_is_refused,
        {"guessed": [4, 50, 6], "expected": [4, REFUSED, REFUSED]},
    ),
    "count a refused guess as none": Bug(
        test_guided_guesses,
        "allowed_guesses",
        "GUESS if token == GUESS else REFUSED",
        "GUESS",
        test_guided_guesses.test_guesses_are_kept_up_to_the_first_that_is_refused,
        {"guessed": [40, 5, 6], "expected": [REFUSED, REFUSED, REFUSED]},
    ),
    "drop protected states for drafts": Bug(
        StateEnds,
        "make_room_for_drafts",
        "Worth.USUAL",
        "Worth.PINNED",
        test_drafts_over_states.test_a_draft_drops_no_protected_state,
    ),
    "time the same position of states again": Bug(
        row_speeds,
        "_steps",
        "start += length if advances else 0",
        "start += 0",
        test_row_speeds.test_rows_of_states_are_timed_after_their_first_positions,
    ),
    "time the step that puts states together": Bug(
        test_row_speeds,
        "measure_rows",
        "extra = 1 if loaded.has_states else 0",
        "extra = 0",
        test_row_speeds.test_rows_of_states_are_timed_after_their_first_positions,
    ),
    "time more states than there is memory for": Bug(
        test_row_speeds,
        "measure_rows",
        "each <= num_slots // _STATES_OF_A_ROW",
        "each <= num_slots",
        test_row_speeds.test_no_more_states_are_timed_than_there_is_memory_for,
        {"num_slots": 6, "sizes": [1, 2]},
    ),
    "count no calls of recurrent layers": Bug(
        test_row_speeds,
        "timed_rows",
        "part.drafter is not None or part.loaded.has_states",
        "part.drafter is not None",
        test_row_speeds.test_drafts_of_states_cost_what_was_measured_for_each_token_of_the_longest,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_test_finds_the_bug_of_drafts_over_states(
    name: str, request: pytest.FixtureRequest
) -> None:
    FOUND[name].check_found(request, (AssertionError,))

"""Bugs planted into drafters: each is found by a test of tokens, of what is accepted, or of the rows of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.nn as nn
import pytest

from mlxserve import LLM
from mlxserve.core.errors import MlxServeError
from mlxserve.hub.embedded import MODEL_NAME
from mlxserve.model import runner
from mlxserve.model.drafting.draft_model import DraftModel
from mlxserve.model.drafting.draft_pages import DraftPages, PairedPages
from mlxserve.model.drafting.drafter import Drafter
from mlxserve.model.drafting.paged_drafter import PagedDrafter
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.scheduler.commit import Commit
from tests import test_draft_models as tokens
from tests.model.drafting import test_draft_pages as rows
from tests.model.drafting import test_drafter as guesses
from tests.mutation.bug import Bug
from tests.scheduler import test_drafts
from tests.scheduler.conftest import make_engine as make_engine

pytestmark = pytest.mark.mutation


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(num_pages=200, **tokens.OPTIONS) as llm:
        yield llm


@pytest.fixture
def own() -> Iterator[LLM]:
    with LLM(num_pages=200, draft_model=MODEL_NAME, **tokens.OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def loaded(build_model: Callable[..., tuple[nn.Module, dict[str, Any]]]) -> LoadedModel:
    return prepare(*build_model("llama"), "tiny")


@pytest.fixture
def pages() -> DraftPages:
    return DraftPages(rows.kv_of())


FOUND: dict[str, Bug] = {
    # ---- tokens
    "publish a page with the rows of rejected guesses": Bug(
        Commit,
        "_publish",
        "end = min(end, request.num_computed)",
        "pass",
        tokens.test_pages_behind_rejected_guesses_are_those_of_the_answer,
    ),
    "accept each guess": Bug(
        Commit,
        "_take",
        "guess != taken[-1].token_id",
        "False",
        tokens.test_whatever_is_in_a_drafters_cache_changes_no_token,
        {"value": None},
    ),
    "accept guesses after a token that ends the answer": Bug(
        Commit,
        "_take",
        "reason is not None or guess",
        "guess",
        test_drafts.test_no_order_of_events_breaks_an_invariant_with_drafts,
        {"seed": 21},
    ),
    "verify placeholders in place of guesses": Bug(
        runner.ModelRunner,
        "_drafted",
        "mx.maximum(guesses, 0)",
        "mx.zeros_like(guesses)",
        guesses.test_a_step_verifies_guesses_that_nobody_has_read,
    ),
    "count what was not guessed": Bug(
        Commit,
        "_end_draft",
        "num_drafted -= result.guesses.count(GUESS)",
        "pass",
        test_drafts.test_what_was_not_guessed_is_neither_counted_nor_learnt,
    ),
    "compare with placeholders": Bug(
        Commit,
        "_commit_fully",
        "result.guesses or chunk.draft",
        "chunk.draft",
        test_drafts.test_placeholders_are_no_tokens_whatever_becomes_of_their_step,
    ),
    "put guesses one row too far": Bug(
        runner,
        "draft_rows",
        "range(end - len(chunk.draft), end)",
        "range(end - len(chunk.draft) - 1, end - 1)",
        guesses.test_a_step_verifies_guesses_that_nobody_has_read,
    ),
    # ---- what is accepted
    "draw with the noise of the position before": Bug(
        Drafter,
        "_guess",
        "chunk.end,",
        "chunk.end - 1,",
        tokens.test_a_model_that_drafts_for_itself_guesses_every_token,
        {"params": tokens.SAMPLING[1]},
    ),
    "write the rows of guesses one slot too early": Bug(
        PagedDrafter,
        "_next",
        "chunk.start + offset, 1",
        "chunk.start + offset - 1, 1",
        guesses.test_drafts_of_several_lengths_take_one_call_for_each_token_of_the_longest,
    ),
    "count the last guess as computed": Bug(
        PagedDrafter,
        "_parts",
        "len(chunk.draft) - 1 if",
        "len(chunk.draft) if",
        guesses.test_accepted_guesses_are_not_computed_again_and_rejected_ones_are,
    ),
    "keep the rows of rejected guesses": Bug(
        DraftPages,
        "overwrite",
        "max(0, chunk.start - index * size)",
        "size",
        rows.test_a_step_forgets_the_rows_from_its_own_on,
    ),
    "catch up without a bound": Bug(
        PagedDrafter,
        "_parts",
        "length = min(num_missing, left)",
        "length = num_missing",
        guesses.test_what_is_missing_is_computed_within_bounds_and_nothing_is_guessed_meanwhile,
    ),
    "guess before the rows are there": Bug(
        PagedDrafter,
        "_parts",
        "is_complete = length == num_missing",
        "is_complete = True",
        guesses.test_what_is_missing_is_computed_within_bounds_and_nothing_is_guessed_meanwhile,
    ),
    "compute no prompt with the drafter": Bug(
        DraftModel,
        "follow",
        "if parts:",
        "if False:",
        tokens.test_the_next_turn_is_drafted_from_cached_pages,
    ),
    "draw from a vocabulary of another size": Bug(
        Drafter,
        "_guess",
        "logits = logits[:, : self._vocab_size]",
        "pass",
        guesses.test_no_guess_is_beyond_the_vocabulary_of_the_model,
    ),
    "take guesses in the order of their lengths": Bug(
        Drafter,
        "propose",
        "ranks.index(number) if",
        "drafting.index(number) if",
        guesses.test_drafts_of_several_lengths_take_one_call_for_each_token_of_the_longest,
    ),
    # ---- pages
    "copy no rows of the drafter": Bug(
        PairedPages,
        "copy_pages",
        "self._drafter.copy_pages(sources, targets)",
        "pass",
        rows.test_pages_of_both_pools_move_together,
    ),
    "forget how many rows a copy has": Bug(
        DraftPages,
        "copy_pages",
        "self._num_good[list(targets)] = self._num_good[list(sources)]",
        "pass",
        rows.test_a_copy_has_as_many_good_rows_as_its_page,
    ),
    "leave the drafter's pool as it is in a resize": Bug(
        PairedPages,
        "resize",
        "self._drafter.resize(num_pages)",
        "pass",
        rows.test_pages_of_both_pools_move_together,
    ),
    "leave the larger pool of the drafter": Bug(
        PairedPages,
        "resize",
        "self._drafter.undo_growth(before)",
        "pass",
        rows.test_neither_pool_grows_where_one_cannot,
    ),
    "read a record without the number of its rows": Bug(
        DraftPages,
        "write_units",
        "self._num_good[list(pages)] = counts",
        "pass",
        rows.test_a_record_brings_rows_and_their_number_back,
    ),
    "count rows after a hole": Bug(
        DraftPages,
        "num_leading",
        "if not len(short):",
        "if True:",
        rows.test_a_hole_hides_the_pages_after_it,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_of_drafters_is_found(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError, IndexError, MlxServeError))

"""Bugs planted into the probe of assistants at load: each is found by a test of what it takes and guesses."""

from __future__ import annotations

import pytest

from mlxserve.model.drafting import assistant_probe, load_assistant
from tests.model.drafting import test_load_assistant as loading
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

folder, target, pair = loading.folder, loading.target, loading.pair
unprobed = loading.unprobed

FOUND: dict[str, Bug] = {
    "take an assistant that guesses nothing": Bug(
        loading,
        "load_assistant",
        "if share < MIN_SHARE:",
        "if False:",
        loading.test_an_assistant_that_guesses_nothing_is_refused,
    ),
    "probe with the hidden state of the token itself": Bug(
        loading,
        "share_accepted",
        "before = slice(position - 1, position)",
        "before = slice(position, position + 1)",
        loading.test_the_probe_guesses_what_drafts_over_pages_guess,
    ),
    "show the probe positions that a window hides": Bug(
        assistant_probe,
        "_shared",
        "slice(0 if window is None else max(0, length - window), length)",
        "slice(0, length)",
        loading.test_the_probe_guesses_what_drafts_over_pages_guess,
    ),
    "count what is no number as a guess": Bug(
        load_assistant,
        "share_accepted",
        "right = right & mx.all(mx.isfinite(logits), axis=-1)",
        "pass",
        loading.test_what_is_no_number_is_no_right_guess,
        {"value": float("inf")},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_of_the_probe_is_found(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError, pytest.fail.Exception))

"""Mistakes in what holds after a call of the engine failed: each is found by a test."""

from __future__ import annotations

import pytest

from mlxserve.engine.engine import Engine
from mlxserve.scheduler.commit import Commit
from tests.engine import test_engine
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "take a token that was read early for the end of its answer": Bug(
        Engine,
        "check",
        " if output.finish_reason",
        "",
        test_engine.test_an_abort_that_failed_half_way_is_found_though_a_token_was_read_early,
    ),
    "return what the commit before gave once more": Bug(
        Commit,
        "update",
        "_ask_guides(guided)\n    self._unreturned = []",
        "_ask_guides(guided)",
        test_engine.test_an_output_is_not_returned_again_where_the_next_commit_fails,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_test_finds_the_bug_of_the_engine(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError, pytest.fail.Exception))

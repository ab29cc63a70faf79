"""Rules of answers that the server writes, and of their followers: without each a test fails."""

from __future__ import annotations

import pytest

from mlxserve.api.chats import patches, routes
from mlxserve.api.chats.answer_writer import AnswerWriter
from mlxserve.api.chats.feed import ChatFeed
from mlxserve.api.chats.growing_blocks import GrowingBlocks
from mlxserve.api.chats.in_process import InProcess
from mlxserve.history import store
from mlxserve.history.chat_file import StoreError
from tests.api.chats import following, test_answers, test_patches
from tests.api.chats.test_answers import disk as disk
from tests.api.chats.test_answers import home as home
from tests.api.chats.test_answers import page as page
from tests.api.chats.test_answers import server as server
from tests.api.conftest import chat as chat
from tests.api.conftest import start_server as start_server
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "send all of a text that grows": Bug(
        patches,
        "_go_on",
        "new[len(old) :]",
        "new",
        test_patches.test_a_text_that_grows_is_sent_as_it_grows,
    ),
    "parse a growing text from its start": Bug(
        GrowingBlocks,
        "advance",
        "len(end) if is_whole else size",
        "0",
        test_patches.test_finished_blocks_are_not_parsed_again,
    ),
    "forget the blocks that are finished": Bug(
        GrowingBlocks,
        "advance",
        "self._finished += finished",
        "pass",
        test_patches.test_a_growing_text_ends_as_the_whole_one,
        {"size": 7},
    ),
    "leave a link without its later definition": Bug(
        GrowingBlocks,
        "advance",
        "is_whole and _DEFINITION.search(text)",
        "False",
        test_patches.test_a_definition_far_below_still_makes_a_link,
    ),
    "write over what another page has written": Bug(
        store,
        "_require_seen",
        'row["leaf_id"] != seen.leaf_id',
        "False",
        test_answers.test_a_stale_write_changes_nothing_and_gets_409,
    ),
    "skip what a follower missed": Bug(
        ChatFeed,
        "place",
        "return after if",
        "return self.next if",
        test_answers.test_a_follower_that_comes_back_gets_what_it_missed_and_no_more,
    ),
    "let any number follow": Bug(
        ChatFeed,
        "enter",
        "len(self._waiters) >= MAX_FOLLOWERS",
        "False",
        test_answers.test_followers_are_limited_by_chat_and_by_owner,
    ),
    "cancel a request that tidies up": Bug(
        InProcess,
        "post",
        "if not reply.is_whole:",
        "if True:",
        test_answers.test_an_answer_goes_on_when_its_client_leaves_and_followers_see_it,
    ),
    "keep an answer in memory until its end": Bug(
        AnswerWriter,
        "_save_often",
        "asyncio.sleep(SAVE_INTERVAL)",
        "asyncio.sleep(9e9)",
        test_answers.test_what_is_written_is_on_the_disk_while_it_grows,
    ),
    "leave a refused question in the branch": Bug(
        AnswerWriter,
        "_ended",
        "is_refused and",
        "False and",
        test_answers.test_a_refusal_of_the_model_fails_the_answer_and_leaves_the_branch,
    ),
    "keep the draft of a question that was sent": Bug(
        routes,
        "_begun",
        'store.set_setting(draft_name(chat.id), "")',
        "pass",
        test_answers.test_drafts_are_kept_by_chat_until_they_are_sent,
    ),
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a bug prevents is not waited for long."""
    monkeypatch.setattr(following, "PATIENCE", 5.0)
    monkeypatch.setattr(test_answers, "PATIENCE", 5.0)


# A claim that fails leaves its followers' connections to the garbage collection.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", FOUND)
def test_a_rule_that_is_broken_is_found(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError, StoreError))

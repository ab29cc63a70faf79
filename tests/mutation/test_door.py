"""Rules of the door and of the event loop's watch: without each a test fails."""

from __future__ import annotations

import pytest

from mlxserve.api import fair_work
from mlxserve.api.access import gate
from mlxserve.api.prompts import Prompts
from mlxserve.api.server import loop_watch
from mlxserve.api.server.loop_watch import LoopWatch
from mlxserve.core.errors import ClientQueueFull
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.helpers.piecewise import Piecewise
from mlxserve.history import search_index, store
from mlxserve.history.chat_file import StoreError
from mlxserve.system import files
from tests.api import test_images, test_loop, test_released_requests
from tests.api.conftest import chat as chat
from tests.api.conftest import real_chat as real_chat
from tests.api.conftest import serve_real as serve_real
from tests.api.conftest import start_server as start_server
from tests.api.native import test_chats
from tests.api.native.test_chats import home as home
from tests.api.native.test_chats import page as page
from tests.api.page import test_markdown
from tests.api.page.test_markdown import parser as parser
from tests.api.server import test_loop_watch
from tests.api.test_loop import _own_files as _own_files
from tests.api.test_loop import client as client
from tests.api.test_loop import meter as meter
from tests.api.test_released_requests import released as released
from tests.helpers import test_fair_executor
from tests.helpers.test_fair_executor import executor as executor
from tests.history import test_search_index, test_store
from tests.history.test_search_index import path as path
from tests.mutation.bug import Bug
from tests.system import test_files

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "let one client have all places": Bug(
        FairExecutor,
        "_may_start",
        "self._num_running[lane, client] < MAX_CLIENT_PLACES[lane]",
        "True",
        test_fair_executor.test_no_client_has_all_places_of_those_who_wait_for_others,
    ),
    "keep the place of work in the loop that was cancelled": Bug(
        FairExecutor,
        "run",
        "self._end(job)",
        "pass",
        test_fair_executor.test_work_in_the_loop_that_is_cancelled_ends_and_frees_its_place,
    ),
    "count waiting for others as work": Bug(
        FairExecutor,
        "_enter",
        "job.own_seconds",
        "job.seconds",
        test_fair_executor.test_work_in_the_loop_that_waits_needs_no_seconds_of_a_processor,
        {"small_bounds": None},
    ),
    "encode large replies in the loop": Bug(
        gate,
        "enter",
        "scope[ENCODE_FAIRLY] = _encode_fairly",
        "pass",
        test_loop.test_no_route_does_much_in_the_loop_and_all_work_is_at_the_door,
    ),
    "leave the rest after a piece that never ends": Bug(
        Piecewise,
        "_do",
        "progress.done.append(None)",
        "pass",
        test_markdown.test_a_text_that_does_not_end_is_plain_and_the_others_are_not,
    ),
    "read a chat of any size at once": Bug(
        store,
        "_up_to",
        "if left < 0:",
        "if False:",
        test_chats.test_a_long_chat_is_read_in_pages,
    ),
    "keep the search index on a full disk": Bug(
        store.Store,
        "_change",
        "search_index.drop(db)",
        "pass",
        test_search_index.test_a_file_at_its_limit_loses_the_index_before_a_message,
    ),
    "delete parents first": Bug(
        store.Store,
        "delete",
        "reversed(ids)",
        "ids",
        test_store.test_a_chat_of_more_messages_than_sqlite_follows_is_deleted,
    ),
    "search an index that is not there": Bug(
        search_index,
        "is_complete",
        "bool(",
        "not bool(None and ",
        test_search_index.test_a_search_finds_the_same_without_the_index,
    ),
    "write a longer text over a file": Bug(
        files,
        "_overwrite",
        " or state.st_size < len(content)",
        "",
        test_files.test_a_file_is_replaced_whole_or_stays,
    ),
    "write through a hard link": Bug(
        files,
        "_overwrite",
        " and state.st_nlink == 1",
        "",
        test_files.test_a_shorter_text_replaces_a_file_on_a_full_disk,
        {"is_synced": False},
    ),
    "take no memory for a fetched file": Bug(
        Prompts,
        "_image",
        "file_hold.grow_to",
        "lambda _: None",
        test_images.test_a_fetched_file_takes_memory_until_it_is_decoded,
    ),
    "charge nobody for holding the loop": Bug(
        LoopWatch,
        "_count",
        "self._charge(scope, seconds)",
        "pass",
        test_loop_watch.test_a_route_that_holds_the_loop_is_named_and_its_client_charged,
    ),
    "forget whose a request's tasks are": Bug(
        loop_watch,
        "_task_of_request",
        "_requests[task] = request",
        "pass",
        test_loop_watch.test_the_tasks_of_a_request_are_its_own_and_those_of_others_are_not,
    ),
    "keep a request by the error of its work": Bug(
        FairExecutor,
        "run",
        "del job",
        "pass",
        test_released_requests.test_a_request_to_a_model_is_released,
        {"name": "a picture", "leaves": False},
    ),
    "keep a request by the thread of its work": Bug(
        FairExecutor,
        "_work",
        "del job, error",
        "pass",
        test_released_requests.test_a_request_to_a_model_is_released,
        {"name": "a picture", "leaves": False},
    ),
    "keep a request by the watch for its client": Bug(
        gate,
        "leave",
        "scope.pop(_GONE, None)",
        "scope.get(_GONE)",
        test_released_requests.test_a_request_to_a_model_is_released,
        {"name": "an answer", "leaves": False},
    ),
    "keep a request by the task that is cancelled with its client": Bug(
        fair_work,
        "cancel_on_disconnect",
        "del task, awaited",
        "pass",
        test_released_requests.test_a_request_to_a_model_is_released,
        {"name": "a picture", "leaves": False},
    ),
    "take a path of an attacker for a label": Bug(
        LoopWatch,
        "_route_of",
        "return _UNKNOWN",
        'return str(scope["path"])',
        test_loop_watch.test_a_path_that_no_route_has_is_one_label,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_rule_that_is_broken_is_found(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(
        request, (AssertionError, TimeoutError, ClientQueueFull, StoreError, pytest.fail.Exception)
    )

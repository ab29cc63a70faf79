"""Rules of rooms that have no table of bugs of their own: without each a test fails."""

from __future__ import annotations

import pytest

from metal_kernels.fences import Fences
from metal_kernels.reading import DeviceError
from mlxserve.engine.engine import Engine
from mlxserve.engine.output_stream import OutputStream
from mlxserve.helpers.fair_executor import FairOrder
from mlxserve.history.chat_stores import ChatStores
from mlxserve.hub import download
from mlxserve.mcp import results
from mlxserve.model.command_buffers import Commits
from mlxserve.model.runner import ModelRunner
from mlxserve.text.deltas import StopStrings
from tests.engine import test_async_engine, test_recovery
from tests.engine.test_recovery import shared as shared
from tests.engine.test_recovery import wanted as wanted
from tests.helpers import test_fair_executor
from tests.history import test_chat_stores
from tests.hub import test_download
from tests.hub.test_download import blobs as blobs
from tests.mcp import test_results
from tests.metal_kernels import test_fences
from tests.model import test_command_buffers, test_runner
from tests.model.test_command_buffers import device as device
from tests.model.test_runner import loaded as loaded
from tests.mutation.bug import Bug
from tests.text import test_deltas
from tests.text.test_deltas import tokenizer as tokenizer

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    # Waits of the host, and the order of what it has launched.
    "read a step that samples nothing before it is computed": Bug(
        ModelRunner,
        "collect",
        "evaluate(pending.done)",
        "pass",
        test_runner.test_a_step_that_samples_nothing_is_waited_for,
    ),
    "let any number of layers be under way": Bug(
        Commits,
        "_after_layer",
        "evaluate(oldest)",
        "pass",
        test_command_buffers.test_each_layer_of_a_long_chunk_is_begun_and_the_oldest_is_waited_for,
    ),
    "write to pages that are still read": Bug(
        Fences,
        "before_write",
        "(*history.reads, history.write, history.write)[:NUM_WAITS]",
        "(history.write, history.write)",
        test_fences.test_a_reader_after_going_on_waits_for_the_write_or_for_what_followed_it,
        {"num_reads": 0},
    ),
    # Others.
    "leave the other requests of a stream running after a failure": Bug(
        OutputStream,
        "__anext__",
        "self.close()",
        "pass",
        test_async_engine.test_a_request_that_a_failure_ended_ends_the_others_of_its_stream,
    ),
    "let a client pay for the time when it was alone": Bug(
        FairOrder,
        "charge",
        "max(self._used.get(client, 0.0), self._now)",
        "self._used.get(client, 0.0)",
        test_fair_executor.test_a_client_that_was_alone_does_not_pay_for_it,
    ),
    "compute on after a failure what nobody waits for": Bug(
        Engine,
        "restart",
        "{*lost, *self._unawaited(awaited)}",
        "lost",
        test_recovery.test_nothing_computes_what_a_failed_call_has_queued_and_could_not_take_back,
        {"at": 2},
    ),
    "send the beginning of a stop string": Bug(
        StopStrings,
        "_release",
        "0 if is_certain else overlap(self._held, self._stops)",
        "0",
        test_deltas.test_a_stop_string_before_the_minimum_of_tokens_is_text,
        {"group": 1},
    ),
    "keep the chats of every key open": Bug(
        ChatStores,
        "_give_back",
        "0 if self._is_closed else _MAX_IDLE",
        "10**6",
        test_chat_stores.test_any_number_of_keys_keep_a_bounded_number_of_files_open,
    ),
    "keep weights that arrived damaged": Bug(
        download,
        "_fetch",
        "_SHA256.fullmatch(metadata.etag) and _digest(part) != metadata.etag",
        "False",
        test_download.test_weights_that_arrive_damaged_are_not_kept,
    ),
    "pass half a character on to the model": Bug(
        results,
        "result_of",
        'well_formed("\\n".join(parts))',
        '"\\n".join(parts)',
        test_results.test_half_a_character_of_a_tool_is_replaced,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_test_that_claims_the_opposite_finds_the_bug_of_a_room(
    name: str, request: pytest.FixtureRequest
) -> None:
    FOUND[name].check_found(
        request, (AssertionError, DeviceError, LookupError, pytest.fail.Exception)
    )

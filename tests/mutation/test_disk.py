"""Every rule of the disk cache is needed: without it a test fails."""

from __future__ import annotations

import pytest

from mlxserve.disk.files import DiskFiles
from mlxserve.disk.index import DiskIndex
from mlxserve.disk.loads import DiskLoads
from mlxserve.disk.record import Records
from mlxserve.disk.thread import DiskThread
from mlxserve.disk.tier import DiskTier
from mlxserve.disk.unwritten import Unwritten
from mlxserve.disk.writes import DiskWrites
from mlxserve.engine.disk_cache import DiskCache
from mlxserve.engine.transfers import Transfers
from tests.disk import test_index, test_tier, test_unwritten
from tests.disk.test_tier import make as make
from tests.engine import test_transfers
from tests.engine.test_transfers import tier as tier
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "leave the model out of a record": Bug(
        DiskFiles,
        "header",
        "fields = (_MAGIC, self._identity,",
        'fields = (_MAGIC, b"",',
        test_tier.test_another_model_never_reads_it,
    ),
    "leave the name out of a record": Bug(
        DiskFiles,
        "header",
        "len(name), name, len(payload))",
        'len(name), b"", len(payload))',
        test_tier.test_a_record_under_another_name_is_not_it,
    ),
    "serve a page before its checksum": Bug(
        DiskFiles,
        "read",
        "header != self.header(name, payload)",
        "header[:8] != self.header(name, payload)[:8]",
        test_tier.test_a_damaged_record_is_lost_with_those_after_it,
        {"damage": lambda content: content[:-1] + bytes([content[-1] ^ 1])},
    ),
    "leave an unfinished file": Bug(
        DiskFiles,
        "_put",
        "unfinished.unlink(missing_ok=True)",
        "pass",
        test_tier.test_a_write_that_fails_leaves_no_file,
    ),
    "promise a file that is gone": Bug(
        DiskThread,
        "_delete",
        "self._index.remove(path)",
        "pass",
        test_tier.test_a_file_that_vanished_is_lost_and_no_longer_promised,
    ),
    "read on after a lost record": Bug(
        DiskThread,
        "_read",
        "if payload is None or len(names) == 1:",
        "if payload is None:\n        self._payloads.append(bytes())\n    if len(names) == 1:",
        test_tier.test_a_damaged_record_is_lost_with_those_after_it,
        {"damage": lambda content: content[:-1]},
    ),
    "write what was deleted before it was written": Bug(
        DiskThread,
        "_take",
        "self._drop_saves(message.names)",
        "pass",
        test_tier.test_a_record_that_waits_to_be_written_is_deleted_as_well,
    ),
    "delete what was saved again": Bug(
        DiskThread,
        "_next",
        "if self._deletes:",
        "if self._deletes and not self._saves:",
        test_tier.test_a_record_that_is_saved_again_before_it_was_deleted_stays,
    ),
    "write pages into a pool that an unread step uses": Bug(
        Transfers,
        "plan_writes",
        "bool(self._endangered) or self.is_reading",
        "bool(self._endangered)",
        test_transfers.test_while_the_disk_is_read_each_step_is_read_before_the_next_plan,
    ),
    "write a forgotten page again": Bug(
        DiskCache,
        "delete",
        "num_deleted.append(self.tier.delete(list(map(kind.record, hashes))))",
        "num_deleted.append(len(hashes))",
        test_transfers.test_forgotten_pages_and_states_leave_memory_and_disk,
    ),
    "write before reading": Bug(
        DiskThread,
        "_next",
        "if self._loads:",
        "if self._saves and not self._listing:\n        return self._write\n    if self._loads:",
        test_tier.test_loads_go_before_writes,
    ),
    "count what was cleared while it was written": Bug(
        DiskTier,
        "_take",
        "event.num_messages < self._cleared_at",
        "False",
        test_tier.test_what_was_under_way_while_it_was_cleared_is_gone,
    ),
    "read what was cleared": Bug(
        DiskThread,
        "_payload",
        "self._listing.is_clearing)",
        "False)",
        test_tier.test_what_was_cleared_is_read_no_more,
    ),
    "never give a disk up": Bug(
        DiskTier,
        "_works",
        "> STALL_SECONDS",
        "> 1e9",
        test_tier.test_a_disk_that_stands_still_is_given_up_once_and_taken_back,
    ),
    "answer what was given up": Bug(
        DiskLoads,
        "answer_all",
        "self._tickets.clear()",
        "pass",
        test_tier.test_a_disk_that_stands_still_is_given_up_once_and_taken_back,
    ),
    "forget what was written today": Bug(
        DiskThread,
        "_count_writes",
        "self._files.add_written(self._day, self._uncounted)",
        "0",
        test_tier.test_a_day_has_a_bound_that_outlives_the_process,
    ),
    "write as much as anybody wants": Bug(
        DiskWrites,
        "_refusal",
        "self.written_today + self._staged_bytes + size > self._daily_writes",
        "False",
        test_tier.test_a_day_has_a_bound_that_outlives_the_process,
    ),
    "grow beyond the limit": Bug(
        DiskThread,
        "_is_too_full",
        "self._index.total + size > self._limit",
        "False",
        test_tier.test_the_least_recently_used_are_deleted_for_room,
    ),
    "delete a hotter record for a colder one": Bug(
        DiskThread,
        "_make_room",
        "record.used <= victim.used",
        "False",
        test_tier.test_a_hotter_record_is_never_deleted_for_a_colder_one,
    ),
    "forget in the next process what was read": Bug(
        Records,
        "touch_all",
        "self.touch(path, at)",
        "pass",
        test_tier.test_recency_is_of_use_also_in_the_next_process,
        {"how": "read"},
    ),
    "delete what was used last": Bug(
        DiskIndex,
        "add",
        "(file.used, file.path)",
        "(-file.used, file.path)",
        test_index.test_the_least_recently_used_goes_first,
    ),
    "write the oldest pages first": Bug(
        Unwritten,
        "__iter__",
        "in reversed(self._used.items())",
        "in self._used.items()",
        test_unwritten.test_the_last_used_come_first,
    ),
    "write what a full disk would not keep": Bug(
        Unwritten,
        "__iter__",
        "if not self.tier.keeps(self._num_bytes, used):",
        "if False:",
        test_unwritten.test_what_a_full_disk_would_not_keep_is_left_out,
    ),
    "note uses in memory alone": Bug(
        DiskCache,
        "use",
        "self.tier.touch(used)",
        "pass",
        test_transfers.test_what_is_used_in_memory_alone_stays_on_disk,
    ),
    "drop the beginning of a conversation from a full disk": Bug(
        DiskCache,
        "use",
        "now - (num_before + number) * _STEP_SECONDS",
        "now + (num_before + number) * _STEP_SECONDS",
        test_transfers.test_a_full_disk_drops_the_end_of_a_conversation,
    ),
    "ask a disk that refuses at once again": Bug(
        Transfers,
        "_write",
        "self._write_after = self._clock() + _PAUSE_SECONDS",
        "pass",
        test_transfers.test_a_disk_that_refuses_is_left_alone_for_a_while,
    ),
    "wait for a slow disk": Bug(
        Transfers,
        "_finish_loads",
        "if pending.deadline < now]",
        "if False]",
        test_transfers.test_a_request_does_not_wait_for_pages_that_do_not_come,
    ),
    "ask a disk that owes an answer": Bug(
        DiskCache,
        "give_up",
        "self._overdue.add(ticket)",
        "pass",
        test_transfers.test_a_request_does_not_wait_for_pages_that_do_not_come,
    ),
    "wait for pages only, not for what they save": Bug(
        Transfers,
        "submit_to_disk",
        "self._disk.patience(load.num_saved)",
        "self._disk.patience(len(load.pages))",
        test_transfers.test_a_recurrent_state_is_read_alone_where_its_pages_are_in_memory,
    ),
    "count the bytes of all pages": Bug(
        DiskCache,
        "pays",
        "count * self.kinds[kind].unit_bytes",
        "(count or 99) * self.kinds[kind].unit_bytes",
        test_transfers.test_a_window_may_pay_where_all_pages_do_not,
    ),
    "write after a failure": Bug(
        Transfers,
        "close",
        "while keeps_pages and",
        "while",
        test_transfers.test_closing_after_a_failure_writes_nothing,
    ),
    "close without an end": Bug(
        Transfers,
        "close",
        "self._clock() < end and",
        "True and",
        test_transfers.test_closing_takes_a_bounded_time,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_test_that_claims_the_opposite_finds_the_bug_of_the_disk(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(test_tier, "LONG", 2.0)  # a bug may make a test wait
    FOUND[name].check_found(request, (AssertionError, ValueError))

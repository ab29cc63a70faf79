"""Every rule of the scheduler and of the page pool is needed: without it a test fails.

A bug is one line of the source, or a part of it, replaced. The random state machine finds some
bugs, a test of the suite that claims the opposite finds the others. A line that is not in the source
any more fails, too: plant the bug anew where the rule is now.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase

from mlxserve.cache.ends import Ends
from mlxserve.cache.eviction import EvictionLog, EvictionOrder
from mlxserve.cache.groups import Window
from mlxserve.cache.kinds.end_reclaimer import EndReclaimer
from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.reclaim import FullPageReclaimer, PageReclaimer
from mlxserve.cache.kinds.state_ends import StateEnds
from mlxserve.cache.kinds.state_names import StateNames
from mlxserve.cache.kinds.state_slots import StateRoom, StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.kinds.window_room import WindowRoom
from mlxserve.cache.page_index import PageIndex
from mlxserve.cache.pages import PagePool
from mlxserve.cache.runs import RunSet
from mlxserve.core.config import PageTail, PreemptionMode
from mlxserve.engine.engine import Engine
from mlxserve.scheduler import limit, planner, preemption, urgency
from mlxserve.scheduler.admission import Admission
from mlxserve.scheduler.balance import Balance
from mlxserve.scheduler.capacity import Capacity
from mlxserve.scheduler.commit import Commit
from mlxserve.scheduler.disk_pages import DiskPages
from mlxserve.scheduler.fairness import FairShare
from mlxserve.scheduler.moves import Moves
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.pins import Pins
from mlxserve.scheduler.planner import StepPlanner
from mlxserve.scheduler.preemption import Preemption
from mlxserve.scheduler.prefix_cache import PrefixCache
from mlxserve.scheduler.prefix_followers import PrefixFollowers
from mlxserve.scheduler.roster import Roster
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.scheduler.urgency import Urgency
from mlxserve.scheduler.waiting import WaitingQueue
from tests.cache import test_ends, test_groups, test_pages, test_state_ends
from tests.engine import test_engine
from tests.mutation.bug import Bug
from tests.scheduler import (
    test_admission,
    test_audit,
    test_balance,
    test_differential,
    test_disk_pages,
    test_drafts,
    test_fairness,
    test_forks,
    test_limit,
    test_pins,
    test_pitfalls,
    test_preemption,
    test_prefix_cache,
    test_resize,
    test_scheduler,
    test_state_snapshots,
    test_urgency,
    test_waiting,
    test_windows,
)
from tests.scheduler.conftest import make_engine as make_engine
from tests.scheduler.test_scheduler_machine import run_machine

pytestmark = pytest.mark.mutation


# ---- found by the state machine

# Options with which the machine makes no engine with recurrent states.
WITHOUT_STATES: dict[str, Any] = {"num_state_slots": None, "state_bytes": None}

FOUND_BY_MACHINE: dict[str, Bug] = {
    "publish before the step is read": Bug(
        StepPlanner,
        "_launch",
        "self._tables.num_unread += bool(chunks)",
        "self._tables.num_unread += bool(chunks); size = self._pool.page_size; "
        "[self._tables.publish(c.request, c.start // size, "
        "min(c.end, len(c.request.token_ids)) // size) for c in chunks]",
    ),
    "find a state before the step is read": Bug(
        StateSlots,
        "_plan",
        "keeps = self._plan_snapshots(request, start, end)",
        "keeps = self._plan_snapshots(request, start, end)\n"
        "    for position, id_ in keeps: self._publish(request, position, id_)",
    ),
    "count pages without a state after them": Bug(
        StateSlots, "num_usable", "not has(hashes[num_pages - 1])", "False"
    ),
    "begin again with the snapshot": Bug(
        StateSlots,
        "_plan",
        "restore = self._ends.names.pop_restored(request)",
        "restore = self._ends.names.restoring.get(request)",
    ),
    "keep a state for another page": Bug(
        StateSlots, "_publish", "// self._pool.page_size", "// self._pool.page_size - 1"
    ),
    "drop a state and keep its arrays": Bug(
        StateEnds,
        "_reclaim",
        "self.names.drop(*map(self._ids.pop, hashes))",
        "list(map(self._ids.pop, hashes))",
    ),
    "give a page of a window back a row early": Bug(
        Window, "first_before", "self.page_size - self.size + 1", "self.page_size - self.size + 2"
    ),
    "find pages without their window": Bug(
        WindowPages, "num_usable", "if first == needed:", "if True:"
    ),
    "give a page of a window back twice": Bug(
        WindowPages, "pass_by", "request.window_first = first", "pass"
    ),
    "publish a page of a window that was given back": Bug(
        WindowPages, "publish", "range(first, end)", "range(max(0, first - 1), end)"
    ),
    "share pages that a leader gives back": Bug(
        Scheduler, "add", "not self.page_tables.ends", "True"
    ),
    "overlook that windows are short": Bug(
        Preemption,
        "might_preempt",
        "tables.num_free if tables.ends else self._pool.num_free",
        "self._pool.num_free",
    ),
    "move a page and not its tables": Bug(
        PageReclaimer, "lower", "self.rename(request, targets)", "pass"
    ),
    "move a page that is being read": Bug(
        PageReclaimer,
        "lower",
        "if each.loading",
        "if False",
        options={**WITHOUT_STATES, "window": 13, "shared": 3},
    ),
    "close a page that is held": Bug(
        PagePool, "lower", "self.index.move(page, target)", "self.index.remove(page)"
    ),
    "publish a window that is not read yet": Bug(
        PageTables,
        "finish_load",
        "has_ends=False",
        "has_ends=True",
    ),
    "release the head first": Bug(PagePool, "release", "reversed(pages)", "pages"),
    "forget the salt": Bug(PrefixCache, "hash", "asked.cache_salt, marks", "b'', marks"),
    "free pages in flight": Bug(
        PageTables,
        "release",
        "if request.num_in_flight:",
        "if False:",
    ),
    "never wake the followers": Bug(
        PrefixFollowers, "pages_published", "for follower in self._end(hash_)", "for follower in ()"
    ),
    "decode past a certain end": Bug(StepPlanner, "_decodes", "start >= last", "start > last"),
    "keep computed tokens over a preemption": Bug(
        Preemption, "requeue", "request.num_computed = 0", "pass"
    ),
    "never read before a plan that preempts": Bug(
        Preemption, "might_preempt", "needed > num_free", "False"
    ),
    "let a decode wait for a prompt": Bug(
        StepPlanner,
        "_plan_decodes",
        "for request in list(self._roster.running.values())",
        "for request in list(self._roster.running.values())[:1]",
    ),
    "decode without a page": Bug(PageTables, "grow", "if missing <= 0:", "if missing <= 1:"),
    "end one token late": Bug(
        Capacity, "length_limit", "asked.num_prompt + ", "asked.num_prompt + 1 + "
    ),
    "never end for want of room": Bug(
        Capacity,
        "max_length",
        "return length if self.can_have(request, length) else min(length, self.of(request))",
        "return length",
    ),
    "hand out a page twice": Bug(RunSet, "_cut", "if stop < end:", "if stop <= end:"),
    "evict what is pinned": Bug(PagePool, "_free", "counts[page] or page in pins", "counts[page]"),
    "share without counting": Bug(PagePool, "retain", "counts[page] += 1", "counts[page] = 1"),
    "overlook the newest eviction": Bug(
        EvictionLog,
        "since",
        "reversed(self._pages), num_evicted",
        "reversed(self._pages), 1, num_evicted",
    ),
    "allocate before hits are retained": Bug(
        PageTables,
        "start",
        "self.pool.retain(cached)",
        "self.pool.release(self.pool.allocate(min(2, self.pool.num_free))); "
        "self.pool.retain(cached)",
    ),
    "keep a claim that was dropped": Bug(Pins, "_end_claim", "del claims[hash_]", "pass"),
    "forget to copy a fork's tail": Bug(
        PageTables,
        "fork",
        "self._copies[fork] = PageCopy(source, pages[0])",
        "self.pool.release([source])",
    ),
    "let a fork write to its leader's tail": Bug(
        PageTables,
        "fork",
        "shared = leader.page_table[:num_pages]",
        "shared = leader.page_table[:num_pages + 1]; num_in_tail = 0",
        options={**WITHOUT_STATES, "window": None, "shared": None},
    ),
    "hold the sources of copies for ever": Bug(
        PageTables,
        "pop_copies",
        "self.pool.release([copy.source for copy in copies])",
        "pass",
    ),
    "copy nothing after a prefix": Bug(
        PageTables,
        "copy_tail",
        "self._copies[request] = PageCopy(tail.page, target)",
        "self.pool.release([tail.page])",
    ),
    "free a duplicate at once": Bug(
        PageTables,
        "_rebind",
        "request.page_table = table",
        "request.page_table = table; self._release_duplicates()",
    ),
    "never free a duplicate": Bug(
        PageTables, "_release_duplicates", "self.pool.release(self._duplicates)", "pass"
    ),
    "begin smaller and drop what runs": Bug(
        Scheduler, "resize", "num_preempted = self.preemption.preempt_to(0)", "pass"
    ),
    "decode past the pages without a look": Bug(
        StepPlanner,
        "_decodes",
        "min(last, len(request.page_table) * self._pool.page_size)",
        "last",
    ),
    "end a page without a look": Bug(
        Commit, "_next_full_commit", "return min(end_of_page, ", "return min(end_of_page + 1, "
    ),
    "plan for a preempted request": Bug(
        StepPlanner,
        "_plan_decodes",
        "if step.has_preempted:",
        "if False:",
        options={"num_pages": 9, "max_num_seqs": 5},
    ),
    "follow a leader that is gone": Bug(
        PrefixFollowers,
        "leave",
        "return self.pages_published(led)",
        "return []",
        options={"num_pages": 24, "enable_prefix_caching": True},
    ),
    "write a page that was evicted": Bug(
        DiskPages,
        "unwritten",
        "if kind.has(hash_):",
        "if True:",
        options={"num_pages": 24, "enable_prefix_caching": True},
    ),
}


# Found after so many orders that each takes ten seconds to a minute.
RARE = (
    "publish a window that is not read yet",
    "forget to copy a fork's tail",
    "copy nothing after a prefix",
    "hold the sources of copies for ever",
    "begin smaller and drop what runs",
    "overlook that windows are short",
    "give a page of a window back a row early",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in RARE else ())
        for name in FOUND_BY_MACHINE
    ],
)
def test_the_state_machine_finds_the_bug(
    name: str, make_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = FOUND_BY_MACHINE[name]
    bug.plant(monkeypatch)

    def make(**options: object) -> object:
        return make_engine(**{**options, **bug.options})

    with pytest.raises((AssertionError, LookupError)):
        run_machine(make, examples=3000, steps=40, phases=[Phase.generate])


# ---- found by one test each

FOUND_BY_CLAIM: dict[str, Bug] = {
    # Which the machine finds after thousands of orders.
    "preempt for windows who holds none": Bug(
        preemption,
        "choose_victim",
        "(scarce.room.num_own(r) if scarce else _frees_a_page(r, pool))",
        "_frees_a_page(r, pool)",
        test_preemption.test_who_holds_no_page_of_a_window_is_not_preempted_for_one,
    ),
    "leave the forks of a leader that ended": Bug(
        Roster,
        "end",
        "self.waiting.add(new_leader)",
        "pass",
        test_forks.test_when_the_leader_is_aborted_the_other_forks_continue,
        options={"steps": 1},
    ),
    "match a tail as if it were full": Bug(
        PrefixCache,
        "tail",
        "return Tail(page, num_tokens) if num_tokens > 0 else None",
        "return Tail(page, page_size - 1)",
        test_pins.test_a_prefix_alone_computes_its_last_token,
    ),
    "divide an image by a chunk": Bug(
        limit,
        "_beside_blocks",
        "return first if first > start else last",
        "return end",
        lambda _: test_limit.test_a_chunk_ends_before_an_image_or_after_it(),
    ),
    "divide an image by a hit": Bug(
        PrefixCache,
        "match",
        "if request.asked.blocks:",
        "if False:",
        test_prefix_cache.test_a_hit_ends_before_an_image_that_one_chunk_computes,
        {"options": {}},
    ),
    "copy a part of an image": Bug(
        PrefixCache,
        "tail",
        "num_tokens = page_size - 1\n        if request.asked.blocks:",
        "num_tokens = page_size - 1\n        if False:",
        test_prefix_cache.test_a_page_is_copied_up_to_an_image_that_one_chunk_computes,
    ),
    "keep no pages for an image beside a window": Bug(
        Window,
        "num_held",
        "+ -(-self.longest_block // self.page_size)",
        "",
        lambda _: test_groups.test_a_request_holds_the_pages_of_an_image_beside_its_window(),
    ),
    "admit in a step that preempted": Bug(
        StepPlanner,
        "plan",
        "if not step.has_preempted:",
        "if True:",
        test_admission.test_after_a_preemption_admission_leaves_room_to_grow,
    ),
    "lower what kinds share before there is a smaller pool": Bug(
        Scheduler,
        "resize",
        "num_preempted = num_forgotten = 0",
        "num_preempted = num_forgotten = 0; "
        "self._beside = self._beside.with_more('pages', num_pages - self.pool.num_pages)",
        test_resize.test_a_resize_that_fails_changes_no_memory_that_kinds_share,
        options={"kind": PagePool},
    ),
    "forget whose result is being committed": Bug(
        Commit,
        "update",
        "self.under_way = request = chunk.request",
        "request = chunk.request",
        test_audit.test_a_token_that_may_not_have_been_reported_is_found,
        options={"kind": PageTables, "method": "publish"},
    ),
    # Guards that no claim held once.
    "a draft takes pages that are reserved": Bug(
        StepPlanner,
        "_num_covered",
        "self.admission.num_reserved() + len(self._roster.running)",
        "len(self._roster.running)",
        test_drafts.test_a_draft_takes_no_page_of_a_prompt_or_of_other_decodes,
    ),
    "a draft takes pages that decodes need next": Bug(
        StepPlanner,
        "_num_covered",
        "self.admission.num_reserved() + len(self._roster.running)",
        "self.admission.num_reserved()",
        test_drafts.test_a_draft_takes_no_page_of_a_prompt_or_of_other_decodes,
    ),
    "accepted drafts cost nothing": Bug(
        Commit,
        "_end_draft",
        "self._roster.fair_share.charge(request.asked.client, decode=num_accepted)",
        "pass",
        test_drafts.test_accepted_drafts_are_charged_to_their_client,
    ),
    "keep the lookup of a request that ended": Bug(
        Commit,
        "end",
        "self._drafts.forget(request)",
        "pass",
        lambda _: test_drafts.test_nothing_is_kept_of_requests_that_ended(),
    ),
    "a decode's draft is chosen as if it were alone": Bug(
        StepPlanner,
        "_plan_drafts",
        "drafts.choose(len(step.decodes), possible, step.budget)",
        "drafts.choose(1, possible, step.budget)",
        test_drafts.test_all_answers_share_the_rows_that_are_cheap,
    ),
    "drafts of guided answers": Bug(
        planner,
        "_draft",
        "if guide is None:",
        "if True:",
        test_drafts.test_a_guided_answer_has_no_drafts_without_masks,
    ),
    "preempt by arrival alone": Bug(
        Preemption,
        "preempt_to",
        "key=order",
        "key=lambda one: one.arrival",
        test_preemption.test_a_shortage_of_memory_leaves_the_oldest_of_the_first_class,
        {"is_urgent_first": False},
    ),
    "forget the source of a copied tail": Bug(
        Admission,
        "_num_taken",
        "taken + (self._pool.num_idle([candidate.tail.page]) if candidate.tail else 0)",
        "taken",
        test_admission.test_the_source_of_a_copied_tail_is_counted_until_it_is_copied,
    ),
    "grow anywhere": Bug(
        PageTables,
        "grow",
        "table[-1] if table else None",
        "None",
        test_scheduler.test_tables_that_grow_in_turns_stay_in_runs,
    ),
    "evict the state of a named prefix": Bug(
        StateEnds,
        "make_room_for",
        "Worth.KEPT",
        "Worth.PINNED",
        test_state_snapshots.test_a_passer_by_takes_no_state_of_a_named_prefix,
    ),
    "forget what another conversation has": Bug(
        Scheduler,
        "forget_prompts",
        "if hash_ not in shared",
        "",
        test_prefix_cache.test_a_forgotten_prompt_is_computed_again_and_what_another_one_has_stays,
    ),
    "forget a named prefix on disk": Bug(
        PageTables,
        "forget",
        "if not self.pool.index.is_known(hash_)",
        "",
        test_prefix_cache.test_a_prompt_that_runs_or_has_a_name_is_not_forgotten,
    ),
    "forget a page and not what follows it": Bug(
        PageIndex,
        "with_following",
        "filter(None, map(self.hash_of, self._children.children_of(hash_)))",
        "()",
        lambda _: test_pages.test_pages_that_are_forgotten_go_with_all_that_follow_them(),
    ),
    # Of layers with a window.
    "evict the window of a named prefix": Bug(
        WindowPages,
        "pin",
        "self.pool.order.keep_until(self._known(hashes), inf)",
        "pass",
        test_windows.test_the_window_of_a_named_prefix_is_found_until_it_is_dropped,
    ),
    "a large chunk takes the window of a named prefix": Bug(
        WindowRoom,
        "_num_growable",
        "max(self._num_held - num_held, num_free - num_kept)",
        "num_free",
        test_windows.test_the_window_of_a_named_prefix_is_found_until_it_is_dropped,
    ),
    "a reset takes the window of a named prefix": Bug(
        WindowPages,
        "reset",
        "self.pool.pin(kept)",
        "kept = []",
        test_windows.test_the_window_of_a_named_prefix_is_found_until_it_is_dropped,
    ),
    "drop the window of another prefix": Bug(
        WindowPages,
        "unpin",
        "if not self._num_keepers[hash_]",
        "",
        test_windows.test_two_named_prefixes_share_a_window,
    ),
    "keep the window of a named prefix once": Bug(
        WindowPages,
        "publish",
        "and hash_ in kept",
        "and False",
        test_windows.test_a_running_request_comes_before_the_window_of_a_named_prefix,
    ),
    "evict passed pages of windows as all others": Bug(
        WindowPages,
        "pass_by",
        "self.pool.order.mark_unhit_useless(passed)",
        "pass",
        test_windows.test_passed_pages_are_evicted_before_all_others,
    ),
    "keep the place that costs least": Bug(
        Ends,
        "first_by_cost",
        "(cost, number) < best[-1][:2]",
        "(cost, number) > best[-1][:2]",
        lambda _: test_ends.test_the_end_of_a_short_conversation_costs_less(),
    ),
    "stop before a place that was passed": Bug(
        Ends,
        "first_by_cost",
        "(1.0, _PASSED)",
        "(1.0, 1.0)",
        lambda _: test_ends.test_the_cheapest_is_the_first_by_cost_whatever_happened(),
    ),
    "do not file a place that was used again": Bug(
        Ends,
        "touch",
        "self._file(end)",
        "pass",
        lambda _: test_ends.test_the_cheapest_is_the_first_by_cost_whatever_happened(),
    ),
    "count the places behind a conversation as its last": Bug(
        EndReclaimer,
        "finish",
        "self._ends.pass_by(continued)",
        "pass",
        test_balance.test_conversations_that_fit_keep_their_windows,
    ),
    "count what an end saves from the beginning of its prompt": Bug(
        Ends,
        "num_saved",
        "(0 if earlier is None else earlier.num_tokens)",
        "0",
        lambda _: test_state_ends.test_the_end_of_an_answer_costs_less_than_that_of_its_prompt(),
    ),
    "leave an end linked to one that was dropped": Bug(
        Ends,
        "_unlink",
        "self._ends[each].before = before",
        "pass",
        lambda _: test_state_ends.test_an_end_before_a_dropped_one_saves_the_tokens_of_both(),
    ),
    "take the slot of a state that saves more": Bug(
        StateEnds,
        "_drop_one",
        "cheapest[0] > max_cost",
        "False",
        lambda _: (
            test_state_ends.test_a_state_that_saves_little_takes_no_slot_of_one_that_saves_more()
        ),
    ),
    "keep states after pages that are gone": Bug(
        StateEnds,
        "_drop_newly_lost",
        "return self.drop_lost()",
        "return False",
        lambda _: test_state_ends.test_a_state_after_an_evicted_page_goes_before_all_others(),
    ),
    "drop states later than others get their memory": Bug(
        StateEnds,
        "lower",
        "dropped = self.names.pop_dropped()",
        "dropped: list[int] = []",
        lambda _: test_state_ends.test_a_lower_limit_drops_states_at_once(),
    ),
    "drop a state that a request begins with next": Bug(
        StateNames,
        "pop_dropped",
        "set(self.restoring.values())",
        "set()",
        lambda _: test_state_ends.test_a_state_that_a_request_will_begin_with_is_not_dropped_yet(),
    ),
    "make room of the end that the next request continues from": Bug(
        Balance,
        "run",
        "self._touch_next(now)",
        "pass",
        test_balance.test_a_long_conversations_window_outlives_short_requests,
    ),
    "begin requests whose states have no memory": Bug(
        StateRoom,
        "num_lacking",
        "STATE_SLOTS + num_reserved - self._ends.num_free",
        "0",
        test_balance.test_requests_wait_where_their_states_have_no_memory,
    ),
    "leave states their memory": Bug(
        StateEnds,
        "make_room",
        "self._drop_one(inf, Worth.PINNED)",
        "False",
        test_balance.test_a_request_can_have_all_but_its_own_states,
    ),
    "keep what leads to a lost place": Bug(
        FullPageReclaimer,
        "_mark_around",
        "pages.append(page)",
        "break",
        test_balance.test_pages_that_lead_to_a_lost_place_are_evicted_first,
    ),
    "give no memory to a request that lacks it": Bug(
        Balance,
        "_transfer_for_starved",
        "if not takers or",
        "if True or",
        test_balance.test_a_request_can_have_all_but_its_own_window,
    ),
    "move memory for a request that cannot begin": Bug(
        Balance,
        "_transfer_for_starved",
        "needed > left or not has_ids",
        "False",
        test_balance.test_nothing_moves_for_a_request_that_could_not_begin,
    ),
    "pass pages of a place that others may go on from": Bug(
        WindowPages,
        "pass_by",
        "index in expected or self.ends.has_page(page)",
        "index in expected",
        test_windows.test_the_end_of_a_protection_loses_no_page_of_a_window,
    ),
    "write no window before it is given up": Bug(
        DiskPages,
        "endangered_at_end",
        "kind.reclaimer is None",
        "True",
        test_windows.test_a_window_is_written_before_it_is_given_up,
    ),
    "expect nothing after a prompt": Bug(
        WindowPages,
        "_expected_windows",
        "likely_ends(request, self.pool.page_size)",
        "()",
        test_windows.test_the_window_at_the_end_of_a_prompt_outlives_a_long_answer,
    ),
    "read pages without their window": Bug(
        DiskPages,
        "reach",
        "reach = num_usable(self._ends, hashes, reach, self._is_available)",
        "pass",
        test_windows.test_a_prompt_is_read_up_to_the_last_window_on_disk,
    ),
    "read a window without room for it": Bug(
        WindowRoom,
        "can_read",
        ">= self._num_held",
        ">= 0",
        test_windows.test_nothing_is_read_without_room_for_its_window,
    ),
    "expect no follower after a window": Bug(
        WindowPages,
        "expect",
        "if window not in windows:",
        "if False:",
        test_windows.test_a_follower_continues_after_the_window_where_its_prompt_leaves_the_leaders,
        {"length": 36},
    ),
    "leave less than the pages of one window": Bug(
        test_groups,
        "max_page_counts",
        "window.num_held if num_pages else 0",
        "0",
        lambda _: (
            test_groups.test_memory_for_one_window_and_little_else_has_the_pages_of_that_window(
                page_bytes=7, window_page_bytes=1
            )
        ),
    ),
    "write no window at the end of a prompt": Bug(
        WindowPages,
        "used_by",
        "for end in likely}",
        "for end in ()}",
        test_windows.test_a_prompt_on_disk_is_read_with_its_last_window,
    ),
    "admit without a count of windows": Bug(
        Admission,
        "_lacks_memory",
        "end.room.num_lacking(request, num_cached, num_reserved) > 0",
        "False",
        test_windows.test_prompts_that_only_fit_one_after_the_other_do_not_thrash,
    ),
    "start with a chunk larger than its windows": Bug(
        Admission,
        "_first_share",
        "budget = min(budget, num_pages * page_size)",
        "pass",
        test_windows.test_a_branch_before_the_window_is_computed_again_and_says_so,
    ),
    "reserve no windows": Bug(
        WindowRoom,
        "num_reserved",
        "reserved += missing",
        "pass",
        test_windows.test_prompts_that_only_fit_one_after_the_other_do_not_thrash,
    ),
    "count found pages of windows as free": Bug(
        WindowRoom,
        "_num_needed",
        " + self._pool.num_idle(found)",
        "",
        test_windows.test_a_window_that_is_found_is_counted_as_taken,
    ),
    "write no window at the end of an answer": Bug(
        WindowPages,
        "used_by",
        " | {num_pages}",
        "",
        test_windows.test_the_next_turn_reads_the_window_at_the_end_of_the_answer,
    ),
    "overlook the windows that answers would free": Bug(
        Urgency,
        "_in_its_way",
        "count - end.room.num_own(answer)",
        "count",
        test_windows.test_an_answer_makes_way_for_its_window,
    ),
    # Of what a plan costs, and of the queue.
    "walk all kept pages": Bug(
        EvictionOrder,
        "stop_keeping",
        "for page in pages:",
        "for page in [one for one in self.kept if one in set(pages)]:",
        lambda _: test_pages.test_the_end_of_a_time_walks_no_pages_that_are_kept_longer(),
    ),
    "end the time of a beginning first": Bug(
        EvictionOrder,
        "keep_until",
        "in reversed(pages)",
        "in pages",
        lambda _: (
            test_pages.test_pages_whose_time_is_over_are_evicted_before_those_that_they_follow()
        ),
    ),
    "leave a client where it was filed": Bug(
        WaitingQueue,
        "_heads_of",
        "head[1] != self._fair_share.tokens_of(place[-1])",
        "False",
        lambda _: (
            test_waiting.test_any_order_of_events_leaves_the_order_of_a_queue_that_is_sorted_anew()
        ),
    ),
    "never rise": Bug(
        WaitingQueue,
        "_rise",
        "self._rises[0][0] <= self._now",
        "False",
        lambda _: (
            test_waiting.test_any_order_of_events_leaves_the_order_of_a_queue_that_is_sorted_anew()
        ),
    ),
    "remember counters of nobody": Bug(
        FairShare,
        "leave",
        "self._in_heap.clear()",
        "pass",
        lambda _: test_fairness.test_counters_begin_anew_once_nobody_is_there(),
    ),
    "lose named prefixes on the way to another pool": Bug(
        Scheduler,
        "_begin",
        "roster.prefixes.update(prefixes)",
        "pass",
        test_resize.test_a_resize_that_fails_on_its_way_loses_no_named_prefix,
        {"at": 0},
    ),
    "overlook a step that was lost": Bug(
        Engine,
        "check",
        "num_unread == (self._unread is not None)",
        "True",
        lambda _, monkeypatch: (
            test_engine.test_the_audit_finds_a_step_whose_results_were_lost_on_the_way(monkeypatch)
        ),
    ),
    "queue what cannot be timed": Bug(
        Engine,
        "add",
        "self._scheduler.abort(request.id)",
        "pass",
        lambda _, monkeypatch: (
            test_engine.test_a_request_that_is_queued_and_cannot_be_timed_is_not_queued(monkeypatch)
        ),
    ),
    # Of --preempt-for-priority-ms.
    "preempt answers of the same class": Bug(
        urgency,
        "_yields",
        "answer.asked.priority > request.asked.priority",
        "answer.asked.priority >= request.asked.priority",
        test_urgency.test_only_answers_of_a_lower_class_make_way,
    ),
    "preempt an answer again and again": Bug(
        urgency,
        "_yields",
        "is_lower and len(answer.token_ids) >= answer.spared_until",
        "is_lower",
        test_urgency.test_an_answer_beside_an_endless_stream_of_urgent_requests_ends,
        {"length": 100},
    ),
    # What went wrong in other engines: tests/scheduler/test_pitfalls.py.
    "P1 keep a match over an eviction": Bug(
        PrefixCache,
        "match",
        "if evicted is None or match.has_lost(evicted):",
        "if False:",
        test_pitfalls.test_p01_a_match_does_not_outlive_an_eviction,
    ),
    "P2 admit on the first chunk": Bug(
        Admission,
        "_num_pages",
        "-(-len(request.token_ids) // self._pool.page_size)",
        "1",
        test_pitfalls.test_p02_prompts_that_only_fit_one_after_the_other_do_not_thrash,
    ),
    "P2 check without reserving": Bug(
        Admission,
        "_supply",
        "self._pool.num_free - self.num_reserved()",
        "self._pool.num_free",
        test_pitfalls.test_p02_prompts_that_only_fit_one_after_the_other_do_not_thrash,
    ),
    "P3 no room to grow": Bug(
        Admission,
        "num_reserved",
        "growth = self._config.growth_pages * len(running) if self._stats.num_preemptions else 0",
        "growth = 0",
        test_pitfalls.test_p03_decodes_that_grow_do_not_preempt_each_other_for_ever,
    ),
    "P4 last in, first out": Bug(
        preemption,
        "recompute_cost",
        "return max(0, request.num_computed - kept * pool.page_size)",
        "return 0",
        test_pitfalls.test_p04_the_victim_is_the_one_that_costs_least,
    ),
    "P5 a victim in flight": Bug(
        preemption,
        "choose_victim",
        "if r.num_in_flight == 0",
        "",
        test_pitfalls.test_p05_a_request_that_cannot_free_a_page_now_is_not_a_victim,
    ),
    "P5 a victim that frees nothing": Bug(
        preemption,
        "_frees_a_page",
        "return any(",
        "return True or any(",
        test_pitfalls.test_p05_a_request_that_cannot_free_a_page_now_is_not_a_victim,
    ),
    "P6 holders wait for the queue": Bug(
        StepPlanner,
        "_plan_prefill",
        "if request.loading:",
        "if request.loading or (self._roster.waiting and request.num_preemptions):",
        test_pitfalls.test_p06_holders_of_restored_pages_go_before_requests_without_any,
    ),
    "P7 no slot while loading": Bug(
        Admission,
        "_has_place",
        "len(roster.running) < ",
        "sum(r.loading is None for r in roster.running.values()) < ",
        test_pitfalls.test_p07_a_request_that_is_read_from_disk_counts_as_running,
    ),
    "P8 no cap": Bug(
        limit,
        "_prefill_cap",
        "if ctx.num_eligible <= 1",
        "if True",
        test_pitfalls.test_p08_a_long_prompt_does_not_keep_the_others_out_of_a_step,
    ),
    "P8 wait for memory": Bug(
        Admission,
        "choose",
        "passed.append(request)",
        "return",
        test_pitfalls.test_p08_a_request_that_lacks_memory_is_overtaken_once,
    ),
    "P8 pass without end": Bug(
        Admission,
        "choose",
        "passed.append(request)",
        "pass",
        test_pitfalls.test_p08_a_request_that_lacks_memory_is_overtaken_once,
    ),
    "P9 break": Bug(
        Admission,
        "choose",
        "self.count_deferral(request)",
        "return",
        test_pitfalls.test_p09_a_prompt_with_less_than_a_page_of_budget_is_deferred_and_others_start,
    ),
    "P10 match the last token": Bug(
        PrefixCache,
        "matchable",
        "(len(request.token_ids) - 1)",
        "len(request.token_ids)",
        test_pitfalls.test_p10_a_prompt_that_is_cached_whole_computes_something,
        {"tail": PageTail.COPY, "computed": 1},
    ),
    "P11 allocate, then retain": Bug(
        PageTables,
        "start",
        "self.pool.retain(cached)",
        "self.pool.release(self.pool.allocate(self.pool.num_free)); self.pool.retain(cached)",
        test_pitfalls.test_p11_what_a_step_matches_it_does_not_evict,
    ),
    "P12 count every admission": Bug(
        StepPlanner,
        "_count_hits",
        "if not request.has_run:",
        "if True:",
        test_pitfalls.test_p12_neither_retries_nor_preemptions_count_as_hits,
    ),
    "P12 count every look": Bug(
        Admission,
        "_decide",
        "cached = cache.match(request)",
        "cached = cache.match(request); self._stats.prefix_queries += len(request.token_ids)",
        test_pitfalls.test_p12_neither_retries_nor_preemptions_count_as_hits,
    ),
    "P13 longest match first": Bug(
        Admission,
        "choose",
        "self._in_order(now, first):",
        "sorted(self._in_order(now, first), key=lambda one: -len(self._tables.cache.match(one))):",
        test_pitfalls.test_p13_a_cold_request_is_not_passed_by_cached_ones,
    ),
    "P14 queue what never fits": Bug(
        Capacity,
        "refuse_too_long",
        "if num_tokens < capacity:",
        "if True:",
        test_pitfalls.test_p14_a_prompt_that_can_never_fit_is_refused_and_delays_no_other,
    ),
    "P15 count hits and compute all the same": Bug(
        Admission,
        "_decide",
        "cached = cache.match(request)",
        "cached = cache.match(request); self._stats.prefix_hits += 4 * len(cached); "
        "cached, cache.num_known = [], lambda request: 0",
        test_pitfalls.test_p15_every_hit_is_a_token_that_is_not_computed,
    ),
    # Admission.
    "charge cached tokens": Bug(
        Admission,
        "_decide",
        "start = len(cached) * self._pool.page_size",
        "start = 0",
        test_admission.test_two_prompts_of_1024_with_512_cached_each_use_1024_of_a_2048_budget,
    ),
    "want pages for cached tokens": Bug(
        Admission,
        "_num_needed",
        "self._num_pages(request) - len(cached)",
        "self._num_pages(request)",
        test_admission.test_a_16_page_prompt_with_12_pages_in_use_by_others_is_admitted_with_4_free,
    ),
    "every request computes the common prefix": Bug(
        Admission,
        "_decide",
        "if awaited is not None:",
        "if False:",
        test_admission.test_four_cold_requests_compute_and_hold_their_long_prefix_once,
    ),
    "followers are looks": Bug(
        Admission,
        "choose",
        "num_looks += num_parked_tokens > MAX_PARKED_TOKENS",
        "num_looks += 1",
        test_admission.test_any_number_of_followers_leaves_the_others_their_turn,
        {"num_followers": 16, "client": ""},
    ),
    "a fork takes a reserved page": Bug(
        Admission,
        "_supply",
        "self._pool.num_free - self.num_reserved()",
        "self._pool.num_free",
        test_forks.test_a_fork_takes_no_page_that_a_prompt_still_needs,
    ),
    "forks overtake uncounted": Bug(
        Commit,
        "_fork",
        "self._admission.count_overtaken(passed)",
        "pass",
        test_forks.test_forks_overtake_a_request_that_lacks_memory_only_as_often_as_requests_may,
        {"max_overtakes": 3, "num_overtaking": 3},
    ),
    # The cache, the disk, resizes.
    "publish a page with an unknown token": Bug(
        Commit,
        "_publish",
        "min(end, len(request.token_ids))",
        "end",
        test_prefix_cache.test_a_page_whose_last_token_was_dropped_is_not_published,
    ),
    "continue without the state that was on disk": Bug(
        PageTables,
        "finish_load",
        "self._begin_again(request)",
        "pass",
        test_disk_pages.test_without_its_state_everything_is_computed_again,
        {"lost": "state"},
    ),
    "read the state with every part": Bug(
        DiskPages,
        "load",
        "if end == request.disk_end:",
        "if True:",
        test_disk_pages.test_a_run_in_parts_has_its_state_at_the_end,
    ),
    "believe that all pages came back from disk": Bug(
        PageTables,
        "finish_load",
        "request.num_computed += num_tokens",
        "request.num_computed += len(load.run.hashes) * self.pool.page_size",
        test_disk_pages.test_what_the_disk_lost_is_computed_and_said,
        {"at_most": 1},
    ),
    "read pages of another position": Bug(
        DiskPages,
        "load",
        "request.page_table[first:end]",
        "request.page_table[: end - first]",
        test_disk_pages.test_pages_on_disk_follow_those_in_memory,
    ),
    "go on as if nothing was lost": Bug(
        PageTables,
        "finish_load",
        "is_lost = num_pages < len(load.run.hashes)",
        "is_lost = False",
        test_disk_pages.test_what_the_disk_lost_is_computed_and_said,
        {"at_most": 1},
    ),
    "save what others hold": Bug(
        FullPages,
        "unsaved",
        "pool.is_exclusive(page) and",
        "True and",
        test_disk_pages.test_pages_that_others_hold_are_not_saved,
    ),
    "save again what is on disk": Bug(
        FullPages,
        "unsaved",
        "if not is_on_disk(hash_)",
        "",
        test_disk_pages.test_what_is_on_disk_already_is_not_saved_again,
    ),
    "read what is computed faster": Bug(
        DiskPages,
        "reach",
        "reach if is_worth_it else first",
        "reach",
        test_disk_pages.test_what_is_computed_faster_is_not_read,
    ),
    "read the pages of an end that memory still has": Bug(
        Admission,
        "_decide",
        "found = cache.known(request)[: reading.reach]",
        "found = cached",
        test_disk_pages.test_an_end_is_read_alone_where_its_pages_are_in_memory,
        {"kinds": "windows"},
    ),
    "find no end on disk whose pages are in memory only": Bug(
        DiskPages,
        "reach",
        "num_known + self._disk.num_leading(hashes[num_known:end])",
        "first + self._disk.num_leading(hashes[first:end])",
        test_disk_pages.test_of_a_window_only_the_pages_that_memory_lacks_are_read,
    ),
    "need a whole window on disk": Bug(
        DiskPages,
        "_is_available",
        "if end.holds_found else",
        "if False else",
        test_disk_pages.test_of_a_window_only_the_pages_that_memory_lacks_are_read,
    ),
    "read a whole window": Bug(
        WindowPages,
        "load",
        "if hash_of(page) is None",
        "",
        test_disk_pages.test_of_a_window_only_the_pages_that_memory_lacks_are_read,
    ),
    "count no state to read": Bug(
        StateSlots,
        "num_to_read",
        "return 1",
        "return 0",
        test_disk_pages.test_an_end_is_read_alone_where_its_pages_are_in_memory,
        {"kinds": "states"},
    ),
    "keep pages that nothing can continue after": Bug(
        PageTables,
        "_begin_again",
        "self.cache.usable(request, request.disk_base)",
        "request.disk_first",
        test_disk_pages.test_an_end_that_is_lost_costs_all_that_memory_cannot_continue_after,
        {"kinds": "windows"},
    ),
    "wake nobody who waits for an end": Bug(
        Moves,
        "finish_load",
        "first = request.disk_base",
        "pass",
        test_disk_pages.test_an_end_that_several_prompts_continue_is_read_once,
        {"kinds": "windows"},
    ),
    "give a short read up that saves a long prompt": Bug(
        DiskPages,
        "load",
        "(request.disk_base if ends else first)",
        "first",
        test_disk_pages.test_an_end_is_read_alone_where_its_pages_are_in_memory,
        {"kinds": "windows"},
    ),
    "compute all pages after a lost one": Bug(
        DiskPages,
        "skip_lost",
        "num_pages = reach - resume",
        "pass",
        test_disk_pages.test_pages_after_one_that_was_lost_are_read,
        {"first": 2},
    ),
    "compute past where reading goes on": Bug(
        StepPlanner,
        "_plan_prefill",
        "resume if start < resume else end",
        "end",
        test_disk_pages.test_pages_after_one_that_was_lost_are_read,
        {"first": 2},
    ),
    "note no use of pages": Bug(
        PageTables,
        "release",
        "self.disk.use(request)",
        "pass",
        test_disk_pages.test_pages_are_written_newest_first_while_nothing_runs,
    ),
    "write named prefixes as all other pages": Bug(
        DiskPages,
        "unwritten",
        "chain(pinned, disk.unwritten(name))",
        "disk.unwritten(name)",
        test_disk_pages.test_named_prefixes_are_written_first,
    ),
    "write all pages beside work": Bug(
        DiskPages,
        "endangered",
        "max(0, num_soon)",
        "None",
        test_disk_pages.test_beside_work_only_pages_about_to_be_evicted_are_written,
    ),
    "accept pages that no request waits for": Bug(
        PageTables,
        "release",
        "request.loading, request.disk_end, request.disk_resume = None, 0, 0",
        "request.disk_end, request.disk_resume = 0, 0",
        test_disk_pages.test_an_abort_while_the_disk_is_read_frees_the_pages,
    ),
    "keep a state after a token that was dropped": Bug(
        StateSlots,
        "_publish",
        "hashes[:num_pages] if num_pages <= len(hashes) else None",
        "hashes[:num_pages]",
        test_state_snapshots.test_a_state_after_a_token_that_was_dropped_is_not_kept,
    ),
    "a smaller pool forgets what waits": Bug(
        Scheduler,
        "_begin_again",
        "for request in waiting:",
        "for request in ():",
        test_resize.test_running_answers_are_the_same_after_they_lost_their_pages,
        {"mode": PreemptionMode.RECOMPUTE},
    ),
    "a smaller pool runs as many as ever": Bug(
        Scheduler,
        "_begin",
        "self.planner.admission.max_running = self._max_running",
        "pass",
        test_resize.test_what_limits_the_running_requests_still_does,
    ),
    "a smaller pool drops named prefixes": Bug(
        Scheduler,
        "_begin_again",
        "if name not in lives:",
        "if False:",
        test_resize.test_a_named_prefix_is_computed_again_and_found,
    ),
    "compute a named prefix again that was aborted": Bug(
        Scheduler,
        "abort",
        "self.roster.prefixes.pop(request_id, None)",
        "pass",
        test_resize.test_a_named_prefix_that_is_aborted_while_it_is_computed_again_stays_gone,
    ),
    "a smaller pool ignores the shares of keys": Bug(
        Pins,
        "refuse_resize",
        "self._beyond_share(quota)",
        "None",
        test_resize.test_each_key_has_its_share_of_a_smaller_pool,
    ),
    "a key keeps the smallest share it ever had": Bug(
        Pins,
        "_beyond_share",
        "max(request.pin_share, shares.get(request.client, 0.0))",
        "min(request.pin_share, shares.get(request.client, 1.0))",
        test_resize.test_a_key_that_had_the_whole_quota_keeps_it,
    ),
    "the same size asks for room to compute prefixes": Bug(
        Capacity,
        "refuse_resize",
        "num_pages >= self._pool.num_pages",
        "num_pages > self._pool.num_pages",
        test_resize.test_the_same_size_asks_for_no_room_to_compute_prefixes_again,
    ),
    "a duplicate page keeps its leader": Bug(
        Commit,
        "_publish",
        "self._roster.pages_published(request.page_hashes[first:end])",
        "self._roster.pages_published(h for page, h in zip(chunk.page_table[first:end], "
        "request.page_hashes[first:end]) if self._tables.pool.index.page_of(h) == page)",
        test_prefix_cache.test_a_page_that_was_known_before_it_was_computed_again_is_not_waited_for,
    ),
    "a prompt without a page preempts at once": Bug(
        StepPlanner,
        "_plan_prefill",
        "not (step.is_empty and step.may_preempt)",
        "False",
        test_scheduler.test_a_prompt_without_a_page_waits_while_others_are_computed,
    ),
    "believe that the disk took everything": Bug(
        Moves,
        "finish_save",
        "num_pages * self._tables.pool.page_size",
        "len(save.units[0][1]) * self._tables.pool.page_size",
        test_disk_pages.test_only_what_the_disk_took_counts_as_swapped,
        {"takes": 0},
    ),
    "promise the pins' pages to others": Bug(
        Capacity,
        "of",
        "self._pins.num_kept_from(request)",
        "0",
        test_pins.test_what_can_never_fit_beside_the_pins_is_refused,
    ),
    # Plans that differ from those of a scheduler that looks at everything.
    "another plan: count free hits as free": Bug(
        Admission,
        "_num_needed",
        "needed += self._pool.num_idle(cached)",
        "pass",
        test_differential.test_d4_the_plan_is_that_of_a_scheduler_that_looks_at_everything,
    ),
    "another plan: admit all into the same pages": Bug(
        Admission,
        "choose",
        "supply.num_pages -= self._num_taken(candidate)",
        "pass",
        test_differential.test_d4_the_plan_is_that_of_a_scheduler_that_looks_at_everything,
    ),
    "another plan: reserve for one request": Bug(
        Admission,
        "num_reserved",
        "growth_pages * len(running)",
        "growth_pages",
        test_differential.test_d4_the_plan_is_that_of_a_scheduler_that_looks_at_everything,
    ),
    "another plan: short is shorter": Bug(
        Admission,
        "_is_short",
        "num_uncached <= (",
        "num_uncached < (",
        test_differential.test_d4_the_plan_is_that_of_a_scheduler_that_looks_at_everything,
    ),
    "another plan: the smaller cap": Bug(
        limit,
        "_prefill_cap",
        "max(",
        "min(",
        test_differential.test_d4_the_plan_is_that_of_a_scheduler_that_looks_at_everything,
    ),
    "another plan: charge tokens": Bug(
        limit,
        "_charge",
        "if not (rules.is_aligned and rules.charges_pages):",
        "if True:",
        test_differential.test_d4_the_plan_is_that_of_a_scheduler_that_looks_at_everything,
    ),
    "another plan: match a token less": Bug(
        PrefixCache,
        "matchable",
        "(len(request.token_ids) - 1)",
        "(len(request.token_ids) - 2)",
        test_differential.test_d4_the_plan_is_that_of_a_scheduler_that_looks_at_everything,
    ),
}


@pytest.mark.parametrize("name", FOUND_BY_CLAIM)
def test_the_test_that_claims_the_opposite_finds_the_bug(
    name: str,
    make_engine: Callable,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bug = FOUND_BY_CLAIM[name]
    assert bug.claim is not None
    bug.plant(monkeypatch)
    options = dict(bug.options)
    fixtures = {"monkeypatch": monkeypatch, "caplog": caplog}
    wanted = inspect.signature(bug.claim).parameters.keys() & fixtures.keys()
    options |= {name: fixtures[name] for name in wanted}
    with pytest.raises((AssertionError, LookupError, pytest.fail.Exception)):
        bug.claim(make_engine, **options)


def test_every_pitfall_of_other_engines_is_planted() -> None:
    claims = {bug.claim for name, bug in FOUND_BY_CLAIM.items() if name.startswith("P")}
    pitfalls = {test for name, test in vars(test_pitfalls).items() if name.startswith("test_p")}
    assert claims == pitfalls

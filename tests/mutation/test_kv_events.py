"""Planted bugs of KV events, each found by a test."""

from __future__ import annotations

import pytest

from mlxserve.cache.events import EventPool
from mlxserve.core.errors import InvalidConfig
from mlxserve.core.kv_events import KvEventsConfig
from mlxserve.disk.tier import Tier
from mlxserve.engine.kv_events import Batches, KvEvents
from mlxserve.engine.tier_events import TierEvents
from tests.core import test_config
from tests.engine import test_kv_events, test_tier_events
from tests.engine.test_kv_events import addresses, served, server  # noqa: F401 (fixtures)
from tests.engine.test_tier_events import disk, store  # noqa: F401 (fixtures)
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

BUGS = {
    "pages of images are reported": Bug(
        EventPool,
        "_report",
        "min(token_ids) < 0",
        "min(token_ids) < -9",
        test_kv_events.test_pages_of_images_and_those_after_them_are_not_reported,
    ),
    "what comes before a continued page is not stored again": Bug(
        EventPool,
        "_report",
        "index.find(index.parent_of(last))",
        "None",
        test_kv_events.test_after_more_events_than_are_taken_all_is_cleared_and_stored_again_when_continued,
    ),
    "events that are not taken are forgotten": Bug(
        EventPool,
        "_start_over",
        "self._events.cleared()",
        "None",
        test_kv_events.test_after_more_events_than_are_taken_all_is_cleared_and_stored_again_when_continued,
    ),
    "a chain is joined to any page": Bug(
        Batches,
        "encode",
        "last != (page.parent, medium, group)",
        "last is None",
        test_kv_events.test_an_adapter_is_told_by_name_and_a_salt_by_a_digest,
    ),
    "pages in memory and on disk are one chain": Bug(
        Batches,
        "encode",
        "last != (page.parent, medium, group)",
        "not last or last[0] != page.parent",
        test_tier_events.test_a_chain_is_joined_on_its_medium_alone,
    ),
    "a page that memory has lost is not told of on disk": Bug(
        TierEvents,
        "_page",
        "or self._evicted.get(hash_)",
        "",
        test_tier_events.test_a_page_that_was_evicted_before_it_was_written_is_told_when_it_is,
    ),
    "what was on disk already is not told": Bug(
        TierEvents,
        "stored",
        "if tier.is_written(name)",
        "if tier is None",
        test_tier_events.test_each_tier_tells_what_it_has_of_pages_that_were_in_memory,
    ),
    "units that were there before their page are not told of": Bug(
        TierEvents,
        "stored",
        "if name in self._units",
        "if not name",
        test_tier_events.test_units_of_other_kinds_are_told_of_while_the_page_is_known,
    ),
    "units of a kind that begins anew stay told": Bug(
        TierEvents,
        "units_cleared",
        "self.unit_removed(kind, name[:HASH_SIZE])",
        "self._units.discard(name)",
        test_tier_events.test_after_a_restart_units_are_told_of_anew,
    ),
    "a record of an unknown kind is a page's": Bug(
        TierEvents,
        "_follow",
        "name[HASH_SIZE:] in self._groups and",
        "",
        test_tier_events.test_units_of_other_kinds_are_told_of_while_the_page_is_known,
    ),
    "a removal from disk that was not taken is forgotten": Bug(
        TierEvents,
        "_retract",
        "self._is_behind |= not",
        "_ =",
        test_tier_events.test_a_removal_that_is_not_taken_makes_all_begin_again,
    ),
    "the tokens of all evicted pages are remembered": Bug(
        TierEvents,
        "removed",
        "len(self._evicted) > self._max_remembered",
        "False",
        test_tier_events.test_the_tokens_of_few_evicted_pages_are_remembered,
    ),
    "records that are deleted are not told": Bug(
        Tier,
        "_forget",
        "self._listener is not None",
        "False",
        test_tier_events.test_records_of_a_tier_that_has_failed_are_removed,
    ),
    "a salt is not told": Bug(
        Batches,
        "_new",
        "page.root not in self._names",
        "not self._names",
        test_kv_events.test_an_adapter_is_told_by_name_and_a_salt_by_a_digest,
    ),
    "the queue has no end": Bug(
        KvEvents,
        "_put",
        "len(self._queue) >= self._max_queued",
        "False",
        test_kv_events.test_a_full_queue_refuses_events,
    ),
    "evictions are not reported": Bug(
        KvEvents,
        "removed",
        "self._put(_Told(hash_, medium, group))",
        "hash_ != b''",
        test_kv_events.test_a_router_loses_what_the_cache_evicts_and_nothing_else,
    ),
    "a replay begins too late": Bug(
        KvEvents,
        "_replay",
        "number >= first",
        "number > first",
        test_kv_events.test_a_late_router_learns_everything_from_a_replay,
    ),
    "addresses stay taken": Bug(
        KvEvents,
        "close",
        "self._notify()",
        "None",
        test_kv_events.test_an_address_that_is_taken_is_a_clear_error_and_is_free_after_close,
    ),
    "one address is taken for both": Bug(
        KvEventsConfig,
        "_check",
        "self.endpoint == self.replay_endpoint",
        "self.endpoint is None",
        test_config.test_wrong_options_of_kv_events_are_refused,
        {
            "options": {"kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:5557"},
            "message": "need two addresses",
        },
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, request: pytest.FixtureRequest) -> None:
    errors = AssertionError, KeyError, InvalidConfig, pytest.fail.Exception
    BUGS[name].check_found(request, errors)

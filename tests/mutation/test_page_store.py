"""Every rule of the page store is needed: without it a test of `-m fleet` fails."""

from __future__ import annotations

import pytest

from mlxserve.chat.view import View
from mlxserve.disk.record import Records
from mlxserve.disk.thread import DiskThread
from mlxserve.disk.tier import Tier
from mlxserve.disk.tiers import Tiers
from tests.fleet import test_page_store, test_store_faults
from tests.fleet.conftest import store as store
from tests.fleet.conftest import unhurried_store as unhurried_store
from tests.fleet.redis_server import need_store
from tests.fleet.test_page_store import folder_of as folder_of
from tests.fleet.test_store_faults import open_tier as open_tier
from tests.fleet.test_store_faults import slow as slow
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "leave the model out of a record": Bug(
        Records,
        "header",
        "fields = (_MAGIC, self._identity,",
        'fields = (_MAGIC, b"",',
        test_store_faults.test_damaged_foreign_and_hostile_values_are_lost,
    ),
    "leave the key out of a page's hash": Bug(
        View,
        "page_salt",
        "{self.salt}\\0{cache_salt or ''}",
        "{self.salt}\\0",
        test_page_store.test_keys_models_and_dtypes_never_share_a_record,
    ),
    "read from the store in a step": Bug(
        Tier,
        "load",
        "load = self._loads.add(names)",
        "load = self._loads.add(names); [self._disk._files.read(name) for name in names[:1] if name in self]",
        test_store_faults.test_no_step_talks_to_the_store,
    ),
    "believe news of any size": Bug(
        DiskThread,
        "_take_found",
        "is_sound and self._files.allows(found.size - HEADER_SIZE)",
        "is_sound",
        test_store_faults.test_damaged_foreign_and_hostile_values_are_lost,
    ),
    "forget a record while the store is away": Bug(
        DiskThread,
        "_delete_some",
        "break",
        "pass",
        test_store_faults.test_what_is_forgotten_while_the_store_is_away_is_deleted_later,
    ),
    "count what is read from disk as read from the store": Bug(
        Tiers,
        "_join",
        "self.each[place] is self._store",
        "True",
        test_page_store.test_what_the_disk_has_is_read_from_disk_and_the_rest_from_the_store,
    ),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.usefixtures("unhurried_disk")
def test_the_test_that_claims_the_opposite_finds_the_bug_of_the_store(
    name: str, request: pytest.FixtureRequest
) -> None:
    need_store()
    if FOUND[name].claim in vars(test_page_store).values():
        request.getfixturevalue("unhurried_store")
    FOUND[name].check_found(request, (AssertionError,))

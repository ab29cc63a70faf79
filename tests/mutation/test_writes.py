"""Writes to pools of one backend: what a step, a layer or a size has of its own is not taken of another."""

from __future__ import annotations

import pytest

from metal_kernels.metal import MetalBackend
from metal_kernels.writes import Writes
from mlxserve.cache.kv import KVPool
from mlxserve.cache.layout import StepLayout
from tests.emulated import emulated_backend
from tests.metal_kernels import test_metal, test_writes
from tests.metal_kernels.test_metal import backend as backend
from tests.metal_kernels.test_metal import kv as kv
from tests.metal_kernels.test_metal import metal as metal
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "keep the plans of one of two pools": Bug(
        MetalBackend,
        "write_kv",
        "kept = plans or Plans()",
        'kept = vars(self).setdefault("kept", Plans())',
        test_writes.test_each_pool_is_written_in_its_own_slots,
        {"make": emulated_backend},
    ),
    "give windows the plans of all positions": Bug(
        StepLayout,
        "with_windows",
        "replace(self, slots=slots, decodes=decodes, chunks=chunks))",
        "replace(self, decodes=decodes, chunks=chunks))",
        test_writes.test_windows_have_slots_of_their_own,
    ),
    "write rows of a fused layer as pages": Bug(
        Writes,
        "of_rotated",
        "row_moves(slots, plans)",
        "page_moves(slots, k_pool.shape[2], plans)",
        test_writes.test_fused_and_unfused_layers_of_a_step_write_all_of_its_rows,
        {"layers": (test_writes.rotated, test_writes.written)},
    ),
    "take the pages of an unfused layer for rows": Bug(
        test_writes,
        "page_moves",
        'plans.plan(("pages", page_size), plan)',
        "plans.plan(_ROWS, plan)",
        test_writes.test_a_whole_page_is_listed_apart_from_its_rows,
    ),
    "list rows twice that fill no page": Bug(
        test_writes,
        "page_moves",
        "or row_moves(slots, plans)",
        "or WritePlan.of_rows(slots)",
        test_writes.test_rows_that_fill_no_page_are_listed_once_for_every_kernel,
    ),
    "resize without settling": Bug(
        MetalBackend,
        "resize_pool",
        "self.settle()",
        "pass",
        test_metal.test_a_pool_is_read_by_mlx_after_all_writes_to_it,
        {"way": "resized"},
    ),
    "read without settling": Bug(
        MetalBackend,
        "read_kv",
        "self.settle()",
        "pass",
        test_metal.test_a_pool_is_read_by_mlx_after_all_writes_to_it,
        {"way": "read"},
    ),
    "wait for a pool instead of its writes": Bug(
        MetalBackend,
        "settle",
        "evaluate(*self.fences.pending())",
        "evaluate(*_pools)",
        test_metal.test_settling_computes_a_write_that_nothing_reads,
    ),
    "wait for no pages from the disk": Bug(
        KVPool,
        "write_units",
        "self.settle()",
        "pass",
        test_metal.test_pages_that_are_written_from_outside_a_step_are_waited_for,
    ),
    "order no writes of a resized pool": Bug(
        MetalBackend,
        "resize_pool",
        "return self._added(resized)",
        "return resized",
        test_metal.test_a_resized_pool_replaces_the_old_one,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_test_finds_the_bug_of_writes(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError, ValueError))

"""Limits of mlx's memory: each wrong sum is found by a test."""

from __future__ import annotations

import pytest

from mlxserve.hub import catalog
from mlxserve.model import sizing
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.system import machine, metal_memory
from mlxserve.system.device_memory import DeviceMemory
from mlxserve.system.metal_memory import MetalMemory, ModelShare
from tests import test_resizing
from tests.geometries import QWEN3_8B
from tests.hub import test_catalog, test_step_estimate
from tests.model import test_sizing
from tests.model.test_sizing import loaded as loaded
from tests.mutation.bug import Bug
from tests.system import test_device_memory, test_metal_memory
from tests.system.test_metal_memory import memory as memory

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "wire one model": Bug(
        metal_memory,
        "_limits_of",
        "sum(share.resident for share in shares)",
        "shares[-1].resident",
        test_metal_memory.test_the_limits_of_several_models_are_their_sums,
    ),
    "keep the freed memory of one model": Bug(
        metal_memory,
        "_limits_of",
        "sum(share.step for share in shares)",
        "shares[-1].step",
        test_metal_memory.test_the_limits_of_several_models_are_their_sums,
    ),
    "wire more than the working set": Bug(
        metal_memory,
        "_limits_of",
        "min(base, sum(share.resident for share in shares))",
        "sum(share.resident for share in shares)",
        test_metal_memory.test_no_more_than_the_working_set_is_wired,
    ),
    "add up limits that were chosen": Bug(
        metal_memory,
        "_limits_of",
        "max(chosen)",
        "sum(chosen)",
        test_metal_memory.test_a_chosen_limit_is_that_of_all_models_together,
        {"chosen": (2.0, 2.0), "wired": 2 << 30},
    ),
    "forget a growth": Bug(
        ModelShare,
        "_set",
        "self._apply()",
        "pass",
        test_metal_memory.test_the_limits_of_several_models_are_their_sums,
    ),
    "keep the limits of what was unloaded": Bug(
        MetalMemory,
        "_set",
        "mx.set_wired_limit(0 if limits is None else limits.wired)",
        "limits and mx.set_wired_limit(limits.wired)",
        test_metal_memory.test_a_model_that_is_unloaded_gives_its_part_back,
        {"first": 1},
    ),
    "wire what other programs have": Bug(
        MetalMemory,
        "add",
        "taken = machine.wired_at_start()",
        "taken = 0",
        test_metal_memory.test_memory_that_other_programs_have_wired_is_not_wired_again,
    ),
    "reserve a tenth of every Mac": Bug(
        DeviceMemory,
        "reserve",
        "min(self.base // 10, _MAX_RESERVE)",
        "self.base // 10",
        test_device_memory.test_the_reserve_is_a_tenth_and_at_most_a_gibibyte,
        {"total": 48, "working_set": 36},
    ),
    "plan with what other programs have wired": Bug(
        DeviceMemory,
        "base",
        "min(self.working_set, self.total - self.taken)",
        "self.working_set",
        test_device_memory.test_what_other_programs_have_wired_is_theirs,
    ),
    "plan with two thirds of the memory on every Mac": Bug(
        machine,
        "memory",
        "working_set()",
        "total * 2 // 3",
        test_device_memory.test_a_mac_plans_with_what_macos_recommends_and_others_left,
    ),
    "reserve something beside a share that was chosen": Bug(
        DeviceMemory,
        "limit",
        "int(self.working_set * utilization)",
        "int(self.base * utilization)",
        test_device_memory.test_a_share_that_the_user_chose_leaves_no_other_reserve,
    ),
    "plan a whole step where mlx keeps no freed arrays": Bug(
        DeviceMemory,
        "limit",
        "if self.is_metal else nbytes",
        "if not self.is_metal else nbytes",
        test_device_memory.test_where_mlx_keeps_no_freed_arrays_only_half_a_step_is_planned,
    ),
    "plan half a step": Bug(
        test_device_memory,
        "beside_cache",
        "max(step, step // 2 + unkept)",
        "step // 2 + unkept",
        test_device_memory.test_where_mlx_keeps_no_freed_arrays_only_half_a_step_is_planned,
    ),
    "take a small reserve for a full memory": Bug(
        DeviceMemory,
        "share",
        "0.1 * (self.base - used) / max(1, self.reserve)",
        "(self.base - used) / self.base",
        test_device_memory.test_all_that_is_planned_is_nine_tenths_in_use_on_every_mac,
        {"total": 128, "working_set": 107.5},
    ),
    "list models by a step of one layer": Bug(
        test_step_estimate,
        "step_on_metal",
        "before * (rows * row",
        "(rows * row",
        test_step_estimate.test_a_step_is_estimated_as_a_server_plans_it,
        {"model": QWEN3_8B, "num_rows": 512},
    ),
    "list models by a step without copies": Bug(
        test_step_estimate,
        "step_on_metal",
        "if copied > seen:",
        "if False:",
        test_step_estimate.test_a_step_is_estimated_as_a_server_plans_it,
        {"model": QWEN3_8B, "num_rows": 512},
    ),
    "list models with a context that leaves no window": Bug(
        catalog,
        "_fit_with_windows",
        "needed = taken + own_window",
        "needed = taken",
        test_catalog.test_a_context_fits_up_to_the_last_page_beside_its_own_window,
    ),
    "share the memory that half a step needs": Bug(
        sizing,
        "left_for_cache",
        "step.beside_cache",
        "step.planned",
        test_sizing.test_kinds_share_what_weights_and_a_step_leave,
    ),
    "leave the memory of a smaller cache to its windows": Bug(
        Scheduler,
        "resize",
        "num_preempted = num_forgotten = 0",
        "num_preempted = num_forgotten = 0; "
        "self._beside = self._beside.with_more('pages', max(0, self.pool.num_pages - num_pages))",
        test_resizing.test_windows_stay_in_the_memory_of_a_smaller_cache,
    ),
    "forget mlx's own limit": Bug(
        MetalMemory,
        "_set",
        "if self._limits is None:",
        "if True:",
        test_metal_memory.test_limits_of_a_model_that_is_loaded_after_the_last_one_was_unloaded_end_as_before,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_wrong_limit_is_found(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError,))

"""Limits of mlx's memory: each wrong sum is found by a test."""

from __future__ import annotations

import pytest

from mlxserve.system import metal_memory
from mlxserve.system.metal_memory import MetalMemory, ModelShare
from tests.mutation.bug import Bug
from tests.system import test_metal_memory
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
        "min(wired, working_set)",
        "wired",
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

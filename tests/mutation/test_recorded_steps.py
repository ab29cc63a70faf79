"""Recorded steps over two pools: what belongs to one of them is not taken of the other."""

from __future__ import annotations

import pytest

from metal_kernels.recording import StepInputs
from mlxserve.cache.window_kv import StepPools
from mlxserve.model import step_graphs
from mlxserve.model.step_graphs import StepGraphs
from tests.model import test_step_graphs
from tests.model.test_step_graphs import loaded as loaded
from tests.mutation.bug import Bug

pytestmark = [pytest.mark.mutation, pytest.mark.usefixtures("compiled", "on_a_cpu")]

_EQUAL = test_step_graphs.test_a_recorded_step_over_two_pools_equals_a_built_one
_WITHIN = test_step_graphs.test_a_recorded_step_past_a_pool_is_refused

FOUND: dict[str, Bug] = {
    "write windows to the slots of other layers": Bug(
        StepGraphs,
        "_inputs",
        "own.slots,",
        "layout.slots,",
        test_step_graphs.test_a_recorded_step_gives_the_logits_of_plain_mlx,
        {"has_states": False, "has_windows": True, "stateful": None},
    ),
    "read windows by the tables of other layers": Bug(
        step_graphs,
        "_recording",
        "windows.slots, windows.tables",
        "windows.slots, first.tables",
        _EQUAL,
        {"is_quantised": False},
    ),
    "keep the moves of one pool": Bug(
        step_graphs, "_recording", "own.plans", "layout.plans", _EQUAL, {"is_quantised": False}
    ),
    "take values for keys": Bug(
        StepPools, "keys_of", "own[: len(", "own[-len(", _EQUAL, {"is_quantised": False}
    ),
    "write past a pool": Bug(
        StepInputs, "collect", "last < num_slots", "last", _WITHIN, {"has_windows": False}
    ),
    "check the pages of one pool": Bug(
        StepGraphs,
        "_inputs",
        "makers, k_pool)",
        "makers, arrays[0][0])",
        _WITHIN,
        {"has_windows": True},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_test_finds_the_bug_of_recorded_steps(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError, ValueError))

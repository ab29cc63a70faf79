"""Ways of a step: a fence that one of them forgets is found by its proof, and one that fails is not gone."""

from __future__ import annotations

import pytest

from metal_kernels import metal
from metal_kernels.gathered_attention import GatheredAttention
from metal_kernels.metal import MetalBackend
from metal_kernels.proof_steps import ProofSteps
from metal_kernels.recording import StepInputs
from metal_kernels.step_ways import StepWay
from tests.metal_kernels import test_long_chunks, test_selftest, test_unfused_attention
from tests.metal_kernels.test_selftest import runs_recorded_steps as runs_recorded_steps
from tests.metal_kernels.test_unfused_attention import calls as calls
from tests.metal_kernels.test_unfused_attention import choose as choose
from tests.mutation.bug import Bug

pytestmark = [pytest.mark.mutation, pytest.mark.usefixtures("runs_recorded_steps")]

_PROVED = test_selftest.test_every_way_of_a_step_is_proved_with_its_control

FOUND: dict[str, Bug] = {
    "forget that rows were rotated into a pool": Bug(
        MetalBackend,
        "rotate_and_write",
        "self.fences.after_write(k_pool, fence)",
        "pass",
        _PROVED,
        {"way": StepWay.ROTATED},
    ),
    "gather before the rows are written": Bug(
        GatheredAttention,
        "attend",
        "after = self._fences.before_read(k_pool)",
        "after = mx.zeros(8, mx.int32)",
        _PROVED,
        {"way": StepWay.GATHERED},
    ),
    "gather for blocks before the rows are written": Bug(
        GatheredAttention,
        "attend",
        "after = self._fences.before_read(k_pool)",
        "after = mx.zeros(8, mx.int32)",
        _PROVED,
        {"way": StepWay.BLOCKS},
    ),
    "record the slots of stand-ins": Bug(
        StepInputs,
        "keep_moves",
        "self.moves, self.moves",
        "self.moves * 0, self.moves * 0",
        _PROVED,
        {"way": StepWay.RECORDED},
    ),
    "prove no recorded step": Bug(
        ProofSteps,
        "_decoder",
        "self.way is StepWay.RECORDED",
        "False",
        test_selftest.test_steps_are_recorded_once,
    ),
    "prove blocks by the fused attention": Bug(
        ProofSteps,
        "_prefilled",
        "self.way is StepWay.BLOCKS",
        "False",
        test_unfused_attention.test_the_proof_of_blocks_computes_several_and_none_fused,
    ),
    "attend in blocks though their proof failed": Bug(
        metal,
        "can_copy",
        " and StepWay.BLOCKS not in without",
        "",
        test_unfused_attention.test_a_chunk_that_is_not_planned_for_is_right_by_tiles,
        {"options": {}, "without": frozenset([StepWay.BLOCKS])},
    ),
    "copy chunks though their proof failed": Bug(
        metal,
        "can_copy",
        " or StepWay.GATHERED in without",
        "",
        test_long_chunks.test_no_chunk_is_copied_where_the_self_test_of_copies_failed,
    ),
}


@pytest.mark.usefixtures("compiled", "on_a_cpu")
@pytest.mark.parametrize("name", FOUND)
def test_a_proof_or_a_test_finds_the_bug_of_a_way(
    name: str, request: pytest.FixtureRequest
) -> None:
    FOUND[name].check_found(request, (AssertionError,))

"""The estimated step of a Mac against the step that a server plans, by replayed command buffers."""

from __future__ import annotations

import pytest

from mlxserve.hub.step_estimate import StepSizes, copied_values, step_on_metal
from tests.geometries import GEOMETRIES, QWEN3_8B, Geometry
from tests.memory_table import max_positions, plan_after

MACS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 512)
ROWS = (512, 1024, 2048)


def estimated(model: Geometry, memory: int, num_rows: int = 512) -> int:
    inner = model.num_used * (model.inner + model.hidden) if model.num_experts else model.inner
    copied = copied_values(model.kv_heads, model.head_dim)
    return step_on_metal(
        StepSizes(model.hidden, inner, model.heads, model.vocabulary, copied),
        num_rows=num_rows,
        num_seqs=64,
        longest=max_positions(model, memory),
        total=memory << 30,
    )


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("model", GEOMETRIES, ids=lambda model: model.name)
def test_a_step_is_estimated_as_a_server_plans_it(model: Geometry, num_rows: int) -> None:
    """It is within a tenth by default, and within a quarter for experts, whose sizes tell less."""
    within = (0.25 if model.num_experts else 0.1) + (0.15 if num_rows > 512 else 0)
    for memory in MACS:
        if max_positions(model, memory):
            planned = plan_after(model, memory, num_rows).step
            assert estimated(model, memory, num_rows) == pytest.approx(planned, rel=within), memory


def test_layers_that_read_pages_leave_no_copies() -> None:
    assert copied_values(8, 128) == 2 * 8 * 128
    assert copied_values(8, 256) == 0
    sizes = StepSizes(4096, 12_288, 32, 151_936)
    without = step_on_metal(sizes, num_rows=512, num_seqs=64, longest=40_960, total=16 << 30)
    assert without < estimated(QWEN3_8B, 16)

"""What is planned for a step covers MLX's peak, and leaves room for a cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from mlxserve.core.step_rows import rows_under_way
from mlxserve.model.step_peak import planned_peak
from tests.command_buffers import Array, Limits, Operation, peak, replay
from tests.geometries import (
    GEOMETRIES,
    GPT_OSS_20B,
    QWEN3_4B,
    QWEN3_8B,
    QWEN3_32B,
    Geometry,
    StepShape,
    operations,
)
from tests.memory_table import (
    limits_of,
    memory_table,
    most_copied,
    plan_after,
    replayed,
)

MACHINES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 512)
POOLS = (4096, 65_536, 1 << 20)  # tokens
SHAPES = {
    "one chunk": StepShape(512),
    "decodes and a chunk": StepShape(512, 63, 1, 64),
    "decodes of long contexts": StepShape(512, 64, 512, 64),
    "one very long context": StepShape(512, 1, 16_384),
    "decodes alone": StepShape(64, 64, 512, 64),
}


def named(model: Geometry) -> str:
    return model.name


# ---- MLX's rules


def array(megabytes: int) -> Array:
    return Array(megabytes << 19, megabytes << 20)  # 16 bits an element


def chain(length: int) -> list[Operation]:
    arrays = [array(2) for _ in range(length + 1)]
    return [Operation((before,), after) for before, after in pairwise(arrays)]


def test_inputs_are_kept_until_their_command_buffer_completes() -> None:
    assert peak(chain(10), Limits(1000, 1000)) == 11 * 2 << 20


def test_evaluation_waits_for_the_first_of_eleven_command_buffers() -> None:
    one_each = peak(chain(100), Limits(0, 1000))  # a commit after every operation
    assert one_each == 12 * 2 << 20, "eleven inputs and the newest output"
    assert peak(chain(100), Limits(1, 1000)) == 23 * 2 << 20


def test_a_command_buffer_is_committed_beyond_its_million_elements() -> None:
    at_once = peak(chain(200), Limits(1000, 1))  # two inputs of 1 Mi elements each
    assert at_once == (2 * 11 + 1) * 2 << 20
    weights = Array(3 << 20, 0, is_permanent=True)
    heavy = [Operation((*op.inputs, weights), op.output) for op in chain(200)]
    assert peak(heavy, Limits(1000, 1)) == 12 * 2 << 20, "weights count, but take no memory"


def test_an_evaluation_waits_for_the_oldest_where_too_many_rows_are_under_way() -> None:
    ops = [replace(op, num_rows=10) for op in chain(100)]
    assert peak(ops, Limits(1000, 1000, 10**6)) == 101 * 2 << 20
    assert peak(ops, Limits(1000, 1000, 40)) == 6 * 2 << 20
    assert replay(ops, Limits(1000, 1000, 40)).num_buffers == 100


def test_an_output_written_over_its_input_takes_no_memory() -> None:
    one = array(2)
    assert peak([Operation((one,), one)] * 50, Limits(1000, 1000)) == 2 << 20


def test_the_replay_agrees_with_an_independent_one() -> None:
    for model, limits, rows, gigabytes in [
        (QWEN3_8B, Limits(200, 400), 256, 0.95),
        (QWEN3_8B, Limits(200, 400), 2048, 6.95),
        (QWEN3_8B, Limits(200, 100), 2048, 1.64),
        (QWEN3_4B, Limits(200, 400), 256, 0.74),
        (QWEN3_4B, Limits(200, 400), 2048, 5.9),
        (QWEN3_32B, Limits(200, 400), 2048, 6.2),
    ]:
        found = peak(operations(model, StepShape(rows), 4096), limits)
        assert found / 1e9 == pytest.approx(gigabytes, rel=0.02), model


# ---- what is planned


DECODES = {
    "one decode": StepShape(1, 1, 1000),
    "eight decodes": StepShape(8, 8, 1000, 8),
    "64 decodes": StepShape(64, 64, 1000, 64),
}


def test_more_rows_are_under_way_on_larger_machines() -> None:
    assert [rows_under_way(gib << 30) for gib in (8, 16, 23)] == [3072] * 3
    assert [rows_under_way(gib << 30) for gib in (24, 36, 47)] == [6144] * 3
    assert [rows_under_way(gib << 30) for gib in (48, 64, 95)] == [8192] * 3
    assert [rows_under_way(gib << 30) for gib in (96, 128, 512)] == [16_384] * 3


@pytest.mark.parametrize("model", GEOMETRIES, ids=named)
@pytest.mark.parametrize("memory", [8, 16, 48, 512])
def test_a_step_of_decodes_is_five_command_buffers_at_most_over_a_whole_pool(
    memory: int, model: Geometry
) -> None:
    """Bound whole, the pools of 36 layers ended 73."""
    plan = plan_after(model, memory)
    pool = max(plan.num_tokens, POOLS[0])
    for name, shape in DECODES.items():
        assert 1 < replayed(model, memory, shape, pool).num_buffers <= 5, name
    whole = operations(model, DECODES["one decode"], pool)
    if plan.starts and model is QWEN3_8B and memory == 512:
        assert replay(whole, limits_of(memory)).num_buffers == 73


@pytest.mark.parametrize("memory", [8, 24, 48, 96])  # one of each limit
@pytest.mark.parametrize("model", GEOMETRIES, ids=named)
def test_decodes_of_very_long_contexts_stay_within_the_planned_peak(
    model: Geometry, memory: int
) -> None:
    plan = plan_after(model, memory)
    planned = plan.step
    if not plan.starts:
        pytest.skip("the weights leave no room for a cache")
    for context in (1_000, 4_000, 8_000, 38_000):
        shape = StepShape(64, 64, context, 64)
        assert replayed(model, memory, shape, POOLS[0]).peak <= planned, context


@pytest.mark.slow
@pytest.mark.parametrize("memory", [8, 24, 48, 96])  # one of each limit
@pytest.mark.parametrize("model", GEOMETRIES, ids=named)
def test_the_planned_peak_covers_every_kind_of_step(model: Geometry, memory: int) -> None:
    plan = plan_after(model, memory)
    planned = plan.step
    if not plan.starts:
        pytest.skip("the weights leave no room for a cache")
    for pool in POOLS:
        for name, shape in SHAPES.items():
            copied = most_copied(model, shape.num_rows - shape.num_decodes, memory)
            for num_copied in {0, copied // 2, copied}:
                over_copies = replace(shape, num_copied=num_copied)
                assert replayed(model, memory, over_copies, pool).peak <= planned, name


def test_the_planned_peak_covers_smaller_steps() -> None:
    """Where a command buffer ends depends on the shapes, so a smaller step may need more."""
    for memory in [8, 24, 48, 96]:
        for model in [QWEN3_4B, GPT_OSS_20B]:
            for most in [512, 2048]:
                planned = plan_after(model, memory, most).step
                for rows in range(most * 11 // 16, most + 1, most // 16):
                    for decodes, context in ((0, 0), (63, 512), (8, 4096)):
                        copied = most_copied(model, rows - decodes, memory)
                        shape = StepShape(rows, decodes, context, max(1, decodes), copied)
                        assert replayed(model, memory, shape, 4096).peak <= planned, shape


def test_so_does_that_of_a_chosen_number_of_rows() -> None:
    for rows in [64, 256, 1024, 2048, 8192]:
        for model in GEOMETRIES:
            for memory in (16, 512):
                planned = plan_after(model, memory, rows).step
                for copied in {0, most_copied(model, rows, memory)}:
                    shape = StepShape(rows, num_copied=copied)
                    assert replayed(model, memory, shape, 4096).peak <= planned, (rows, model)


def test_a_plan_is_not_far_above_the_peak() -> None:
    for memory in MACHINES:
        for model in GEOMETRIES:
            planned = plan_after(model, memory).step
            copied = (0, most_copied(model, 449, memory), 8192)
            steps = [replace(SHAPES["decodes and a chunk"], num_copied=number) for number in copied]
            assert planned <= 1.7 * max(
                replayed(model, memory, step, 4096).peak for step in steps
            ), (memory, model)


@pytest.mark.parametrize(
    ("model", "memory", "least_tokens"),
    [
        (QWEN3_4B, 8, 8_192),
        (QWEN3_8B, 16, 16_384),
        (QWEN3_32B, 48, 40_960),
        (GPT_OSS_20B, 24, 8192),
    ],
    ids=str,
)
def test_a_model_starts_where_its_weights_leave_room(
    model: Geometry, memory: int, least_tokens: int
) -> None:
    assert plan_after(model, memory).num_tokens >= least_tokens


def test_a_planned_peak_grows_with_the_rows_that_were_not_measured() -> None:
    assert planned_peak(10_000, 2048, 4096) == 2 * planned_peak(10_000, 2048, 2048)


def test_the_documented_table_is_the_one_that_is_printed() -> None:
    """`python -m tests.perf memory` prints it."""
    text = (Path(__file__).parents[2] / "docs/tuning.md").read_text(encoding="utf-8")
    assert memory_table() in text

"""Instructions are counted as they run: by thread, by turn of a loop, and by what they cost on a GPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.emulator import LaunchError, metal_kernel

ONE = "out[thread_position_in_grid.x] = x[thread_position_in_grid.x];"  # a kernel to add to


def count(body: str, threads: int = 32, header: str = "") -> float:
    """Of a kernel over `threads` floats, in instructions of a simdgroup."""
    kernel = metal_kernel("counted", ["x"], ["out"], body, header, count=True)
    numbers = mx.arange(max(8, threads), dtype=mx.float32)
    kernel(
        inputs=[numbers],
        output_shapes=[(threads,)],
        output_dtypes=[mx.float32],
        grid=(threads, 1, 1),
        threadgroup=(32, 1, 1),
    )
    assert kernel.statistics is not None
    return kernel.statistics.num_instructions


def more(statements: str, value: str = "v") -> float:
    """What the statements add to a kernel that loads `v` and stores it."""
    before = "uint i = thread_position_in_grid.x; float v = x[i];"
    return count(f"{before} {statements} out[i] = {value};") - count(f"{before} out[i] = v;")


def test_every_simdgroup_counts() -> None:
    assert count(ONE, 64) == 2 * count(ONE, 32) > 0


@pytest.mark.parametrize(
    ("statements", "instructions"),
    [
        ("v = v + 1.5f;", 1),
        ("v = v * v + 1.5f;", 1),  # multiplied and added at once
        ("float4 w = float4(v, v + 1.0f, 2.0f * v, v); v = dot(w, w);", 6),
        ("v = fast::exp2(v);", 4),
        ("v = precise::tanh(v);", 20),
        ("v = v / 3.5f;", 4),
        ("v = simd_sum(v);", 10),
        ("v = simd_shuffle_xor(v, ushort(1));", 1),
        ("v = float(half(v));", 2),
    ],
)
def test_an_operation_costs_what_a_gpu_issues(statements: str, instructions: int) -> None:
    assert more(statements) == instructions


def test_a_product_of_matrices_costs_its_multiply_adds_and_registers_nothing() -> None:
    setup = (
        "simdgroup_matrix<float, 8, 8> a[2];"
        "a[0].thread_elements()[0] = v; a[0].thread_elements()[1] = v; a[1] = a[0];"
    )
    value = "a[1].thread_elements()[0]"
    product = "simdgroup_multiply_accumulate(a[1], a[0], a[0], a[1]);"
    assert more(setup, value) == 0
    assert more(setup + product, value) == 16
    assert more(setup + 3 * product, value) == 48


def test_turns_of_a_loop_count_as_often_as_they_run() -> None:
    """With a number of turns that only the run knows; the branch counts, too."""
    loop = "for (int k = 0; k < int(x[{0}]); k++) v = simd_sum(v);"
    turn = more(loop.format(5)) - more(loop.format(4))
    assert turn == more(loop.format(6)) - more(loop.format(5)) >= 11


def test_what_is_not_entered_does_not_count() -> None:
    statements = "if (x[3] > {0}) v = simd_sum(v);"  # a branch that no compiler turns into a choice
    assert more(statements.format("2.5f")) - more(statements.format("3.5f")) == 10


def test_a_run_is_checked_or_counted() -> None:
    with pytest.raises(LaunchError, match="checked or counted, not both"):
        metal_kernel("both", ["x"], ["out"], ONE, check=True, count=True)

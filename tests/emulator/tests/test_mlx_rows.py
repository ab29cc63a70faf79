"""MLX's own kernels over rows, unmodified: sort, reduce and scan."""

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator import OutputBuffer
from tests.emulator.tests.mlx_headers import DTYPES, assert_close, exact, load, random, scalar

REDUCE = "atomic.h reduction/ops.h reduce.h"
SCAN = "binary_ops.h scan.h"
ROWS, COLUMNS = 8, 333

every_dtype = pytest.mark.parametrize("name", DTYPES)


def run_sort(name: str, out_dtype: mx.Dtype, metal: str) -> tuple[mx.array, mx.array]:
    """Rows and the result of sorting each."""
    x = random(DTYPES[name], ROWS, COLUMNS, seed=1)
    by_index = "true" if metal == "uint" else "false"
    run = load("sort.h", f"block_sort<{name}, {metal}, {by_index}, 64, 8>")
    lengths = (COLUMNS, 1, 1, COLUMNS, COLUMNS)  # of a row, then strides
    out = run(
        {0: x, **{2 + k: scalar(length, np.int32) for k, length in enumerate(lengths)}},
        {1: OutputBuffer(x.shape, out_dtype)},
        grid=(64, ROWS, 1),
        threadgroup=(64, 1, 1),
    )[1]
    return x, out


@every_dtype
def test_a_sort_orders_every_row(name: str) -> None:
    x, out = run_sort(name, DTYPES[name], name)
    assert np.array_equal(exact(out), np.sort(exact(x)))


@every_dtype
def test_an_argsort_names_the_order_of_every_row(name: str) -> None:
    x, out = run_sort(name, mx.uint32, "uint")
    assert np.array_equal(np.array(out), np.argsort(exact(x), kind="stable"))


def reduced(name: str, op: str, out_dtype: mx.Dtype, metal: str) -> tuple[mx.array, mx.array]:
    x = random(DTYPES[name], ROWS, COLUMNS, seed=2)
    run = load(REDUCE, f"row_reduce_simple<{name}, {metal}, {op}<{metal}>, int>")
    out = run(
        {0: x, 2: scalar(COLUMNS, np.uint64), 3: scalar(ROWS, np.int64)},
        {1: OutputBuffer((ROWS,), out_dtype)},
        grid=(64, ROWS // 4, 1),
        threadgroup=(64, 1, 1),
    )[1]
    return x, out


@every_dtype
def test_a_sum_of_every_row(name: str) -> None:
    x, out = reduced(name, "Sum", mx.float32, "float")
    assert_close(out / COLUMNS, exact(x).sum(-1) / COLUMNS)


@every_dtype
def test_the_maximum_of_every_row(name: str) -> None:
    x, out = reduced(name, "Max", DTYPES[name], name)
    assert np.array_equal(exact(out), exact(x).max(-1))


def test_whether_all_of_a_row_are_true() -> None:
    x = mx.array(np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) != 2 * COLUMNS + 5)
    run = load(REDUCE, "row_reduce_simple<bool, bool, And<bool>, int>")
    out = run(
        {0: x, 2: scalar(COLUMNS, np.uint64), 3: scalar(ROWS, np.int64)},
        {1: OutputBuffer((ROWS,), mx.bool_)},
        grid=(64, ROWS // 4, 1),
        threadgroup=(64, 1, 1),
    )[1]
    assert np.array(out).tolist() == [row != 2 for row in range(ROWS)]


@every_dtype
def test_a_sum_of_everything(name: str) -> None:
    x = random(DTYPES[name], ROWS, COLUMNS, seed=3)
    run = load(REDUCE, f"all_reduce<{name}, float, Sum<float>, int>")
    size = scalar(x.size, np.uint64)
    out = run(
        {0: x, 2: size, 3: size},
        {1: OutputBuffer((1,), mx.float32)},
        grid=(128, 1, 1),
        threadgroup=(128, 1, 1),
    )[1]
    assert_close(out / x.size, exact(x).sum(keepdims=True).reshape(1) / x.size)


@pytest.mark.parametrize("is_inclusive", [True, False])
@pytest.mark.parametrize("is_reversed", [True, False])
def test_a_scan_of_every_row(is_inclusive: bool, is_reversed: bool) -> None:
    x = mx.array(np.arange(2 * COLUMNS).reshape(2, COLUMNS) % 17, mx.float32)
    order = f"{str(is_inclusive).lower()}, {str(is_reversed).lower()}"
    run = load(SCAN, f"contiguous_scan<float, float, CumSum<float>, 4, {order}>")
    out = run(
        {0: x, 2: scalar(COLUMNS, np.uint64)},
        {1: OutputBuffer(x.shape, mx.float32)},
        # With fewer threads the kernel reads sums that no simdgroup wrote, and drops them.
        grid=(1024, 2, 1),
        threadgroup=(1024, 1, 1),
    )[1]
    rows = exact(x)[:, ::-1] if is_reversed else exact(x)
    sums = np.cumsum(rows, -1) - (0 if is_inclusive else rows)
    assert np.array_equal(exact(out), sums[:, ::-1] if is_reversed else sums)


@every_dtype
def test_a_copy_of_a_transposed_array(name: str) -> None:
    x = random(DTYPES[name], 6, 5, 4, seed=4)
    run = load("copy.h", f"copy_g<{name}, {name}, 2, int>")  # two elements per thread
    out = run(
        {
            0: x,
            2: np.array([4, 5, 6], np.int32),
            3: np.array([1, 4, 20], np.int64),
            5: scalar(3, np.int32),
        },
        {1: OutputBuffer((4, 5, 6), x.dtype)},
        grid=(3, 5, 4),
        threadgroup=(3, 5, 4),
    )[1]
    assert np.array_equal(exact(out), exact(x).transpose())

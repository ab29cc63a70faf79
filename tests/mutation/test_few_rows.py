"""Planted bugs of the products of a few rows, each found by a test."""

from __future__ import annotations

import pytest

from metal_kernels import few_rows, few_rows_trial
from mlxserve.model.few_row_products import FewRowLinear, FewRowProduct
from tests.metal_kernels import test_few_rows, test_few_rows_trial
from tests.metal_kernels.test_few_rows_trial import weights
from tests.model import test_few_row_products
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

__all__ = ["weights"]  # a fixture of the claims

BUGS = {
    "the order of sums is compared in 16 bits alone": Bug(
        few_rows_trial,
        "_has_equal_bits",
        "if not _are_equal(kernel, exact, packs, ROWS[-1:]):",
        "if False:",
        test_few_rows_trial.test_bits_are_compared_in_float32_first,
    ),
    "the slower product is taken": Bug(
        few_rows_trial,
        "_is_faster",
        "return ours < ",
        "return ours > ",
        test_few_rows_trial.test_rows_are_taken_where_they_are_faster,
    ),
    "a kernel that the compiler refuses ends the load": Bug(
        few_rows_trial,
        "try_few_rows",
        "except REFUSALS as",
        "except KeyError as",
        test_few_rows_trial.test_a_kernel_that_is_refused_is_not_taken,
        {"error": ValueError("too many threads")},
    ),
    "inputs for which MLX has a kernel of its own are taken": Bug(
        few_rows,
        "refusal",
        "weights.width <= _NARROW",
        "weights.width < 64",
        test_few_rows.test_weights_that_are_not_taken,
        {"columns": 8, "width": 128, "bits": 4, "group_size": 64, "why": "shape"},
    ),
    "rows of another dtype go to the kernel": Bug(
        FewRowProduct,
        "__call__",
        " and x.dtype == self._dtype",
        "",
        test_few_row_products.test_rows_of_another_dtype_are_mlx_own,
    ),
    "a bias is left out": Bug(
        FewRowLinear,
        "__call__",
        'product + self["bias"]',
        "product",
        test_few_row_products.test_a_bias_is_added,
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, request: pytest.FixtureRequest) -> None:
    BUGS[name].check_found(request, (AssertionError, ValueError))

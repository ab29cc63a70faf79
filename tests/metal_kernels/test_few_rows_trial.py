"""The trial takes a kernel only where its bits are MLX's and its time is less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import pytest

from metal_kernels import few_rows_trial
from metal_kernels.few_rows import PACKS, ROWS, FewRows, Quantised, one_by_one
from metal_kernels.few_rows_trial import FewRowsChoice
from metal_kernels.kernels import Kernels, on_metal
from metal_kernels.metal import MetalBackend
from tests.emulated import emulated_factory
from tests.metal_kernels.mlx_products import packs_of, quantised, rows_alone


@dataclass
class Stub(FewRows):
    """Computes MLX's results for one number of words of a lane, and others for the other."""

    packs: int = PACKS[1]
    wrong_rows: tuple[int, ...] = ()  # numbers of rows whose last row is another's
    error: Exception | None = None
    calls: list[tuple[int, mx.Dtype]] = field(default_factory=list)

    def product(self, rows: mx.array, weights: Quantised, packs: int) -> mx.array:
        if self.error is not None:
            raise self.error
        self.calls.append((len(rows), rows.dtype))
        alone = one_by_one(rows, weights)
        is_wrong = packs != self.packs and rows.dtype == mx.float32
        if is_wrong or (len(rows) in self.wrong_rows and rows.dtype != mx.float32):
            alone = mx.concatenate([alone[:-1], alone[:1]])
        return alone


def timer(*seconds: float) -> Callable[[Callable[[], None]], float]:
    """Answers these in turn: for each number of rows ours, then MLX's."""
    answers = iter(seconds)

    def measure(run: Callable[[], None]) -> float:
        run()
        return next(answers)

    return measure


@pytest.fixture
def weights() -> list[Quantised]:
    return [quantised(8, 256, 4, 32, mx.bfloat16, seed) for seed in (1, 2)]


def test_rows_are_taken_where_they_are_faster(weights: list[Quantised]) -> None:
    chosen = few_rows_trial.try_few_rows(Stub(), weights, timer(1, 2, 3, 2, 2, 2, 1, 5))
    assert chosen == FewRowsChoice(frozenset({2, 5}), PACKS[1])


def test_the_reason_is_told_where_no_rows_are_faster(weights: list[Quantised]) -> None:
    chosen = few_rows_trial.try_few_rows(Stub(), weights, timer(*[2, 1] * len(ROWS)))
    assert chosen == FewRowsChoice(reason="MLX's own products are faster", packs=PACKS[1])


@pytest.mark.parametrize("wrong_rows", [(count,) for count in ROWS])
def test_bits_that_differ_for_any_number_of_rows_are_refused(
    wrong_rows: tuple[int, ...], weights: list[Quantised]
) -> None:
    chosen = few_rows_trial.try_few_rows(Stub(wrong_rows=wrong_rows), weights, timer())
    assert "another order" in chosen.reason
    assert not chosen.rows


def test_bits_are_compared_in_float32_first(weights: list[Quantised]) -> None:
    stub = Stub(packs=0)  # neither order
    chosen = few_rows_trial.try_few_rows(stub, weights, timer(*[1, 2] * len(ROWS)))
    assert "another order" in chosen.reason
    assert stub.calls == [(5, mx.float32)] * len(PACKS)


@pytest.mark.parametrize("error", [RuntimeError("Unable to build"), ValueError("too many threads")])
def test_a_kernel_that_is_refused_is_not_taken(error: Exception, weights: list[Quantised]) -> None:
    assert few_rows_trial.try_few_rows(Stub(error=error), weights) == FewRowsChoice(
        reason=str(error)
    )


def test_as_many_matrices_are_timed_as_caches_do_not_hold(weights: list[Quantised]) -> None:
    timed: list[int] = []
    stub = Stub()

    def count(run: Callable[[], None]) -> float:
        before = len(stub.calls)
        run()
        timed.append(len(stub.calls) - before)
        return 1.0

    few_rows_trial.try_few_rows(stub, weights * 20, count)
    assert timed == [16, 0] * len(ROWS)


@pytest.fixture
def as_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's products of single rows are those of its Metal kernels."""
    monkeypatch.setattr(Quantised, "product", lambda weights, rows: rows_alone(rows, weights))


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_mac")
@pytest.mark.parametrize(("width", "bits"), [(512, 4), (640, 4), (256, 8), (384, 8)])
def test_the_order_of_mlx_kernels_is_found(width: int, bits: int) -> None:
    weights = quantised(16, width, bits, 64, mx.bfloat16)
    kernel = FewRows(Kernels(emulated_factory()))
    chosen = few_rows_trial.try_few_rows(kernel, [weights], timer(*[1, 2] * len(ROWS)))
    assert chosen == FewRowsChoice(frozenset(ROWS), packs_of(weights))


@pytest.mark.metal
def test_a_trial_ends_on_this_machine() -> None:
    """On a Mac with whatever it finds; in the emulator MLX's products are a CPU's, and differ."""
    weights = quantised(8, 256, 8, 32, mx.float16)
    chosen = few_rows_trial.try_few_rows(MetalBackend(on_metal).few_rows, [weights])
    assert bool(chosen.rows) == (chosen.reason == "")

"""CostModel: the time of a step as a function of its contents.

    seconds = a + b * prefill tokens + c * their context + d * decodes + e * contexts of the decodes

Linear in a transformer's work: `a` reads the weights, `b` and `d` multiply them with rows, `c` and
`e` attend. The form and the idea of fitting it to recorded steps are Vidur's (arXiv 2405.05319).
It knows nothing of schedulers or clocks.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxserve.core.errors import InvalidConfig
from mlxserve.request import Chunk

Array = npt.NDArray[np.float64]

MIN_STEPS = 20  # fewer do not determine five coefficients
REWEIGHTINGS = 10
HOLD_OUT = 5  # every fifth step is predicted instead of fitted


@dataclass(frozen=True, slots=True)
class StepWork:
    """A step's work. Contexts are in tokens; a prompt chunk's is taken at its middle."""

    prefill: int = 0  # prompt tokens
    prefill_context: float = 0.0  # sum over prompt tokens of the tokens before them
    decodes: int = 0
    decode_context: int = 0  # sum over decodes of the tokens before them
    chunks: int = 0

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> StepWork:
        prefill = decodes = decode_context = 0
        prefill_context = 0.0
        for chunk in chunks:
            if chunk.start < chunk.request.prefill_end:
                prefill += chunk.length
                prefill_context += chunk.length * (chunk.start + chunk.length / 2)
            else:
                decodes += 1
                decode_context += chunk.start
        return cls(prefill, prefill_context, decodes, decode_context, len(chunks))


@dataclass(frozen=True, slots=True)
class RecordedStep:
    seconds: float
    work: StepWork


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per step, per token, and per token and token of context."""

    step: float
    prefill: float
    prefill_context: float
    decode: float
    decode_context: float

    def seconds(self, work: StepWork) -> float:
        return (
            self.step
            + self.prefill * work.prefill
            + self.prefill_context * work.prefill_context
            + self.decode * work.decodes
            + self.decode_context * work.decode_context
        )


# Calculated, not measured: 8e9 weights at 4.5 bits read at 400 GB/s, 2 flops per weight and row at
# 11 Tflops, 131 kB of keys and values per token. A decode costs half a row's flops, because part of
# them overlaps with reading the weights.
ASSUMED = CostModel(
    step=0.0125, prefill=1.4e-3, prefill_context=4.8e-8, decode=7e-4, decode_context=3.3e-7
)


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost model and its prediction errors on held-out steps."""

    model: CostModel
    num_fitted: int
    num_held_out: int
    mean_error: float  # of the held-out steps, relative and absolute
    median_error: float
    total_error: float  # predicted over measured total time, minus 1

    def text(self) -> str:
        return (
            f"fitted to {self.num_fitted} steps; prediction error on {self.num_held_out} others: "
            f"{self.mean_error:.1%} mean, {self.median_error:.1%} median, "
            f"{self.total_error:+.1%} in total"
        )


def fit(steps: Sequence[RecordedStep]) -> Fit:
    """Non-negative least squares of relative errors. Raises InvalidConfig for too few steps."""
    if len(steps) < MIN_STEPS:
        raise InvalidConfig(
            f"the recording has {len(steps)} steps, but a fit needs {MIN_STEPS}: record a longer load"
        )
    fitted = [step for index, step in enumerate(steps) if index % HOLD_OUT]
    others = steps[::HOLD_OUT]
    model = _fit(fitted)
    errors = [abs(model.seconds(s.work) / s.seconds - 1) for s in others]
    predicted = sum(model.seconds(s.work) for s in others)
    return Fit(
        model,
        len(fitted),
        len(others),
        statistics.fmean(errors),
        statistics.median(errors),
        predicted / sum(s.seconds for s in others) - 1,
    )


def _fit(steps: Sequence[RecordedStep]) -> CostModel:
    """Errors are relative to the predicted time, so the weights are found in a few rounds.

    Relative to the measured time, a noisy machine's slow steps hardly counted, and the model came
    out too fast (by 36 % where equal steps differed by a factor of 3).
    """
    work = np.array([(1.0, *astuple(step.work)[:4]) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    expected = seconds
    for _ in range(REWEIGHTINGS):
        found = _non_negative(work / expected[:, None], seconds / expected)
        expected = np.maximum(work @ found, seconds.min() / 10)
    return CostModel(*map(float, found))


def _non_negative(rows: Array, targets: Array) -> Array:
    """The best least-squares solution over all subsets of coefficients with no negative value.

    That is the constrained optimum, and five coefficients have only 31 subsets.
    """
    # Scale the columns, as contexts are counted in millions and decodes in units.
    scale = np.maximum(rows.max(axis=0), np.finfo(float).tiny)
    best, least = np.zeros(5), math.inf
    for size in range(1, 6):
        for columns in map(list, itertools.combinations(range(5), size)):
            part = rows[:, columns] / scale[columns]
            found, *_ = np.linalg.lstsq(part, targets, rcond=None)
            error = float(((part @ found - targets) ** 2).sum())
            if (found >= 0).all() and error < least:
                least, best = error, np.zeros(5)
                best[columns] = found / scale[columns]
    return best


def read_trace(file: Path) -> list[RecordedStep]:
    """The steps of a recording. Raises InvalidConfig, which names the invalid line."""
    steps = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            steps.append(_recorded(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidConfig(
                f"{file}, line {number}: not a recorded step ({error!r}); to record a file, use "
                "`python -m tests.perf simulate --model MODEL --fit FILE`"
            ) from error
    return steps


def _recorded(fields: dict[str, Any]) -> RecordedStep:
    seconds = float(fields["seconds"])
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"a step took {seconds} seconds")
    work = StepWork(
        int(fields["prefill"]),
        float(fields["prefill_context"]),
        int(fields["decodes"]),
        int(fields["decode_context"]),
        int(fields["chunks"]),
    )
    return RecordedStep(seconds, work)

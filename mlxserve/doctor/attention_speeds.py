"""How fast attention is on this machine, beside mlx's own over contiguous keys, which mlx-lm uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import mlx.core as mx

from metal_kernels.choice import select_backend
from metal_kernels.speeds import TimedAttention, dense_seconds, paged_seconds
from mlxserve import machine
from mlxserve.doctor.measurement import Measurement
from mlxserve.doctor.sections import first_line

_DECODES = ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192))  # batch, context
_PROMPTS = (512, 2048)


@dataclass(frozen=True, slots=True)
class Task:
    """What is timed, and its figure: `amount` per second."""

    name: str
    unit: str
    what: TimedAttention
    amount: float


def tasks(dtype: mx.Dtype) -> Iterable[Task]:
    for batch, context in _DECODES:
        what = TimedAttention(context, batch, dtype=dtype)
        name = f"attention of {batch} decodes at {context} tokens"
        yield Task(name.replace("1 decodes", "1 decode"), "GB/s", what, what.kv_bytes / 1e9)
    for rows in _PROMPTS:
        what = TimedAttention(rows, rows=rows, dtype=dtype)
        yield Task(f"attention of a prompt of {rows} rows", "rows/s", what, rows)


def attention_speeds(wanted: Iterable[Task] | None = None) -> list[Measurement]:
    """On the backend that "auto" selects; float16 on Metal, float32 on a CPU."""
    is_metal = machine.is_metal()
    dtype = mx.float16 if is_metal else mx.float32
    repeats, queued = (5, 8) if is_metal else (2, 1)
    backend = select_backend("auto")
    return [
        _measured(
            task,
            lambda what: paged_seconds(backend, what, repeats, queued),
            lambda what: dense_seconds(what, repeats, queued),
        )
        for task in (tasks(dtype) if wanted is None else wanted)
    ]


def _measured(
    task: Task, ours: Callable[[TimedAttention], float], theirs: Callable[[TimedAttention], float]
) -> Measurement:
    rates: list[float | None] = []
    reasons = []
    for who, seconds in (("mlxserve", ours), ("mlx-lm", theirs)):
        try:
            rates.append(task.amount / seconds(task.what))
        except (RuntimeError, ValueError) as error:
            rates.append(None)
            reasons.append(f"{who}: {first_line(str(error))}")
        mx.clear_cache()
    return Measurement(task.name, task.unit, rates[0], rates[1], "; ".join(reasons) or None)

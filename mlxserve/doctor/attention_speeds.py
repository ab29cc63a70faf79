"""Attention speed of this machine, next to mlx's own over contiguous keys, which mlx-lm uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import mlx.core as mx

from metal_kernels import cooperative_tiles
from metal_kernels.choice import select_backend
from metal_kernels.speeds import (
    TimedAttention,
    dense_seconds,
    latent_seconds,
    memory_bandwidth,
    paged_seconds,
)
from mlxserve.doctor.measurement import Measurement
from mlxserve.doctor.sections import first_line
from mlxserve.system import machine

_DECODES = ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192))  # batch, context
_PROMPTS = (512, 2048)
_CHUNK = 512  # rows of a chunk behind a context
_CONTEXTS = (8192, 32768)
_GROUPS = (1, 4, 8, 16)
# Kv heads and query heads for each, by head dimension, of models that are used much.
_HEADS = {
    64: (8, 8),  # gpt-oss
    128: (8, 4),  # Qwen3, Llama 3
    256: (2, 8),  # Qwen3.5; Gemma 4's layers with a window
    512: (4, 8),  # Gemma 4's other layers
}
# Of these, what MLX computes unfused unless its fused kernel is forced.
_UNFUSED = (256, 512)
_FEW_ROWS = (64, 256)  # an agent's turn, and a chunk beside other answers
_LATENT_HEADS = 16  # GLM-4.7-Flash has 20, DeepSeek V3 128


@dataclass(frozen=True, slots=True)
class Task:
    """A timed computation; its figure is `amount` per second."""

    name: str
    unit: str
    what: TimedAttention
    amount: float
    is_latent: bool = False  # mlx has no attention of the kind: only ours is timed


def tasks(dtype: mx.Dtype, other: mx.Dtype, grown: int) -> Iterable[Task]:
    """Tasks of the report.

    `other`: for groups and long contexts; `grown`: bytes of a grown pool.
    """
    yield from _plain(dtype)
    for context in _CONTEXTS:
        chunk = TimedAttention(context, rows=_CHUNK, dtype=other)
        name = f"attention of {_CHUNK} rows behind {context} tokens"
        yield Task(name, "rows/s", chunk, _CHUNK)
        yield Task(f"{name}, tile kernel", "rows/s", replace(chunk, by_tiles=True), _CHUNK)
        in_8_bits = replace(chunk, is_quantised=True, by_tiles=True)
        yield Task(f"{name}, tile kernel, q8", "rows/s", in_8_bits, _CHUNK)
        decode = TimedAttention(context, dtype=other, is_quantised=True)
        name = f"attention of 1 decode at {context} tokens"
        yield Task(f"{name}, q8", "GB/s", decode, decode.kv_bytes / 1e9)
    yield from _of_head_dims(other)
    for group in _GROUPS:
        decode = TimedAttention(_CONTEXTS[0], group=group, dtype=other)
        name = f"attention of 1 decode at {_CONTEXTS[0]} tokens, {dtype_name(other)}"
        name = f"{name}, {group} query heads per kv head"
        yield Task(name, "GB/s", decode, decode.kv_bytes / 1e9)
        in_8_bits = replace(decode, is_quantised=True)
        yield Task(f"{name}, q8", "GB/s", in_8_bits, in_8_bits.kv_bytes / 1e9)
    for rows in (1, _CHUNK):
        what = TimedAttention(_CONTEXTS[0], rows=rows, group=_LATENT_HEADS, dtype=other)
        who = "1 decode" if rows == 1 else f"{rows} rows"
        name = f"attention of {who} over {_CONTEXTS[0]} latents, {_LATENT_HEADS} heads"
        yield Task(name, "rows/s", what, rows, is_latent=True)
    for pool_bytes, state in ((0, "of its size"), (grown, "that is whole")):
        what = TimedAttention(_CONTEXTS[0], dtype=other, pool_bytes=pool_bytes)
        name = f"attention of 1 decode at {_CONTEXTS[0]} tokens in a pool {state}"
        yield Task(name, "GB/s", what, what.kv_bytes / 1e9)


def _of_head_dims(dtype: mx.Dtype) -> Iterable[Task]:
    """Chunks in each way that they may attend, and decodes, with the heads of models."""
    for head_dim, (kv_heads, group) in _HEADS.items():
        decode = TimedAttention(
            _CONTEXTS[0], kv_heads=kv_heads, head_dim=head_dim, group=group, dtype=dtype
        )
        heads = f"{kv_heads} kv heads of {head_dim}, {group} query heads each"
        name = f"attention of 1 decode at {_CONTEXTS[0]} tokens, {heads}"
        yield Task(name, "GB/s", decode, decode.kv_bytes / 1e9)
        for rows in _FEW_ROWS:
            name = f"attention of {rows} rows behind {_CONTEXTS[0]} tokens, {heads}"
            chunk = replace(decode, rows=rows)
            yield Task(f"{name}, tile kernel", "rows/s", replace(chunk, by_tiles=True), rows)
            yield Task(f"{name}, copies", "rows/s", replace(chunk, by_copies=True), rows)
            if head_dim in cooperative_tiles.HEAD_DIMS:
                tensors = replace(chunk, is_cooperative=True)
                yield Task(f"{name}, cooperative tensors", "rows/s", tensors, rows)
            if head_dim in _UNFUSED:
                unfused = replace(chunk, by_blocks=True)
                yield Task(f"{name}, copies, unfused", "rows/s", unfused, rows)


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _plain(dtype: mx.Dtype) -> Iterable[Task]:
    """Tasks that every report since the first has measured."""
    for batch, context in _DECODES:
        what = TimedAttention(context, batch, dtype=dtype)
        name = f"attention of {batch} decodes at {context} tokens"
        yield Task(name.replace("1 decodes", "1 decode"), "GB/s", what, what.kv_bytes / 1e9)
    for rows in _PROMPTS:
        what = TimedAttention(rows, rows=rows, dtype=dtype)
        yield Task(f"attention of a prompt of {rows} rows", "rows/s", what, rows)


def attention_speeds(wanted: Iterable[Task] | None = None) -> list[Measurement]:
    """Measure the backend that "auto" selects, after the memory's bandwidth.

    In float16 and bfloat16 on Metal; in float32 on a CPU, where only tasks of seconds run.
    """
    is_metal = machine.is_metal()
    repeats, queued = (5, 8) if is_metal else (2, 1)
    backend = select_backend("auto")

    def ours(task: Task) -> float:
        timed = latent_seconds if task.is_latent else paged_seconds
        return timed(backend, task.what, repeats, queued)

    def theirs(task: Task) -> float:
        if task.is_latent:
            raise ValueError("has no attention over latents")
        return dense_seconds(task.what, repeats, queued)

    if wanted is None:
        grown = min(machine.working_set() // 8, 2 << 30) if is_metal else 0
        every = tasks(mx.float16, mx.bfloat16, grown)
        wanted = every if is_metal else _plain(mx.float32)
    bandwidth = Measurement("memory bandwidth, read and written", "GB/s", memory_bandwidth())
    return [bandwidth, *(_measured(task, ours, theirs) for task in wanted)]


def _measured(
    task: Task, ours: Callable[[Task], float], theirs: Callable[[Task], float]
) -> Measurement:
    rates: list[float | None] = []
    reasons = []
    for who, seconds in (("mlxserve", ours), ("mlx-lm", theirs)):
        try:
            rates.append(task.amount / seconds(task))
        except (RuntimeError, ValueError) as error:
            rates.append(None)
            reasons.append(f"{who}: {first_line(str(error))}")
        mx.clear_cache()
    return Measurement(task.name, task.unit, rates[0], rates[1], "; ".join(reasons) or None)

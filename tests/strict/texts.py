"""Every kernel text that the project can generate, written by the installed MLX.

The Metal backend runs with a factory that records calls and computes nothing, so its own planner
chooses the templates. Inside an `mx.export_function` trace MLX then writes each text, on any machine.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from metal_kernels import cooperative_tiles, few_rows, quantised
from metal_kernels.draft_units import MAX_ROWS
from metal_kernels.few_rows import Quantised
from metal_kernels.kernels import SMALLEST_INPUT, Kernel, KernelSpec, Size
from metal_kernels.latents import LATENT_DIMS
from metal_kernels.limits import PAGE_SIZES
from metal_kernels.metal import DTYPES, MetalBackend
from metal_kernels.ops import Attention, Heads
from metal_kernels.refusals import refusal
from metal_kernels.replay import DeltaRows, Readout, Rows, Spans, SsmRows
from metal_kernels.tables import IntArray, SequenceTables

# Query heads per kv head: every number up to 16, then those of models (Falcon has 71).
GROUPS = (*range(1, 17), 20, 24, 28, 32, 40, 48, 64, 71, 128)
KV_HEADS = (1, 2, 3, 4, 8)
_DIMENSIONS = range(8, 1025, 8)  # where head dimensions that the kernels take are looked for
_LISTING = re.compile(r"Generated source code for `(\w+)`:\n```\n(.*?)\n```\n", re.DOTALL)

Template: TypeAlias = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class KernelText:
    """One text, and how many threads a threadgroup has that runs it."""

    kernel: str
    template: Template
    threads: int
    text: str = ""

    @property
    def label(self) -> str:
        values = (f"{name}={str(value).removeprefix('mlx.core.')}" for name, value in self.template)
        return f"{self.kernel}<{', '.join(values)}>"


@dataclass(frozen=True, slots=True)
class _Call:
    """A kernel's call, with all that its text depends on."""

    spec: KernelSpec
    source: str
    text: KernelText  # not written yet
    inputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]
    output_dtypes: tuple[mx.Dtype, ...]
    grid: Size
    threadgroup: Size

    def write(self) -> mx.array:
        """Let MLX print the text."""
        kernel: Any = mx.fast.metal_kernel(
            name=self.spec.name,
            input_names=list(self.spec.inputs),
            output_names=list(self.spec.outputs),
            source=self.source,
            header=self.spec.header,
        )
        outputs: list[mx.array] = kernel(
            inputs=[mx.zeros(shape, dtype) for shape, dtype in self.inputs],
            template=list(self.text.template),
            grid=self.grid,
            threadgroup=self.threadgroup,
            output_shapes=[(8,)] * len(self.output_dtypes),
            output_dtypes=list(self.output_dtypes),
            verbose=True,
        )
        return outputs[0]


class _Recorder:
    """A factory of kernels that compute nothing. Keeps one call of each distinct text."""

    def __init__(self) -> None:
        self.calls: dict[object, _Call] = {}

    def __call__(self, spec: KernelSpec, source: str) -> Kernel:
        def kernel(
            *,
            inputs: list[mx.array],
            template: list[tuple[str, int | mx.Dtype]],
            grid: Size,
            threadgroup: Size,
            output_shapes: list[tuple[int, ...]],
            output_dtypes: list[mx.Dtype],
        ) -> list[mx.array]:
            threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
            text = KernelText(spec.name, tuple(template), threads)
            types = tuple((x.dtype, x.ndim, x.size < SMALLEST_INPUT) for x in inputs)
            key = (text.label, types, tuple(output_dtypes), threads)
            if key not in self.calls:
                self.calls[key] = _Call(
                    spec,
                    source,
                    text,
                    tuple((x.shape, x.dtype) for x in inputs),
                    tuple(output_dtypes),
                    grid,
                    threadgroup,
                )
            pairs = zip(output_shapes, output_dtypes, strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in pairs]

        return kernel


@functools.cache
def every_text() -> tuple[KernelText, ...]:
    """All texts: dtypes, head dimensions, groups, numbers of kv heads, page sizes, 8 bits or not."""
    recorder = _Recorder()
    for dtype in DTYPES:
        for key_dim, value_dim in head_dims(dtype):
            for group in GROUPS:
                for pool in (dtype, quantised.DTYPE):
                    for uses_matrices in (True, False):
                        backend = MetalBackend(recorder, uses_matrices=uses_matrices)
                        _use(backend, dtype, key_dim, value_dim, pool, group=group)
            for page_size in PAGE_SIZES:
                _use(MetalBackend(recorder), dtype, key_dim, value_dim, page_size=page_size)
            for kv_heads in KV_HEADS:
                _use(MetalBackend(recorder), dtype, key_dim, value_dim, kv_heads=kv_heads)
            if key_dim == value_dim:
                _use_rotations(MetalBackend(recorder), dtype, key_dim)
        for dims in LATENT_DIMS:
            _use_latents(MetalBackend(recorder), dtype, *dims)
        _use_few_rows(MetalBackend(recorder), dtype)
        _use_replay(MetalBackend(recorder), dtype)
    return _written(tuple(recorder.calls.values()))


@functools.cache
def some_texts() -> tuple[KernelText, ...]:
    """Those of one head dimension and one head in each group: a few seconds less than all."""
    recorder = _Recorder()
    for dtype in DTYPES:
        _use(MetalBackend(recorder), dtype, 128, 128, group=1)
    return _written(tuple(recorder.calls.values()))


def head_dims(dtype: mx.Dtype) -> Iterator[tuple[int, int]]:
    """The head dimensions of keys and of values that the backend does not refuse."""
    for key_dim in _DIMENSIONS:
        for value_dim in _DIMENSIONS:
            if refusal(key_dim, value_dim, dtype) is None:
                yield key_dim, value_dim


def representative(texts: Sequence[KernelText]) -> list[KernelText]:
    """A few of each kernel: every dtype at 128, of kept states as well, and the extremes of every number in bfloat16.

    The extremes of a number are taken as the first text with its least and greatest value.
    """
    chosen: dict[str, KernelText] = {}
    for kernel in dict.fromkeys(text.kernel for text in texts):
        of_kernel = [text for text in texts if text.kernel == kernel]
        at_128 = [text for text in of_kernel if dict(text.template).get("D", 128) == 128]
        for name, dtype in product(("T", "S"), DTYPES):
            _keep(chosen, [text for text in at_128 if _has(text, name, dtype)])
        _keep(chosen, [text for text in of_kernel if _has(text, "T", quantised.DTYPE)])
        in_bfloat = [text for text in of_kernel if _has(text, "T", mx.bfloat16)]
        for name in dict.fromkeys(name for text in in_bfloat for name, _ in text.template):
            numbers = [dict(text.template)[name] for text in in_bfloat]
            if isinstance(numbers[0], int):
                for extreme in (min(numbers), max(numbers)):
                    _keep(chosen, [t for t in in_bfloat if _has(t, name, extreme)])
    return list(chosen.values())


def _has(text: KernelText, name: str, value: object) -> bool:
    found = dict(text.template).get(name)
    return type(found) is type(value) and found == value


def _keep(chosen: dict[str, KernelText], candidates: list[KernelText]) -> None:
    if candidates:
        chosen.setdefault(candidates[0].text, candidates[0])


def _use(
    backend: MetalBackend,
    dtype: mx.Dtype,
    key_dim: int,
    value_dim: int,
    pool_dtype: mx.Dtype | None = None,
    *,
    group: int = 4,
    kv_heads: int = 2,
    page_size: int = 32,
) -> None:
    """Call every op, with many rows and with one, with and without what a layer may have."""
    keys = backend.new_pool(20, kv_heads, page_size, key_dim, pool_dtype or dtype)
    values = backend.new_pool(20, kv_heads, page_size, value_dim, pool_dtype or dtype)
    heads = kv_heads * group
    slots = np.array([*range(2 * page_size), 5 * page_size + 1, 5 * page_size + 3], np.int32)
    pages = np.array([[0, 1, 5], [2, 3, 4]], np.int32)
    for rows in (slots, slots[:1]):
        new_keys = mx.zeros((len(rows), kv_heads, key_dim), dtype)
        new_values = mx.zeros((len(rows), kv_heads, value_dim), dtype)
        backend.write_kv(new_keys, new_values, keys, values, rows)
        if keys.dtype == quantised.DTYPE:  # rows from the disk cache
            new_keys = mx.zeros((len(rows), kv_heads, key_dim + 4), pool_dtype)
            backend.write_kv(new_keys, new_keys, keys, values, rows)
    backend.copy_pages(keys, values, np.array([0], np.int32), np.array([11], np.int32), page_size)
    long = SequenceTables(
        np.arange(256 // page_size, dtype=np.int32)[None],
        np.array([256], np.int32),
        np.array([0, 256], np.int32),
        page_size,
    )
    backend.paged_prefill(
        mx.zeros((256, heads, key_dim), dtype), keys, values, long, Attention(1.0)
    )
    for sinks in (None, mx.zeros((heads,), dtype)):
        for sequences in (1, 2):
            lengths = np.array([2 * page_size + 1, 5], np.int32)[:sequences]
            starts = np.arange(sequences + 1, dtype=np.int32)
            one_row_each = SequenceTables(pages[:sequences], lengths, starts, page_size)
            queries = mx.zeros((sequences, heads, key_dim), dtype)
            backend.paged_decode(queries, keys, values, one_row_each, Attention(1.0), sinks)
            for drafted in (2, MAX_ROWS):
                draft = _rows_of_a_draft(pages[:1], page_size, drafted)
                queries = mx.zeros((drafted, heads, key_dim), dtype)
                backend.paged_decode(queries, keys, values, draft, Attention(1.0), sinks)
            chunks = SequenceTables(pages[:sequences], lengths, 3 * starts, page_size)
            queries = mx.zeros((3 * sequences, heads, key_dim), dtype)
            backend.paged_prefill(
                queries, keys, values, chunks, Attention(1.0, window=7, softcap=3.0), sinks
            )
    image = replace(chunks, ends=np.repeat(lengths, 3))  # each row sees the whole chunk
    backend.paged_prefill(queries, keys, values, image, Attention(1.0))
    if key_dim == value_dim and cooperative_tiles.is_supported(key_dim, dtype):
        for of_chunks, some_sinks in ((chunks, None), (image, sinks)):
            backend.attend_tiles(
                queries, keys, values, of_chunks, Attention(1.0), some_sinks, is_cooperative=True
            )


def _rows_of_a_draft(pages: IntArray, page_size: int, count: int) -> SequenceTables:
    """Rows of one sequence, whose positions follow one another."""
    lengths = page_size + np.arange(1, count + 1, dtype=np.int32)
    starts = np.arange(count + 1, dtype=np.int32)
    return SequenceTables(np.repeat(pages, count, axis=0), lengths, starts, page_size)


def _use_rotations(backend: MetalBackend, dtype: mx.Dtype, dim: int) -> None:
    """Rows of one projection and of three, with norms and gates and without, of every part that is rotated."""
    slots, heads = np.array([3, 17], np.int32), Heads(6, 2, dim, dim, step=dim)
    cases = (
        heads,
        heads._replace(rotated=dim // 4, is_traditional=True, step=2 * dim),
        heads._replace(rotated=dim // 2, epsilon=(1e-6, 1e-6)),
        heads._replace(rotated=0, epsilon=(1e-6, 1e-6)),
        heads._replace(rotated=dim, epsilon=(1e-6, 1e-6, 1e-6)),
    )
    for pool_dtype in (dtype, quantised.DTYPE):
        first, second = (backend.new_pool(4, 2, 16, dim, pool_dtype) for _ in range(2))
        pools = first, second
        for number, case in enumerate(cases):
            turns = mx.zeros((2, 1, 1, case.rotated) if case.rotated else 8)
            norms = None if case.epsilon is None else (mx.zeros(dim, dtype), mx.zeros(dim, dtype))
            rows = [mx.zeros((2, 1, width), dtype) for width in case.widths]
            projected = rows if number % 2 else [mx.concatenate(rows, axis=-1)]
            backend.rotate_and_write(projected, turns, case, norms, pools, slots)


def _use_latents(backend: MetalBackend, dtype: mx.Dtype, latent_dim: int, rope_dim: int) -> None:
    """As `_use`, with every number of heads that the dispatch depends on."""
    k_pool, v_pool = (backend.new_pool(4, 1, 16, dim, dtype) for dim in (latent_dim, rope_dim))
    for slots in (np.arange(16, dtype=np.int32), np.array([17], np.int32)):
        latents = mx.zeros((len(slots), 1, latent_dim), dtype)
        keys = mx.zeros((len(slots), 1, rope_dim), dtype)
        backend.write_kv(latents, keys, k_pool, v_pool, slots)
    backend.copy_pages(k_pool, v_pool, np.array([0], np.int32), np.array([3], np.int32), 16)
    pages, lengths = np.array([[0, 1]], np.int32), np.array([20], np.int32)
    for heads in GROUPS:
        for num_rows in (1, 3):
            tables = SequenceTables(pages, lengths, np.array([0, num_rows], np.int32), 16)
            q_latent = mx.zeros((num_rows, heads, latent_dim), dtype)
            q_rope = mx.zeros((num_rows, heads, rope_dim), dtype)
            backend.paged_latent(q_latent, q_rope, k_pool, v_pool, tables, scale=1.0)


def _use_few_rows(backend: MetalBackend, dtype: mx.Dtype) -> None:
    """Products of every number of rows, with every kind of weights."""
    for bits, group_size in product(few_rows.BITS, few_rows.GROUP_SIZES):
        packed, scales, biases = mx.quantize(mx.zeros((8, 256)), group_size, bits)
        weights = Quantised(packed, scales, biases, group_size, bits).astype(dtype)
        for num_rows, packs in product(few_rows.ROWS, few_rows.PACKS):
            backend.few_rows.product(mx.zeros((num_rows, 256), dtype), weights, packs)


def _use_replay(backend: MetalBackend, dtype: mx.Dtype) -> None:
    """Rows of drafts, with states in float32 and in the dtype of the rows."""
    states = {dtype, mx.float32}
    for (rows, readout, shape), kept_in in product(_recurrences(dtype), states):
        state, spans = mx.zeros(shape, kept_in), Spans([(0, 0, 2), (1, 2, 2)])
        backend.replay.outputs(rows, readout, state, spans)
        backend.replay.states(rows, state, spans)


def _recurrences(dtype: mx.Dtype) -> Iterator[tuple[Rows, Readout, tuple[int, ...]]]:
    """Those of published models: numbers of a state, and gates of a head or of each number."""
    for key_dim, has_gates in product((32, 64, 128, 192, 256), (False, True)):
        keys, values = mx.zeros((4, 2, key_dim), dtype), mx.zeros((4, 4, 128), dtype)
        gates = mx.zeros((4, 4, key_dim) if has_gates else (4, 4))
        rows = DeltaRows(keys, values, gates, mx.zeros((4, 4), dtype))
        yield rows, (keys,), (2, 4, 128, key_dim)
    for size in (32, 64, 128, 256):
        inputs, heads = mx.zeros((4, 2, size), dtype), mx.zeros(8)
        of_ssm = SsmRows(mx.zeros((4, 8, 64), dtype), mx.zeros((4, 8)), heads, inputs)
        yield of_ssm, (inputs, heads.astype(dtype)), (2, 8, 64, size)


def _written(calls: Sequence[_Call]) -> tuple[KernelText, ...]:
    """What MLX prints for these calls, in one trace."""

    def trace(unused: mx.array) -> list[mx.array]:
        return [call.write() for call in calls]

    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        sys.stdout.flush()
        stdout = os.dup(1)
        with printed.open("wb") as file:
            os.dup2(file.fileno(), 1)
        try:
            mx.export_function(str(Path(folder) / "trace.mlxfn"), trace, mx.zeros((1,)))
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        listings = _LISTING.findall(printed.read_text())
    texts: dict[str, KernelText] = {}
    for call, (name, text) in zip(calls, listings, strict=True):
        assert name == call.spec.name
        known = texts.get(text)
        if known is None or known.threads < call.text.threads:
            texts[text] = replace(call.text, text=text)
    return tuple(texts.values())

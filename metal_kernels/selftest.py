"""The self-test of in-place writes, run on this machine before anything relies on them.

MLX does not document that a kernel may write an array declared as its input, nor that kernels
sharing a fence stay in order. So a few steps are launched without waiting: each writes every slot
anew and attends over them, with decodes and with a chunk, and only its fences order it after the
previous step. A lost, late or early write gives some step the keys of another. Each `StepWay` is
tested in the same manner.

At start-up this is `QUICK`, and `QUICK_WAYS`. The doctor runs `thorough` loads, whose kernels take long enough to
overlap, and next to each a *control*: the same steps with the fences withheld. It must fail; where
it passes, the test shows nothing on this machine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels import quantised
from metal_kernels.kernels import Factory, Kernel, KernelSpec
from metal_kernels.limits import MIN_COPIED_ROWS
from metal_kernels.metal import DTYPES, MetalBackend
from metal_kernels.numpy_attention import Floats, attend, in_8_bits, unpacked
from metal_kernels.ops import Attention
from metal_kernels.proof_steps import ProofSteps
from metal_kernels.reading import evaluate, read
from metal_kernels.rounding import TOLERANCES, row_error
from metal_kernels.step_ways import StepWay
from metal_kernels.tables import IntArray, SequenceTables

log = logging.getLogger("metal_kernels")

_PAGE_SIZE = 32


@dataclass(frozen=True, slots=True)
class FenceLoad:
    """The size of a self-test: the pools' shape and the steps."""

    dtype: mx.Dtype
    num_sequences: int
    length: int  # tokens of each sequence
    kv_heads: int
    group: int  # query heads per kv head
    head_dim: int
    chunk: int  # rows that the first sequence attends with, next to the decodes
    steps: int
    is_quantised: bool = False  # the pools; `dtype` is that of rows and queries
    way: StepWay | None = None  # None: op by op

    @property
    def label(self) -> str:
        """Describe the pools' contents, and the way of the steps."""
        contents = "q8" if self.is_quantised else str(self.dtype).removeprefix("mlx.core.")
        return contents if self.way is None else f"{contents}, {self.way.value}"

    @property
    def pool_dtype(self) -> mx.Dtype:
        return quantised.DTYPE if self.is_quantised else self.dtype

    @property
    def num_pages(self) -> int:
        """One page more than is written: pages are copied to it."""
        return self.num_sequences * self._pages_of_a_sequence + 1

    @property
    def pool_bytes(self) -> int:
        """Bytes of keys and values."""
        width = quantised.row_width(self.head_dim, self.pool_dtype)
        row = self.kv_heads * width * self.pool_dtype.size
        return 2 * self.num_pages * _PAGE_SIZE * row

    @property
    def _pages_of_a_sequence(self) -> int:
        return -(-self.length // _PAGE_SIZE)

    def page_tables(self) -> IntArray:
        """Return the pages in descending order, so that no two are consecutive."""
        pages = np.arange(self.num_pages - 2, -1, -1, dtype=np.int32)
        return pages.reshape(self.num_sequences, -1)

    def slots(self) -> IntArray:
        """Slots of all tokens, sequence by sequence."""
        positions = np.arange(self.length)
        pages = self.page_tables()[:, positions // _PAGE_SIZE]
        return (pages * _PAGE_SIZE + positions % _PAGE_SIZE).astype(np.int32).reshape(-1)

    def decodes(self) -> SequenceTables:
        return SequenceTables(
            page_tables=self.page_tables(),
            context_lens=np.full(self.num_sequences, self.length, np.int32),
            query_starts=np.arange(self.num_sequences + 1, dtype=np.int32),
            page_size=_PAGE_SIZE,
        )

    def chunks(self) -> SequenceTables:
        return SequenceTables(
            page_tables=self.page_tables()[:1],
            context_lens=np.array([self.length], np.int32),
            query_starts=np.array([0, self.chunk], np.int32),
            page_size=_PAGE_SIZE,
        )


# Whole pages and single rows, two partitions; milliseconds next to compiling the kernels.
QUICK = FenceLoad(
    mx.float32, num_sequences=1, length=325, kv_heads=2, group=2, head_dim=64, chunk=5, steps=4
)


QUICK_Q8 = replace(QUICK, is_quantised=True)
QUICK_GROUP = replace(QUICK, group=8)  # runs on another kernel


def in_way(load: FenceLoad, way: StepWay) -> FenceLoad:
    """Return the load in this way. Copies are made of a long chunk's pages, in 16 bits."""
    if not way.has_copies:
        return replace(load, way=way)
    chunk = MIN_COPIED_ROWS + 3
    length = max(load.length, chunk + 6)
    return replace(load, way=way, dtype=mx.float16, chunk=chunk, length=length)


QUICK_WAYS = {way: in_way(QUICK, way) for way in StepWay}


def thorough(dtype: mx.Dtype, *, is_quantised: bool = False) -> FenceLoad:
    """A pool of 64 MB, written eight times."""
    return FenceLoad(
        dtype,
        num_sequences=8,
        length=2043,
        kv_heads=16 if is_quantised else 16 // dtype.size,
        group=4,
        head_dim=128,
        chunk=64,
        steps=8,
        is_quantised=is_quantised,
    )


def every_thorough_load() -> list[FenceLoad]:
    """Thorough loads of each dtype, of pools in 8 bits, and in each way."""
    return [
        *(thorough(dtype) for dtype in DTYPES),
        thorough(mx.float16, is_quantised=True),
        *(in_way(thorough(mx.float16), way) for way in StepWay),
    ]


@dataclass(frozen=True, slots=True)
class FenceProof:
    """The errors with fences (None: none) and without them, in the control."""

    load: FenceLoad
    with_fences: str | None
    without_fences: str | None


def why_not_in_place(backend: MetalBackend, load: FenceLoad = QUICK) -> str | None:
    """Return the error of the backend's in-place writes on this machine; None if correct."""
    return _Test(load, backend).error()


def prove(factory: Factory, loads: Sequence[FenceLoad] | None = None) -> Iterator[FenceProof]:
    """Run the self-test and its control, by default of every thorough load."""
    for load in every_thorough_load() if loads is None else loads:
        proof = FenceProof(
            load,
            _Test(load, MetalBackend(factory)).error(),
            _Test(load, MetalBackend(_without_fences(factory))).error(),
        )
        log.info(
            "self-test in %s over %.0f MB: with fences %s, without %s",
            load.label,
            load.pool_bytes / 1e6,
            proof.with_fences or "right",
            proof.without_fences or "right as well, so it shows nothing on this machine",
        )
        # A thorough load leaves half a gigabyte of freed arrays.
        mx.clear_cache()
        yield proof


def _without_fences(factory: Factory) -> Factory:
    """Return kernels that wait for nothing on the device, launched in the same order.

    Their fence is an array that no kernel wrote. It depends on the real one, so mlx launches what
    makes that first, but puts no barrier between the two.
    """

    def make(spec: KernelSpec, source: str) -> Kernel:
        kernel = factory(spec, source)
        written_by_none = mx.zeros(8, mx.int32)
        evaluate(written_by_none)

        def call(*, inputs: list[mx.array], **arguments: Any) -> list[mx.array]:
            bound = [
                mx.depends(written_by_none, array) if name.startswith("after") else array
                for name, array in zip(spec.inputs, inputs, strict=True)
            ]
            return kernel(inputs=bound, **arguments)

        return call

    return make


class _Test:
    """The steps of a load on one backend, and the exact answers."""

    def __init__(self, load: FenceLoad, backend: MetalBackend) -> None:
        self._load = load
        self._backend = backend
        random = np.random.default_rng(0)
        heads = load.kv_heads * load.group
        rows = load.num_sequences * load.length

        def draw(*shape: int) -> Floats:
            drawn = mx.array(random.standard_normal(shape, np.float32))
            return read(drawn.astype(load.dtype).astype(mx.float32))

        self._keys = draw(rows, load.kv_heads, load.head_dim)
        self._values = draw(rows, load.kv_heads, load.head_dim)
        self._decode_queries = draw(load.num_sequences, heads, load.head_dim)
        self._chunk_queries = draw(load.chunk, heads, load.head_dim)

    def error(self) -> str | None:
        """Return the first error; None if all answers are right."""
        load = self._load
        copied = np.array([0], np.int32), np.array([load.num_pages - 1], np.int32)
        try:
            shape = (load.num_pages, load.kv_heads, _PAGE_SIZE, load.head_dim)
            k_pool, v_pool = (self._backend.new_pool(*shape, load.pool_dtype) for _ in range(2))
            outputs = self._launch(k_pool, v_pool)
            self._backend.copy_pages(k_pool, v_pool, *copied, _PAGE_SIZE)
            self._backend.settle()
            answers = [tuple(map(_floats, pair)) for pair in outputs]
            wrong = self._error_of_pools(k_pool, v_pool, copied)
        except (RuntimeError, ValueError) as error:
            # A text that Apple's compiler refuses; more threads than the kernel's registers allow.
            return f"a kernel does not run: {str(error).strip()[:200]}"
        return wrong or self._error_of_answers(answers)

    def _launch(self, k_pool: mx.array, v_pool: mx.array) -> list[tuple[mx.array, mx.array]]:
        """Launch all steps without waiting: the (decodes, chunk) of each."""
        load, backend = self._load, self._backend
        queries = mx.array(self._decode_queries).astype(load.dtype)
        asked_by_chunk = mx.array(self._chunk_queries).astype(load.dtype)
        written = [
            [mx.array(rows).astype(load.dtype) for rows in self._written(step)]
            for step in range(load.steps)
        ]
        # Before the first step, because waiting for one's keys would wait for the step before it.
        evaluate(queries, asked_by_chunk, *(array for pair in written for array in pair))
        steps = ProofSteps(
            backend,
            load.way,
            (k_pool, v_pool),
            load.slots(),
            load.decodes(),
            load.chunks(),
            Attention(load.head_dim**-0.5),
            queries,
            asked_by_chunk,
        )
        return [steps.launch(keys, values) for keys, values in written]

    def _written(self, step: int) -> tuple[Floats, Floats]:
        """Keys and values of a step: the drawn ones, their dimensions shifted."""
        keys, values = (np.roll(rows, step, axis=-1) for rows in (self._keys, self._values))
        return keys, values

    def _right(self, step: int) -> tuple[Floats, Floats]:
        keys, values = self._written(step)
        if self._load.is_quantised:
            keys, values = in_8_bits(keys), in_8_bits(values)
        length = self._load.length
        decoded = [
            attend(query[None], keys[first : first + length], values[first : first + length])
            for query, first in zip(self._decode_queries, range(0, len(keys), length), strict=True)
        ]
        prefilled = attend(self._chunk_queries, keys[:length], values[:length])
        return np.concatenate(decoded), prefilled

    def _error_of_answers(self, answers: list[tuple[Floats, ...]]) -> str | None:
        right = [self._right(step) for step in range(self._load.steps)]
        for step, pair in enumerate(answers):
            for kind, (name, answer) in enumerate(zip(("", "the chunk of "), pair, strict=True)):
                if self._is_alike(answer, right[step][kind]):
                    continue
                who = f"{name}step {step}"
                if not answer.any():
                    return f"{who} attended over keys that were not written yet"
                for other, another in enumerate(right):
                    if self._is_alike(answer, another[kind]):
                        return f"{who} attended over the keys of step {other}"
                return f"{who} attended over a mixture of keys"
        return None

    def _is_alike(self, ours: Floats, theirs: Floats) -> bool:
        """Compare two arrays; False for NaN."""
        return row_error(ours, theirs) <= TOLERANCES[self._load.dtype]

    def _error_of_pools(
        self, k_pool: mx.array, v_pool: mx.array, copied: tuple[IntArray, IntArray]
    ) -> str | None:
        """Check what the last step wrote, and the page that was copied."""
        held = self._backend.read_kv(k_pool, v_pool, self._load.slots())
        source, target = (
            self._backend.read_kv(k_pool, v_pool, _slots_of(int(page[0]))) for page in copied
        )
        written = self._written(self._load.steps - 1)
        for number, name in enumerate(("keys", "values")):
            if not self._holds(held[number], written[number]):
                return f"{name} written by a kernel are not in the pool: mlx handed it a copy"
            if not np.array_equal(_floats(source[number]), _floats(target[number])):
                return f"a page of {name} was not copied"
        return None

    def _holds(self, held: mx.array, written: Floats) -> bool:
        """True if the pool holds the written rows bit by bit, or within 8 bits.

        On the border of two values a GPU may take either.
        """
        if not self._load.is_quantised:
            return np.array_equal(_floats(held), written)
        most = 0.51 / 127 * np.abs(written).max(axis=-1, keepdims=True)
        return bool((np.abs(unpacked(read(held)) - written) <= most).all())


def _slots_of(page: int) -> IntArray:
    return page * _PAGE_SIZE + np.arange(_PAGE_SIZE, dtype=np.int32)


def _floats(array: mx.array) -> npt.NDArray[np.float32]:
    return read(array.astype(mx.float32))

"""The self-test of in-place writes, run on this machine before anything relies on them.

MLX does not document that a kernel may write an array declared as its input, nor that kernels
sharing a fence stay in order. So at start-up a few steps are launched without waiting: each writes
every slot anew and attends over them, and only its fence orders it after the previous step. A lost,
late or early write gives some step the keys of another.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.metal import MetalBackend
from metal_kernels.reading import read, view
from metal_kernels.tables import SequenceTables

_STEPS = 4
_PAGE_SIZE = 32
_NUM_PAGES = 12
_LENGTH = 10 * _PAGE_SIZE + 5  # whole pages, single rows, two partitions; one page is free
_HEADS = 2
_HEAD_DIM = 64
_TOLERANCE = 1e-4  # of values around 1, in float32

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step writes and queries, and the right answer."""

    keys: Floats  # (length, heads, head_dim)
    values: Floats
    queries: Floats  # (1, heads, head_dim)

    @classmethod
    def draw(cls, seed: int) -> _Step:
        random = np.random.default_rng(seed)
        rows = (_LENGTH, _HEADS, _HEAD_DIM)
        shapes = (rows, rows, (1, _HEADS, _HEAD_DIM))
        keys, values, queries = (random.standard_normal(s, np.float32) for s in shapes)
        return cls(keys, values, queries)

    def answer(self, queries: Floats) -> Floats:
        scores = np.einsum("qhd,khd->hk", queries, self.keys) * _HEAD_DIM**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        answer: Floats = np.einsum("hk,khd->hd", weights, self.values)[None]
        return answer


def why_not_in_place(backend: MetalBackend) -> str | None:
    """What went wrong, or None where the backend's writes are correct on this machine."""
    pages = np.arange(_NUM_PAGES - 2, -1, -1, dtype=np.int32)  # the last page of the pool is free
    positions = np.arange(_LENGTH)
    slots = pages[positions // _PAGE_SIZE] * _PAGE_SIZE + positions % _PAGE_SIZE
    tables = SequenceTables(
        page_tables=pages[None],
        context_lens=np.array([_LENGTH], np.int32),
        query_starts=np.array([0, 1], np.int32),
        page_size=_PAGE_SIZE,
    )
    steps = [_Step.draw(seed) for seed in range(_STEPS)]
    shape = (_NUM_PAGES, _HEADS, _PAGE_SIZE, _HEAD_DIM)
    pools = [backend.new_pool(*shape, mx.float32) for _ in range(2)]
    copied = np.array([pages[0]], np.int32), np.array([_NUM_PAGES - 1], np.int32)
    try:
        outputs = []
        for step in steps:
            keys, values, queries = map(mx.array, (step.keys, step.values, step.queries))
            backend.write_kv(keys, values, pools[0], pools[1], slots.astype(np.int32))
            output = backend.paged_decode(
                queries, pools[0], pools[1], tables, scale=_HEAD_DIM**-0.5
            )
            mx.async_eval(output)  # type: ignore[no-untyped-call]
            outputs.append(output)
        backend.copy_pages(pools[0], pools[1], *copied, _PAGE_SIZE)
        backend.settle()
        answers = [read(output) for output in outputs]
    except RuntimeError as error:  # mlx raises it for a text that Apple's compiler refuses
        return f"a kernel does not run: {str(error).strip()[:200]}"
    return _error_of_pools(pools, steps[-1], slots, copied) or _error_of_answers(answers, steps)


def _error_of_answers(answers: list[Floats], steps: list[_Step]) -> str | None:
    for number, (answer, step) in enumerate(zip(answers, steps, strict=True)):
        expected = step.answer(step.queries)
        if np.abs(answer - expected).max() <= _TOLERANCE:
            continue
        if not answer.any():
            return f"step {number} attended over keys that were not written yet"
        for other, another in enumerate(steps):
            if np.abs(answer - another.answer(step.queries)).max() <= _TOLERANCE:
                return f"step {number} attended over the keys of step {other}"
        return f"step {number} attended over a mixture of keys"
    return None


def _error_of_pools(
    pools: list[mx.array],
    last: _Step,
    slots: npt.NDArray[np.int32],
    copied: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]],
) -> str | None:
    for name, pool, rows in zip(("keys", "values"), pools, (last.keys, last.values), strict=True):
        memory = view(pool)
        held = memory[slots // _PAGE_SIZE, :, slots % _PAGE_SIZE]
        if not np.array_equal(held, rows):
            return f"{name} written by a kernel are not in the pool: mlx handed it a copy"
        if not np.array_equal(memory[copied[1]], memory[copied[0]]):
            return f"a page of {name} was not copied"
    return None

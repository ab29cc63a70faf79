"""ProofSteps: the steps that the self-test launches, in each way that a step may go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx

from metal_kernels.first_page import first_pages
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention, Heads, Slots
from metal_kernels.recording import StepInputs
from metal_kernels.step_ways import StepWay
from metal_kernels.tables import Plans, RecordedTables, SequenceTables

# Writes the keys and values of a step, (T, kv_heads, head_dim).
Write: TypeAlias = Callable[[mx.array, mx.array], None]
# Writes, and returns what the decodes attend.
Decode: TypeAlias = Callable[[mx.array, mx.array], mx.array]
Answers: TypeAlias = tuple[mx.array, mx.array]  # of the decodes, and of a chunk

NUM_BLOCKS = 4  # of a chunk that attends in blocks


def record(step: Callable[..., Any]) -> Callable[..., Any]:
    """A function that builds the same graph as `step`, which it calls once."""
    recorded: Callable[..., Any] = mx.compile(step)
    return recorded


@dataclass(slots=True)
class ProofSteps:
    """Steps that all write these slots, and attend with the same queries."""

    backend: MetalBackend
    way: StepWay | None  # None: op by op
    pools: tuple[mx.array, mx.array]
    slots: Slots
    tables: SequenceTables
    chunks: SequenceTables
    attention: Attention
    queries: mx.array
    chunk_queries: mx.array
    _recorded: Decode | None = field(default=None, init=False)

    def launch(self, keys: mx.array, values: mx.array) -> Answers:
        """Launch a step without waiting for it."""
        if self.way is not None and self.way.has_copies:
            # Before the decodes, which wait for the write as well.
            self._write(keys, values)
            prefilled = self._prefilled()
            mx.async_eval(prefilled)  # type: ignore[no-untyped-call]
            decoded = self._decoded()
        else:
            decoded = self._decoder()(keys, values)
            prefilled = self._prefilled()
        mx.async_eval(decoded, prefilled)  # type: ignore[no-untyped-call]
        return decoded, prefilled

    def _decoder(self) -> Decode:
        if self.way is StepWay.RECORDED:
            return self._by_recording
        return partial(self._built, self._rotate if self.way is StepWay.ROTATED else self._write)

    def _built(self, write: Write, keys: mx.array, values: mx.array) -> mx.array:
        write(keys, values)
        return self._decoded()

    def _decoded(self) -> mx.array:
        return self.backend.paged_decode(self.queries, *self.pools, self.tables, self.attention)

    def _prefilled(self) -> mx.array:
        chunk = self.chunk_queries, *self.pools, self.chunks, self.attention
        if self.way is StepWay.BLOCKS:
            scores = self.chunk_queries[..., 0].nbytes * int(self.chunks.context_lens[0])
            return self.backend.attend_copies(*chunk, block_bytes=scores // NUM_BLOCKS)
        return self.backend.paged_prefill(*chunk)

    def _write(self, keys: mx.array, values: mx.array) -> None:
        self.backend.write_kv(keys, values, *self.pools, self.slots)

    def _rotate(self, keys: mx.array, values: mx.array) -> None:
        """Rotate by nothing: a cosine is 1, and a sine 0. The keys stand for queries, too."""
        num_rows, num_kv, dim = keys.shape
        turns = mx.broadcast_to(mx.arange(dim) < dim // 2, (num_rows, 1, 1, dim))
        self.backend.rotate_and_write(
            [side.reshape(num_rows, 1, -1) for side in (keys, keys, values)],
            mx.contiguous(turns.astype(mx.float32)),
            Heads(num_kv, num_kv, dim, rotated=dim),
            None,
            self.pools,
            self.slots,
        )

    def _by_recording(self, keys: mx.array, values: mx.array) -> mx.array:
        if self._recorded is None:
            # A step that is built shows what is uploaded for a recorded one.
            decoded = self._built(self._write, keys, values)
            makers = {key: make for key, (make, _) in self.tables.uploads.items()}
            inputs = StepInputs.collect(self.slots, Plans(), self.tables, makers, self.pools[0])
            self._recorded = partial(self._replay, inputs, record(self._recording(inputs)))
            return decoded
        return self._recorded(keys, values)

    def _replay(
        self, inputs: StepInputs, build: Callable[..., Any], keys: mx.array, values: mx.array
    ) -> mx.array:
        k_pools, fences = self.pools[:1], self.backend.fences
        decoded, after = build(
            keys,
            values,
            self.queries,
            inputs.arrays(),
            first_pages(self.pools),
            fences.state(k_pools),
        )
        fences.resume(k_pools, after)
        return decoded  # type: ignore[no-any-return]

    def _recording(self, like: StepInputs) -> Callable[..., tuple[mx.array, list[list[mx.array]]]]:
        """Return a step as a function of arrays, as `mlxserve/model/step_graphs.py` has it."""
        backend, attention = self.backend, self.attention
        num_sequences, page_size = len(self.tables), self.tables.page_size

        def step(
            keys: mx.array,
            values: mx.array,
            queries: mx.array,
            arrays: list[mx.array],
            pools: list[mx.array],
            fences: list[list[mx.array]],
        ) -> tuple[mx.array, list[list[mx.array]]]:
            inputs, plans = like.over(arrays), Plans()
            inputs.keep_moves(plans)
            tables = RecordedTables(num_sequences, page_size, inputs.uploads)
            kernels = backend.recording(pools[:1], fences)
            k_pool, v_pool = pools
            kernels.write_kv(keys, values, k_pool, v_pool, inputs.slots, plans)
            decoded = kernels.paged_decode(queries, k_pool, v_pool, tables, attention)
            return decoded, kernels.fences.state([k_pool])

        return step

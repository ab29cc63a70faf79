"""KVPool: the arrays of keys and values of all layers.

Knows neither requests nor the owners of pages: rows are written to the slots of a StepLayout, and
attend over the pages that it names. All arrays belong to the engine's thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels import quantised
from metal_kernels.ops import Attention, Backend, Heads, Norms, Projected
from metal_kernels.reading import read
from metal_kernels.tables import Plans
from mlxserve.cache.layout import StepLayout
from mlxserve.core.errors import OutOfMemory, in_one_line

log = logging.getLogger("mlxserve.cache")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The shape of one layer's keys and values."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype  # of the layer's computation
    window: int | None = None  # positions a row sees, including its own; None for all
    # Latent attention: keys are the latent vectors, which are the values as well, and values are
    # the rotated part that all heads' keys have in common.
    is_latent: bool = False
    is_quantised: bool = False  # in 8 bits, with a scale for each slot and head

    @property
    def pool_dtype(self) -> mx.Dtype:
        return quantised.DTYPE if self.is_quantised else self.dtype

    @property
    def row_widths(self) -> tuple[int, int]:
        """Numbers of elements of a slot's row of one head in the pools of keys and of values."""
        key, value = (
            quantised.row_width(dim, self.pool_dtype) for dim in (self.key_dim, self.value_dim)
        )
        return key, value

    def bytes_per_token(self) -> int:
        return self.kv_heads * sum(self.row_widths) * self.pool_dtype.size


Backends: TypeAlias = Backend | Sequence[Backend]  # one for all layers, or one for each

# Errors that mlx, numpy and the operating system raise if there is no memory.
_REFUSALS = (RuntimeError, MemoryError, OSError)


def refused_memory(num_pages: int, nbytes: int, error: BaseException) -> OutOfMemory:
    """Return the error for `num_pages` pages of `nbytes` bytes in all that the system refused."""
    log.debug("memory for the cache was refused", exc_info=error)
    return OutOfMemory(
        f"{num_pages} pages of the KV cache need {nbytes / (1 << 30):.2f} GiB, and the system refused "
        f"this memory ({in_one_line(error)}). Ask for fewer pages (num_pages, "
        "gpu_memory_utilization), or raise the memory limit of this process."
    )


class KVPool:
    """A pair of arrays for each layer, of `num_backed * page_size` token slots each.

    `num_backed` grows with need up to `num_pages`: on Metal an array is resident from the start,
    while on Linux a page of zeros takes memory when it is written (a pool of 1 GiB took 2 MB).
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_pages: int,
        page_size: int,
        backends: Backends,
        num_backed: int | None = None,
    ) -> None:
        """Allocate the first `num_backed` pages, or all.

        Raises OutOfMemory if the system refuses the memory.
        """
        self.specs = tuple(layers)
        self.num_pages = num_pages
        self.num_backed = num_backed or num_pages
        self._first_backed = num_backed
        self.page_size = page_size
        self.backends: tuple[Backend, ...] = (
            (backends,) * len(layers) if not isinstance(backends, Sequence) else tuple(backends)
        )
        assert len(self.backends) == len(layers), "a backend for each layer"
        # Whether a step may start while the one before runs: a single layer whose writes are not in
        # place would copy its whole pool.
        self.writes_in_place = all(backend.writes_in_place for backend in self.backends)
        self.on_resized: Callable[[int], None] = lambda _: None  # with the bytes of all arrays
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        self._allocate()

    def _allocate(self) -> None:
        def pools(dims: Sequence[int]) -> list[mx.array]:
            return [
                backend.new_pool(self.num_backed, s.kv_heads, self.page_size, dim, s.pool_dtype)
                for backend, s, dim in zip(self.backends, self.specs, dims, strict=True)
            ]

        try:
            self._keys = pools([spec.key_dim for spec in self.specs])
            self._values = pools([spec.value_dim for spec in self.specs])
            mx.eval(self._keys, self._values)
        except _REFUSALS as error:
            self._keys, self._values = [], []
            nbytes = self.nbytes_of(self.num_backed)
            raise refused_memory(self.num_backed, nbytes, error) from error
        self.on_resized(self.nbytes)

    @property
    def dtype(self) -> str:
        """Name of the type in which rows are stored, `q8` if quantised; several are joined by commas."""
        dtypes = {spec.pool_dtype for spec in self.specs}
        names = {"q8" if one == quantised.DTYPE else str(one).rpartition(".")[2] for one in dtypes}
        return ", ".join(sorted(names))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self._keys, *self._values))

    def nbytes_of(self, num_pages: int) -> int:
        """Return the size of `num_pages` pages in bytes."""
        per_token = sum(spec.bytes_per_token() for spec in self.specs)
        return num_pages * self.page_size * per_token

    def check(self) -> None:
        """Audit that every array has all backed pages, or more. Raises AssertionError."""
        assert self.num_backed <= self.num_pages, "more pages have memory than there are"
        for keys, values, spec in zip(self._keys, self._values, self.specs, strict=True):
            for array in (keys, values):
                num_pages = self._num_pages_of(array, spec)
                assert num_pages >= self.num_backed, (
                    "an array of the cache has fewer pages than it should"
                )

    def with_arrays(self, arrays: Sequence[mx.array], backend: Backend) -> KVPool:
        """Return a pool of the same layers over other arrays, in the order of `arrays()`, for one step."""
        other = copy(self)
        other.backends = (backend,) * len(self.specs)
        # Another object of this class.
        other._keys = list(arrays[: len(self.specs)])  # noqa: SLF001
        other._values = list(arrays[len(self.specs) :])  # noqa: SLF001
        return other

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate so that everything written so far is in the pool."""
        return [*self._keys, *self._values]

    def rows(self, layer: int, array: mx.array) -> mx.array:
        """Return a model's rows (T, heads, 1, head_dim) in the shape that the layer's backend takes."""
        return array if self.backends[layer].takes_model_rows else array.squeeze(2)

    def write(self, layer: int, keys: mx.array, values: mx.array, step: StepLayout) -> None:
        """Write the rows' keys and values, as `rows` returns them, to the step's slots."""
        self._keys[layer], self._values[layer] = self.backends[layer].write_kv(
            keys, values, self._keys[layer], self._values[layer], step.slots, step.plans
        )
        if step.after_layer is not None:
            step.after_layer(keys)

    def rotate_and_write(
        self,
        layer: int,
        projected: Projected,
        turns: mx.array,
        heads: Heads,
        norms: Norms,
        step: StepLayout,
    ) -> mx.array:
        """Normalise, rotate and write the rows' projections; return queries (T, heads, 1, head_dim)."""
        pools = self._keys[layer], self._values[layer]
        queries, (self._keys[layer], self._values[layer]) = self.backends[layer].rotate_and_write(
            projected, turns, heads, norms, pools, step.slots, step.plans
        )
        if step.after_layer is not None:
            step.after_layer(queries)
        return queries

    def settle(self) -> None:
        """Wait until every write and copy is in the arrays. Raises DeviceError."""
        for backend in dict.fromkeys(self.backends):
            sides = zip(self.backends, self._keys, self._values, strict=True)
            pools = (pool for other, *both in sides if other is backend for pool in both)
            backend.settle(*pools)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy each source to its target, after everything written so far."""
        pages = np.fromiter(sources, np.int32), np.fromiter(targets, np.int32)
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            self._keys[layer], self._values[layer] = self.backends[layer].copy_pages(
                keys, values, *pages, self.page_size
            )

    def back(self, num_pages: int) -> None:
        """Allocate memory for the first `num_pages` pages, between the launches of two steps.

        Raises OutOfMemory as `resize` does.
        """
        assert num_pages <= self.num_pages, "these pages do not exist"
        if num_pages <= self.num_backed:
            return
        self._resize_arrays(num_pages)
        log.info(
            "The KV cache has memory for %d of its %d pages (%.2f GiB)",
            self.num_backed,
            self.num_pages,
            self.nbytes / (1 << 30),
        )

    def back_ahead(self, num_pages: int) -> bool:
        """Grow the arrays of one layer ahead of `back(num_pages)`. False if all are grown.

        Growing all layers at once copies the whole pool, and every answer would wait for that.
        """
        assert num_pages <= self.num_pages, "these pages do not exist"
        if num_pages <= self.num_backed:
            return False
        for layer in range(len(self.specs)):
            if min(self._pages_of(layer)) < num_pages:
                try:
                    self._grow_layer(layer, num_pages)
                except _REFUSALS as error:  # `back` raises if the memory is needed
                    log.debug("memory for the cache was refused ahead of need", exc_info=error)
                    return False
                return True
        return False

    def _grow_layer(self, layer: int, num_pages: int) -> None:
        for arrays in (self._keys, self._values):
            arrays[layer] = self._resized(arrays[layer], layer, num_pages)
            mx.clear_cache()
        self.on_resized(self.nbytes)

    def _pages_of(self, layer: int) -> tuple[int, int]:
        """Return the numbers of pages that the layer's arrays of keys and of values have memory for."""
        spec = self.specs[layer]
        return (
            self._num_pages_of(self._keys[layer], spec),
            self._num_pages_of(self._values[layer], spec),
        )

    def _num_pages_of(self, array: mx.array, spec: LayerSpec) -> int:
        """Return how many pages an array has. Its rows may be empty: an index over keys has no values."""
        return math.prod(array.shape[:-1]) // (self.page_size * spec.kv_heads)

    def shrink(self, num_pages: int) -> None:
        """Free the memory beyond the first `num_pages` pages, between the launches of two steps.

        The first pages keep their content, and `back` can allocate the others again. Raises OutOfMemory as
        `back` does.
        """
        self.num_backed = min(self.num_backed, num_pages)
        for layer in range(len(self.specs)):
            if max(self._pages_of(layer)) <= num_pages:
                continue
            try:
                self._grow_layer(layer, self.num_backed)
            except _REFUSALS as error:
                raise refused_memory(num_pages, self.nbytes_of(num_pages), error) from error

    def resize(self, num_pages: int) -> None:
        """Change the number of pages. A larger pool keeps its content; a smaller one begins empty.

        Additional pages get memory only if all others have it. No step may be under way. Raises OutOfMemory;
        a larger pool is then unchanged, but `check` fails on one that was to be smaller.
        """
        if num_pages < self.num_pages:
            self.restart(num_pages)
            return
        if self.num_backed == self.num_pages:
            self._resize_arrays(num_pages)
        self.num_pages = num_pages

    def _resize_arrays(self, num_pages: int) -> None:
        """Grow one array after another, so that at most one of them exists twice.

        Returns freed memory to the machine immediately. Raises OutOfMemory if the system refuses the
        memory, and changes nothing.
        """
        if num_pages == self.num_backed:
            return
        try:
            for layer in range(len(self.specs)):
                self._grow_layer(layer, num_pages)
        except _REFUSALS as error:
            for layer in range(len(self.specs)):
                self._grow_layer(layer, self.num_backed)
            raise refused_memory(num_pages, self.nbytes_of(num_pages), error) from error
        self.num_backed = num_pages

    def _resized(self, array: mx.array, layer: int, num_pages: int) -> mx.array:
        if self._num_pages_of(array, self.specs[layer]) == num_pages:
            return array  # grown ahead
        return self.backends[layer].resize_pool(array, num_pages, self.page_size)

    def restart(self, num_pages: int) -> None:
        """Replace all arrays by empty ones of `num_pages` pages. Raises OutOfMemory."""
        self._keys, self._values = [], []
        self.num_pages = num_pages
        self.num_backed = min(self._first_backed or num_pages, num_pages)
        mx.clear_cache()
        self._allocate()

    def read_units(self, pages: Sequence[int]) -> list[bytes]:
        """Return the keys and values of all layers, for each page. No step may be under way."""
        if not self.specs:
            return [b""] * len(pages)
        slots = self._slots(pages)
        columns = [
            read(rows.reshape(len(pages), -1).view(mx.uint8))
            for backend, keys, values in zip(self.backends, self._keys, self._values, strict=True)
            for rows in backend.read_kv(keys, values, slots)
        ]
        return [row.tobytes() for row in np.concatenate(columns, axis=1)]

    def write_units(self, pages: Sequence[int], payloads: Sequence[bytes]) -> None:
        """Write payloads that `read_units` returned, from this pool or one with the same layers."""
        if not self.specs:
            return
        slots, plans = self._slots(pages), Plans()
        rows = np.stack([np.frombuffer(payload, np.uint8) for payload in payloads])
        begin = 0
        for layer, spec in enumerate(self.specs):
            sides: list[mx.array] = []
            for width in spec.row_widths:
                end = begin + self.page_size * spec.kv_heads * width * spec.pool_dtype.size
                side = mx.array(rows[:, begin:end]).view(spec.pool_dtype)
                sides.append(side.reshape(len(slots), spec.kv_heads, width))
                begin = end
            keys, values = sides
            self._keys[layer], self._values[layer] = self.backends[layer].write_kv(
                keys, values, self._keys[layer], self._values[layer], slots, plans
            )
        self.settle()

    def _slots(self, pages: Sequence[int]) -> npt.NDArray[np.int32]:
        firsts = np.fromiter(pages, np.int64)[:, None] * self.page_size
        return (firsts + np.arange(self.page_size)).reshape(-1).astype(np.int32)

    def attend(
        self,
        layer: int,
        queries: mx.array,
        step: StepLayout,
        attention: Attention,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend with queries, as `rows` returns them, over their sequences' pages; same shape."""
        keys, values = self._keys[layer], self._values[layer]
        backend = self.backends[layer]
        decode, prefill = backend.paged_decode, backend.paged_prefill
        chunks = step.chunks
        if step.windowed is not None and attention.window is not None:
            chunks = step.windowed
        if step.decodes is None:
            assert chunks is not None, "a step has rows"
            return prefill(queries, keys, values, chunks, attention, sinks)
        if chunks is None:
            return decode(queries, keys, values, step.decodes, attention, sinks)
        first, rest = queries[: step.num_decodes], queries[step.num_decodes :]
        return mx.concatenate(
            [
                decode(first, keys, values, step.decodes, attention, sinks),
                prefill(rest, keys, values, chunks, attention, sinks),
            ]
        )

    def attend_latent(
        self,
        layer: int,
        queries: mx.array,
        rotated: mx.array,
        step: StepLayout,
        *,
        scale: float,
    ) -> mx.array:
        """Attend with latent queries (T, heads, latent dim).

        rotated: the rotated parts of the queries (T, heads, rotated dim), already scaled
        """
        pools = self._keys[layer], self._values[layer]
        outputs = []
        for tables, rows in (
            (step.decodes, slice(step.num_decodes)),
            (step.chunks, slice(step.num_decodes, None)),
        ):
            if tables is not None:
                outputs.append(
                    self.backends[layer].paged_latent(
                        queries[rows], rotated[rows], *pools, tables, scale=scale
                    )
                )
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def gather(self, layer: int, step: StepLayout) -> tuple[mx.array, mx.array]:
        """Return keys and values of the only sequence of a step, each (1, kv_heads, positions, dim)."""
        assert step.chunks is not None, "the sequence is a chunk"
        pools, dtype = (self._keys[layer], self._values[layer]), self.specs[layer].dtype
        keys, values = self.backends[layer].gather_kv(*pools, step.chunks)
        return keys.astype(dtype), values.astype(dtype)

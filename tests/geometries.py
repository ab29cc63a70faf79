"""Real models as lists of Metal operations, built from their config.json without weights.

Views are left out: they dispatch nothing and share their input's memory. Weights have 4 bits in
groups of 64, activations 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mlxserve.core.step_rows import rows_kept
from mlxserve.model.command_buffers import ROWS_OF_A_COMMIT
from tests.command_buffers import Array, Operation

_PARTITION: Final = 256  # keys of one threadgroup of paged_decode


@dataclass(frozen=True, slots=True)
class Geometry:
    """A decoder's sizes; `num_experts` 0 for a dense one."""

    name: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    max_length: int
    weight_size: int  # bytes of the 4-bit files
    num_experts: int = 0
    num_used: int = 0  # experts of one token
    is_tied: bool = False

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.kv_heads * 2 * self.head_dim * 2


QWEN3_4B = Geometry(
    "Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151_936, 40_960, 2_263_000_000, is_tied=True
)
QWEN3_8B = Geometry("Qwen3-8B", 36, 4096, 32, 8, 128, 12_288, 151_936, 40_960, 4_608_000_000)
QWEN3_32B = Geometry("Qwen3-32B", 64, 5120, 64, 8, 128, 25_600, 151_936, 40_960, 18_430_000_000)
GPT_OSS_20B = Geometry(
    "gpt-oss-20b", 24, 2880, 64, 8, 64, 2880, 201_088, 131_072, 11_900_000_000, 32, 4
)
GEOMETRIES = (QWEN3_4B, QWEN3_8B, QWEN3_32B, GPT_OSS_20B)


@dataclass(frozen=True, slots=True)
class StepShape:
    """Rows of a step: decodes, each with a context, and the rows of one chunk."""

    num_rows: int
    num_decodes: int = 0
    decode_context: int = 0
    num_sampled: int = 1
    num_copied: int = 0  # positions that MLX's attention reads copies of, for the chunk


def operations(model: Geometry, step: StepShape, bound_tokens: int) -> list[Operation]:
    """What one step dispatches. bound_tokens: of the part of the cache that kernels bind"""
    return list(_Forward(model, step, bound_tokens).run())


def permanent(num_elements: int) -> Array:
    return Array(num_elements, 0, is_permanent=True)


class _Forward:
    def __init__(self, model: Geometry, step: StepShape, bound_tokens: int) -> None:
        self._model = model
        self._step = step
        self._bound_elements = bound_tokens * model.kv_heads * model.head_dim
        self._waiting = 0  # rows of layers since the last commit

    def run(self) -> Iterator[Operation]:
        model, step = self._model, self._step
        tokens = Array(step.num_rows, 4 * step.num_rows)
        x = self._rows(model.hidden)
        yield Operation((tokens, self._weight(model.hidden, model.vocabulary)), x, 3)
        for _ in range(model.num_layers):
            yield from self._layer(x)
        chosen = _half(step.num_sampled * model.hidden)
        yield Operation((x,), chosen)
        yield Operation((chosen,), chosen)
        logits = _half(step.num_sampled * model.vocabulary)
        yield Operation((chosen, self._weight(model.hidden, model.vocabulary)), logits)
        yield from self._sample(logits)

    def _layer(self, x: Array) -> Iterator[Operation]:
        """`x` is the residual: both sums are written over it."""
        normed = self._rows(self._model.hidden)
        yield Operation((x, permanent(self._model.hidden)), normed)
        attended = self._rows(self._model.hidden)
        yield from self._attention(normed, attended)
        yield Operation((x, attended), x)
        normed, output = self._rows(self._model.hidden), self._rows(self._model.hidden)
        yield Operation((x, permanent(self._model.hidden)), normed)
        if self._model.num_experts:
            yield from self._experts(normed, output)
        else:
            yield from self._mlp(normed, output)
        yield Operation((x, output), x)

    def _attention(self, x: Array, output: Array) -> Iterator[Operation]:
        model = self._model
        width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        q, k, v = self._rows(width), self._rows(kv_width), self._rows(kv_width)
        for array, size in ((k, kv_width), (q, width), (v, kv_width)):
            yield Operation((x, self._weight(model.hidden, size)), array)
            if array is v:
                break
            yield Operation((array,), array)  # norms and rotations, in place
            yield Operation((array,), array, num_rows=self._rows_to_commit() if array is k else 0)
        pools = permanent(self._bound_elements), permanent(self._bound_elements)
        yield Operation((k, v, *pools), _fence())
        parts = []
        if step_rows := self._step.num_decodes:
            partitions = step_rows * -(-max(1, self._step.decode_context) // _PARTITION)
            size = partitions * model.heads * (model.head_dim + 4)
            partials, merged = Array(size, 4 * size), _half(step_rows * width)
            yield Operation((q, *pools), partials)
            yield Operation((partials,), merged)
            parts.append(merged)
        if chunk_rows := self._step.num_rows - step_rows:
            attended, read = _half(chunk_rows * width), pools
            if self._step.num_copied:
                size = self._step.num_copied * kv_width
                read = (_half(size), _half(size))
                yield Operation(pools, read[0])
                yield Operation((), read[1], 0)  # by the same dispatch
            yield Operation((q, *read), attended)
            parts.append(attended)
        whole = parts[0]
        if len(parts) > 1:
            whole = self._rows(width)
            yield Operation(tuple(parts), whole, 2)
        yield Operation((whole, self._weight(width, model.hidden)), output)

    def _rows_to_commit(self) -> int:
        """As `Commits.after_layer` counts them."""
        step = self._step
        seen_by_decodes = step.num_decodes * step.decode_context
        self._waiting += rows_kept(
            step.num_rows, step.num_decodes, seen_by_decodes, step.num_copied
        )
        if self._waiting < ROWS_OF_A_COMMIT:
            return 0
        num_rows, self._waiting = self._waiting, 0
        return num_rows

    def _mlp(self, x: Array, output: Array) -> Iterator[Operation]:
        model = self._model
        gate, up = self._rows(model.inner), self._rows(model.inner)
        yield Operation((x, self._weight(model.hidden, model.inner)), gate)
        yield Operation((x, self._weight(model.hidden, model.inner)), up)
        yield Operation((gate, up), gate)
        yield Operation((gate, self._weight(model.inner, model.hidden)), output)

    def _experts(self, x: Array, output: Array) -> Iterator[Operation]:
        """`SwitchGLU` of mlx-lm with biases, on rows sorted by expert."""
        model, rows = self._model, self._step.num_rows
        scores, order = self._rows(model.num_experts), self._rows(2 * model.num_experts)
        yield Operation((x, self._weight(model.hidden, model.num_experts)), scores)
        yield Operation((scores,), order)  # argpartition
        chosen = self._rows(model.num_used)
        yield Operation((scores, order), chosen)  # take_along_axis
        yield Operation((chosen,), chosen)  # softmax
        pairs = rows * model.num_used
        places = [Array(pairs, 4 * pairs) for _ in range(4)]
        for before, after in zip((order, *places), places, strict=False):  # two sorts, two gathers
            yield Operation((before,), after)
        inputs = _half(pairs * model.hidden)
        yield Operation((x, places[0]), inputs)
        sides = [_half(pairs * model.inner) for _ in range(2)]
        for side in sides:
            yield from self._expert(inputs, side, model.hidden, model.inner, places[3], pairs)
        yield Operation((sides[0], sides[1]), sides[0])
        down = _half(pairs * model.hidden)
        yield from self._expert(sides[0], down, model.inner, model.hidden, places[3], pairs)
        unsorted = _half(pairs * model.hidden)
        yield Operation((down, places[1]), unsorted)
        yield Operation((unsorted, chosen), unsorted)
        yield Operation((unsorted,), output)

    def _expert(
        self, x: Array, output: Array, width: int, size: int, experts: Array, pairs: int
    ) -> Iterator[Operation]:
        weight = permanent(self._model.num_experts * width * size // 8)
        yield Operation((x, weight, experts), output)
        biases = _half(pairs * size)
        yield Operation((permanent(self._model.num_experts * size), experts), biases)
        yield Operation((output, biases), output)

    def _sample(self, logits: Array) -> Iterator[Operation]:
        """float32, log-probabilities, a sort by probability, its sums and a choice."""
        size = logits.num_elements
        wide, order = Array(size, 4 * size), Array(size, 4 * size)
        yield Operation((logits,), wide)
        weights = Array(size, 4 * size)
        yield Operation((wide,), weights)
        yield Operation((weights,), order, 8)  # a merge sort
        ordered = Array(size, 4 * size)
        yield Operation((weights, order), ordered)
        sums = Array(size, 4 * size)
        yield Operation((ordered,), sums)
        yield Operation((sums, ordered), sums, 3)
        yield Operation((sums,), _fence())

    def _rows(self, width: int) -> Array:
        return _half(self._step.num_rows * width)

    def _weight(self, width: int, size: int) -> Array:
        """Packed eight to an element, with a scale and a bias for each group of 64."""
        return permanent(width * size // 8 + 2 * (width * size // 64))


def _half(num_elements: int) -> Array:
    return Array(num_elements, 2 * num_elements)


def _fence() -> Array:
    return Array(8, 32)

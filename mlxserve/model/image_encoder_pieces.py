"""TowerPieces: cuts the encoder's computation into bounded pieces, evaluated between steps.

An attention or a product over a large image takes longer than a step. Both are called with blocks
of rows, and an attention's are its queries, which attend over all keys; a piece ends where its
multiply-adds reach a bound. Parts of a layer whose multiply-adds are not counted, such as norms,
are pieces of their own.

mlx-vlm's towers call mlx's own attention, most of them directly and some by a compiled function,
whose calls are not seen. Both names are replaced, as `paged.py` does, by functions that do more
only while a tower is called.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.model.paged import defining_modules
from mlxserve.model.shown_pictures import extend

# Multiply-adds of a piece: 3 ms of a GPU of 10 TFLOPS; 5 ms of products of two CPU cores, and 30 ms of attention.
METAL_WORK = 1 << 34
CPU_WORK = 1 << 27
# Blocks of one call: building the graph of more would itself take longer than a piece.
_MAX_BLOCKS = 256
_FEWEST_ROWS = 64  # rows of a product: fewer wait for its weights
_FEWEST_QUERIES = 16  # fewer wait for keys
# The path of an element of a list, or of one of its own parts: a layer, its attention, its norms.
_PIECE = re.compile(r"\D*\.\d+(\.\w+)?")
_FEED_FORWARD = re.compile(r".*\.(mlp|feed_forward|ffn)")
_COMPILED = "ensure_fused_sdpa"
_MARK = "_mlxserve_cut"
_PRODUCTS = (nn.Linear, nn.QuantizedLinear)


class TowerPieces:
    """Cuts calls of the encoder's layers. Lives on the engine's thread."""

    def __init__(self, whole: nn.Module, max_work: int) -> None:
        """Cut the calls of mlx-vlm's model `whole`, which has lost its language model.

        max_work: multiply-adds of a piece
        """
        self.max_work = max_work
        self._outputs: list[mx.array] = []
        self._work = 0  # work of the current piece
        _cut_attention(whole)
        for path, module in whole.named_modules():
            if isinstance(module, _PRODUCTS) or _is_by_rows(path, module):
                extend(module, _Product, _pieces=self, _work=_row_work(module))
            elif isinstance(module, (nn.Conv2d, nn.Conv3d)):
                extend(module, _Convolution, _pieces=self)
            if _PIECE.fullmatch(path):
                extend(module, _Piece, _pieces=self)
            elif "deepstack_merger_list" in module:
                extend(module, _DeepTower)

    @contextmanager
    def collecting(self) -> Iterator[list[mx.array]]:
        """Collect the outputs of the pieces of an encoder called in this block, in order."""
        outputs: list[mx.array] = []
        self._outputs, self._work = outputs, 0
        _called.pieces = self
        try:
            yield outputs
        finally:
            _called.pieces = None
            self._outputs = []

    @property
    def _is_called(self) -> bool:
        return _called.pieces is self

    def end(self, output: Any) -> None:
        """End a piece with this output."""
        first = output[0] if isinstance(output, (tuple, list)) else output
        if self._is_called and isinstance(first, mx.array):
            self._end(first)

    def _end(self, output: mx.array) -> None:
        self._outputs.append(output)
        self._work = 0

    def in_blocks(
        self,
        call: Callable[[slice], mx.array],
        num_rows: int,
        *,
        work: int,
        axis: int = 0,
        fewest: int = 1,
    ) -> mx.array:
        """Call `call` on blocks of at least `fewest` rows, and join the results.

        work: multiply-adds of a row. A piece ends after each block, and after calls that reach the
            bound together.
        """
        if not self._is_called:
            return call(slice(None))
        # Parts of a block are no pieces, nor are those of a function that is compiled.
        _called.pieces = None
        try:
            outputs = self._called_in_blocks(call, num_rows, work, fewest)
        finally:
            _called.pieces = self
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis)

    def _called_in_blocks(
        self, call: Callable[[slice], mx.array], num_rows: int, work: int, fewest: int
    ) -> list[mx.array]:
        block_rows = max(self.max_work // max(work, 1), -(-num_rows // _MAX_BLOCKS), fewest)
        num_blocks = max(1, math.ceil(num_rows / block_rows))
        bounds = [num_rows * n // num_blocks for n in range(num_blocks + 1)]
        outputs = []
        for first, end in pairwise(bounds):
            output = call(slice(first, end) if num_blocks > 1 else slice(None))
            outputs.append(output)
            self._work += work * (end - first)
            if num_blocks > 1 or self._work >= self.max_work:
                self._end(output)
        return outputs


class _Called(threading.local):
    pieces: TowerPieces | None = None


_called = _Called()


class _Piece:
    _pieces: TowerPieces

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        self._pieces.end(output)
        return output


class _Product:
    """A product, or the products and activations of a layer's MLP."""

    _pieces: TowerPieces
    _work: int

    def __call__(self, x: mx.array) -> mx.array:
        call = super().__call__  # type: ignore[misc]
        rows = x.reshape(-1, x.shape[-1])
        output = self._pieces.in_blocks(
            lambda at: call(rows[at]), rows.shape[0], work=self._work, fewest=_FEWEST_ROWS
        )
        return output.reshape(*x.shape[:-1], -1)


class _Convolution:
    """A convolution over patches: separate elements for most encoders, one image for others."""

    _pieces: TowerPieces
    weight: mx.array
    stride: Sequence[int]

    def __call__(self, x: mx.array) -> mx.array:
        call = super().__call__  # type: ignore[misc]
        positions = math.prod(x.shape[1:-1]) // math.prod(self.stride)
        work = self.weight.size * max(1, positions)
        return self._pieces.in_blocks(lambda at: call(x[at]), x.shape[0], work=work)


class _Unread(Sequence[mx.array]):
    """Deep features that must stay lazy.

    mlx-vlm's Qwen3-VL evaluates a list of them at once, and all layers before them; mlx does so
    with lists, and not with sequences that it does not know.
    """

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self._arrays = tuple(arrays)

    def __getitem__(self, index: Any) -> Any:
        return self._arrays[index]

    def __len__(self) -> int:
        return len(self._arrays)


class _DeepTower:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows, deep = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return rows, _Unread(deep)


def _is_by_rows(path: str, module: nn.Module) -> bool:
    """True if it computes each row independently. Its activations are large on a CPU."""
    leaves = [each for _, each in module.named_modules() if not each.children()]
    known = (*_PRODUCTS, nn.GELU, nn.SiLU)
    return bool(_FEED_FORWARD.fullmatch(path)) and all(isinstance(m, known) for m in leaves)


def _row_work(module: nn.Module) -> int:
    """Multiply-adds of one row."""
    products = [each for each in module.modules() if isinstance(each, _PRODUCTS)]
    return sum(
        each.weight.size * (32 // each.bits if hasattr(each, "bits") else 1) for each in products
    )


def _cut_attention(whole: nn.Module) -> None:
    """Replace mlx's attention in the encoder's modules by one in blocks. Idempotent."""
    base = sys.modules.get("mlx_vlm.models.base")
    for module in (base, *defining_modules(whole)):
        if hasattr(module, _COMPILED):
            _replace(module, _COMPILED)
    _replace(mx.fast, "scaled_dot_product_attention")


def _replace(module: Any, name: str) -> None:
    plain = getattr(module, name)
    if hasattr(plain, _MARK):
        return

    @functools.wraps(plain)
    def attention(q: mx.array, k: mx.array, v: mx.array, *args: Any, **options: Any) -> mx.array:
        pieces = _called.pieces
        if pieces is None:
            output: mx.array = plain(q, k, v, *args, **options)
            return output
        options |= dict(zip(("scale", "mask"), args, strict=False))

        def attend(at: slice) -> mx.array:
            output: mx.array = plain(q[:, :, at], k, v, **_masked(options, num_queries, at))
            return output

        batch, num_heads, num_queries, head_size = q.shape
        work = batch * num_heads * k.shape[2] * (head_size + v.shape[3])
        # A mask by its name follows from the number of a query.
        fewest = num_queries if isinstance(options.get("mask"), str) else _FEWEST_QUERIES
        return pieces.in_blocks(attend, num_queries, work=work, axis=2, fewest=fewest)

    setattr(attention, _MARK, True)
    setattr(module, name, attention)


def _masked(options: dict[str, Any], num_queries: int, at: slice) -> dict[str, Any]:
    """Return the options with the mask of the queries `at`."""
    mask = options.get("mask")
    if isinstance(mask, mx.array) and mask.ndim > 1 and mask.shape[-2] == num_queries:
        return {**options, "mask": mask[..., at, :]}
    return options

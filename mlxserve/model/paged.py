"""use_paged_attention: lets an unmodified mlx-lm model attend over pages.

mlx-lm's model modules import the name `scaled_dot_product_attention` from their `base`. In every
module that defines one of a model's layers, that name is replaced by a function that looks at whose
keys it is given: those of a paged layer are attended over in its pages, any others get the original,
so a dense reference still runs in the same process. A model that calls mlx's own attention is
reached in the same way.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.cache.key_owners import owner_of
from mlxserve.cache.layer_kv import LayerKV
from mlxserve.model import gemma2

_NAME = "scaled_dot_product_attention"
_MARK = "_mlxserve_paged"


@dataclass(slots=True)
class SeenAttention:
    """The attention calls recorded in a dense forward of one token."""

    latent: set[int] = field(default_factory=set)  # ids of caches whose keys are the values, too


class _Watched(threading.local):
    seen: SeenAttention | None = None


_watched = _Watched()


@contextmanager
def watching_attention() -> Iterator[SeenAttention]:
    """Record the calls of attention on this thread."""
    _watched.seen = seen = SeenAttention()
    try:
        yield seen
    finally:
        _watched.seen = None


def use_paged_attention(model: nn.Module) -> None:
    """Make every attention layer of `model` accept a LayerKV as its cache. Idempotent."""
    for module in defining_modules(model):
        attention = getattr(module, _NAME, None)
        if attention is not None and not hasattr(attention, _MARK):
            setattr(module, _NAME, _paged(attention))
        elif attention is None and _calls_mlx_attention(module):
            _use_paged_mlx_attention()
    gemma2.use_paged_attention(model)


def defining_modules(model: nn.Module) -> list[ModuleType]:
    """Return the modules that define its layers' classes and their bases."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return [sys.modules[name] for name in {kind.__module__ for kind in kinds}]


def _calls_mlx_attention(module: Any) -> bool:
    """True if a model's module calls mlx's own attention by its name."""
    kinds = [value for value in vars(module).values() if isinstance(value, type)]
    calls: list[Any] = [vars(k).get("__call__") for k in kinds if issubclass(k, nn.Module)]
    return any(_NAME in call.__code__.co_names for call in calls if hasattr(call, "__code__"))


def _use_paged_mlx_attention() -> None:
    """Route mlx's own attention to pages, where its keys are a paged layer's. Idempotent."""
    original = mx.fast.scaled_dot_product_attention
    if hasattr(original, _MARK):
        return

    def attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        owner = owner_of(k)
        if owner is None:
            return original(q, k, v, **options)
        return owner.attend(
            q, scale=options["scale"], mask=options.get("mask"), sinks=options.get("sinks")
        )

    setattr(attention, _MARK, True)
    mx.fast.scaled_dot_product_attention = attention


def _paged(dense: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        **options: Any,
    ) -> mx.array:
        if _watched.seen is not None and keys is values and isinstance(mask, mx.array):
            _watched.seen.latent.add(id(cache))
        # Whose keys they are counts, and not which cache a layer holds: it may be another one's.
        owner = owner_of(keys) or (cache if isinstance(cache, LayerKV) else None)
        if owner is None:
            return dense(
                queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks, **options
            )
        if options:
            raise ValueError(f"attention with {', '.join(sorted(options))}")
        return owner.attend(queries, scale=scale, mask=mask, sinks=sinks)

    setattr(attention, _MARK, True)
    return attention


class RowSelector:
    """Selects the rows of a step that become logits: the head costs as much as several layers.

    Holds the rows of the current forward; the wrapped head reads them.
    """

    def __init__(self) -> None:
        self.rows: mx.array | None = None
        self._num_rows = 0
        self._axis = 0
        self._captured: list[mx.array] | None = None
        self._unnormed: list[mx.array] | None = None

    @contextmanager
    def choosing(self, rows: mx.array | None, num_rows: int, axis: int = 0) -> Iterator[None]:
        """Select rows while the model is called with `num_rows` along `axis`; None selects all."""
        self.rows, self._num_rows, self._axis = rows, num_rows, axis
        try:
            yield
        finally:
            self.rows = None

    def select(self, hidden: mx.array) -> mx.array:
        if self._captured is not None:
            self._captured.append(hidden)
        # A definition may call its head for pieces of the rows (Cohere Compass): their logits are all kept.
        if self.rows is None or hidden.shape[self._axis] != self._num_rows:
            return hidden
        return hidden[self.rows] if self._axis == 0 else hidden[:, self.rows]

    def show_unnormed(self, hidden: mx.array) -> None:
        """Take note of the input of the model's last norm."""
        if self._unnormed is not None:
            self._unnormed.append(hidden)

    @contextmanager
    def capturing(self, *, before_norm: bool = False) -> Iterator[list[mx.array]]:
        """Collect the head's input while the model is called.

        before_norm: the input of the last norm instead, which must be a `ShownNorm`
        """
        captured: list[mx.array] = []
        if before_norm:
            self._unnormed = captured
        else:
            self._captured = captured
        try:
            yield captured
        finally:
            self._captured = self._unnormed = None

    @contextmanager
    def recording(self) -> Iterator[list[mx.array]]:
        """Collect what `capturing` around this call would, which is not added to that."""
        around = self._captured, self._unnormed
        captured: list[mx.array] = []
        self._captured, self._unnormed = (None if each is None else captured for each in around)
        try:
            yield captured
        finally:
            self._captured, self._unnormed = around

    def show_recorded(self, captured: Iterable[mx.array]) -> None:
        """Add what a recorded call of the model returns of what it collected."""
        for each in (self._captured, self._unnormed):
            if each is not None:
                each.extend(captured)


class ShownNorm(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
    """A model's last norm, whose input can be captured."""

    def __init__(self, norm: nn.Module, selector: RowSelector) -> None:
        super().__init__()
        self.norm = norm
        self._selector = selector

    def __call__(self, hidden: mx.array) -> mx.array:
        self._selector.show_unnormed(hidden)
        normed: mx.array = self.norm(hidden)
        return normed


class SelectedRowsHead(nn.Module):  # type: ignore[misc]
    """A head that computes only the selected rows."""

    def __init__(self, head: nn.Module, selector: RowSelector) -> None:
        super().__init__()
        self.head = head
        self._selector = selector

    def __call__(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self.head(self._selector.select(hidden))
        return logits


def select_rows(model: nn.Module, selector: RowSelector) -> None:
    """Wrap the head of `model`: its `lm_head`, or the tied embedding's `as_linear`.

    A model whose head is neither computes the logits of all rows, and `ModelRunner.logits`
    selects afterwards.
    """
    for _, module in model.named_modules():
        head = module.get("lm_head") if isinstance(module, dict) else None
        if isinstance(head, nn.Module) and not isinstance(head, SelectedRowsHead):
            module.lm_head = SelectedRowsHead(head, selector)
    for embedding in _embeddings(model):
        embedding.as_linear = _selected(embedding, selector)


def _embeddings(model: nn.Module) -> Sequence[nn.Module]:
    return [m for _, m in model.named_modules() if hasattr(m, "as_linear")]


def _selected(embedding: nn.Module, selector: RowSelector) -> Callable[[mx.array], mx.array]:
    own = vars(embedding).get("as_linear")  # that of a rank without a head

    def selected(hidden: mx.array) -> mx.array:
        rows = selector.select(hidden)
        # The class is looked up late, because `few_row_products.py` may change it.
        logits: mx.array = own(rows) if own else type(embedding).as_linear(embedding, rows)
        return logits

    return selected

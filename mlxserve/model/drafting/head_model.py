"""HeadModel: a head for multi-token prediction as a model of its family with one layer, which is called with tokens.

    family's model    embed_tokens ── layers ── norm ── lm_head
    head              HeadInput ───── layer ─── norm ── the model's own head

So everything that serves a model serves a head: masks, pages, windows, fused layers, the probe. The hidden states that
it reads beside the tokens are shown to it around a call, as images are to a model that sees (`showing`); without
them they are zeros. What it shares with the model is called, and is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxserve.hub.head_families import HeadFamily
from mlxserve.model.definitions import definition_of
from mlxserve.model.load import LoadedModel
from mlxserve.model.paged import ShownNorm


class _Shown:
    """The hidden states that a call reads, and those that it leaves for the next one."""

    def __init__(self) -> None:
        self.hidden: mx.array | None = None  # (rows, size)
        self.carried: mx.array | None = None


class HeadInput(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
    """Takes the place of an embedding: joins each token's with the hidden state shown for it."""

    def __init__(
        self,
        embed: Callable[[mx.array], mx.array],
        norm: nn.Module,
        shown: _Shown,
        *,
        is_hidden_first: bool,
    ) -> None:
        """Build the input of a head.

        embed: of the model that is drafted for
        norm: one like those of the head
        """
        super().__init__()
        size = norm.weight.shape[0]
        self.embedding_norm = type(norm)(size, eps=norm.eps)
        self.hidden_norm = type(norm)(size, eps=norm.eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self._embed = embed
        self._shown = shown
        self._is_hidden_first = is_hidden_first

    def __call__(self, tokens: mx.array) -> mx.array:
        embedded = self._embed(tokens)
        hidden = self._shown.hidden
        hidden = mx.zeros_like(embedded) if hidden is None else hidden.reshape(embedded.shape)
        halves = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        if self._is_hidden_first:
            halves.reverse()
        joined: mx.array = self.projection(mx.concatenate(halves, axis=-1))
        return joined


class HeadNorm(nn.Module):  # type: ignore[misc]
    """A head's last norm, which leaves its output, or its input, for the next guess."""

    def __init__(self, norm: nn.Module, shown: _Shown, *, carries_normed: bool) -> None:
        super().__init__()
        self.norm = norm
        self._shown = shown
        self._carries_normed = carries_normed

    def __call__(self, hidden: mx.array) -> mx.array:
        normed: mx.array = self.norm(hidden)
        self._shown.carried = normed if self._carries_normed else hidden
        return normed


class SharedHead(nn.Module):  # type: ignore[misc]
    """Calls the head of the model that is drafted for, whose weights are not this module's."""

    def __init__(self, head: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self._head = head

    def __call__(self, hidden: mx.array) -> mx.array:
        return self._head(hidden)


class HeadModel(nn.Module):  # type: ignore[misc]
    """A head as a model: `model(tokens, cache=caches)` returns logits of the token after the next one."""

    def __init__(self, config: Mapping[str, Any], family: HeadFamily, target: LoadedModel) -> None:
        """Build a head without its weights.

        config: of the family, changed to one layer
        target: the model that it drafts for
        """
        super().__init__()
        definition = definition_of(config)
        arguments = definition.arguments.from_dict({**config, **definition.changes})
        self.whole = definition.model(arguments)
        self.args = getattr(self.whole, "args", None)
        self.takes_normed = family.takes_normed
        self._shown = _Shown()
        inner = _at(self.whole, family.inner)
        norm = inner[family.norm]
        embedding = _embedding_of(target)
        inner[family.embedding] = HeadInput(
            lambda tokens: embedding(tokens),
            norm,
            self._shown,
            is_hidden_first=family.is_hidden_first,
        )
        inner[family.norm] = HeadNorm(norm, self._shown, carries_normed=family.carries_normed)
        _parent_of_head(self.whole).lm_head = SharedHead(_head_of(target))
        # Whose cache makes the mask of layers that keep states. A head has none: the last entry is None.
        self._makes_state_mask = hasattr(inner, "ssm_idx")
        if self._makes_state_mask:
            inner.ssm_idx = -1

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        if cache is not None and self._makes_state_mask:
            cache = [*cache, None]
        logits: mx.array = self.whole(tokens, cache=cache)
        return logits

    @property
    def layers(self) -> Any:
        return self.whole.layers

    def make_cache(self) -> Any:
        return make_prompt_cache(self.whole)

    @property
    def carried(self) -> mx.array:
        """The hidden states of the last call for the guesses after its own: (rows, size), not evaluated."""
        carried = self._shown.carried
        assert carried is not None, "the head has not been called"
        return carried.reshape(-1, carried.shape[-1])

    @contextmanager
    def showing(self, hidden: mx.array | None) -> Iterator[None]:
        """Show a hidden state for each row while the head is called: (rows, size); None for zeros."""
        self._shown.hidden = hidden
        try:
            yield
        finally:
            self._shown.hidden = None


def show_hidden(target: LoadedModel, family: HeadFamily) -> None:
    """Let the model show the hidden states that heads of its family read. Idempotent."""
    inner = _at(target.model, family.inner)
    if not family.takes_normed and not isinstance(inner[family.norm], ShownNorm):
        shown = ShownNorm(inner[family.norm], target.selector)
        inner[family.norm] = shown
        if family.norm in vars(inner):  # those of fused layers are attributes as well
            vars(inner)[family.norm] = shown


def _at(model: nn.Module, path: str) -> Any:
    module: Any = model
    for name in path.split("."):
        module = module[name]
    return module


def _parent_of_head(model: nn.Module) -> Any:
    return next(module for _, module in model.named_modules() if "lm_head" in module)


def _embedding_of(target: LoadedModel) -> nn.Module:
    """Return the embedding of the model's tokens, without adapters."""
    return next(
        module
        for _, module in target.model.named_modules()
        if hasattr(module, "as_linear")
        and "weight" in module
        and module.weight.shape[0] >= target.vocab_size
    )


def _head_of(target: LoadedModel) -> Callable[[mx.array], mx.array]:
    """Return the model's head as a function: a module would become a part of the head that drafts."""
    for _, module in target.model.named_modules():
        if isinstance(head := module.get("lm_head"), nn.Module):
            return lambda hidden: head(hidden)
    embedding = _embedding_of(target)
    return lambda hidden: embedding.as_linear(hidden)

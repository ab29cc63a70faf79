"""A model's part by attention heads: mlx-lm's own `shard`, after checks that it does not make.

Each rank has some heads of every layer, and some columns of every feed-forward part; two sums over all
ranks in each layer put the results together. The head stays whole, on rank 0 alone: to gather logits
costs as much as half of it saves for one row, and more for several.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn

from mlxserve.core.errors import UnsupportedModel, in_one_line
from mlxserve.model.rank_group import RankGroup

# The names that mlx-lm's modules give to what `shard` divides.
_KV_HEADS = dict.fromkeys(("n_kv_heads", "num_key_value_heads", "num_kv_heads"), "heads of keys")
_HEADS = {
    **dict.fromkeys(("n_heads", "num_attention_heads", "num_heads"), "attention heads"),
    **_KV_HEADS,
    "num_k_heads": "heads of recurrent keys",
    "num_v_heads": "heads of recurrent values",
}
_GROUP = "sharding_group"  # attribute with which mlx-lm's modules gather the ranks' results


def split_by_heads(model: nn.Module, group: RankGroup, name: str, kind: str) -> None:
    """Reduce `model`, whose weights are not evaluated, to this rank's part.

    Raises UnsupportedModel.
    """
    if not hasattr(model, "shard"):
        raise UnsupportedModel(
            f"{name}: {kind} models cannot be split by heads (mlx-lm has no `shard` for them). Use "
            "pipeline_parallel_size, which splits by layers."
        )
    for attention in model.modules():
        counts = {n: v for n, v in vars(attention).items() if isinstance(v, int) and v > 0}
        for kv_heads in _KV_HEADS:
            count = counts.get(kv_heads, group.size)
            if "k_proj" in attention and count < group.size and group.size % count == 0:
                _repeat_kv_heads(attention, kv_heads, group.size // count)
        for heads, words in _HEADS.items():
            if heads in counts and getattr(attention, heads) % group.size:
                raise UnsupportedModel(
                    f"{name} has {counts[heads]} {words}, which tensor_parallel_size={group.size} "
                    f"does not divide. Sizes that do: {_in_words(_divisors(counts[heads]))}."
                )
    whole = _heads_of(model)
    try:
        model.shard(group.mx_group)
    except (ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
        raise UnsupportedModel(
            f"{name} cannot be split over tensor_parallel_size={group.size} ranks: "
            f"{in_one_line(error).rstrip('.')}. Try fewer ranks, or pipeline_parallel_size."
        ) from error
    for module, head in whole:
        if module.lm_head is not head:
            _restore_head(module, head, name, kind)


def _heads_of(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return (module, its `lm_head`) pairs."""
    heads = ((module, module.get("lm_head")) for module in model.modules())
    return [(module, head) for module, head in heads if isinstance(head, nn.Module)]


def _restore_head(module: nn.Module, head: nn.Module, name: str, kind: str) -> None:
    """Undo `shard`'s split of the head and the gathering of logits in the forward.

    Raises UnsupportedModel if mlx-lm expresses that in another way than in qwen3_5.
    """
    if getattr(module, _GROUP, None) is None:
        raise UnsupportedModel(
            f"{name}: {kind} models cannot be split by heads, because mlx-lm divides their last layer "
            "in a way of its own. Use pipeline_parallel_size, which splits by layers."
        )
    module.lm_head = head
    setattr(module, _GROUP, None)


def _repeat_kv_heads(attention: nn.Module, name: str, times: int) -> None:
    """Repeat key heads if there are fewer than ranks: several ranks keep the same one."""
    count = getattr(attention, name)
    for projection in (attention.k_proj, attention.v_proj):
        for key, value in projection.parameters().items():
            if isinstance(value, mx.array):
                rows = value.reshape(count, value.shape[0] // count, *value.shape[1:])
                projection[key] = mx.repeat(rows, times, axis=0).reshape(-1, *value.shape[1:])
    setattr(attention, name, count * times)


def _divisors(count: int) -> Iterator[int]:
    return (size for size in range(2, count + 1) if count % size == 0)


def _in_words(numbers: Iterator[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


class NoHead(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
    """The head of a rank that samples nothing: returns ones that depend on its input."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def __call__(self, hidden: mx.array) -> mx.array:
        ones = mx.depends(mx.ones((1,) * hidden.ndim, hidden.dtype), hidden)
        logits: mx.array = mx.broadcast_to(ones, (*hidden.shape[:-1], self._vocab_size))
        return logits


def drop_head(model: nn.Module) -> None:
    """Replace a worker's `lm_head`, or its tied embedding's `as_linear`, by NoHead."""
    modules = list(model.modules())
    for module in modules:
        if isinstance(head := module.get("lm_head"), nn.Module):
            module.lm_head = NoHead(head.weight.shape[0])
    for module in modules:
        if hasattr(module, "as_linear"):
            module.as_linear = NoHead(module.weight.shape[0]).__call__

"""Which part of a model a rank has, and the sentences for models that cannot be divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig, UnsupportedModel
from mlxserve.model.rank_group import RankGroup, Split
from mlxserve.model.split_by_heads import NoHead, drop_head, split_by_heads
from mlxserve.model.split_by_layers import (
    NoEmbedding,
    RemoteLayer,
    Stage,
    missing_embedding_size,
    parts,
    restore_embedding,
    split_by_layers,
)
from tests.model.test_every_architecture import build

import mlx.core as mx  # isort: skip

BuildModel = Callable[..., tuple[Any, dict[str, Any]]]


class Group:
    """As mlx's, of a process that is alone."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Alone:
    """Ranks whose other ranks are not reached: what it sends it keeps, for the next one to receive."""

    def __init__(self, split: Split, rank: int, size: int) -> None:
        self.split, self.rank, self.size = split, rank, size
        self.sent: mx.array | None = None
        self.mx_group = Group(rank, size)
        self.is_lead = rank == 0
        self.has_embedding = split is Split.HEADS or rank == size - 1

    def send(self, x: mx.array, rank: int) -> mx.array:
        self.sent = x
        return x

    def receive_like(self, x: mx.array, rank: int) -> mx.array:
        assert self.sent is not None
        assert (self.sent.shape, self.sent.dtype) == (x.shape, x.dtype)
        return self.sent


def group(split: Split, rank: int, size: int) -> RankGroup:
    return cast(RankGroup, Alone(split, rank, size))


@pytest.mark.parametrize(
    ("count", "size", "wanted"),
    [
        (4, 2, [(2, 4), (0, 2)]),
        (5, 2, [(2, 5), (0, 2)]),
        (3, 3, [(2, 3), (1, 2), (0, 1)]),
        (7, 3, [(4, 7), (2, 4), (0, 2)]),
    ],
)
def test_rank_0_has_the_last_layers_and_low_ranks_one_more(
    count: int, size: int, wanted: list[tuple[int, int]]
) -> None:
    assert [(part.start, part.stop) for part in parts(count, size)] == wanted


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_keeps_its_layers_and_no_weights_of_others(
    rank: int, build_model: BuildModel
) -> None:
    model, _ = build_model("llama", num_hidden_layers=6, tie_word_embeddings=False)
    whole = [layer.parameters() for layer in model.layers]
    split_by_layers(model, group(Split.LAYERS, rank, 3), "it")
    if rank:
        drop_head(model)
    kinds = [type(layer) for layer in model.layers]
    mine = [index for index, kind in enumerate(kinds) if kind is not RemoteLayer]
    assert mine == list(parts(6, 3)[rank])
    assert kinds.count(Stage) == (1 if rank in (0, 2) else 2)
    for index, layer in enumerate(model.layers):
        kept = layer.parameters()
        assert bool(kept) == (index in mine)
        if index in mine:
            assert kept.get("layer", kept).keys() == whole[index].keys()
    assert isinstance(model.lm_head, NoHead) == (rank != 0)
    assert isinstance(model.model.embed_tokens, NoEmbedding) == (rank != 2)


@pytest.mark.parametrize("kind", ["llama", "gptj", "talkie"])
def test_the_hidden_states_go_on_wherever_a_layer_is_given_them(kind: str) -> None:
    """GPT-J's layers are given them by name, talkie's as the second argument after the embeddings."""
    tokens = mx.array([[3, 1, 4, 1, 5]])
    whole, _ = build(kind)
    expected = whole(tokens)
    sent = None
    for rank in (1, 0):
        model, _ = build(kind)
        one = Alone(Split.LAYERS, rank, 2)
        one.sent = sent
        split_by_layers(model, cast(RankGroup, one), kind)
        found = model(tokens)
        sent = one.sent
    assert mx.array_equal(found, expected).item()
    assert not mx.allclose(expected, mx.zeros_like(expected)).item()


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_shared_layers": 0},
        {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        {"num_kv_shared_layers": 1, "layer_types": [SLIDING, SLIDING, FULL, FULL, SLIDING, FULL]},
    ],
    ids=["own keys", "as the larger ones", "keys of the same rank"],
)
def test_layers_of_gemma_4_return_more_than_hidden_states(
    changes: dict[str, Any], build_model: BuildModel
) -> None:
    tokens = mx.array([[3, 1, 4, 1, 5]])
    mx.random.seed(3)
    whole, _ = build_model("gemma4_text", **changes)
    weights, sent, found = whole.parameters(), None, None
    expected = whole(tokens)
    for rank in (1, 0):
        model, _ = build_model("gemma4_text", **changes)
        model.update(weights)
        one = Alone(Split.LAYERS, rank, 2)
        one.sent = sent
        split_by_layers(model, cast(RankGroup, one), "it")
        found = model(tokens)
        sent = one.sent
    assert found is not None
    assert mx.array_equal(found, expected).item()


def test_keys_of_another_rank_are_refused(build_model: BuildModel) -> None:
    model, _ = build_model("gemma4_text")
    with pytest.raises(
        UnsupportedModel,
        match=r"this gemma4_text model .*=2 ranks, because its layer 5 reads the keys of layer 2, which another rank",
    ):
        split_by_layers(model, group(Split.LAYERS, 1, 2), "it")


def test_an_embedding_comes_back_for_what_drafts_with_it(build_model: BuildModel) -> None:
    model, _ = build_model("llama", tie_word_embeddings=False)
    embedding = model.model.embed_tokens
    assert missing_embedding_size(model) == 0
    split_by_layers(model, group(Split.LAYERS, 0, 2), "it")
    assert model.model.embed_tokens is not embedding
    assert missing_embedding_size(model) == embedding.weight.nbytes
    for _ in range(2):
        restore_embedding(model)
        assert model.model.embed_tokens is embedding
    assert missing_embedding_size(model) == 0


def test_an_embedding_that_is_also_the_head_stays(build_model: BuildModel) -> None:
    model, _ = build_model("llama", tie_word_embeddings=True)
    split_by_layers(model, group(Split.LAYERS, 0, 2), "it")
    assert not isinstance(model.model.embed_tokens, NoEmbedding)
    drop_head(model)
    hidden = mx.zeros((2, 1, 64))
    logits = model.model.embed_tokens.as_linear(hidden)
    assert logits.shape == (2, 1, model.model.embed_tokens.weight.shape[0])


def test_more_ranks_than_layers_are_refused(build_model: BuildModel) -> None:
    model, _ = build_model("llama")
    with pytest.raises(
        UnsupportedModel, match="it has 3 layers, fewer than pipeline_parallel_size=4"
    ):
        split_by_layers(model, group(Split.LAYERS, 0, 4), "it")


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_do(
    build_model: BuildModel,
) -> None:
    model, _ = build_model("llama")
    with pytest.raises(UnsupportedModel, match=r"4 attention heads.*=3 does not divide.*: 2, 4\."):
        split_by_heads(model, group(Split.HEADS, 0, 3), "it", "llama")


def test_a_kind_that_mlx_lm_cannot_split_by_heads_is_refused(build_model: BuildModel) -> None:
    model, _ = build_model("phi3")
    with pytest.raises(UnsupportedModel, match=r"phi3 models cannot be split by heads.*pipeline"):
        split_by_heads(model, group(Split.HEADS, 0, 2), "it", "phi3")


def test_fewer_heads_of_keys_than_ranks_are_repeated(build_model: BuildModel) -> None:
    model, _ = build_model("llama")
    attention = model.layers[0].self_attn
    keys = attention.k_proj.weight
    split_by_heads(model, group(Split.HEADS, 3, 4), "it", "llama")
    assert (attention.n_heads, attention.n_kv_heads) == (1, 1)
    assert mx.array_equal(attention.k_proj.weight, keys[64:]).item()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_head_that_mlx_lm_divides_stays_whole_on_rank_0(rank: int) -> None:
    """Else rank 0 would put its half of the logits beside the ones of a rank without a head."""
    model, _ = build("qwen3_5")
    [module] = [module for module in model.modules() if "lm_head" in module]
    vocab_size = module.lm_head.weight.shape[0]
    split_by_heads(model, group(Split.HEADS, rank, 2), "it", "qwen3_5")
    if rank:
        drop_head(model)
    assert isinstance(module.lm_head, NoHead) == (rank == 1)
    assert module.lm_head(mx.zeros((1, 1, 128))).shape == (1, 1, vocab_size)
    assert module.sharding_group is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "cannot both be above 1",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be"),
        ({"distributed_backend": "nccl"}, "distributed_backend must be one of any, ring"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        EngineConfig().with_options(**options)

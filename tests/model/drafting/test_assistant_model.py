"""The definition of Gemma 4's assistants computes what mlx-vlm's does, with the same weights, keys and values."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten

from mlxserve.model.definitions import defer_mlx_vlm
from mlxserve.model.drafting.assistant_model import AssistantArgs, AssistantModel, ClusteredHead
from tests.assistants import assistant_config, random_weights
from tests.conftest import build_model

CLUSTERED: dict[str, Any] = {
    "use_ordered_embeddings": True,
    "num_centroids": 64,
    "centroid_intermediate_top_k": 4,
}
WINDOW = 24


def config_of(**changes: Any) -> dict[str, Any]:
    _, target = build_model("gemma4_text")
    return assistant_config(target, **changes)


def own_model(config: dict[str, Any], weights: dict[str, mx.array]) -> AssistantModel:
    model = AssistantModel(AssistantArgs.from_dict(config))
    model.update(tree_unflatten(list(model.sanitize(weights).items())))
    return model


def reference(config: dict[str, Any], weights: dict[str, mx.array]) -> Any:
    """mlx-vlm's model, which makes a whole draft; its target is another one's embedding."""
    defer_mlx_vlm()
    package = "mlx_vlm.speculative.drafters.gemma4_assistant"
    vlm = importlib.import_module(f"{package}.gemma4_assistant")
    arguments = importlib.import_module(f"{package}.config").Gemma4AssistantConfig
    model = vlm.Gemma4AssistantDraftModel(arguments.from_dict(config))
    model.update(tree_unflatten(list(model.sanitize(weights).items())))
    return model


class Embedding:
    """A target of mlx-vlm's, as far as its assistants look at it."""

    embed_scale = 8.0

    def __init__(self, weight: mx.array) -> None:
        self._weight = weight

    def embed_tokens(self, ids: mx.array) -> mx.array:
        return self._weight[ids]


@pytest.mark.slow  # mlx-vlm takes a second to import
@pytest.mark.parametrize("changes", [{}, CLUSTERED], ids=["all logits", "clusters"])
@pytest.mark.parametrize("length", [9, 57])
def test_a_draft_is_that_of_mlx_vlm(length: int, changes: dict[str, Any]) -> None:
    """Its three tokens, and the hidden state and logits of the first, before and after the window is full."""
    config = config_of(**changes)
    weights = random_weights(config)
    draw = np.random.default_rng(length)

    def random(*shape: int) -> mx.array:
        return mx.array(draw.normal(size=shape).astype(np.float32))

    target = Embedding(random(2048, 64))
    full = random(1, 1, length, 128), random(1, 1, length, 128)
    sliding = random(1, 1, length, 64), random(1, 1, length, 64)
    hidden, token = random(1, 64), 17

    theirs = reference(config, weights)
    theirs.bind(target)
    shared = {"full_attention": full, "sliding_attention": sliding}
    theirs.set_shared_kv(shared, kv_offset=length, position=length - 1)
    drafted = theirs.draft_block(
        token, hidden[None], None, 4, sampler=lambda logits: mx.argmax(logits, axis=-1)
    )
    first = target.embed_tokens(mx.array([token])) * target.embed_scale
    carried, expected = theirs(
        mx.concatenate([first, hidden], axis=-1)[None], shared, mx.array([[length - 1]])
    )

    ours = own_model(config, weights)
    seen = {
        "full_attention": full,
        "sliding_attention": (sliding[0][:, :, -WINDOW:], sliding[1][:, :, -WINDOW:]),
    }
    ids, logits, after = [], [], hidden
    for _ in range(3):
        embedded = target.embed_tokens(mx.array([token])) * target.embed_scale
        one, after = ours(embedded, after, mx.array([length - 1]), seen)
        logits.append(np.array(one))
        if len(ids) == 0:
            np.testing.assert_allclose(np.array(after), np.array(carried[0]), atol=2e-5)
        token = int(np.argmax(logits[-1]))
        ids.append(token)
    np.testing.assert_allclose(logits[0], np.array(expected[0]), atol=2e-5)
    assert ids == np.array(drafted)[0].tolist()


def test_tokens_outside_the_chosen_clusters_lose_in_each_row_of_its_own() -> None:
    args = AssistantArgs.from_dict(config_of(**CLUSTERED))
    head = ClusteredHead(args)
    head.token_ordering = mx.array(np.random.default_rng(2).permutation(2048).astype(np.int32))
    table = mx.array(np.random.default_rng(3).normal(size=(2048, 64)).astype(np.float32))
    rows = mx.array([[1.0], [40.0]]) * mx.ones((2, 64))
    logits = np.array(head(rows, table.__getitem__))
    dense = np.array(rows @ table.T)
    for mine, every in zip(logits, dense, strict=True):
        computed = np.isclose(mine, every, atol=1e-3)
        assert 4 * 32 <= computed.sum() < 4 * 32 + 20
        assert mine[~computed].max() == mine[~computed].min() < mine[computed].min()
    alone = np.array(head(rows[:1], table.__getitem__))
    np.testing.assert_allclose(alone[0], logits[0], atol=1e-5)


def test_a_checkpoint_may_have_the_targets_parts_and_a_head_that_is_the_embedding() -> None:
    config = config_of(**CLUSTERED)
    weights = random_weights(config)
    more = {
        "lm_head.weight": weights["model.embed_tokens.weight"],
        "model.layers.0.self_attn.k_proj.weight": mx.zeros((64, 64)),
        "model.layers.0.self_attn.k_norm.weight": mx.zeros(64),
    }
    model = AssistantModel(AssistantArgs.from_dict(config))
    found = model.sanitize({**weights, **more})
    assert found.keys() == weights.keys()
    assert found["masked_embedding.token_ordering"].dtype == mx.int32


def test_a_head_of_its_own_is_used_where_the_config_says_so() -> None:
    config = config_of(tie_word_embeddings=False)
    weights = random_weights(config)
    model = own_model(config, weights)
    keys = {
        kind: (mx.zeros((1, 1, 1, dim)),) * 2
        for kind, dim in (("full_attention", 128), ("sliding_attention", 64))
    }
    rows = mx.ones((1, 64))
    logits, _ = model(rows, rows, mx.array([0]), keys)
    model.lm_head.weight = weights["lm_head.weight"] * 2
    doubled, _ = model(rows, rows, mx.array([0]), keys)
    np.testing.assert_allclose(np.array(doubled), 2 * np.array(logits), rtol=1e-5)

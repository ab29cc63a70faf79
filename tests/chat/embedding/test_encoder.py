"""Vectors and scores are those of the published formulas, alone and beside others."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.chat.embedding.build import check, load_encoder
from mlxserve.chat.embedding.encoder import Encoder, EncoderText
from mlxserve.chat.embedding.encoding import BATCH_TOKENS, Encoding, batches
from mlxserve.core.errors import InvalidParameter, UnsupportedModel
from mlxserve.hub.files import find_model
from mlxserve.hub.text_encoders import text_encoder
from mlxserve.model.definitions import defer_mlx_vlm
from tests.chat.embedding.conftest import MEAN, SIZES, write_modules

TEXTS = [[1, 5, 9, 4, 2], [1, 7, 2], [1, *range(4, 15), 2]]
Weights = Mapping[str, np.ndarray]


def encoder_of(folder: Path) -> Encoder:
    files = find_model(str(folder))
    rules = text_encoder(files)
    assert rules is not None
    return load_encoder(files, rules, is_metal=False, memory_limit=1 << 30)


def vectors(encoder: Encoder, texts: Sequence[Sequence[int]], **options: Any) -> np.ndarray:
    return np.array(encoder.vectors([EncoderText(text) for text in texts], **options))


def weights_of(folder: Path) -> Weights:
    found = mx.load(str(folder / "model.safetensors"))
    assert isinstance(found, dict)
    return {name: np.array(array, np.float64) for name, array in found.items()}


# ---- BERT as its paper has it (Devlin et al., 2018), in numpy


def linear(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    from math import erf

    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def attention(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    heads = SIZES["num_attention_heads"]
    q, k, v = (
        np.stack(np.split(linear(x, w, f"{name}.self.{part}"), heads, axis=-1))
        for part in ("query", "key", "value")
    )
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return linear(np.concatenate(list(shares @ v), axis=-1), w, f"{name}.output.dense")


def bert(ids: Sequence[int], w: Weights, types: Sequence[int] | None = None) -> np.ndarray:
    """(tokens, hidden)."""
    x = w["embeddings.word_embeddings.weight"][list(ids)]
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = x + w["embeddings.token_type_embeddings.weight"][list(types or [0] * len(ids))]
    x = layer_norm(x, w, "embeddings.LayerNorm")
    for number in range(SIZES["num_hidden_layers"]):
        name = f"encoder.layer.{number}"
        x = layer_norm(
            x + attention(x, w, f"{name}.attention"), w, f"{name}.attention.output.LayerNorm"
        )
        inner = gelu(linear(x, w, f"{name}.intermediate.dense"))
        x = layer_norm(x + linear(inner, w, f"{name}.output.dense"), w, f"{name}.output.LayerNorm")
    return x


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True}, lambda x: x[0]),
        ({"pooling_mode_mean_tokens": True}, lambda x: x.mean(axis=0)),
        ({"pooling_mode_max_tokens": True}, lambda x: x.max(axis=0)),
        ({"pooling_mode": "lasttoken"}, lambda x: x[-1]),
        (
            {"pooling_mode_mean_sqrt_len_tokens": True},
            lambda x: x.sum(axis=0) / np.sqrt(len(x)),
        ),
        (
            {"pooling_mode_weightedmean_tokens": True},
            lambda x: np.average(x, axis=0, weights=np.arange(1, len(x) + 1)),
        ),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            lambda x: np.concatenate([x[0], x.mean(axis=0)]),
        ),
    ],
)
def test_texts_of_a_batch_are_pooled_as_the_files_say(
    encoder_folder: Callable[..., Path],
    pooling: dict[str, Any],
    expected: Callable[[np.ndarray], np.ndarray],
) -> None:
    folder = encoder_folder()
    write_modules(folder, "Pooling", pooling=pooling)
    weights = weights_of(folder)
    wanted = [expected(bert(text, weights)) for text in TEXTS]
    np.testing.assert_allclose(vectors(encoder_of(folder), TEXTS), wanted, rtol=1e-4, atol=1e-4)


def test_vectors_are_scaled_where_the_files_say_so_and_cut_ones_again(bert_folder: Path) -> None:
    encoder, weights = encoder_of(bert_folder), weights_of(bert_folder)
    wanted = np.stack([bert(text, weights).mean(axis=0) for text in TEXTS])
    np.testing.assert_allclose(vectors(encoder, TEXTS), unit(wanted), atol=1e-5)
    short = vectors(encoder, TEXTS, dimensions=8)
    np.testing.assert_allclose(short, unit(wanted[:, :8]), atol=1e-5)


def test_layers_after_the_pooling(encoder_folder: Callable[..., Path]) -> None:
    folder = encoder_folder()
    write_modules(folder, "Pooling", "Dense", "Normalize")
    config = {"in_features": 32, "out_features": 6, "bias": True}
    config |= {"activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
    dense = {"linear.weight": mx.random.normal((6, 32)), "linear.bias": mx.random.normal((6,))}
    mx.save_safetensors(str(folder / "2_Dense" / "model.safetensors"), dense)
    weight, bias = (np.array(array) for array in dense.values())
    pooled = np.stack([bert(text, weights_of(folder)).mean(axis=0) for text in TEXTS])
    wanted = unit(np.tanh(pooled @ weight.T + bias))
    np.testing.assert_allclose(vectors(encoder_of(folder), TEXTS), wanted, atol=1e-4)
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"2_Dense/model.safetensors is missing"):
        encoder_of(folder)


def test_a_cross_encoder_scores_pairs(reranker_folder: Path) -> None:
    encoder, weights = encoder_of(reranker_folder), weights_of(reranker_folder)
    pairs = [EncoderText([1, 5, 2, 9, 8, 2], 3), EncoderText([1, 5, 2, 7, 2], 3)]
    found = np.array(encoder.scores(pairs))
    for pair, score in zip(pairs, found, strict=True):
        types = [int(place >= 3) for place in range(len(pair))]
        first = bert(pair.ids, weights, types)[0]
        logit = linear(np.tanh(linear(first, weights, "pooler.dense")), weights, "classifier")[0]
        assert score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)


@pytest.mark.parametrize("kind", ["xlm-roberta", "roberta", "modernbert"])
def test_padding_changes_no_text(encoder_folder: Callable[..., Path], kind: str) -> None:
    extra = {"local_attention": 4, "hidden_act": None} if kind == "modernbert" else {}
    folder = encoder_folder("xlm-roberta" if kind == "roberta" else kind, **extra)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    encoder = encoder_of(folder)
    check(encoder, kind)
    alone = np.concatenate([vectors(encoder, [text]) for text in TEXTS])
    np.testing.assert_allclose(vectors(encoder, TEXTS), alone, atol=1e-5)
    assert np.abs(alone[0] - alone[1]).max() > 0.01


# ---- decoders


@pytest.fixture
def decoder_folder(write_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def write(kind: str, pooling: dict[str, Any], **changes: Any) -> Path:
        folder = write_model(tmp_path, kind, **changes)
        write_modules(folder, "Pooling", "Normalize", pooling=pooling)
        return folder

    return write


def without_head(folder: Path) -> None:
    """As embedding models are published: no head, and names without `model.`."""
    found = mx.load(str(folder / "model.safetensors"))
    assert isinstance(found, dict)
    bare = {k.removeprefix("model."): v for k, v in found.items() if not k.startswith("lm_head")}
    mx.eval(bare)
    mx.save_safetensors(str(folder / "model.safetensors"), bare, {"format": "mlx"})


@pytest.mark.parametrize("is_bare", [False, True])
def test_the_last_token_of_a_decoder(
    decoder_folder: Callable[..., Path], build_model: Callable[..., Any], is_bare: bool
) -> None:
    folder = decoder_folder("qwen3", {"pooling_mode_lasttoken": True})
    if is_bare:
        without_head(folder)
    model, _ = build_model("qwen3")
    wanted = unit(np.stack([np.array(model.model(mx.array([text])))[0, -1] for text in TEXTS]))
    np.testing.assert_allclose(vectors(encoder_of(folder), TEXTS), wanted, atol=1e-4)


def test_a_bidirectional_decoder_sees_both_ways_within_its_window(
    decoder_folder: Callable[..., Path],
) -> None:
    # One layer, whose window of 4 lets a token see two before and two after it.
    folder = decoder_folder(
        "gemma3_text",
        {"pooling_mode_cls_token": True},
        use_bidirectional_attention=True,
        sliding_window=4,
        sliding_window_pattern=2,
        num_hidden_layers=1,
    )
    without_head(folder)
    encoder = encoder_of(folder)
    text = [5, 6, 7, 8, 9]
    [first] = vectors(encoder, [text])
    [near] = vectors(encoder, [[5, 6, 11, 8, 9]])
    [far] = vectors(encoder, [[5, 6, 7, 11, 12]])
    assert np.abs(first - near).max() > 1e-3
    np.testing.assert_array_equal(first, far)
    beside = vectors(encoder, [text, list(range(5, 30))])
    np.testing.assert_allclose(beside[0], first, atol=1e-5)


def test_embedding_gemma_s_layers_are_those_of_mlx_vlm(decoder_folder: Callable[..., Path]) -> None:
    """For texts that are no longer than the window, as mlx-vlm has none."""
    folder = decoder_folder(
        "gemma3_text",
        MEAN,
        use_bidirectional_attention=True,
        sliding_window=64,
        rope_theta=1e6,  # mlx-vlm's, which does not read it
    )
    config = json.loads((folder / "config.json").read_text())
    defer_mlx_vlm()
    theirs = importlib.import_module("mlx_vlm.models.gemma3_embedding")
    model = theirs.Model(theirs.ModelConfig.from_dict(config))
    found = mx.load(str(folder / "model.safetensors"))
    assert isinstance(found, dict)
    weights = {name: array for name, array in found.items() if name.startswith("model.")}
    model.load_weights(list(weights.items()), strict=False)  # but for its layers after the pooling
    wanted = []
    for text in TEXTS:
        hidden = np.array(model(mx.array([text])).last_hidden_state)[0]
        wanted.append(unit(hidden.mean(axis=0)))
    np.testing.assert_allclose(vectors(encoder_of(folder), TEXTS), wanted, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_that_judges_scores_by_its_yes_against_its_no(
    write_model: Callable[..., Path],
    build_model: Callable[..., Any],
    tmp_path: Path,
    tied: bool,
) -> None:
    folder = tmp_path / "Small-Reranker"
    folder.mkdir()
    write_model(folder, "qwen3", tie_word_embeddings=tied)
    files = find_model(str(folder))
    rules = text_encoder(files)
    assert rules is not None
    assert rules.judges
    encoder = load_encoder(files, rules, (20, 30), is_metal=False, memory_limit=1 << 30)
    model, _ = build_model("qwen3", tie_word_embeddings=tied)
    found = np.array(encoder.scores([EncoderText(text) for text in TEXTS]))
    for text, score in zip(TEXTS, found, strict=True):
        logits = np.array(model(mx.array([text])))[0, -1]
        assert score == pytest.approx(1 / (1 + np.exp(logits[20] - logits[30])), abs=1e-5)


def test_layers_that_a_conversion_has_put_into_the_model_s_own_file(
    decoder_folder: Callable[..., Path], build_model: Callable[..., Any]
) -> None:
    folder = decoder_folder("qwen3", {"pooling_mode_lasttoken": True})
    found = mx.load(str(folder / "model.safetensors"))
    assert isinstance(found, dict)
    dense = mx.random.normal((6, 64))
    mx.eval(found)
    mx.save_safetensors(
        str(folder / "model.safetensors"), {**found, "dense.0.weight": dense}, {"format": "mlx"}
    )
    model, _ = build_model("qwen3")
    last = np.stack([np.array(model.model(mx.array([text])))[0, -1] for text in TEXTS])
    wanted = unit(last @ np.array(dense).T)
    np.testing.assert_allclose(vectors(encoder_of(folder), TEXTS), wanted, atol=1e-4)


# ---- batches


def test_texts_come_back_in_their_order_whatever_batches_they_were_in(bert_folder: Path) -> None:
    encoder = encoder_of(bert_folder)
    texts = [[1, *([4 + n % 9] * (n % 13)), 2] for n in range(60)] * 4
    work = Encoding(encoder, [EncoderText(text) for text in texts])
    num_pieces, found = 1, work.advance(1)
    while found is None:
        num_pieces, found = num_pieces + 1, work.advance(1)
    work.release()
    assert num_pieces > 1
    assert work.num_done == sum(map(len, texts))
    wanted = np.concatenate([vectors(encoder, [text]) for text in texts[:60]] * 4)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_batches_are_bounded_with_their_padding() -> None:
    lengths = [3, 500, 3000, 4, 700, 900, 10, 10_000]
    made = batches(lengths)
    assert sorted(number for batch in made for number in batch) == list(range(len(lengths)))
    for batch in made:
        padded = len(batch) * max(lengths[number] for number in batch)
        assert len(batch) == 1 or padded <= BATCH_TOKENS
    assert len(made) < len(lengths)


def test_more_dimensions_than_the_model_has_are_refused(bert_folder: Path) -> None:
    work = Encoding(encoder_of(bert_folder), [EncoderText([1, 2])], dimensions=33)
    with pytest.raises(InvalidParameter, match="this model's vectors have 32"):
        work.advance(1)


# ---- what is refused


def test_a_network_that_mixes_texts_of_a_batch_is_refused(bert_folder: Path) -> None:
    encoder = encoder_of(bert_folder)
    network = encoder.network

    def blind(ids: mx.array, mask: mx.array, types: mx.array | None) -> mx.array:
        """Takes padding for text."""
        hidden: mx.array = network(ids, mx.ones_like(mask), types)
        return hidden

    encoder.network = blind
    with pytest.raises(UnsupportedModel, match="cannot be served in batches"):
        check(encoder, "blind")


def test_another_activation_than_the_definition_computes_is_refused(
    encoder_folder: Callable[..., Path],
) -> None:
    with pytest.raises(UnsupportedModel, match="has another activation"):
        encoder_of(encoder_folder(hidden_act="relu"))


def test_a_decoder_that_sees_both_ways_by_its_own_code_is_refused(
    decoder_folder: Callable[..., Path],
) -> None:
    folder = decoder_folder("qwen2", {"pooling_mode_lasttoken": True}, is_causal=False)
    with pytest.raises(UnsupportedModel, match="by code of its own"):
        encoder_of(folder)


def test_without_mlx_vlm_the_way_to_install_it_is_said(
    bert_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.chat.embedding.networks.is_installed", lambda: False)
    with pytest.raises(UnsupportedModel, match=r"install .*--no-deps 'mlx-vlm"):
        encoder_of(bert_folder)

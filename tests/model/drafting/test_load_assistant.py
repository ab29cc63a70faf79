"""Loading an assistant: quantised for Metal, refused beside a model that it was not made for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.cache.kv import KVPool
from mlxserve.core.errors import InvalidConfig, OutOfMemory, UnsupportedModel
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.hub.assistants import is_assistant, why_not_for
from mlxserve.hub.files import find_model
from mlxserve.model.attention import choose_attention
from mlxserve.model.drafting.assistant import FULL, SLIDING, Assistant, last_layers
from mlxserve.model.drafting.assistant_model import AssistantModel
from mlxserve.model.drafting.assistant_probe import share_accepted
from mlxserve.model.drafting.load_assistant import LoadedAssistant, load_assistant
from mlxserve.model.load import LoadedModel, load
from mlxserve.model.rank_group import RankGroup
from mlxserve.model.runner import ModelRunner
from mlxserve.request import GUESS, Chunk, LiveRequest, Request, as_page_table
from tests.assistants import read_assistant, write_agreeing_pair, write_assistant
from tests.assistants import unprobed as unprobed
from tests.heads import TEXT

GIB = 1 << 30
CLUSTERED: dict[str, Any] = {
    "use_ordered_embeddings": True,
    "num_centroids": 64,
    "centroid_intermediate_top_k": 4,
}


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("gemma4_text")


@pytest.fixture(scope="module")
def target(folder: Path) -> LoadedModel:
    return load(find_model(str(folder)), is_metal=False, memory_limit=GIB)


def loaded(
    path: Path, target: LoadedModel, *, is_metal: bool = False, memory_limit: int = GIB
) -> LoadedAssistant:
    return load_assistant(
        find_model(str(path)),
        target,
        lambda: TEXT,
        is_metal=is_metal,
        memory_limit=memory_limit,
    )


def logits(model: AssistantModel) -> np.ndarray:
    keys = {
        "full_attention": (mx.ones((1, 1, 2, 128)),) * 2,
        "sliding_attention": (mx.ones((1, 1, 2, 64)),) * 2,
    }
    rows = mx.sin(mx.arange(64))[None]
    found, _ = model(rows, rows, mx.array([3]), keys)
    return np.array(found.astype(mx.float32))


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("changes", [{}, CLUSTERED], ids=["all logits", "clusters"])
def test_weights_have_4_bits_on_metal_and_are_as_published_on_a_cpu(
    changes: dict[str, Any], folder: Path, target: LoadedModel, tmp_path: Path
) -> None:
    path = write_assistant(tmp_path / "a", folder, **changes)
    whole, packed = loaded(path, target), loaded(path, target, is_metal=True)
    published = read_assistant(path)
    np.testing.assert_array_equal(logits(whole.model), logits(published))
    assert packed.weight_size < whole.weight_size / 4
    dense = [m for _, m in packed.model.named_modules() if type(m) in (nn.Linear, nn.Embedding)]
    narrow = [m for m in dense if m.weight.shape[-1] % 64]
    assert dense == narrow, "all others are quantised"
    assert whole.layers == packed.layers == (), "it keeps nothing of a position"
    assert np.isfinite(logits(packed.model)).all()


@pytest.mark.usefixtures("unprobed")
def test_what_is_quantised_already_is_loaded_as_it_is(
    folder: Path, target: LoadedModel, tmp_path: Path
) -> None:
    path = write_assistant(tmp_path / "a", folder)
    model = read_assistant(path)
    nn.quantize(model, 32, 8)
    file = str(path / "model.safetensors")
    mx.save_safetensors(file, dict(tree_flatten(model.parameters())), metadata={"format": "mlx"})
    config = json.loads((path / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8}
    (path / "config.json").write_text(json.dumps(config))
    packed = loaded(path, target, is_metal=True)
    assert {m.bits for _, m in packed.model.named_modules() if hasattr(m, "bits")} == {8}
    np.testing.assert_allclose(logits(packed.model), logits(model), atol=1e-4)


def test_the_last_layers_with_keys_of_their_own_are_read(target: LoadedModel) -> None:
    """Four of the six layers have some; the last two share them."""
    assert [spec.window for spec in target.layers] == [24, 24, None, 24]
    assert last_layers(target.layers) == {"full_attention": 2, "sliding_attention": 3}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"backbone_hidden_size": 2560},
            r"is the assistant of Gemma 4 E4B \(a model with hidden states of 2560 numbers\), and .* is a model with "
            r"hidden states of 64 numbers\. Choose its own assistant",
        ),
        ({"head_dim": 32}, "have 4 heads of 32 numbers, and .* has 1 of 64 there"),
        ({"global_head_dim": 256}, "full_attention layers have 4 heads of 256 numbers"),
        ({"vocab_size": 4096}, "has a vocabulary of 4096 tokens, and .* one of 2048"),
    ],
    ids=["hidden size", "head size", "head size of full layers", "vocabulary"],
)
def test_an_assistant_of_another_model_is_refused(
    changes: dict[str, Any],
    sentence: str,
    folder: Path,
    target: LoadedModel,
    tmp_path: Path,
) -> None:
    path = write_assistant(tmp_path / "a", folder, **changes)
    with pytest.raises(InvalidConfig, match=sentence):
        loaded(path, target)


@pytest.mark.parametrize("kind", [FULL, SLIDING])
def test_a_layer_of_another_rank_is_not_read(
    kind: str, folder: Path, target: LoadedModel, tmp_path: Path
) -> None:
    """Rank 0 of a pipeline has the last layers, and may have none of a type."""
    own = tuple(each for each in target.layers if (each.window is None) != (kind == FULL))
    of_rank = replace(
        target, caches=replace(target.caches, layers=own), group=cast(RankGroup, object())
    )
    path = write_assistant(tmp_path / "a", folder)
    with pytest.raises(
        InvalidConfig, match=f"keys of the last {kind} layer .* rank 0 does not have"
    ):
        loaded(path, of_rank)


def test_the_sentence_names_the_assistant_that_fits() -> None:
    assistant = {"model_type": "gemma4_assistant", "backbone_hidden_size": 1536}
    target = {
        "model_type": "gemma4",
        "text_config": {"model_type": "gemma4_text", "hidden_size": 5376},
    }
    reason = why_not_for(assistant, "small", target, "large")
    assert reason is not None
    assert "small is the assistant of Gemma 4 E2B" in reason
    assert "Choose google/gemma-4-31B-it-assistant" in reason
    assert why_not_for({**assistant, "backbone_hidden_size": 5376}, "a", target, "b") is None


def test_a_model_of_another_family_has_no_assistant() -> None:
    reason = why_not_for({"model_type": "gemma4_assistant"}, "a", {"model_type": "qwen3"}, "b")
    assert reason is not None
    assert "b is a qwen3 model" in reason


def test_assistants_are_known_by_their_config() -> None:
    assert is_assistant({"model_type": "gemma4_assistant"})
    assert is_assistant({"model_type": "gemma4_unified_assistant"})
    assert not is_assistant({"model_type": "gemma4"})


def test_an_assistant_that_does_not_fit_into_memory_is_refused(
    folder: Path, target: LoadedModel, tmp_path: Path
) -> None:
    path = write_assistant(tmp_path / "a", folder)
    with pytest.raises(OutOfMemory, match="the weights need"):
        loaded(path, target, memory_limit=target.weight_size + 1000)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_centroids": 62}, "2048 tokens are not divided among 62 clusters"),
        ({"centroid_intermediate_top_k": 0}, "0 clusters of 64 are chosen"),
        ({"centroid_intermediate_top_k": 65}, "65 clusters of 64 are chosen"),
        ({"hidden_size_per_layer_input": 8}, "cannot be loaded"),
    ],
    ids=["indivisible", "none chosen", "too many chosen", "more weights"],
)
def test_a_config_that_no_assistant_has_is_refused(
    changes: dict[str, Any],
    sentence: str,
    folder: Path,
    target: LoadedModel,
    tmp_path: Path,
) -> None:
    path = write_assistant(tmp_path / "a", folder, **CLUSTERED)
    config = json.loads((path / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.update({name: value for name, value in changes.items() if name in part})
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=sentence):
        loaded(path, target)


def test_layers_of_an_unknown_type_are_refused(
    folder: Path, target: LoadedModel, tmp_path: Path
) -> None:
    kinds = ["chunked_attention", "sliding_attention", "full_attention"]
    path = write_assistant(tmp_path / "a", folder, layer_types=kinds)
    with pytest.raises(UnsupportedModel, match="layers of the type 'chunked_attention'"):
        loaded(path, target)


def test_an_order_with_tokens_that_do_not_exist_is_refused(
    folder: Path, target: LoadedModel, tmp_path: Path
) -> None:
    """mlx would read past the end of the embedding."""
    path = write_assistant(tmp_path / "a", folder, **CLUSTERED)
    file = str(path / "model.safetensors")
    weights = dict(mx.load(file))
    weights["masked_embedding.token_ordering"] += 1
    mx.save_safetensors(file, weights, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="order of tokens"):
        loaded(path, target)


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    """A model, and an assistant that mostly guesses its tokens."""
    own, assistant = write_agreeing_pair(tmp_path_factory.mktemp("pair"), folder)
    return load(find_model(str(own)), is_metal=False, memory_limit=GIB), assistant


def test_an_assistant_that_guesses_the_models_tokens_is_taken(
    pair: tuple[LoadedModel, Path],
) -> None:
    model, assistant = pair
    share = share_accepted(loaded(assistant, model).model, model, TEXT)
    assert share > 0.3


def test_an_assistant_that_guesses_nothing_is_refused(
    folder: Path, target: LoadedModel, tmp_path: Path
) -> None:
    path = write_assistant(tmp_path / "a", folder)
    sentence = r"draft_model=a: 0 % of its guesses at 32 tokens .* 10 % are required\. It may be the assistant of another"
    with pytest.raises(InvalidConfig, match=sentence):
        loaded(path, target)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_no_right_guess(
    value: float, pair: tuple[LoadedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, assistant = pair
    call = AssistantModel.__call__

    def spoiled(self: AssistantModel, *arguments: Any) -> tuple[mx.array, mx.array]:
        logits, hidden = call(self, *arguments)
        logits[:, 0] = -value  # not the best one
        return logits, hidden

    monkeypatch.setattr(AssistantModel, "__call__", spoiled)
    with pytest.raises(InvalidConfig, match="0 % of its guesses"):
        loaded(assistant, model)


def test_the_probe_guesses_what_drafts_over_pages_guess(
    folder: Path,
    target: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unprobed: None,
) -> None:
    """The last guess of the probe, at the end of a text longer than the window."""
    model, assistant = target, loaded(write_assistant(tmp_path / "a", folder), target).model
    calls = []
    call = AssistantModel.__call__

    def listening(self: AssistantModel, *arguments: Any) -> tuple[mx.array, mx.array]:
        calls.append(call(self, *arguments))
        return calls[-1]

    monkeypatch.setattr(AssistantModel, "__call__", listening)
    share_accepted(assistant, model, TEXT)
    probed = np.array(calls[-1][0])
    choice = choose_attention("auto", model)
    kv = KVPool(model.layers, 8, 16, choice.backends)
    drafter = Assistant(assistant, model, kv)
    runner = ModelRunner(choice.loaded, kv, drafter=drafter)
    request = LiveRequest(Request("text", TEXT, SamplingParams(temperature=0)))
    request.prefill_end, end = len(TEXT), len(TEXT) - 1
    pages = as_page_table(range(8))
    for chunk in (
        Chunk(request, 0, end, pages, samples=True),
        Chunk(request, end, 2, pages, samples=True, draft=(GUESS,)),
    ):
        pending = runner.launch([chunk])
        runner.start(pending)
        runner.collect(pending)
    np.testing.assert_allclose(np.array(calls[-1][0]), probed, atol=0.01)

"""Real folders become models; broken ones are refused with one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from metal_kernels.reading import DeviceError
from mlxserve.cache.kv import LayerSpec
from mlxserve.core.errors import MlxServeError, OutOfMemory, UnsupportedModel
from mlxserve.hub.files import check_folder, find_model, text_config
from mlxserve.model.load import LoadedModel, load, prepare, read_model

GIB = 1 << 30
PROMPT = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
ModelFolder = Callable[[str], Path]


def load_folder(folder: Path, *, is_metal: bool = False, memory_limit: int = GIB) -> LoadedModel:
    return load(find_model(str(folder)), is_metal=is_metal, memory_limit=memory_limit)


def logits(model: nn.Module) -> np.ndarray:
    return np.array(model(PROMPT).astype(mx.float32))


def dtypes(model: nn.Module) -> set[mx.Dtype]:
    return {array.dtype for _, array in tree_flatten(model.parameters())}


def rewrite(folder: Path, **config: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **config}))


def tensors(folder: Path) -> dict[str, mx.array]:
    found = mx.load(str(folder / "model.safetensors"))
    assert isinstance(found, dict)
    return found


def save(folder: Path, model: nn.Module) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))


@pytest.fixture
def llama(model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A copy of a llama's folder that a test may change."""
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "llama"))


# ---- what is loaded


def test_a_folder_becomes_a_model_with_its_layers_shapes(model_folder: ModelFolder) -> None:
    loaded = load_folder(model_folder("llama"))
    spec = LayerSpec(kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)
    assert loaded.layers == (spec, spec, spec)
    assert (
        loaded.vocab_size
        == json.loads((model_folder("llama") / "config.json").read_text())["vocab_size"]
    )
    assert loaded.max_length == 512
    weights = np.sum([array.size for _, array in tree_flatten(loaded.model.parameters())])
    assert loaded.weight_size == 4 * weights


@pytest.mark.parametrize(
    ("kind", "windows"),
    [("gemma3_text", (24, None, 24)), ("gpt_oss", (24, None, 24)), ("qwen3", (None,) * 3)],
)
def test_windows_are_read_from_the_models_own_caches(
    kind: str, windows: tuple[int | None, ...], model_folder: ModelFolder
) -> None:
    assert tuple(spec.window for spec in load_folder(model_folder(kind)).layers) == windows


def test_the_dense_path_of_a_loaded_model_is_unchanged(model_folder: ModelFolder) -> None:
    dense, _ = load_model(model_folder("qwen3"))
    expected = logits(dense)
    assert np.array_equal(logits(load_folder(model_folder("qwen3")).model), expected)


def test_half_precision_weights_become_float32_on_a_cpu(llama: Path) -> None:
    model, _ = load_model(llama)
    model.set_dtype(mx.bfloat16)
    save(llama, model)
    loaded = load_folder(llama)
    assert dtypes(loaded.model) == {mx.float32}
    assert loaded.layers[0].dtype == mx.float32
    model.set_dtype(mx.float32)
    assert np.allclose(logits(loaded.model), logits(model), atol=1e-5)


def test_weights_stay_as_stored_on_metal(llama: Path) -> None:
    model, _ = load_model(llama)
    model.set_dtype(mx.float16)
    save(llama, model)
    loaded = load_folder(llama, is_metal=True)
    assert dtypes(loaded.model) == {mx.float16}
    assert loaded.layers[0].dtype == mx.float16


def quantise(folder: Path, bits: int = 4, group_size: int = 32, **options: Any) -> nn.Module:
    """Quantise a folder's model in place, as mlx-lm's converter does; returns the model."""
    model, _ = load_model(folder)
    nn.quantize(model, group_size=group_size, bits=bits, **options)
    save(folder, model)
    rewrite(folder, quantization={"group_size": group_size, "bits": bits, **options})
    return model


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_dequantised_model_has_the_same_logits_on_a_cpu(
    kind: str, bits: int, model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_folder(kind), tmp_path / kind))
    quantised = quantise(folder, bits)
    loaded = load_folder(folder)
    assert dtypes(loaded.model) == {mx.float32}
    assert not any(hasattr(module, "bits") for module in loaded.model.modules())
    expected = logits(quantised)
    assert np.abs(logits(loaded.model) - expected).max() < 1e-3 * np.abs(expected).max()


def test_a_model_in_4_bit_floats_has_the_same_logits_on_a_cpu(llama: Path) -> None:
    quantised = quantise(llama, mode="mxfp4")
    loaded = load_folder(llama)
    expected = logits(quantised)
    assert np.abs(logits(loaded.model) - expected).max() < 1e-3 * np.abs(expected).max()


def test_scales_in_16_bits_do_not_round_the_values_on_a_cpu(llama: Path) -> None:
    quantised = quantise(llama)
    quantised.set_dtype(mx.bfloat16)
    save(llama, quantised)
    loaded = load_folder(llama)
    quantised.set_dtype(mx.float32)
    assert np.allclose(logits(loaded.model), logits(quantised), atol=1e-5)


def test_a_quantised_model_that_only_fits_quantised_stays_quantised(llama: Path) -> None:
    whole = load_folder(llama)
    quantised = quantise(llama)
    loaded = load_folder(llama, memory_limit=whole.weight_size - 1)
    assert mx.uint32 in dtypes(loaded.model)
    assert np.allclose(logits(loaded.model), logits(quantised), atol=1e-5)


def test_weights_in_several_files_are_one_model(llama: Path) -> None:
    whole = load_folder(llama)
    weights = tensors(llama)
    (llama / "model.safetensors").unlink()
    for shard in (0, 1):
        part = dict(sorted(weights.items())[shard::2])
        mx.save_safetensors(str(llama / f"model-0000{shard + 1}-of-00002.safetensors"), part)
    assert np.array_equal(logits(load_folder(llama).model), logits(whole.model))


def test_text_config_overrides_the_outer_config() -> None:
    config = {"model_type": "x", "vocab_size": 1, "text_config": {"vocab_size": 2}}
    assert text_config(config)["vocab_size"] == 2
    assert text_config({"vocab_size": 3})["vocab_size"] == 3


def test_a_vocabulary_missing_from_the_config_is_measured(
    build_model: Callable[..., tuple[nn.Module, dict[str, Any]]],
) -> None:
    model, config = build_model("llama")
    size = config.pop("vocab_size")
    assert prepare(model, config, "tiny").vocab_size == size


# ---- what is refused


def refusal(folder: Path, kind: type[MlxServeError] = UnsupportedModel, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load_folder(folder, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert "Traceback" not in text
    assert folder.name in text
    return text


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_weight_file_is_refused(share: float, llama: Path) -> None:
    file = llama / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    assert "cannot be loaded" in refusal(llama)


def test_a_git_lfs_pointer_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "cannot be loaded" in refusal(llama)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_weights_tell_whether_the_head_is_the_embedding_where_the_config_says_null(
    llama: Path, is_tied: bool
) -> None:
    weights = {name: array for name, array in tensors(llama).items() if "lm_head" not in name}
    head = {} if is_tied else {"lm_head.weight": -weights["model.embed_tokens.weight"]}
    mx.save_safetensors(str(llama / "model.safetensors"), {**weights, **head})
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": None}))
    model, read = read_model(check_folder(llama, "llama"), is_metal=False)
    assert read["tie_word_embeddings"] is is_tied
    assert ("lm_head" in model) is not is_tied


def test_a_missing_tensor_is_named(llama: Path) -> None:
    weights = tensors(llama)
    del weights["model.layers.1.mlp.up_proj.weight"]
    mx.save_safetensors(str(llama / "model.safetensors"), weights)
    assert "model.layers.1.mlp.up_proj.weight" in refusal(llama)


def test_an_extra_tensor_is_named(llama: Path) -> None:
    weights = tensors(llama)
    weights["model.layers.1.mlp.side_proj.weight"] = mx.zeros((2, 2))
    mx.save_safetensors(str(llama / "model.safetensors"), weights)
    assert "model.layers.1.mlp.side_proj.weight" in refusal(llama)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "no_such_kind"}, "has a definition of that kind. A newer version"),
        ({"model_type": "bert"}, "is an encoder (bert), which turns texts into vectors"),
        ({"model_type": "whisper"}, "is a model for audio (whisper), and cannot be served"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is an encoder with a decoder (t5)"),
        ({"model_type": "olmo"}, "needs the package 'hf_olmo'"),
        ({"model_type": "base"}, "cannot be loaded"),
        ({"hidden_size": 32}, "Expected shape"),
        ({"hidden_size": "many"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 4}, "Missing 9 parameters"),
        ({"num_hidden_layers": 2}, "Received 9 parameters not in model"),
        ({"num_attention_heads": None}, "cannot be loaded"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings must be a whole number"),
        ({"max_position_embeddings": -1}, "max_position_embeddings must be a whole number"),
        ({"quantization": 4}, "cannot be loaded"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_its_weights_is_refused(
    changes: dict[str, Any], message: str, llama: Path
) -> None:
    rewrite(llama, **changes)
    assert message in refusal(llama)


def test_weights_larger_than_memory_are_refused_before_they_are_read(llama: Path) -> None:
    size = find_model(str(llama)).weight_size
    file = llama / "model.safetensors"
    file.write_bytes(b"\0" * size)  # nothing that could be loaded
    assert "the weights need 0.0 GiB" in refusal(llama, OutOfMemory, memory_limit=size - 1)


def test_weights_that_fit_only_in_half_precision_are_refused_on_a_cpu(llama: Path) -> None:
    model, _ = load_model(llama)
    model.set_dtype(mx.bfloat16)
    save(llama, model)
    limit = find_model(str(llama)).weight_size + 1000
    assert "converted to float32" in refusal(llama, OutOfMemory, memory_limit=limit)
    assert load_folder(llama, is_metal=True, memory_limit=limit).vocab_size


MAMBA2 = {
    "model_type": "mamba2",
    "num_heads": 4,
    "head_dim": 16,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "state_size": 8,
    "num_hidden_layers": 2,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, 100.0],
    "time_step_rank": "auto",
}


def test_a_recurrent_model_has_states_and_no_keys() -> None:
    from mlx_lm.models import mamba2

    loaded = prepare(mamba2.Model(mamba2.ModelArgs.from_dict(MAMBA2)), MAMBA2, "tiny")
    assert loaded.layers == ()
    [spec, _] = loaded.states
    assert [shape for shape, _ in spec.arrays] == [(3, 80), (4, 16, 8)]
    assert loaded.state_nbytes == 2 * 4 * (3 * 80 + 4 * 16 * 8)


def test_a_cache_of_another_kind_is_refused_by_its_name(
    build_model: Callable[..., tuple[nn.Module, dict[str, Any]]],
) -> None:
    model, config = build_model("llama")

    class OwnCache:
        pass

    model.make_cache = lambda: [OwnCache()]
    with pytest.raises(UnsupportedModel, match=r"form of their own \(OwnCache\).* docs/models.md"):
        prepare(model, config, "tiny")


def test_a_layer_that_stores_no_keys_is_refused_by_its_number(
    build_model: Callable[..., tuple[nn.Module, dict[str, Any]]],
) -> None:
    model, config = build_model("llama")

    class Identity(nn.Module):  # type: ignore[misc]
        def __call__(self, x: mx.array, *arguments: object) -> mx.array:
            return x

    model.model.layers[1].self_attn = Identity()
    with pytest.raises(UnsupportedModel, match=r"layers \[1\] of this llama model store neither"):
        prepare(model, config, "tiny")


def test_a_model_that_fails_on_its_first_tokens_is_refused_and_the_log_says_why(
    build_model: Callable[..., tuple[nn.Module, dict[str, Any]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "mlxserve.caches")
    model, config = build_model("llama")

    class Raising(nn.Module):  # type: ignore[misc]
        def __call__(self, x: mx.array, *arguments: object) -> mx.array:
            raise ValueError("no such thing\nin the second line")

    model.model.layers[2].self_attn = Raising()
    with pytest.raises(UnsupportedModel, match="this llama model fails on its first tokens"):
        prepare(model, config, "tiny")
    assert "no such thing" in caplog.text


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            "[Compile::eval_cpu] Failed to compile function Cf4: g++: fatal error: No space left on "
            "device\ncompilation terminated.",
            "No space left on device",
        ),
        (
            "filesystem error: temp_directory_path: No such file or directory",
            "No such file or directory",
        ),
        ("[Compile::eval_cpu] Failed to compile function Cf4: 1", "the log has the details"),
    ],
)
def test_where_mlx_cannot_compile_the_model_is_not_blamed(
    build_model: Callable[..., tuple[nn.Module, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    error: str,
    why: str,
) -> None:
    monkeypatch.setenv("TMPDIR", "/full/folder")
    model, config = build_model("llama")

    class Raising(nn.Module):  # type: ignore[misc]
        def __call__(self, x: mx.array, *arguments: object) -> mx.array:
            raise DeviceError(f"the device failed to compute an array: {error}")

    model.model.layers[2].self_attn = Raising()
    with pytest.raises(UnsupportedModel) as caught:
        prepare(model, config, "tiny")
    assert str(caught.value) == (
        f"tiny: mlx could not compile a function for this CPU ({why}). It needs g++, and free space in "
        "the folder for temporary files, /full/folder (TMPDIR)."
    )


@pytest.mark.parametrize(
    ("method", "extra", "named"),
    [
        ("fp8", "weight_scale_inv", "FP8 (8-bit floats)"),
        ("bitsandbytes", "weight.absmax", "bitsandbytes"),
        ("gptq", "g_idx", "GPTQ"),
        ("exl2", "q_weight", "EXL2"),
        ("hqq", "meta", "HQQ"),
    ],
)
def test_weights_of_another_quantisation_are_refused_with_what_to_take_instead(
    llama: Path, method: str, extra: str, named: str
) -> None:
    rewrite(llama, quantization_config={"quant_method": method, "bits": 4, "group_size": 64})
    weights = {**tensors(llama), f"model.layers.0.mlp.up_proj.{extra}": mx.zeros((2, 2))}
    mx.save_safetensors(str(llama / "model.safetensors"), weights)
    text = refusal(llama)
    assert f"is quantised with {named}" in text
    assert "Take an MLX conversion" in text


def test_awq_without_quantised_layers_is_refused_by_its_name(llama: Path) -> None:
    rewrite(llama, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 64})
    assert "is quantised with AWQ" in refusal(llama)


def test_8_bit_floats_without_scales_are_not_computed_with_as_whole_numbers(llama: Path) -> None:
    weights = tensors(llama)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = mx.to_fp8(weights[name])
    mx.save_safetensors(str(llama / "model.safetensors"), weights)
    assert "model.layers.1.mlp.up_proj.weight is in mlx.core.uint8" in refusal(llama)


def test_weights_without_a_head_are_those_of_an_embedding_model(llama: Path) -> None:
    bare = {name.removeprefix("model."): array for name, array in tensors(llama).items()}
    mx.save_safetensors(str(llama / "model.safetensors"), bare)
    text = refusal(llama)
    assert "has the weights of a bare llama model" in text
    assert "/v1/embeddings" in text


def test_a_reranker_is_refused_by_what_it_is(llama: Path) -> None:
    weights = {**tensors(llama), "score.weight": mx.zeros((1, 64))}
    mx.save_safetensors(str(llama / "model.safetensors"), weights)
    rewrite(llama, architectures=["LlamaForSequenceClassification"])
    assert "is a classifier or reranker (LlamaForSequenceClassification)" in refusal(llama)


# ---- folders as they are published


def test_code_in_a_folder_is_not_run_and_does_not_matter(llama: Path) -> None:
    expected = logits(load_folder(llama).model)
    ran = llama / "ran"
    (llama / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w')")
    rewrite(llama, auto_map={"AutoModel": "modeling_own.Model"}, model_file="modeling_own.py")
    assert np.array_equal(logits(load_folder(llama).model), expected)
    assert not ran.exists()


def test_a_kind_without_a_definition_is_refused_and_its_own_code_mentioned(llama: Path) -> None:
    rewrite(llama, model_type="no_such", auto_map={"AutoModel": "modeling_own.Model"})
    assert "Code in the model's folder is never run." in refusal(llama)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_rope_parameters_of_transformers_5_are_what_rope_theta_was(
    kind: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_folder(kind), tmp_path / kind))
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    rewrite(folder, rope_theta=777.0, rope_scaling=scaling)
    expected = logits(load_folder(folder).model)
    rewrite(folder, rope_theta=None, rope_scaling=None)
    content = json.loads((folder / "config.json").read_text())
    del content["rope_theta"], content["rope_scaling"]
    content["rope_parameters"] = {**scaling, "rope_theta": 777.0}
    (folder / "config.json").write_text(json.dumps(content))
    assert np.array_equal(logits(load_folder(folder).model), expected)


def test_a_text_model_is_told_what_only_the_top_of_its_config_says(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Qwen3-VL's `tie_word_embeddings`."""
    folder = Path(shutil.copytree(model_folder("qwen3"), tmp_path / "qwen3_vl"))
    text = json.loads((folder / "config.json").read_text())
    tied = text.pop("tie_word_embeddings", True)
    whole = {"model_type": "qwen3_vl", "tie_word_embeddings": tied, "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    named = {f"language_model.{name}": array for name, array in tensors(folder).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), named)
    assert np.array_equal(
        logits(load_folder(folder).model), logits(load_model(model_folder("qwen3"))[0])
    )


@pytest.mark.parametrize(
    ("changes", "length", "longest"),
    [
        ({"max_position_embeddings": 256}, 256, 256),
        ({"max_position_embeddings": None, "n_ctx": 300}, 300, 300),
        ({"max_position_embeddings": None}, 2048, 2048),  # of transformers' LlamaConfig
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 1024, 1024),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 512, 1024),
    ],
    ids=str,
)
def test_the_context_of_a_model(
    changes: dict[str, Any], length: int, longest: int, llama: Path
) -> None:
    rewrite(llama, **changes)
    context = load_folder(llama).context
    assert (context.length, context.longest) == (length, longest)


def test_the_context_of_a_definition_that_transformers_does_not_know(
    build_model: Callable[..., tuple[nn.Module, dict[str, Any]]],
) -> None:
    model, config = build_model("llama")
    unknown = {**config, "model_type": "own", "max_position_embeddings": None}
    model.args.max_position_embeddings = 777
    assert prepare(model, unknown, "tiny").max_length == 777
    model.args.max_position_embeddings = None
    assert prepare(model, unknown, "tiny").max_length == 4096


def test_left_over_weights_of_a_vision_tower_are_named(llama: Path) -> None:
    weights = {**tensors(llama), "vision_tower.conv.weight": mx.zeros((2, 2))}
    mx.save_safetensors(str(llama / "model.safetensors"), weights)
    text = refusal(llama)
    assert "has weights of another part (vision_tower)" in text
    assert "Take a conversion of the text model" in text


def test_missing_weights_are_refused_with_what_to_do(llama: Path) -> None:
    weights = tensors(llama)
    del weights["model.norm.weight"]
    mx.save_safetensors(str(llama / "model.safetensors"), weights)
    assert "download the model again" in refusal(llama)

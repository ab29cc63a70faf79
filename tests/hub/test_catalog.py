"""Which models are listed, and whether each fits in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mlxserve.cache.groups import Window
from mlxserve.core.config import EngineConfig, SchedulerConfig
from mlxserve.hub.catalog import Entry, MemoryFit, Origin, entries, memory_fit
from mlxserve.hub.embedded import MODEL_NAME
from mlxserve.hub.files import find_model
from mlxserve.hub.known_models import KNOWN_WINDOWS
from mlxserve.hub.kv_shapes import KVShape
from mlxserve.model.window_group import WindowGroup
from mlxserve.system.device_memory import MemoryLimit

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}
KV = KVShape(36 * 8 * 128 * 2, has_states=False, num_rows=36 * 8 * 2)
SMALL = KVShape(20, has_states=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The download cache of a machine without models."""
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(folder: Path, config: object = CONFIG, *, size: int = 1000) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(size))


def fit_of(
    entry: Entry,
    *,
    context: int | None,
    memory: int,
    is_metal: bool = True,
    in_8_bits: bool = False,
    num_seqs: int = 64,
) -> MemoryFit:
    return memory_fit(
        entry,
        memory=MemoryLimit(memory),
        is_metal=is_metal,
        options=SchedulerConfig(max_model_len=context, max_num_seqs=num_seqs),
        in_8_bits=in_8_bits,
    )


def step_of(entry: Entry, memory: int, *, is_metal: bool = True, in_8_bits: bool = False) -> int:
    limit = MemoryLimit(memory)
    return entry.step_size(limit, SchedulerConfig(), is_metal=is_metal, in_8_bits=in_8_bits)


def named(name: str) -> Entry | None:
    return next((entry for entry in entries() if entry.name == name), None)


def test_the_bundled_model_is_first_with_the_kv_size_of_the_engine(cache: Path) -> None:
    first = entries()[0]
    assert (first.name, first.source, first.context) == (MODEL_NAME, Origin.BUNDLED, 4096)
    assert 32 * first.kv_size(4) == 128 << 10, "the engine's pages of 32 tokens have 128 KiB"


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"max_position_embeddings": float("inf")},
        {"num_attention_heads": {}},
        {"hidden_size": "wide", "head_dim": None},
    ],
)
def test_a_folder_that_cannot_be_loaded_is_not_listed_and_hides_no_other(
    cache: Path, change: dict[str, object]
) -> None:
    put(cache / "models--a--bad" / "snapshots" / "1", {**CONFIG, **change})
    put(cache / "models--a--good" / "snapshots" / "1")
    assert named("a/bad") is None
    assert named("a/good") is not None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["fifo", "deep", "odd", "link"])
def test_files_that_cannot_be_read_hide_no_other_model(cache: Path, name: str, kind: str) -> None:
    bad = cache / "models--a--bad" / "snapshots" / "1"
    put(bad)
    (bad / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(bad / name)
    elif kind == "link":
        (bad / name).symlink_to("nothing")
        (bad.parent / "2").symlink_to("nothing")
    else:
        odd = '{"model_type": "x", "weight_map": {"a": [], "b": {}}}'
        (bad / name).write_text("[" * 100_000 if kind == "deep" else odd)
    put(cache / "models--a--good" / "snapshots" / "1")
    assert named("a/good") is not None


def test_a_downloaded_model_is_no_longer_suggested(cache: Path) -> None:
    name = "mlx-community/Qwen3-4B-4bit"
    assert (entry := named(name)) is not None
    assert entry.source is Origin.SUGGESTED
    put(cache / "models--mlx-community--Qwen3-4B-4bit" / "snapshots" / "abc")
    assert named(name) == Entry(
        name, Origin.DOWNLOADED, 1000, KV, 40_960, 32, 32 * 128, 4 * 32 * 128, copied=8 * 128 * 2
    )
    assert sum(entry.name == name for entry in entries()) == 1


def test_folders_are_found_by_their_path(cache: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "home/models/mine", tmp_path / "user/.lmstudio/models/a/b"
    put(ours)
    put(theirs, {**CONFIG, "text_config": {"num_hidden_layers": 2}})
    assert (entry := named(str(ours))) is not None
    assert entry.source is Origin.FOLDER
    assert (entry := named(str(theirs))) is not None
    assert entry.kv.num_values == KV.num_values // 18


@pytest.mark.parametrize(
    "config", [{}, [], {"model_type": "x"}, {**CONFIG, "num_attention_heads": "many"}]
)
def test_an_unreadable_model_is_not_listed(cache: Path, tmp_path: Path, config: object) -> None:
    put(tmp_path / "home/models/mine", config)
    assert named(str(tmp_path / "home/models/mine")) is None


def test_an_incomplete_download_is_listed_as_a_suggestion(cache: Path) -> None:
    folder = cache / "models--mlx-community--Qwen3-4B-4bit" / "snapshots" / "abc"
    put(folder)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (entry := named("mlx-community/Qwen3-4B-4bit")) is not None
    assert entry.source is Origin.SUGGESTED


def test_weights_and_the_context_must_fit_together() -> None:
    entry = Entry("m", Origin.FOLDER, weight_size=1000, kv=SMALL, context=0)
    assert entry.kv_size(2) == 40
    fit = fit_of(entry, context=100, memory=5000)
    assert (fit.fits, fit.num_tokens, fit.needed) == (True, 100, 5000)
    assert not fit_of(entry, context=101, memory=5000).fits
    assert not fit_of(entry, context=100, memory=5000, is_metal=False).fits, "float32"
    assert fit_of(entry, context=2, memory=999).num_tokens == 0


def test_a_draft_model_takes_memory_for_its_weights_and_for_each_token() -> None:
    entry = Entry("m", Origin.FOLDER, weight_size=1000, kv=SMALL, context=0)
    drafter = Entry(
        "d", Origin.FOLDER, weight_size=300, kv=KVShape(8, has_states=False, num_rows=2), context=0
    )
    assert drafter.draft_size(2) == 16
    assert drafter.draft_size(2, in_8_bits=True) == 8 + 2 * 4
    windowed = Entry(
        "w",
        Origin.FOLDER,
        300,
        KVShape(8, has_states=False, num_rows=2, window=24, num_window_values=6),
        0,
    )
    assert windowed.draft_size(2) == 16, "its layers keep every token"
    fit = memory_fit(
        entry,
        memory=MemoryLimit(1300 + 100 * (40 + 16)),
        is_metal=True,
        options=SchedulerConfig(max_model_len=100),
        drafter=drafter,
    )
    assert (fit.fits, fit.num_tokens, fit.needed) == (True, 100, 1300 + 5600)


def test_in_8_bits_more_tokens_fit_beside_a_scale_for_each_row() -> None:
    entry = Entry("m", Origin.FOLDER, 1000, KVShape(256, has_states=False, num_rows=4), 0)
    assert entry.kv_size(2, in_8_bits=True) == 256 + 4 * 4
    fit = fit_of(entry, context=10, memory=1000 + 2720, in_8_bits=True)
    assert (fit.fits, fit.num_tokens, fit.needed) == (True, 10, 3720)
    assert fit_of(entry, context=10, memory=3720).num_tokens == 5


def test_latents_stay_in_16_bits() -> None:
    entry = Entry("m", Origin.FOLDER, 1000, KVShape(256, has_states=False), 0)
    assert entry.kv_size(2, in_8_bits=True) == 512


def test_a_tenth_of_the_cache_is_for_the_recurrent_states_of_a_request() -> None:
    entry = Entry("m", Origin.FOLDER, 1000, KVShape(20, has_states=True), 0)
    fit = fit_of(entry, context=90, memory=5000)
    assert (fit.fits, fit.num_tokens, fit.needed) == (True, 90, 5000)
    assert not fit_of(entry, context=91, memory=5000).fits


@pytest.mark.parametrize("gigabytes", [22, 40, 90])
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_layers_with_a_window_take_what_a_server_gives_them(
    gigabytes: int, in_8_bits: bool
) -> None:
    known = {entry.name: entry for entry in entries()}
    for name in KNOWN_WINDOWS:
        check_windows(known[name], int(gigabytes * 0.7e9), in_8_bits)


def check_windows(entry: Entry, memory: int, in_8_bits: bool) -> None:
    """A server shares the same memory in the same way."""
    fit = fit_of(entry, context=None, memory=memory, in_8_bits=in_8_bits)
    page = EngineConfig().page_size
    window = Window(entry.kv.window, page)
    of_window = entry.window_size(2, in_8_bits=in_8_bits) // window.num_held
    of_others = page * entry.kv_size(2, in_8_bits=in_8_bits)
    left = memory - entry.weight_size - step_of(entry, memory, in_8_bits=in_8_bits)
    if left < 0:
        assert not fit.fits
        return
    group = WindowGroup(window, of_window, of_others, is_shared=True)
    config = EngineConfig().with_options(max_num_batched_tokens=512)
    num_pages, num_windows = group.fitted(config, left, entry.context)
    assert (fit.num_tokens, fit.num_windows) == (num_pages * page, num_windows // window.num_held)
    assert fit.fits == (fit.num_tokens >= entry.context)


def test_a_context_fits_up_to_the_last_page_beside_its_own_window() -> None:
    [entry] = (known for known in entries() if known.name == "mlx-community/gemma-3-27b-it-4bit")
    memory = int(21.5e9)
    whole = fit_of(entry, context=None, memory=memory)
    assert not whole.fits
    assert whole.num_windows is not None
    assert whole.num_windows > 4
    longest = fit_of(entry, context=whole.num_tokens, memory=memory)
    assert longest.fits
    assert fit_of(entry, context=whole.num_tokens, memory=longest.needed).fits
    assert not fit_of(entry, context=whole.num_tokens, memory=longest.needed - 1).fits
    assert not fit_of(entry, context=whole.num_tokens + 1, memory=memory).fits


def test_a_model_without_attention_takes_any_context() -> None:
    entry = Entry("m", Origin.FOLDER, 1000, KVShape(0, has_states=True), 0)
    fit = fit_of(entry, context=10**6, memory=1000)
    assert (fit.fits, fit.num_tokens, fit.needed) == (True, 10**6, 1000)
    fit = fit_of(entry, context=2, memory=999)
    assert (fit.fits, fit.num_tokens) == (False, 0)


@pytest.mark.parametrize(
    ("config", "kv"),
    [
        ({**CONFIG, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 9),
        ({**CONFIG, "linear_num_value_heads": 32, "full_attention_interval": 4}, 9),
        ({"model_type": "mamba2", "num_hidden_layers": 4, "hidden_size": 64}, 0),
    ],
)
def test_only_layers_with_attention_count(
    cache: Path, tmp_path: Path, config: dict[str, object], kv: int
) -> None:
    put(tmp_path / "home/models/mine", config)
    assert (entry := named(str(tmp_path / "home/models/mine"))) is not None
    assert entry.kv == KVShape(kv * 8 * 128 * 2, has_states=True, num_rows=kv * 8 * 2)


def test_a_step_must_fit_as_well() -> None:
    entry = Entry("m", Origin.FOLDER, 1000, SMALL, 0, num_heads=1, width=1, inner=2)
    step = step_of(entry, 1000)
    assert step > 512 * (7 + 4) * 2
    fit = fit_of(entry, context=10, memory=1000 + step + 400)
    assert (fit.fits, fit.num_tokens, fit.needed) == (True, 10, 1000 + step + 400)
    assert not fit_of(entry, context=10, memory=1000 + step + 399).fits


def test_the_estimated_step_of_the_embedded_model_matches_the_measured_one(cache: Path) -> None:
    from mlxserve.model.attention import choose_attention
    from mlxserve.model.load import load
    from mlxserve.model.step_peak import measure_step

    loaded = load(find_model(None), is_metal=False, memory_limit=1 << 34)
    _, backend, _ = choose_attention("auto", loaded)
    config = EngineConfig()
    step = measure_step(config, loaded, backend, is_metal=False, memory_limit=1 << 34)
    measured = step.planned
    assert 0.75 < step_of(entries()[0], 1 << 34, is_metal=False) / measured < 1.35


def test_only_active_experts_count_for_a_step(cache: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "hidden_size": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    put(tmp_path / "home/models/mine", config)
    assert (entry := named(str(tmp_path / "home/models/mine"))) is not None
    assert entry.inner == 4 * (32 + 64)


def test_the_requested_context_is_capped_at_the_models() -> None:
    entry = Entry("m", Origin.FOLDER, weight_size=1000, kv=SMALL, context=50)
    assert fit_of(entry, context=8192, memory=3000).fits


def test_a_well_known_model_has_the_size_of_its_weights(cache: Path) -> None:
    assert (entry := named("mlx-community/Qwen3-8B-4bit")) is not None
    assert 4.5e9 < entry.weight_size < 4.7e9
    assert entry.kv_size(2) == 144 << 10


# Layers, head size, vocabulary, whether embeddings are tied, experts and their intermediate size.
SHAPES = {
    "mlx-community/Qwen3-0.6B-4bit": (28, 128, 151_936, True, 1, 3072),
    "mlx-community/Llama-3.2-1B-Instruct-4bit": (16, 64, 128_256, True, 1, 8192),
    "mlx-community/Llama-3.2-3B-Instruct-4bit": (28, 128, 128_256, True, 1, 8192),
    "mlx-community/Qwen3-4B-4bit": (36, 128, 151_936, True, 1, 9728),
    "mlx-community/Mistral-7B-Instruct-v0.3-4bit": (32, 128, 32_768, False, 1, 14_336),
    "mlx-community/Qwen3-8B-4bit": (36, 128, 151_936, False, 1, 12_288),
    "mlx-community/Qwen3-14B-4bit": (40, 128, 151_936, False, 1, 17_408),
    "mlx-community/Qwen3-30B-A3B-4bit": (48, 128, 151_936, False, 128, 768),
    "mlx-community/Qwen3-32B-4bit": (64, 128, 151_936, False, 1, 25_600),
    "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit": (48, 128, 151_936, False, 128, 768),
    "mlx-community/Qwen2.5-Coder-7B-Instruct-4bit": (28, 128, 152_064, False, 1, 18_944),
    "mlx-community/Qwen2.5-Coder-32B-Instruct-4bit": (64, 128, 152_064, False, 1, 27_648),
    "mlx-community/gemma-3-1b-it-qat-4bit": (26, 256, 262_144, True, 1, 6912),
    "mlx-community/gemma-3-4b-it-4bit": (34, 256, 262_208, True, 1, 10_240),
    "mlx-community/gemma-3-12b-it-4bit": (48, 256, 262_208, True, 1, 15_360),
    "mlx-community/gemma-3-27b-it-4bit": (62, 128, 262_208, True, 1, 21_504),
    "mlx-community/DeepSeek-R1-Distill-Qwen-1.5B-4bit": (28, 128, 151_936, False, 1, 8960),
    "mlx-community/DeepSeek-R1-Distill-Qwen-7B-4bit": (28, 128, 152_064, False, 1, 18_944),
    "mlx-community/DeepSeek-R1-Distill-Llama-8B-4bit": (32, 128, 128_256, False, 1, 14_336),
    "mlx-community/DeepSeek-R1-Distill-Qwen-14B-4bit": (48, 128, 152_064, False, 1, 13_824),
    "mlx-community/DeepSeek-R1-Distill-Qwen-32B-4bit": (64, 128, 152_064, False, 1, 27_648),
    "mlx-community/Ministral-3-3B-Instruct-2512-4bit": (26, 128, 131_072, True, 1, 9216),
    "mlx-community/Ministral-3-8B-Instruct-2512-4bit": (34, 128, 131_072, False, 1, 14_336),
    "mlx-community/Phi-4-mini-instruct-4bit": (32, 128, 200_064, True, 1, 8192),
    "mlx-community/phi-4-4bit": (40, 128, 100_352, False, 1, 17_920),
    "mlx-community/SmolLM3-3B-4bit": (36, 128, 128_256, True, 1, 11_008),
}


def test_a_suggested_model_weighs_what_its_shape_says(cache: Path) -> None:
    known = {entry.name: entry for entry in entries()}
    for name, (layers, head_dim, vocabulary, is_tied, experts, inner) in SHAPES.items():
        entry = known[name]
        keys_and_values = entry.kv.num_values // layers
        attention = entry.width * (2 * entry.num_heads * head_dim + keys_and_values)
        parameters = layers * (attention + experts * 3 * entry.width * inner)
        parameters += vocabulary * entry.width * (1 if is_tied else 2)
        assert entry.weight_size == pytest.approx(parameters * 4.5 / 8, rel=0.01), name


# (Billions of parameters, bits of each on average, what their config.json says.)
MIXED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        0.1345,
        16,  # not quantised
        {
            "model_type": "llama",
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
        },
    ),
    "mlx-community/LFM2-8B-A1B-4bit": (
        8.34,
        4.5,
        {
            "model_type": "lfm2_moe",
            "num_hidden_layers": 24,
            "layer_types": [
                "full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv"
                for layer in range(24)
            ],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 2048,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "max_position_embeddings": 128_000,
        },
    ),
    "mlx-community/gpt-oss-20b-MXFP4-Q8": (
        20.9,
        4.63,  # experts in MXFP4, the others in 8 bits
        {
            "model_type": "gpt_oss",
            "sliding_window": 128,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "hidden_size": 2880,
            "num_experts_per_tok": 4,
            "intermediate_size": 2880,
            "max_position_embeddings": 131_072,
        },
    ),
    "mlx-community/GLM-4.7-Flash-4bit": (
        29.9,
        4.5,
        {
            "model_type": "glm4_moe_lite",
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "hidden_size": 2048,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "max_position_embeddings": 202_752,
        },
    ),
    "mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit": (
        79.7,
        4.5,
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 48,
            "full_attention_interval": 4,
            "linear_num_value_heads": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "hidden_size": 2048,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "max_position_embeddings": 262_144,
        },
    ),
    "mlx-community/Qwen3.5-9B-MLX-4bit": (
        8.95,
        4.5,
        {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 32,
            "full_attention_interval": 4,
            "linear_num_value_heads": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "max_position_embeddings": 262_144,
        },
    ),
    "mlx-community/Qwen3.5-35B-A3B-4bit": (
        34.6,
        4.5,
        {
            "model_type": "qwen3_5_moe_text",
            "num_hidden_layers": 40,
            "full_attention_interval": 4,
            "linear_num_value_heads": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "hidden_size": 2048,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "max_position_embeddings": 262_144,
        },
    ),
    "mlx-community/gemma-4-e2b-it-4bit": (
        4.64,
        4.5,
        {
            "model_type": "gemma4_text",
            "num_hidden_layers": 35,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "sliding_window": 512,
            "num_kv_shared_layers": 20,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "max_position_embeddings": 131_072,
        },
    ),
    "mlx-community/gemma-4-31b-it-4bit": (
        30.7,
        4.5,
        {
            "model_type": "gemma4_text",
            "num_hidden_layers": 60,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
            "sliding_window": 1024,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "max_position_embeddings": 262_144,
        },
    ),
}


def test_a_suggestion_is_judged_as_if_it_was_here(cache: Path, tmp_path: Path) -> None:
    folders = {name: tmp_path / "home/models" / name.replace("/", "-") for name in MIXED}
    for name, (_, _, config) in MIXED.items():
        put(folders[name], config)
    known = {entry.name: entry for entry in entries()}
    for name, (billions, bits, _) in MIXED.items():
        here, suggested = known[str(folders[name])], known[name]
        assert suggested.kv == here.kv, name
        assert (suggested.context, suggested.num_heads) == (here.context, here.num_heads), name
        assert (suggested.width, suggested.inner) == (here.width, here.inner), name
        assert suggested.copied == here.copied, name
        assert suggested.weight_size == pytest.approx(billions * 1e9 * bits / 8, rel=0.01), name


def test_every_suggested_models_size_is_checked(cache: Path) -> None:
    suggested = {e.name for e in entries() if e.source is Origin.SUGGESTED}
    assert suggested == SHAPES.keys() | MIXED.keys()


def test_a_model_is_judged_with_its_full_context_unless_less_is_requested() -> None:
    entry = Entry("m", Origin.FOLDER, weight_size=1000, kv=SMALL, context=100)
    assert fit_of(entry, context=None, memory=5000).context == 100
    assert fit_of(entry, context=None, memory=5000).fits
    assert not fit_of(entry, context=None, memory=4999).fits
    assert fit_of(entry, context=50, memory=3000).fits
    assert fit_of(entry, context=200, memory=9000).context == 100
    silent = Entry("m", Origin.FOLDER, weight_size=1000, kv=SMALL, context=0)
    assert fit_of(silent, context=None, memory=5000).context == 8192

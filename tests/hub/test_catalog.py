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
    windowed = [entry for entry in entries() if entry.kv.window]
    assert len(windowed) > 10
    for entry in windowed:
        check_windows(entry, int(gigabytes * 0.7e9), in_8_bits)


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


@pytest.mark.parametrize("name", ["num_experts_per_tok", "top_k_experts"])
def test_only_active_experts_count_for_a_step(cache: Path, tmp_path: Path, name: str) -> None:
    config = {**CONFIG, "hidden_size": 64, name: 4, "moe_intermediate_size": 32}
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


def test_a_model_is_judged_with_its_full_context_unless_less_is_requested() -> None:
    entry = Entry("m", Origin.FOLDER, weight_size=1000, kv=SMALL, context=100)
    assert fit_of(entry, context=None, memory=5000).context == 100
    assert fit_of(entry, context=None, memory=5000).fits
    assert not fit_of(entry, context=None, memory=4999).fits
    assert fit_of(entry, context=50, memory=3000).fits
    assert fit_of(entry, context=200, memory=9000).context == 100
    silent = Entry("m", Origin.FOLDER, weight_size=1000, kv=SMALL, context=0)
    assert fit_of(silent, context=None, memory=5000).context == 8192

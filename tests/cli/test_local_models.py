"""`mlxserve models` of this machine, `show` and `rm`, offline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxserve.cli.running_servers import registered
from mlxserve.hub.embedded import model_path
from mlxserve.hub.gguf_places import package_model
from tests import heads
from tests.cli.commands import Run, error_line
from tests.hub.gguf.architectures import ARCHITECTURES, build
from tests.text.effort_rules import EFFORT_RULES

NAME = "mlx-community/Qwen3-4B-4bit"
CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "quantization": {"bits": 4, "group_size": 64},
}


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A model as huggingface_hub stores it: files in blobs, and links to them."""
    folder = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "blobs" / "weights").write_bytes(bytes(8_000_000))
    (snapshot / "model.safetensors").symlink_to("../../blobs/weights")
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_what_is_here_is_listed_before_what_can_be_downloaded(
    downloaded: Path, offline: Run
) -> None:
    listed = json.loads(offline("list", "--json").out)["models"]
    names = [one["name"] for one in listed if one["source"] != "suggested"]
    assert [name for name in names if name != "smollm2"] == ["mlxserve-mini", NAME]
    assert ("smollm2" in names) == (package_model() is not None)
    here, _, others = offline("list").out.partition("To download")
    assert here.startswith("On this machine:\n")
    assert NAME in here
    assert NAME not in others
    assert "qwen3:8b" in others


def test_a_model_is_shown_by_its_short_name(downloaded: Path, offline: Run) -> None:
    card = json.loads(offline("show", "qwen3:4b", "--json").out)
    assert (card["name"], card["architecture"], card["bits"], card["context"]) == (
        NAME, "qwen3", 4, 40_960,
    )  # fmt: skip
    assert card["kv_bytes_per_token"] == 2 * 2 * 36 * 8 * 128
    shown = offline("show", NAME).out
    assert "qwen3, 36 layers" in shown
    assert "144.0 KiB per token" in shown


def test_a_shown_model_has_the_memory_of_the_list(downloaded: Path, offline: Run) -> None:
    listed = json.loads(offline("list", "--json").out)
    [card] = (one for one in listed["models"] if one["name"] == NAME)
    shown = json.loads(offline("show", NAME, "--json").out)
    assert shown["memory"] == listed["memory"]
    for name in ("needed", "num_tokens", "num_windows"):
        assert shown[name] == card[name]
    tokens = "fits" if card["fits"] else f"{card['num_tokens']:,} of 40,960 tokens"
    assert f"  Fits here     {tokens}, with default options" in offline("show", NAME).out


def listed_here(offline: Run) -> str:
    """The part of the list that has models on this machine."""
    return offline("list").out.partition("To download")[0]


def test_the_repository_of_what_drafts_for_a_model_is_shown(downloaded: Path, offline: Run) -> None:
    folder = downloaded.parent / "models--mlx-community--Qwen3.5-4B-MLX-4bit" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    draft = "mlx-community/Qwen3.5-4B-MTP-4bit"
    assert json.loads(offline("show", "qwen3.5:4b", "--json").out)["draft"] == draft
    assert f"Drafts        {draft} drafts for it" in offline("show", "qwen3.5:4b").out
    assert "(draft repository)" in listed_here(offline)
    assert json.loads(offline("show", NAME, "--json").out)["draft"] is None


def test_a_model_that_was_trained_to_see_is_listed_and_shown_so(
    tmp_path: Path, downloaded: Path, offline: Run
) -> None:
    assert "(vision)" not in listed_here(offline)
    folder = tmp_path / "models" / "seeing"
    folder.mkdir(parents=True)
    config = {"model_type": "qwen3_vl", "text_config": CONFIG, "vision_config": {"depth": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    assert "(vision)" in listed_here(offline)
    assert json.loads(offline("show", str(folder), "--json").out)["vision"] is True
    assert "Images        seen with the extra `vision`" in offline("show", str(folder)).out
    assert "Images" not in offline("show", NAME).out


def test_a_model_with_a_head_is_listed_and_shown_so(
    tmp_path: Path, downloaded: Path, offline: Run
) -> None:
    assert "(head)" not in listed_here(offline)
    folder = heads.write(tmp_path / "models" / "mimo", "mimo")
    assert "(head)" in listed_here(offline)
    assert json.loads(offline("show", str(folder), "--json").out)["head"] is True
    assert "Drafts        it has a head" in offline("show", str(folder)).out
    assert "Drafts" not in offline("show", NAME).out
    (folder / "model-mtp.safetensors").unlink()
    assert json.loads(offline("show", str(folder), "--json").out)["head"] is False


def test_a_model_with_windows_is_shown_with_what_they_take(tmp_path: Path, offline: Run) -> None:
    folder = tmp_path / "models" / "small"
    folder.mkdir(parents=True)
    windows = {"sliding_window": 1024, "sliding_window_pattern": 6}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **windows}))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    card = json.loads(offline("show", str(folder), "--json").out)
    of_layer = 2 * 2 * 8 * 128
    assert (card["window"], card["kv_bytes_per_token"]) == (1024, 6 * of_layer)
    assert card["window_kv_bytes"] == (32 + 2) * 32 * 30 * of_layer
    shown = offline("show", str(folder)).out
    assert "24.0 KiB per token, and 127.5 MiB for layers that see the last 1,024 tokens" in shown


def test_the_bundled_model_is_shown_with_what_its_template_takes(offline: Run) -> None:
    shown = offline("show", "mlxserve-mini").out
    assert "mlxserve-mini (included)" in shown
    assert "Template      does not take images; ids of calls: none" in shown
    card = json.loads(offline("show", "mlxserve-mini", "--json").out)["chat_template"]
    assert card["late_system"] is True
    assert card["arguments"] == "text"
    assert card["call_format"] == {"name": "json_tools", "reads_back": True}


def test_the_efforts_that_a_template_takes_are_shown(tmp_path: Path, offline: Run) -> None:
    folder = tmp_path / "models" / "thinking"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder / name)
    (folder / "model.safetensors").write_bytes(bytes(1000))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = EFFORT_RULES["qwen 3.8"] + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shown = offline("show", str(folder)).out
    assert "; reasoning_effort: low, medium, xhigh (default)" in shown
    assert "; thinking is turned off by enable_thinking=false; " in shown
    controls = json.loads(offline("show", str(folder), "--json").out)["chat_template"]["controls"]
    assert controls["efforts"][0]["mapping"]["high"] == "xhigh"


def test_a_folder_of_any_place_is_shown(tmp_path: Path, downloaded: Path, offline: Run) -> None:
    folder = tmp_path / "elsewhere" / "mine"
    folder.mkdir(parents=True)
    assert "config.json" in error_line(offline("show", str(folder)))
    for file in next(downloaded.glob("snapshots/*")).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    card = json.loads(offline("show", str(folder), "--json").out)
    assert (card["name"], card["source"], card["layers"]) == ("mine", "folder", 36)


def test_a_model_that_is_not_here_is_not_shown(offline: Run) -> None:
    line = error_line(offline("show", "qwen3:4b"))
    assert "is not on this machine" in line
    assert "`mlxserve pull qwen3:4b` downloads it" in line
    assert "Did you mean" not in line
    assert "Did you mean qwen3:4b" in error_line(offline("show", "qwen3:4bb"))


def test_a_downloaded_model_is_deleted(downloaded: Path, offline: Run) -> None:
    assert "pass --yes" in error_line(offline("rm", NAME))
    assert downloaded.exists()
    done = offline("rm", "qwen3:4b", "--yes")
    assert done.out == f"Deleted {NAME}, 0.01 GB\n"
    assert not downloaded.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mlxserve-mini", "is included, not downloaded"),
        ("a/b", "is not here"),
        ("../..", "is a path of your own"),
        ("qwen3:4b", "is not here"),
    ],
)
def test_what_was_not_downloaded_is_not_deleted(
    tmp_path: Path, name: str, words: str, offline: Run
) -> None:
    (tmp_path / "hub").mkdir()
    assert words in error_line(offline("rm", name, "--yes"))
    assert (tmp_path / "hub").exists()


@pytest.fixture(name="gguf")
def gguf_fixture(tmp_path: Path) -> Path:
    """A GGUF file as huggingface_hub stores it."""
    folder = tmp_path / "hub" / "models--org--repo-GGUF" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    kinds = {"proj.weight": "Q4_0", "embed_tokens.weight": "Q8_0"}
    build(ARCHITECTURES[0], folder / "small-Q4_0.gguf", kinds)
    return folder / "small-Q4_0.gguf"


GGUF = "hf.co/org/repo-GGUF:Q4_0"


def test_a_gguf_file_is_listed_with_its_format(gguf: Path, offline: Run) -> None:
    listed = json.loads(offline("list", "--json").out)["models"]
    one = next(one for one in listed if one["name"] == GGUF)
    assert (one["source"], one["format"], one["fits"]) == ("downloaded", "gguf", True)
    line = next(row for row in offline("list").out.splitlines() if GGUF in row)
    assert line.split()[1:3] == ["downloaded", "gguf"]
    assert line.endswith("fits")


def test_a_gguf_file_is_shown_with_its_kinds_of_blocks(gguf: Path, offline: Run) -> None:
    card = json.loads(offline("show", GGUF, "--json").out)
    assert (card["architecture"], card["layers"], card["context"]) == ("llama", 2, 256)
    counts = {kind: one["tensors"] for kind, one in card["quantisation"].items()}
    assert counts == {"Q4_0": 14, "Q8_0": 1, "F32": 6}
    assert sum(one["file_size"] for one in card["quantisation"].values()) < gguf.stat().st_size
    assert card["chat_template"] is not None
    assert "Q4_0 (14 tensors, " in offline("show", str(gguf)).out


def test_a_folder_with_a_gguf_file_and_a_config_is_shown(
    tmp_path: Path, gguf: Path, offline: Run
) -> None:
    """As some repositories have them, whose config.json is the original model's."""
    (tmp_path / "own").mkdir()
    shutil.copy(gguf, tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text('{"model_type": "llama"}')
    assert "Q4_0 (14 tensors, " in offline("show", str(tmp_path / "own")).out


def test_a_downloaded_gguf_file_is_deleted(gguf: Path, offline: Run) -> None:
    assert "Deleted org/repo-GGUF" in offline("rm", GGUF, "--yes").out
    assert not gguf.exists()


def test_of_two_quantisations_one_is_deleted(gguf: Path, offline: Run) -> None:
    blobs = gguf.parents[2] / "blobs"
    blobs.mkdir()
    other = gguf.with_name("small-Q8_0.gguf")
    for file, blob in ((gguf, blobs / "one"), (other, blobs / "two")):
        blob.write_bytes(gguf.read_bytes())
        file.unlink(missing_ok=True)
        file.symlink_to(blob)
    assert offline("rm", GGUF, "--yes").out == f"Deleted {GGUF}, 0.00 GB\n"
    assert [file.name for file in blobs.iterdir()] == ["two"]
    assert list(gguf.parent.iterdir()) == [other]
    assert offline("rm", "hf.co/org/repo-GGUF:Q8_0", "--yes").out.startswith(
        "Deleted org/repo-GGUF, "
    )
    assert not blobs.parent.exists()


def test_a_repository_whose_file_is_served_is_not_deleted(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, offline: Run
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    with registered("http://127.0.0.1:1", [GGUF], needs_key=False):
        for name in (GGUF, "org/repo-GGUF"):
            assert "is served at http://127.0.0.1:1" in error_line(offline("rm", name, "--yes"))
    assert gguf.exists()


def test_a_file_of_the_users_own_is_not_deleted(tmp_path: Path, gguf: Path, offline: Run) -> None:
    own = gguf.rename(tmp_path / "own.gguf")
    assert "is a path of your own" in error_line(offline("rm", str(own), "--yes"))
    assert own.exists()


def test_other_programs_files_are_not_deleted(
    tmp_path: Path, gguf: Path, offline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = tmp_path / "ollama/blobs" / f"sha256-{'ab' * 32}"
    blob.parent.mkdir(parents=True)
    gguf.rename(blob)
    manifest = tmp_path / "ollama/manifests/registry.ollama.ai/library/small/1b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'ab' * 32}"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    done = offline("rm", "small:1b", "--yes")
    assert "small:1b is in Ollama's folder, not downloaded by mlxserve" in error_line(done)
    assert blob.exists()


def test_an_adapters_folder_is_shown(tmp_path: Path, offline: Run) -> None:
    config = {"model": "org/Base", "lora_parameters": {"scale": 20.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    pair = {
        "q_proj.lora_a": np.ones((6, 3), np.float32),
        "q_proj.lora_b": np.ones((3, 4), np.float32),
    }
    save_file(pair, tmp_path / "adapters.safetensors")
    shown = offline("show", str(tmp_path)).out
    assert "Trained from  org/Base" in shown
    assert "of 1 layers, rank 3, scale 20" in shown
    card = json.loads(offline("show", str(tmp_path), "--json").out)
    assert (card["rank"], card["base"]) == (3, "org/Base")


def test_what_a_mixed_folder_has_beside_its_model_is_shown(tmp_path: Path, offline: Run) -> None:
    """The folder of the included model, with an adapter and a GGUF file among its files."""
    folder = tmp_path / "mixed"
    shutil.copytree(model_path(), folder)
    for name in ("adapter_config.json", "adapters.safetensors", "other-Q8_0.gguf"):
        (folder / name).write_text("{}")
    shown = offline("show", str(folder)).out
    assert "  Not served    adapters.safetensors, other-Q8_0.gguf" in shown
    card = json.loads(offline("show", str(folder), "--json").out)
    assert (card["format"], card["not_served"]) == (
        "mlx", ["adapters.safetensors", "other-Q8_0.gguf"],
    )  # fmt: skip

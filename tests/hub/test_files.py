"""Model folders that are incomplete or broken are refused with a clear message; code in one is ignored."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from mlxserve.core.errors import ModelNotFound, UnsupportedModel
from mlxserve.hub.embedded import MODEL_NAME, model_path
from mlxserve.hub.files import DATA_FILES, find_model, unserved_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all that `files` checks; the weights are empty."""
    found = tmp_path / "small-model"
    found.mkdir()
    write(found / "config.json", {"model_type": "llama", "hidden_size": 8})
    write(found / "tokenizer_config.json", {"eos_token": "</s>"})
    (found / "model.safetensors").write_bytes(b"12345678")
    return found


def write(file: Path, content: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def refusal(model: Path | str) -> str:
    """The message of a refused folder: one line, without a Python exception."""
    with pytest.raises(UnsupportedModel) as caught:
        find_model(str(model))
    text = str(caught.value)
    assert "\n" not in text
    assert "Error(" not in text
    return text


def test_a_folder_is_found_with_its_name_config_and_weights(folder: Path) -> None:
    files = find_model(str(folder))
    assert files.name == "small-model"
    assert files.path == folder.resolve()
    assert files.config["hidden_size"] == 8
    assert files.weights == [folder.resolve() / "model.safetensors"]
    assert files.weight_size == 8


def test_weights_in_several_files_are_all_found(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for shard in (2, 1):
        (folder / f"model-0000{shard}-of-00002.safetensors").write_bytes(b"1234")
    files = find_model(str(folder))
    assert [file.name[:11] for file in files.weights] == ["model-00001", "model-00002"]
    assert files.weight_size == 8


def test_a_folder_without_a_tokenizer_config_is_accepted(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    assert find_model(str(folder)).name == "small-model"


def test_a_path_may_be_relative_or_start_with_a_tilde(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find_model("~/small-model").path == folder.resolve()
    monkeypatch.chdir(folder)
    assert find_model(".").name == "small-model"


@pytest.mark.parametrize("name", [None, MODEL_NAME])
def test_no_name_is_the_embedded_model(name: str | None) -> None:
    assert find_model(name).path == model_path()


# ---- incomplete and broken


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json cannot be read"),
        ("", "config.json cannot be read"),
        ("[" * 100_000, "config.json cannot be read"),
        ("[1]", "must contain a JSON object"),
        ({"hidden_size": 8}, "has no model_type"),
        ({"model_type": 3}, "has no model_type"),
    ],
    ids=["cut", "empty", "deep", "list", "no_type", "type_3"],
)
def test_an_invalid_config_is_refused(folder: Path, content: Any, message: str) -> None:
    write(folder / "config.json", content)
    assert message in refusal(folder)


def test_a_config_that_is_not_utf_8_is_refused(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"model_type": "\xff"}')
    assert "config.json cannot be read" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors.index.json",
     "model.safetensors", "chat_template.jinja"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["fifo", "endless"])
def test_a_file_that_would_never_end_is_refused_at_once(folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name) if kind == "fifo" else (folder / name).symlink_to("/dev/zero")
    assert f"{name} is not a regular file" in refusal(folder)


def test_a_broken_tokenizer_config_is_refused(folder: Path) -> None:
    write(folder / "tokenizer_config.json", "{")
    assert "tokenizer_config.json cannot be read" in refusal(folder)


def test_a_folder_without_safetensors_is_refused_with_advice(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "mlx_lm.convert" in refusal(folder)


def holds(folder: Path, *names: str) -> Path:
    """The folder with empty files of these names, and without weights."""
    (folder / "model.safetensors").unlink()
    for name in names:
        write(folder / name, "{}")
    return folder


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pytorch_model.bin", "PyTorch"),
        ("weights.npz", "old MLX"),
        ("consolidated.safetensors", "safetensors of another name"),
    ],
)
def test_weights_that_are_not_read_are_named(folder: Path, name: str, kind: str) -> None:
    assert f"It has {name} ({kind}) instead." in refusal(holds(folder, name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "adapter_config.json",
            "holds an adapter.*--adapter NAME=FOLDER.*mlx_lm.fuse --model MODEL",
        ),
        ("model_index.json", "holds a model that makes images"),
        ("params.json", "in the format of their makers"),
    ],
)
def test_a_folder_that_is_no_language_model_is_refused_by_what_it_is(
    folder: Path, name: str, message: str
) -> None:
    (folder / "config.json").unlink()
    write(folder / name, {})
    assert re.search(message, refusal(folder))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"n_mels": 80, "n_audio_state": 384}, "small-model is a model for audio."),
        ({"model_type": "kokoro", "sample_rate": 24000}, "is a model for audio (kokoro)"),
        ({"model_type": "bert"}, "is an encoder (bert), which turns texts into vectors"),
        (
            {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]},
            "is a classifier or reranker (Qwen3ForSequenceClassification)",
        ),
    ],
    ids=str,
)
def test_a_model_without_weights_that_are_read_is_refused_by_what_it_is(
    folder: Path, config: dict[str, Any], message: str
) -> None:
    write(folder / "config.json", config)
    assert message in refusal(holds(folder, "weights.safetensors"))


# ---- code in the folder


@pytest.mark.parametrize("key", ["model_file", "auto_map"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_config_that_names_code_is_no_reason_to_refuse(folder: Path, file: str, key: str) -> None:
    content = json.loads((folder / file).read_text())
    write(folder / file, {**content, key: {"AutoModel": "modeling.Model"}})
    write(folder / "inner" / "modeling.py", "raise SystemExit")
    assert find_model(str(folder)).name == "small-model"


def test_no_download_pattern_matches_python_files() -> None:
    assert not any(pattern.endswith((".py", "*")) for pattern in DATA_FILES)


# ---- names


def not_found(model: str, revision: str | None = None) -> str:
    with pytest.raises(ModelNotFound) as caught:
        find_model(model, revision)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_file_is_not_a_folder(folder: Path) -> None:
    assert "is a file. Name the folder" in not_found(str(folder / "config.json"))


def test_a_name_that_is_neither_folder_nor_repository_is_not_found() -> None:
    for name in [
        "no-such-model",
        "/no/such/folder",
        "a/b/c",
        "-x/y",
        "~no-such-user/model",
        "x" * 5000,
        "org/" + "y" * 200,
        "org/na me",
        "org/\0",
        "https://example.org/model",
    ]:
        assert "neither an existing folder nor a Hugging Face repository id" in not_found(name), (
            name
        )


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The Hub's offline mode, an empty cache, and sockets that fail."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a socket was used")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_without_a_network_a_missing_repository_is_not_found() -> None:
    text = not_found("some-org/some-model")
    assert (
        "some-org/some-model is not on this machine, and huggingface.co cannot be reached" in text
    )


@pytest.mark.usefixtures("no_network")
def test_a_short_name_means_its_repository() -> None:
    assert "mlx-community/Qwen3-4B-4bit is not on this machine" in not_found("qwen3:4b")
    assert "Did you mean qwen3:0.6b or qwen3:4b" in not_found("qwen3")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["org/two--dashes", "org/two..dots", "org/name.git", "org/end-"])
def test_an_invalid_repository_name_is_not_found(name: str) -> None:
    assert f"{name!r} is neither an existing folder" in not_found(name)


def response(status: int) -> Any:
    request = type("Request", (), {"method": "GET", "url": "http://127.0.0.1/"})()
    headers: dict[str, str] = {}
    return type("Response", (), {"status_code": status, "headers": headers, "request": request})()


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            errors.GatedRepoError("gated", response=response(403)),
            "requires accepting its conditions",
        ),
        (errors.RevisionNotFoundError("x", response=response(404)), "has no revision 'v9'"),
        (
            errors.RepositoryNotFoundError("x", response=response(404)),
            "no folder or Hugging Face repository",
        ),
        (errors.HfHubHTTPError("x", response=response(500)), "cannot be downloaded now"),
        (
            errors.HTTPError("the connection broke"),
            "cannot be downloaded now: the connection broke",
        ),
        (OSError(28, "No space left on device"), "No space left on device. Check the network"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_download_that_fails_says_what_to_do(
    failure: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert message in not_found("some-org/some-model", "v9")


def test_a_downloaded_folder_is_checked_and_named_after_its_repository(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = find_model("some-org/some-model", "v2")
    assert files.name == "some-org/some-model"
    assert asked == {
        "repository": "some-org/some-model",
        "revision": "v2",
        "allow_patterns": list(DATA_FILES),
    }
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="some-org/some-model: there is no model"):
        find_model("some-org/some-model")


def test_a_shard_that_is_not_there_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model-00002-of-00003.safetensors").write_bytes(b"1234")
    text = refusal(folder)
    assert "2 of its files are not in" in text
    assert "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in text
    assert "Download the model again" in text


@pytest.mark.parametrize("first", ["model-00001-of-000002", "model-1-of-2"])
def test_the_numbers_of_shards_may_be_of_any_width(folder: Path, first: str) -> None:
    """DeepSeek's and Kimi's have five digits of the file and six of all files."""
    (folder / "model.safetensors").unlink()
    (folder / f"{first}.safetensors").write_bytes(b"1234")
    second = first.replace("1", "2", 1)
    assert f"1 of its files are not in {folder.resolve()}: {second}.safetensors" in refusal(folder)
    (folder / f"{second}.safetensors").write_bytes(b"1234")
    assert len(find_model(str(folder)).weights) == 2


def test_a_file_that_only_the_index_knows_is_named(folder: Path) -> None:
    names = {"a": "model.safetensors", "b": "model-extra.safetensors"}
    write(folder / "model.safetensors.index.json", {"weight_map": names})
    assert "model-extra.safetensors" in refusal(folder)
    (folder / "model-extra.safetensors").write_bytes(b"1234")
    assert len(find_model(str(folder)).weights) == 2


def test_weights_beside_those_that_are_served_are_named(folder: Path) -> None:
    assert unserved_weights(folder) == []
    others = ["a-Q4_0.gguf", "adapters.safetensors", "mmproj-f16.gguf", "pytorch_model.bin"]
    for name in (*others, "notes.txt", "training_args.bin"):
        (folder / name).write_bytes(b"GGUF")
    assert find_model(str(folder)).gguf is None
    assert unserved_weights(folder) == others
    beside_a_file = ["adapters.safetensors", "mmproj-f16.gguf", "model.safetensors", others[-1]]
    assert unserved_weights(folder / others[0]) == beside_a_file

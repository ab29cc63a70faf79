"""Finds, downloads and checks a model's files. Never imports mlx.

Only data is read: safetensors, GGUF, JSON, templates and tokenizer vocabularies. Code in a folder (Python
files, and what `model_file` and `auto_map` name) is neither downloaded nor run, and no reason to refuse
a model either: its definition is mlx-lm's (CVE-2026-5843 was a `model_file`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlxserve.core.errors import ModelNotFound, UnsupportedModel
from mlxserve.hub.download import fetch_weights
from mlxserve.hub.embedded import MODEL_NAME, model_path
from mlxserve.hub.fingerprint import fingerprint
from mlxserve.hub.gguf.folder import model_folder
from mlxserve.hub.gguf.reader import Header, is_gguf, read_header
from mlxserve.hub.gguf.sizes import size_in_memory
from mlxserve.hub.gguf_places import choose, find_gguf, hub_reference, served_from, with_its_shards
from mlxserve.hub.known_models import repository_of, suggestions
from mlxserve.hub.model_config import check_model_config
from mlxserve.hub.unsupported_formats import describe_folder, describe_kind, describe_weights
from mlxserve.system.files import MAX_TEXT, check_model_files, read_json

# The files downloaded from a repository: nothing executable.
DATA_FILES = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.tiktoken",
    "tokenizer.model",
    "model*.safetensors",
    "*_Dense/model.safetensors",  # layers of embedding models
)
# Weights that may lie beside those that are served: an adapter's, another format's, another program's.
_MODEL = "model*.safetensors"
_WEIGHTS = ("*.safetensors", "*.gguf", "*.npz", "*.pth", "pytorch_model*.bin", "adapter_model.bin")
_SHARD = re.compile(r"(model-)([0-9]+)-of-([0-9]+)(\.safetensors)")
_MAX_SHARDS = 10_000
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True)  # without slots, for what is cached
class ModelFiles:
    """A checked model folder. `name` is the model's name in the API.

    gguf: the header of the file that has the weights, and all that is in `path`; None for a model folder
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    gguf: Header | None = None

    @property
    def weights(self) -> list[Path]:
        if self.gguf is not None:
            return sorted({tensor.file for tensor in self.gguf.tensors.values()})
        return sorted(self.path.glob(_MODEL))

    @property
    def place(self) -> Path:
        """The folder, or the GGUF file (of a split one the first)."""
        return self.path if self.gguf is None else self.weights[0]

    @property
    def weight_size(self) -> int:
        """Bytes of the weights in memory; a GGUF file's after repacking."""
        if self.gguf is not None:
            return size_in_memory(self.gguf)
        return sum(file.stat().st_size for file in self.weights)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the model by its contents: a copy elsewhere has the same one. Raises OSError."""
        return fingerprint(self.path, self.config, self.weights)


def unserved_weights(place: Path) -> list[str]:
    """Return the names of weights beside those that are served of a model's folder or GGUF file.

    Of other GGUF files beside one only the encoders of images are named: the others are models of their own.
    """
    is_file = place.is_file()
    folder = place.parent if is_file else place
    served = set(() if is_file else folder.glob(_MODEL))
    patterns = [p if p != "*.gguf" or not is_file else "mmproj*.gguf" for p in _WEIGHTS]
    found = {file for pattern in patterns for file in folder.glob(pattern)}
    return sorted(file.name for file in found - served)


def find_model(model: str | None, revision: str | None = None) -> ModelFiles:
    """The files of a local folder, a GGUF file or a repository; None is the included model.

    Raises ModelNotFound, or UnsupportedModel for an incomplete or refused folder or file.
    """
    if model is None or model == MODEL_NAME:
        return check_folder(model_path(), MODEL_NAME)
    path = existing_path(model)
    if path is not None and path.is_dir():
        return check_folder(path.resolve(), path.resolve().name)
    if path is not None and is_gguf(path):
        return _gguf_model(path, path.stem)
    if path is not None:
        raise ModelNotFound(
            f"{model} is a file. Name the folder that contains the model's files, or a GGUF file."
        )
    if (file := find_gguf(model)) is not None:
        return _gguf_model(file, model)
    if (reference := hub_reference(model)) is not None:
        return _gguf_model(_download_gguf(*reference, revision), model)
    model = repository_named(model)
    return check_folder(_download(model, revision), model)


def _gguf_model(file: Path, name: str) -> ModelFiles:
    """Raises UnsupportedModel."""
    try:
        header = read_header(file)
        folder = model_folder(header)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    config = _read_json(folder / "config.json", name)
    check_model_config(config, name)
    return ModelFiles(name, folder, config, header.without_vocabulary())


def repository_named(model: str) -> str:
    """Return the repository that a name refers to. Raises ModelNotFound."""
    if (repository := repository_of(model)) is not None:
        return repository
    if _REPOSITORY.fullmatch(model):
        return model
    raise ModelNotFound(
        f"{model!r} is neither an existing folder nor a Hugging Face repository id (such as "
        f"mlx-community/Qwen3.5-4B-MLX-4bit).{did_you_mean(model) or ' `mlxserve search` looks on the hub.'}"
    )


def did_you_mean(model: str) -> str:
    """Return a sentence with similar known names; empty if none is close."""
    names = suggestions(model)
    return f" Did you mean {' or '.join(names)}?" if names else ""


def check_folder(path: Path, name: str) -> ModelFiles:
    """Check that a folder is a complete model. Raises UnsupportedModel."""
    _check_kinds(path, name)
    if gguf_files := served_from(path):
        if len(gguf_files) > 1:
            raise UnsupportedModel(
                f"{name} has {len(gguf_files)} GGUF files. Name one of them: "
                f"{', '.join(str(file) for file in gguf_files[:5])}."
            )
        return _gguf_model(gguf_files[0], name)
    if not (path / "config.json").exists() and (what := describe_folder(path)) is not None:
        raise UnsupportedModel(f"{name} {what}")
    config = _read_json(path / "config.json", name)
    what = describe_kind(config)
    if not isinstance(config.get("model_type"), str):
        why = f" is {what}." if what is not None else ": config.json has no model_type."
        raise UnsupportedModel(f"{name}{why}")
    if (path / "tokenizer_config.json").exists():
        _read_json(path / "tokenizer_config.json", name)
    check_model_config(config, name)
    files = ModelFiles(name, path, config)
    if not files.weights:
        if what is not None:
            raise UnsupportedModel(f"{name} is {what}, and cannot be served.")
        raise UnsupportedModel(
            f"{name}: there is no model*.safetensors in {path}. {describe_weights(path)}Convert the "
            "model with `mlx_lm.convert`, or download an MLX version."
        )
    if missing := _missing_weights(files):
        raise UnsupportedModel(
            f"{name}: {len(missing)} of its files are not in {path}: {', '.join(missing[:3])}. Download "
            "the model again; what is there is kept."
        )
    return files


def _check_kinds(path: Path, name: str) -> None:
    try:
        check_model_files(path)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(
            f"{name}: the folder cannot be used: {error}. Download the model again."
        ) from error


def _missing_weights(files: ModelFiles) -> list[str]:
    """Names of weight files that the index, or a file name such as 1-of-3, promises."""
    present = {file.name for file in files.weights}
    promised = set(present)
    if (index := files.path / "model.safetensors.index.json").exists():
        names = _read_json(index, files.name).get("weight_map")
        promised |= {str(name) for name in (names if isinstance(names, dict) else {}).values()}
    for name in present:
        if match := _SHARD.fullmatch(name):
            start, own, count, end = match.groups()
            numbers = range(1, min(int(count), _MAX_SHARDS) + 1)
            # Not len(count): DeepSeek and Kimi publish model-00001-of-000163.safetensors.
            promised |= {f"{start}{number:0{len(own)}}-of-{count}{end}" for number in numbers}
    return sorted(promised - present)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of config.json."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def existing_path(model: str) -> Path | None:
    """Return this path if it exists."""
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):
        # Too long for a path; the home of an unknown user.
        return None


def _read_json(file: Path, name: str) -> dict[str, Any]:
    try:
        content = read_json(file, MAX_TEXT)
    except FileNotFoundError as error:
        raise UnsupportedModel(
            f"{name}: {file.parent} has no {file.name}, so it is not a model folder."
        ) from error
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{name}: {file.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{name}: {file.name} must contain a JSON object.")
    return content


def pull_model(model: str) -> ModelFiles:
    """Like `find_model`, but keeps an interrupted download and resumes it."""
    if existing_path(model) is None and model != MODEL_NAME and find_gguf(model) is None:
        if hub_reference(model) is not None:
            return find_model(model)
        model = repository_named(model)
        with _as_model_not_found(model, None):
            fetch_weights(model)
    return find_model(model)


def _download(repository: str, revision: str | None) -> Path:
    """Download a snapshot with a progress bar and return its folder. Raises ModelNotFound."""
    from huggingface_hub import snapshot_download

    with _as_model_not_found(repository, revision):
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=list(DATA_FILES))
        )


def _download_gguf(repository: str, kind: str | None, revision: str | None) -> Path:
    """Download one of a repository's GGUF files, resuming a partial one. Raises ModelNotFound."""
    from huggingface_hub import HfApi, snapshot_download

    with _as_model_not_found(repository, revision):
        # Not list_repo_files, which asks six times where there is no network.
        card = HfApi().model_info(repository, revision=revision)
        names = [file.rfilename for file in card.siblings or ()]
        chosen = choose(names, kind, repository)
        wanted = with_its_shards(chosen, names)
        if revision is None:
            fetch_weights(repository, wanted)
        folder = snapshot_download(repository, revision=revision, allow_patterns=wanted)
    return Path(folder) / chosen


@contextmanager
def _as_model_not_found(repository: str, revision: str | None) -> Iterator[None]:
    """Convert huggingface_hub's errors to ModelNotFound with advice."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{repository} requires accepting its conditions. Accept them on its page, then log in "
            "with `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(f"{repository} has no revision {revision!r}.") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"There is no folder or Hugging Face repository {repository!r} (or it is private)."
            f"{did_you_mean(repository)}"
        ) from error
    except HFValidationError as error:
        raise ModelNotFound(
            f"{repository!r} is neither an existing folder nor a valid repository id: {error}"
        ) from error
    # HTTPError is the HTTP client's own; failures during a transfer are raised as one.
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{repository} is not on this machine, and huggingface.co cannot be reached. Check the "
            "network connection, or name a local folder."
        ) from error
    except (HTTPError, OSError) as error:
        raise ModelNotFound(
            f"{repository} cannot be downloaded now: {str(error).splitlines()[0] or type(error).__name__}. "
            "Check the network connection and the free disk space, or name a local folder."
        ) from error

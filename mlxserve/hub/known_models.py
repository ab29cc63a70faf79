"""Models that are known by name: `catalogue.toml`, and the short names that people type.

    qwen3.5:4b                    mlx-community/Qwen3.5-4B-MLX-4bit
    llama3.2:1b                   mlx-community/Llama-3.2-1B-Instruct-4bit
    gpt-oss:20b                   mlx-community/gpt-oss-20b-MXFP4-Q8

Short names are family:size, as Ollama's; LM Studio's publisher/family-size is understood as well. Never uses the
network.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("catalogue.toml")
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Publishers in LM Studio's names. Not microsoft and openai, whose own repositories are called the same.
_LM_STUDIO = frozenset({"qwen", "google", "mistralai", "meta-llama", "liquid", "deepseek"})
_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A row of the catalogue.

    names: short names; the first one is shown
    purpose: "embedding" or "rerank" of a model that does not write, else empty
    config: what its config.json says, as far as memory depends on it; None for models that do not write
    weight_size: bytes of the text model in memory
    has_head: its files have a head that drafts for it
    draft: the repository of a head or an assistant that drafts for it; empty if none is known
    is_fast: answers quickly for what it can
    is_earlier: of an earlier year, and recommended to nobody
    """

    repository: str
    names: tuple[str, ...]
    purpose: str = ""
    config: Mapping[str, Any] | None = None
    weight_size: int = 0
    sees: bool = False
    has_head: bool = False
    draft: str = ""
    is_fast: bool = False
    is_earlier: bool = False


@cache
def known_models() -> Mapping[str, KnownModel]:
    """Return the catalogue by repository, the best model first."""
    catalogue = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    rows = (_known_model(row, catalogue["shapes"]) for row in catalogue["models"])
    return {model.repository: model for model in rows}


def _known_model(row: Mapping[str, Any], shapes: Mapping[str, Any]) -> KnownModel:
    return KnownModel(
        row["repository"],
        tuple(row["names"]),
        purpose=row.get("purpose", ""),
        config=shapes[row["shape"]] if "shape" in row else None,
        weight_size=row.get("weight_size", 0),
        sees=row.get("sees", False),
        has_head=row.get("has_head", False),
        draft=row.get("draft", ""),
        is_fast=row.get("fast", False),
        is_earlier=row.get("earlier", False),
    )


def short_name(repository: str) -> str | None:
    """Return the short name of a known model that writes; None for other repositories."""
    model = known_models().get(repository)
    return None if model is None or model.purpose else model.names[0]


def short_names() -> list[str]:
    """Return the short names of the models that write, best first."""
    return [model.names[0] for model in known_models().values() if not model.purpose]


def draft_of(repository: str) -> str:
    """Return the repository of what drafts for this model; empty if none is known."""
    model = known_models().get(repository)
    return "" if model is None else model.draft


def matching(words: str) -> list[KnownModel]:
    """Return the known models whose names have all these words, best first."""
    wanted = words.casefold().split()
    return [
        model
        for model in known_models().values()
        if wanted and all(_is_named(model, word) for word in wanted)
    ]


def _is_named(model: KnownModel, word: str) -> bool:
    """True if a name has this word; the size 4b is part of neither 14b nor 4bit."""
    owner, _, last = model.repository.casefold().partition("/")
    names = [*model.names, owner]
    if not word[0].isdigit():
        return any(word in name for name in (*names, last))
    parts = [part for name in names for part in name.replace("-", ":").split(":")]
    return any(part.removeprefix("e").startswith(word) or part.startswith(word) for part in parts)


def repository_of(name: str) -> str | None:
    """Return the repository of a short name in any spelling; None if unknown."""
    plain = _plain(_in_lm_studio(name) or name.removesuffix(":latest"))
    if not plain:
        return None
    return _by_name().get(plain) or _alone_in_its_family().get(plain)


@cache
def _by_name() -> Mapping[str, str]:
    """Repositories by short names and by their own last parts, as `_plain` spells them."""
    by_name: dict[str, str] = {}
    for model in known_models().values():
        last = model.repository.rpartition("/")[2]
        parts = () if model.purpose else (last, last.removesuffix("-4bit"))
        for name in (*model.names, *parts):
            by_name.setdefault(_plain(name), model.repository)
    return by_name


@cache
def _alone_in_its_family() -> Mapping[str, str]:
    """Repositories by the name of a family that has one size only."""
    sizes: dict[str, list[str]] = {}
    for model in known_models().values():
        if not model.purpose:
            sizes.setdefault(_plain(_family(model)), []).append(model.repository)
    return {family: members[0] for family, members in sizes.items() if len(members) == 1}


def _family(model: KnownModel) -> str:
    return model.names[0].partition(":")[0]


def _in_lm_studio(name: str) -> str | None:
    """Return the short name for one of LM Studio's, such as google/gemma-3-12b.

    None for other names. A repository with the publisher's own weights differs: by capitals, or by
    an ending such as -it.
    """
    publisher, _, rest = name.partition("/")
    if publisher not in _LM_STUDIO or rest != rest.lower():
        return None
    return next((short for short in short_names() if _plain(short) == _plain(rest)), None)


def families() -> frozenset[str]:
    """Family names without a size: qwen3.5, llama3.2."""
    return frozenset(_family(model) for model in known_models().values() if not model.purpose)


def suggestions(name: str) -> list[str]:
    """Suggest short names, most likely first; a family name suggests its sizes."""
    models = sorted(known_models().values(), key=lambda model: model.weight_size)
    known = [short for model in models for short in model.names]
    wanted = _plain(name.rpartition("/")[2])
    family = [short for short in known if wanted and wanted == _plain(short.partition(":")[0])]
    plain = {_plain(short): short for short in known}
    close = difflib.get_close_matches(wanted, plain, n=_SUGGESTIONS, cutoff=0.6)
    part = [
        short
        for key, short in plain.items()
        if len(wanted) > 2 and (key in wanted or wanted in key)
    ]
    names = dict.fromkeys([*family, *(part or [plain[key] for key in close])])
    return list(names) if family else list(names)[:_SUGGESTIONS]


def _plain(name: str) -> str:
    """Lower case, without punctuation, which people spell differently."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())

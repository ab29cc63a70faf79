"""Reads generation_config.json: end tokens and the authors' sampling parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxserve.core.errors import InvalidParameter
from mlxserve.core.sampling_params import MAX_BIAS, SamplingParams
from mlxserve.hub.files import ModelFiles, text_config
from mlxserve.system.files import MAX_TEXT, read_json

log = logging.getLogger("mlxserve.hub")

_COUNTS = ("top_k", "max_tokens")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """End tokens and default sampling parameters; any of `eos_token_ids` ends an answer."""

    eos_token_ids: tuple[int, ...]
    default_params: SamplingParams


def read_generation_config(files: ModelFiles) -> GenerationConfig:
    """The model's generation config; defaults where it is missing or unusable (logged)."""
    content = _read(files.path / "generation_config.json")
    places = (content, files.config, text_config(files.config))
    ids = next((p["eos_token_id"] for p in places if p.get("eos_token_id") is not None), None)
    ids = ids if isinstance(ids, list) else [ids]
    return GenerationConfig(tuple(filter(_is_token_id, ids)), _params(content))


def for_vocabulary(params: SamplingParams, size: int) -> SamplingParams:
    """Drop parameters for token ids beyond the vocabulary (logged).

    No request could be served with them.
    """
    known = {token_id: bias for token_id, bias in params.logit_bias.items() if token_id < size}
    if len(known) == len(params.logit_bias):
        return params
    log.warning(
        "generation_config.json suppresses %d tokens beyond the model's %d, which are ignored",
        len(params.logit_bias) - len(known),
        size,
    )
    return replace(params, logit_bias=known)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file, MAX_TEXT)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("generation_config.json cannot be read and is ignored: %s", error)
        return {}
    return content if isinstance(content, dict) else {}


def _params(content: Mapping[str, Any]) -> SamplingParams:
    """Return the usable values as sampling parameters; each is checked on its own."""
    if content.get("do_sample") is False:
        chosen: dict[str, Any] = {"temperature": 0.0}
    else:
        chosen = {name: content[name] for name in _SAMPLING if content.get(name) is not None}
    if content.get("max_new_tokens") is not None:
        chosen["max_tokens"] = content["max_new_tokens"]
    if isinstance(suppressed := content.get("suppress_tokens"), list):
        chosen["logit_bias"] = dict.fromkeys(filter(_is_token_id, suppressed), -MAX_BIAS)
    usable: dict[str, Any] = {}
    for name, value in chosen.items():
        is_count = name in _COUNTS and isinstance(value, float) and value.is_integer()
        param: dict[str, Any] = {name: int(value) if is_count else value}
        try:
            SamplingParams(**param)
        except InvalidParameter as error:
            log.warning("generation_config.json: a value is ignored: %s", error)
        else:
            usable |= param
    return SamplingParams(**usable)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31

"""A model's generation_config.json: its end tokens, and the sampling parameters of its makers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxserve.errors import InvalidParameter
from mlxserve.files import MAX_TEXT, read_json
from mlxserve.hub.files import ModelFiles
from mlxserve.sampling_params import MAX_BIAS, SamplingParams

log = logging.getLogger("mlxserve.hub")

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """`eos_token_ids` are all tokens that end an answer."""

    eos_token_ids: tuple[int, ...]
    default_params: SamplingParams


def read_generation_config(files: ModelFiles) -> GenerationConfig:
    """The model's generation config; defaults if the file is missing or unusable (logged)."""
    content = _read(files.path / "generation_config.json")
    ids = content.get("eos_token_id", files.config.get("eos_token_id"))
    ids = ids if isinstance(ids, list) else [ids]
    return GenerationConfig(
        tuple(token_id for token_id in ids if isinstance(token_id, int)), _params(content)
    )


def for_vocabulary(params: SamplingParams, size: int) -> SamplingParams:
    """Without what is said of tokens that the model does not have (logged): no request could be
    served with it."""
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
    if content.get("do_sample") is False:
        chosen: dict[str, Any] = {"temperature": 0.0}
    else:
        chosen = {
            name: content[name] for name in _SAMPLING if isinstance(content.get(name), (int, float))
        }
    if isinstance(longest := content.get("max_new_tokens"), int):
        chosen["max_tokens"] = longest
    if isinstance(suppressed := content.get("suppress_tokens"), list):
        ids = [token_id for token_id in suppressed if isinstance(token_id, int)]
        chosen["logit_bias"] = dict.fromkeys(ids, -MAX_BIAS)
    try:
        return SamplingParams(**chosen)
    except InvalidParameter as error:
        log.warning("generation_config.json is ignored: %s", error)
        return SamplingParams()

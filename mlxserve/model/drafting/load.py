"""Loads the draft model of a config beside the model that it drafts for."""

from __future__ import annotations

import logging
from dataclasses import replace

from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig
from mlxserve.hub.files import ModelFiles
from mlxserve.model.attention import AttentionChoice, choose_attention
from mlxserve.model.load import LoadedModel, load

log = logging.getLogger("mlxserve.model.drafting")


def load_draft_model(
    config: EngineConfig,
    files: ModelFiles,
    target: LoadedModel,
    *,
    is_metal: bool,
    memory_limit: int,
) -> AttentionChoice:
    """Load the model in `files` as a drafter for `target`, whose weights have been loaded.

    memory_limit: bytes for both. Raises InvalidConfig for a kind of model that does not draft, and what
        `load_probed` raises.
    """
    loaded = load(files, is_metal=is_metal, memory_limit=memory_limit - target.weight_size)
    if loaded.has_states:
        raise InvalidConfig(
            f"draft_model={files.name} keeps a recurrent state, which does not return to the last accepted "
            "token. Choose a draft model whose layers are all attention.",
            option="draft_model",
        )
    if config.kv_cache_dtype == "q8" and not any(spec.is_latent for spec in loaded.layers):
        loaded = loaded.in_8_bits()
    choice = choose_attention(config.attention_backend, loaded)
    if choice.loaded.by_sequence:
        raise InvalidConfig(
            f"draft_model={files.name} is served one sequence at a time, because its attention needs whole "
            "sequences, and would draft slowly. Choose another draft model.",
            option="draft_model",
        )
    log.info(
        "%s drafts for %s: %.2f GiB of weights, %.1f KiB a token",
        files.name,
        target.name,
        loaded.weight_size / (1 << 30),
        sum(spec.bytes_per_token() for spec in loaded.layers) / (1 << 10),
    )
    return choice._replace(loaded=replace(choice.loaded, name=files.name))

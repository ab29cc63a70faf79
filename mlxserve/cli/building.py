"""Builds engines and their chats from options, for the commands that load models."""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from mlxserve.api.config import ServerConfig
from mlxserve.chat.registry.entries import RegisteredAdapter, RegisteredModel
from mlxserve.chat.registry.keep_alive import keep_alive_seconds
from mlxserve.chat.registry.registry import ModelRegistry
from mlxserve.cli.settings import ModelSettings
from mlxserve.cli.streams import print_error
from mlxserve.core.config import MIN_PAGES, EngineConfig
from mlxserve.core.errors import EngineStopped, InvalidConfig, UnsupportedModel

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel
    from mlxserve.helpers.fair_executor import FairExecutor
    from mlxserve.hub.catalog import Entry
    from mlxserve.hub.facts import ModelFacts
    from mlxserve.hub.files import ModelFiles
    from mlxserve.hub.text_encoders import TextEncoder

# Tokens that an idle model's pool keeps, unless max_model_len is given.
_USEFUL_CONTEXT = 8192


@dataclass(frozen=True)
class _Candidate:
    settings: ModelSettings
    files: ModelFiles
    adapters: tuple[RegisteredAdapter, ...] = ()


def build(config: EngineConfig) -> TextModel:
    """Import mlx and load the model. Raises MlxServeError; a missing model fails before mlx loads."""
    from mlxserve.hub.adapter_files import find_adapters
    from mlxserve.hub.files import find_model
    from mlxserve.system import machine

    files = find_model(config.model, config.revision)
    find_adapters(config.adapters)
    machine.import_mlx_lm()
    return _build(config, files)


def build_registry(
    models: Sequence[ModelSettings], server: ServerConfig
) -> tuple[ModelRegistry, FairExecutor]:
    """Import mlx, load the first model, and register the others to be loaded on request.

    Returns the registry and the executor shared by all models. Raises MlxServeError; a missing
    model fails before mlx loads.
    """
    from mlxserve.system import machine

    candidates = [_candidate(model) for model in models]
    machine.import_mlx_lm()
    from mlxserve.build import new_fair_executor

    executor = new_fair_executor()
    is_alone = len(candidates) == 1
    first, *others = (
        _registered(each, None if is_alone else _entry(each.files), server, executor)
        for each in candidates
    )
    registered = [replace(first, aliases=(*first.aliases, *server.alias), preload=True), *others]
    if others:
        _refuse_together(models, registered)
    memory = machine.memory()
    budget = max(memory.limit(model.config.gpu_memory_utilization).nbytes for model in models)
    registry = ModelRegistry(
        registered,
        budget=math.inf if is_alone else budget,  # the options of the only model bound it
        shared_budget=budget,
        close=executor.close,
    )
    asyncio.run(registry.preload())
    return registry, executor


def register(model: ModelSettings, server: ServerConfig, executor: FairExecutor) -> RegisteredModel:
    """Return a model to add to a registry. Raises MlxServeError."""
    from mlxserve.hub.files import find_model

    files = find_model(model.config.model, model.config.revision)
    return _registered(_Candidate(model, files), _entry(files), server, executor)


def _candidate(model: ModelSettings) -> _Candidate:
    """Find a model's files and adapters. Raises ModelNotFound, UnsupportedModel."""
    from mlxserve.hub.adapter_files import find_adapters
    from mlxserve.hub.files import find_model

    files = find_model(model.config.model, model.config.revision)
    adapters = tuple(
        RegisteredAdapter(name=each.name, size=each.size)
        for each in find_adapters(model.config.adapters)
    )
    named = files if model.name is None else replace(files, name=model.name)
    return _Candidate(model, named, adapters)


def _entry(files: ModelFiles) -> Entry | None:
    """Return the sizes of a model's cache according to its files; None for a text encoder."""
    from mlxserve.hub.catalog import Origin, entry_of
    from mlxserve.hub.text_encoders import is_text_encoder

    if is_text_encoder(files):
        return None
    return entry_of(files.name, Origin.FOLDER, files.place)


def _refuse_together(
    models: Sequence[ModelSettings], registered: Sequence[RegisteredModel]
) -> None:
    """Raises InvalidConfig for options that several models cannot have."""
    if any(model.config.num_ranks > 1 for model in models):
        raise InvalidConfig(
            "Several ranks serve one model. Give --model once, or leave the ranks out."
        )
    traces = Counter(model.config.trace for model in models if model.config.trace is not None)
    if any(count > 1 for count in traces.values()):
        raise InvalidConfig(
            "Several models cannot write one trace. Set `trace` in the table of one of them.",
            option="trace",
        )
    if sum(model.config.kv_publisher is not None for model in models) > 1:
        raise InvalidConfig(
            "KV events are those of one model. Set `kv_events` in the table of one of them.",
            option="kv_events",
        )
    names = Counter(name for each in registered for name in (each.name, *each.aliases))
    if twice := [name for name, count in names.items() if count > 1]:
        raise InvalidConfig(
            f"Two models are called {twice[0]!r}. Give each one once, and other aliases, or names of "
            "your own in tables of the configuration file."
        )


def _registered(
    candidate: _Candidate, entry: Entry | None, server: ServerConfig, executor: FairExecutor
) -> RegisteredModel:
    """Return a model for the registry.

    entry: its memory according to its files; None if it has the memory alone
    """
    from mlxserve.hub.text_encoders import text_encoder

    model, files, adapters = candidate.settings, candidate.files, candidate.adapters
    config, stays = model.config, model.is_named or model.options.preload
    min_pages, max_pages = _pool_sizes(config, entry)
    encoder = text_encoder(files)
    default = "-1" if stays else server.keep_alive
    return RegisteredModel(
        name=files.name,
        load=partial(_build, config, files, executor),
        aliases=tuple(model.options.aliases),
        unlisted=() if config.model is None else (config.model,),
        weight_size=files.weight_size,
        context=config.scheduler.max_model_len or _context(entry, encoder),
        min_bytes=files.weight_size
        + sum(each.size for each in adapters)
        + _estimate(config, entry, min_pages),
        min_pages=min_pages,
        max_pages=max_pages,
        keep_alive=keep_alive_seconds(model.options.keep_alive or default),
        preload=stays,
        purpose=_purpose(encoder),
        facts=None if stays else _facts(files),
        adapters=adapters,
    )


def _purpose(encoder: TextEncoder | None) -> str:
    if encoder is None:
        return "completion"
    return "rerank" if encoder.is_reranker else "embedding"


def _facts(files: ModelFiles) -> ModelFacts | None:
    """Facts to show before a model is loaded; None for damaged files, which loading refuses."""
    from mlxserve.hub.facts import ModelFacts

    try:
        return ModelFacts.from_files(files)
    except UnsupportedModel:
        return None


def _context(entry: Entry | None, encoder: TextEncoder | None) -> int:
    """Context length in tokens according to the files; 0 if unknown."""
    if encoder is not None:
        return encoder.max_length
    return 0 if entry is None else entry.context


def _pool_sizes(config: EngineConfig, entry: Entry | None) -> tuple[int, int]:
    """(min, max) useful pages; equal if the number is configured."""
    if config.num_pages is not None:
        return config.num_pages, config.num_pages
    longest = entry.context if entry is not None and entry.context else _USEFUL_CONTEXT
    context = config.scheduler.max_model_len or min(longest, _USEFUL_CONTEXT)
    most = config.scheduler.max_num_seqs * (config.scheduler.max_model_len or longest)
    return max(MIN_PAGES, -(-context // config.page_size)), most // config.page_size


def _estimate(config: EngineConfig, entry: Entry | None, num_pages: int) -> int:
    """Bytes of a step and of `num_pages`, estimated from the model's files."""
    from mlxserve.system import machine

    if entry is None:
        return 0
    is_metal = machine.is_metal()
    of_value = 2 if is_metal else 4
    in_8_bits = config.kv_cache_dtype == "q8"
    of_token = entry.kv_size(of_value, in_8_bits=in_8_bits)
    of_windows = entry.window_size(of_value, in_8_bits=in_8_bits)
    step = 0
    if is_metal or config.num_pages is None:
        limit = machine.memory().limit(config.gpu_memory_utilization)
        step = entry.step_size(limit, config.scheduler, is_metal=is_metal, in_8_bits=in_8_bits)
    return step + of_windows + num_pages * config.page_size * of_token


def _build(
    config: EngineConfig,
    files: ModelFiles,
    executor: FairExecutor | None = None,
    memory_limit: int | None = None,
) -> TextModel:
    from mlxserve.ranks.run import build_text_model_of_ranks  # imports mlx and mlx-lm

    try:
        return build_text_model_of_ranks(
            config, files, executor=executor, memory_limit=memory_limit
        )
    except EngineStopped as error:
        # The engine's thread may wait for another rank for ever.
        if config.num_ranks > 1:
            print_error(error)
            os._exit(1)
        raise

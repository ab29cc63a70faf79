"""The one place where objects meet their arguments."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from metal_kernels import Backend, select_backend
from mlxserve import machine
from mlxserve.cache.kv import KVPool
from mlxserve.cache.pages import PagePool
from mlxserve.cache.store import PageStore
from mlxserve.chat import Chat
from mlxserve.config import EngineConfig, PreemptionMode
from mlxserve.engine.async_engine import AsyncEngine
from mlxserve.engine.engine import Engine
from mlxserve.engine.pace import Pace
from mlxserve.engine.trace import Spans
from mlxserve.engine.transfers import Swapper
from mlxserve.errors import InvalidConfig, InvalidParameter, UnsupportedModel
from mlxserve.hub.files import ModelFiles, find_model
from mlxserve.model.load import LoadedModel, load
from mlxserve.model.probe import probe
from mlxserve.model.runner import ModelRunner
from mlxserve.model.sizing import fit_pages
from mlxserve.sampling_params import SamplingParams
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.text.tokenizer import Tokenizer

log = logging.getLogger("mlxserve.build")

# What a trace shows, method by method. Sampling is part of the step's graph: it is built in
# "launch" and computed with all else that "wait for the device" waits for (on a CPU, "start").
_SCHEDULER_SPANS = {"schedule": "schedule", "update": "update"}
_RUNNER_SPANS = {"launch": "launch", "start": "start", "collect": "wait for the device"}
_TOKENIZER_SPANS = (
    {"render": "render", "encode": "encode"},
    {"stream": {"push": "detokenise"}},
)


def build_chat(config: EngineConfig, files: ModelFiles | None = None) -> Chat:
    """Load the model and start its engine. Raises MlxServeError with what to do about it.

    `files` are the model's, where they have been found already.
    """
    files = files or find_model(config.model, config.revision)
    spans = Spans(config.trace) if config.trace else None
    settled: list[int] = []  # what only the engine's thread can find out

    def build() -> Engine:
        engine, vocab_size = build_engine(config, files, spans)
        settled.append(vocab_size)
        return engine

    engine = AsyncEngine(
        build, log_interval=None if config.disable_log_stats else config.log_stats_interval
    )
    [vocab_size] = settled
    generation = _generation_config(files.path)
    tokenizer = Tokenizer(files.path, _eos_token_ids(files, generation))
    return Chat(
        engine,
        spans.timed(tokenizer, *_TOKENIZER_SPANS) if spans else tokenizer,
        model_name=files.name,
        vocab_size=vocab_size,
        default_params=_default_params(generation),
        fingerprint=fingerprint(files),
        tool_keep_seconds=config.tool_keep_seconds,
    )


def fingerprint(files: ModelFiles) -> str:
    """Names a model's configuration and weights, the latter by size and time, unread."""
    digest = blake2b((files.path / "config.json").read_bytes(), digest_size=16)
    for file in files.weights:
        state = file.stat()
        digest.update(f"{file.name}/{state.st_size}/{state.st_mtime_ns}".encode())
    return digest.hexdigest()


def build_engine(
    config: EngineConfig, files: ModelFiles, spans: Spans | None = None, pace: Pace | None = None
) -> tuple[Engine, int]:
    """(engine, vocabulary size), built on the thread that will run it.

    `pace` replaces the one that the config describes.
    """
    memory = machine.memory()
    memory_limit = int(memory.working_set * config.gpu_memory_utilization)
    loaded = load(files, is_metal=machine.is_metal(), memory_limit=memory_limit)
    backend, difference = choose_attention(config.attention_backend, loaded)
    options = config.scheduler
    max_model_len = options.max_model_len or loaded.max_length
    if max_model_len > loaded.max_length:
        raise InvalidConfig(
            f"max_model_len={max_model_len}, but {files.name} was made for {loaded.max_length} "
            "tokens; lower it."
        )
    num_pages = config.num_pages or fit_pages(
        loaded,
        backend,
        page_size=config.page_size,
        memory_limit=memory_limit,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_tokens=options.max_num_seqs * max_model_len,
    )
    if options.max_model_len is not None:
        _check_capacity(max_model_len, num_pages, config.page_size)
    if not options.enable_chunked_prefill:  # a whole prompt must fit into a step
        max_model_len = min(max_model_len, num_pages * config.page_size)
    pool = PagePool(num_pages, config.page_size, config.hot_after_hits)
    kv = KVPool(loaded.layers, num_pages, config.page_size, backend)
    scheduler = Scheduler(replace(options, max_model_len=max_model_len), pool)
    log.info(
        "%s is loaded: KV cache %d tokens in %d pages of %d (%.2f GiB), context %d, attention by %s, "
        "probe difference %.1e",
        files.name,
        num_pages * config.page_size,
        num_pages,
        config.page_size,
        kv.nbytes / (1 << 30),
        scheduler.max_model_len,
        backend.name,
        difference,
    )
    # As at the start, whoever names a number of pages may have more than that, but not more than
    # there is.
    most = memory.working_set if machine.is_metal() else memory.total
    runner = ModelRunner(loaded.model, loaded.selector, kv, config.seed, memory_limit=most)
    pace = pace or Pace(config.itl_target_ms / 1e3 or None)
    store = _store(config, files)
    swapper = Swapper(scheduler, runner, store) if store else None
    if spans is None:
        engine = Engine(scheduler, runner, pace, swapper=swapper)
    else:
        engine = Engine(
            spans.timed(scheduler, _SCHEDULER_SPANS),
            spans.timed(runner, _RUNNER_SPANS),
            pace,
            swapper=swapper,
            spans=spans,
        )
        engine = spans.timed(engine, {"step": "step"})
    return engine, loaded.vocab_size


def choose_attention(name: str, loaded: LoadedModel) -> tuple[Backend, float]:
    """(backend, difference that the probe found) for a model.

    On "auto" a model whose answers are wrong on the kernels gets plain mlx instead, and the log
    says so; if it is wrong there, too, it cannot be paged. Raises InvalidConfig, UnsupportedModel.
    """
    shapes = [(spec.key_dim, spec.value_dim, spec.dtype) for spec in loaded.layers]
    try:
        backend = select_backend(name, shapes)
    except ValueError as error:
        raise InvalidConfig(f"attention_backend: {error}") from error
    try:
        return backend, probe(loaded, backend)
    except UnsupportedModel as error:
        if name != "auto" or backend.name == "cpu":
            raise
        reason = error
    plain = select_backend("cpu")
    difference = probe(loaded, plain)
    log.warning("attention by plain mlx, which is slower: %s", reason)
    return plain, difference


def _store(config: EngineConfig, files: ModelFiles) -> PageStore | None:
    if config.scheduler.preemption_mode is not PreemptionMode.SWAP:
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = (
        Path(config.swap_dir).expanduser() if config.swap_dir else Path(cache, "mlxserve", "swap")
    )
    limit = int(config.swap_space * (1 << 30))
    return PageStore(base, limit=limit, model=fingerprint(files))


def _check_capacity(max_model_len: int, num_pages: int, page_size: int) -> None:
    """Raises InvalidConfig where a context is longer than the whole pool."""
    if max_model_len > num_pages * page_size:
        raise InvalidConfig(
            f"max_model_len={max_model_len} needs {-(-max_model_len // page_size)} pages of "
            f"{page_size} tokens, and the cache has {num_pages}. Lower max_model_len, or "
            "raise gpu_memory_utilization or num_pages."
        )


def _generation_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        log.warning("generation_config.json cannot be read and is not used: %s", error)
        return {}
    return content if isinstance(content, dict) else {}


def _eos_token_ids(files: ModelFiles, generation: dict[str, Any]) -> list[int]:
    """Every token that ends an answer: generation_config.json knows best, then config.json."""
    ids = generation.get("eos_token_id", files.config.get("eos_token_id"))
    if isinstance(ids, int):
        return [ids]
    return [i for i in ids if isinstance(i, int)] if isinstance(ids, list) else []


def _default_params(generation: dict[str, Any]) -> SamplingParams:
    """What the model's makers recommend for sampling, where they say so."""
    chosen: dict[str, Any] = {}
    if generation.get("do_sample") is False:
        chosen["temperature"] = 0.0
    else:
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            if isinstance(generation.get(name), (int, float)):
                chosen[name] = generation[name]
    try:
        return SamplingParams(**chosen)
    except InvalidParameter as error:
        log.warning("generation_config.json is not used: %s", error)
        return SamplingParams()

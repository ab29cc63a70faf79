"""How long a context and how many pages: what only the loaded model and the machine decide.

The pages are those that fit into the usable memory minus the weights and a measured step's peak.
"""

from __future__ import annotations

import logging

import mlx.core as mx

from metal_kernels import Backend
from mlxserve.cache.kv import KVPool
from mlxserve.config import EngineConfig
from mlxserve.errors import InvalidConfig, OutOfMemory
from mlxserve.model.batch import Batch
from mlxserve.model.load import LoadedModel
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from mlxserve.sampling_params import SamplingParams

log = logging.getLogger("mlxserve.sizing")

# Rows of the measured forward. A step's temporaries grow with its rows, so the peak of a full step
# is extrapolated; measuring all 2,048 rows would cost seconds of start-up on a CPU.
_MEASURED_ROWS = 256


def settle(
    config: EngineConfig,
    loaded: LoadedModel,
    backend: Backend,
    memory_limit: int,
    *,
    device_memory: int | None = None,
) -> EngineConfig:
    """The config with `num_pages` and `max_model_len`. Raises InvalidConfig, OutOfMemory.

    memory_limit: bytes to plan with, where no number of pages is asked for
    device_memory: bytes that pages which are asked for must fit in; None does not check

    `max_model_len` may be more than the pages hold, because the pool can grow later. Not so
    without chunked prefill: a whole prompt must then fit into a step.
    """
    options = config.scheduler
    max_model_len = options.max_model_len or loaded.max_length
    if max_model_len > loaded.max_length:
        raise InvalidConfig(
            f"max_model_len={max_model_len}, but {loaded.name} was made for {loaded.max_length} "
            "tokens; lower it.",
            option="max_model_len",
        )
    if config.num_pages is not None and device_memory is not None:
        _refuse_too_many_pages(config.num_pages, config.page_size, loaded, device_memory)
    num_pages = config.num_pages or fit_pages(
        loaded,
        backend,
        page_size=config.page_size,
        memory_limit=memory_limit,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_tokens=options.max_num_seqs * max_model_len,
    )
    num_tokens = num_pages * config.page_size
    if options.max_model_len is not None and max_model_len > num_tokens:
        raise InvalidConfig(
            f"max_model_len={max_model_len} needs {-(-max_model_len // config.page_size)} pages of "
            f"{config.page_size} tokens, and the cache has {num_pages}. Lower max_model_len, or "
            "raise gpu_memory_utilization or num_pages.",
            option="max_model_len",
        )
    if not options.enable_chunked_prefill:
        max_model_len = min(max_model_len, num_tokens)
    return config.with_options(num_pages=num_pages, max_model_len=max_model_len)


def _refuse_too_many_pages(
    num_pages: int, page_size: int, loaded: LoadedModel, device_memory: int
) -> None:
    """Before the pages are allocated: filling memory until the system ends the process is no answer.

    Raises OutOfMemory.
    """
    page_bytes = _page_bytes(loaded, page_size)
    left = max(0, device_memory - loaded.weight_size)
    if num_pages * page_bytes > left:
        raise OutOfMemory(
            f"num_pages={num_pages} needs {num_pages * page_bytes / (1 << 30):.2f} GiB, but next to "
            f"the weights of {loaded.name} the device has {left / (1 << 30):.2f} GiB. Ask for at "
            f"most {left // page_bytes} pages, or leave num_pages out."
        )


def _page_bytes(loaded: LoadedModel, page_size: int) -> int:
    return page_size * sum(spec.bytes_per_token() for spec in loaded.layers)


def fit_pages(
    loaded: LoadedModel,
    backend: Backend,
    *,
    page_size: int,
    memory_limit: int,
    max_num_batched_tokens: int,
    max_tokens: int,
) -> int:
    """Number of pages that fit in `memory_limit` bytes, at most enough for `max_tokens` tokens.

    Raises OutOfMemory if fewer than two pages fit next to the weights.
    """
    peak = peak_of_a_step(loaded, backend, page_size, max_num_batched_tokens)
    page_bytes = _page_bytes(loaded, page_size)
    left = memory_limit - loaded.weight_size - peak
    log.info(
        "Memory: %.2f GiB usable, weights %.2f GiB, peak of a step %.2f GiB, page %.0f KiB",
        memory_limit / (1 << 30),
        loaded.weight_size / (1 << 30),
        peak / (1 << 30),
        page_bytes / (1 << 10),
    )
    num_pages = min(left // page_bytes, max(2, -(-max_tokens // page_size)))
    if num_pages < 2:
        raise OutOfMemory(
            f"{loaded.name}: the weights and a step of {max_num_batched_tokens} tokens leave no "
            "memory for a cache. Raise gpu_memory_utilization, lower max_num_batched_tokens, or "
            "choose a smaller model."
        )
    return int(num_pages)


def peak_of_a_step(
    loaded: LoadedModel, backend: Backend, page_size: int, max_num_batched_tokens: int
) -> int:
    """Bytes that a step of `max_num_batched_tokens` rows needs next to weights and pool."""
    rows = min(_MEASURED_ROWS, max_num_batched_tokens)
    pages = as_page_table(range(-(-rows // page_size)))
    kv = KVPool(loaded.layers, len(pages), page_size, backend)
    runner = ModelRunner(loaded.model, loaded.selector, kv)
    request = LiveRequest(Request("sizing", [0] * rows, SamplingParams(temperature=0)))
    batch = Batch.of([Chunk(request, 0, rows, pages, samples=True)], page_size)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(runner.logits(batch, mx.array(batch.tokens)))
    peak = max(0, mx.get_peak_memory() - before)
    del kv, runner
    mx.synchronize()
    mx.clear_cache()
    return peak * max_num_batched_tokens // rows

"""Context length and number of pages, which depend on the loaded model and the machine.

The pages are those that fit into the usable memory minus the weights and a measured step's peak.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.pool_memory import PoolMemory, max_states
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig, OutOfMemory
from mlxserve.model.load import LoadedModel
from mlxserve.model.step_peak import StepPeak
from mlxserve.model.window_group import WindowGroup
from mlxserve.request import STATE_SLOTS

log = logging.getLogger("mlxserve.sizing")

_FEWEST_SLOTS, _MAX_SLOTS = 6, 1024  # bounds of the slots for recurrent states


def default_step_budget(config: EngineConfig, *, is_metal: bool) -> EngineConfig:
    """Return the config with `max_num_batched_tokens`, if it has none."""
    if config.scheduler.max_num_batched_tokens is not None:
        return config
    num_rows = config.scheduler.step_rows(is_metal=is_metal)
    return config.with_options(max_num_batched_tokens=num_rows)


def with_sizes(
    config: EngineConfig,
    loaded: LoadedModel,
    step: StepPeak | None,
    memory_limit: int,
    *,
    device_memory: int | None = None,
    group: WindowGroup | None = None,
) -> EngineConfig:
    """Return the config with `num_pages`, `num_window_pages` and `max_model_len`.

    step: may be None if the config has `num_pages`
    memory_limit: bytes to plan with if the config names no number of pages
    device_memory: bytes that requested pages must fit in; None skips the check
    group: sliding-window layers that may have a pool of their own; they share one if that would
        give no longer contexts

    `max_model_len` may be more than the pages hold, because the pool can grow later. Not so without
    chunked prefill: a whole prompt must then fit into a step.

    Raises InvalidConfig, OutOfMemory.
    """
    sizes = _configured(config, loaded, step, memory_limit, group) or _fitted(
        config, loaded, step, memory_limit, group
    )
    options, num_tokens = config.scheduler, sizes.num_pages * config.page_size
    _refuse_long_context(config, loaded)
    if config.num_pages is not None and device_memory is not None:
        _refuse_too_many_pages(sizes, config.page_size, loaded, device_memory, group)
    _refuse_context_beyond(config, sizes)
    if group is not None and sizes.num_window_pages:
        group.log_division(sizes.num_pages, sizes.num_window_pages, options.max_num_seqs)
    if shares_states(config, loaded):
        log.info(
            "The cache is shared by up to %d tokens and up to %s recurrent states of %.1f MiB: each running "
            "request needs %d, and each conversation to be continued one",
            num_tokens,
            sizes.num_slots,
            loaded.state_nbytes / (1 << 20),
            STATE_SLOTS,
        )
    max_model_len = options.max_model_len or loaded.max_length
    if not options.enable_chunked_prefill:
        max_model_len = min(max_model_len, num_tokens)
    return config.with_options(
        num_pages=sizes.num_pages,
        num_window_pages=sizes.num_window_pages,
        max_model_len=max_model_len,
        num_state_slots=sizes.num_slots,
        max_num_seqs=_limit_by_states(options.max_num_seqs, sizes.num_slots),
    )


def shares_states(config: EngineConfig, loaded: LoadedModel) -> bool:
    """Return True if recurrent states share memory with pages.

    What ranks can have depends on each one's layers, and chosen numbers are kept: they divide it once.
    """
    chosen = config.num_pages, config.num_window_pages, config.num_state_slots
    return loaded.has_states and loaded.group is None and bool(loaded.layers) and not any(chosen)


def pool_memory(
    config: EngineConfig,
    loaded: LoadedModel,
    step: StepPeak | None,
    memory_limit: int,
    group: WindowGroup | None,
    has_shared_states: bool = False,
) -> PoolMemory | None:
    """Return the memory that several kinds share, or None if they share nothing.

    It has what weights and a step leave, or what the maximum numbers of units take if that is less.

    The arguments are those of `with_sizes`; `config` has the sizes that it found.

    has_shared_states: as `shares_states` returned before there were sizes
    """
    assert config.num_pages is not None
    num_windows, num_slots = config.num_window_pages or 0, config.num_state_slots or 0
    windows = group if num_windows else None
    if step is None or not (has_shared_states or (windows is not None and windows.is_shared)):
        return None
    left = left_for_cache(loaded, step, memory_limit)
    page_bytes = {FullPages.name: _page_bytes(loaded, config.page_size)}
    most = 0
    if windows is not None:
        page_bytes = {
            FullPages.name: windows.other_page_bytes,
            WindowPages.name: windows.page_bytes,
        }
        most += num_windows * windows.page_bytes
    if has_shared_states:
        page_bytes[StateSlots.name] = loaded.state_nbytes
        most += num_slots * loaded.state_nbytes
    else:
        left -= num_slots * loaded.state_nbytes
    most += config.num_pages * page_bytes[FullPages.name]
    return PoolMemory(min(left, most), page_bytes)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of pages and slots.

    `num_slots` is None if the model has no states, `num_window_pages` 0 if windows have no pool of their own.
    """

    num_pages: int
    num_slots: int | None
    num_window_pages: int = 0


def _configured(
    config: EngineConfig,
    loaded: LoadedModel,
    step: StepPeak | None,
    memory_limit: int,
    group: WindowGroup | None,
) -> Sizes | None:
    """Return the configured number of pages, and the slots to match; None if not configured."""
    if config.num_pages is None:
        return None
    num_slots = config.num_state_slots if loaded.has_states else None
    if num_slots is None and loaded.has_states:
        of_pages = config.num_pages * _page_bytes(loaded, config.page_size)
        left = left_for_cache(loaded, step, memory_limit)
        cache_size = of_pages + of_pages // 3 if loaded.layers else left
        num_slots = loaded.all_min(fit_states(loaded, cache_size))
    return Sizes(config.num_pages, num_slots, 0 if group is None else group.configured(config))


def _fitted(
    config: EngineConfig,
    loaded: LoadedModel,
    step: StepPeak | None,
    memory_limit: int,
    group: WindowGroup | None,
) -> Sizes:
    """Return as many pages and slots as fit into memory. Raises OutOfMemory, InvalidConfig.

    Of shared memory these are maxima.
    """
    assert step is not None, "the number of pages follows from a measured step"
    num_slots = config.num_state_slots if loaded.has_states else None
    left = left_for_cache(loaded, step, memory_limit)
    num_fixed = num_slots or 0  # slots that no page can have
    if shares_states(config, loaded):
        num_slots = max_states(left, loaded.state_nbytes, _page_bytes(loaded, config.page_size))
        num_fixed = STATE_SLOTS
    elif num_slots is None and loaded.has_states:
        num_fixed = num_slots = loaded.all_min(fit_states(loaded, left))
    options = config.scheduler
    longest = options.max_model_len or loaded.max_length
    memory_limit -= num_fixed * loaded.state_nbytes
    num_pages = fit_pages(
        loaded,
        step,
        page_size=config.page_size,
        memory_limit=memory_limit,
        max_tokens=options.max_num_seqs * longest,
    )
    num_pages = loaded.all_min(num_pages)
    if group is not None:
        left = left_for_cache(loaded, step, memory_limit)
        num_others, num_window_pages = map(loaded.all_min, group.fitted(config, left, longest))
        max_pages = -(-options.max_num_seqs * longest // config.page_size)
        if (num_others := min(num_others, max_pages)) > num_pages:
            return Sizes(num_others, num_slots, num_window_pages)
    return Sizes(num_pages, num_slots)


def _refuse_long_context(config: EngineConfig, loaded: LoadedModel) -> None:
    """Raises InvalidConfig."""
    wanted = config.scheduler.max_model_len
    longest = loaded.context.longest
    if wanted is not None and wanted > longest:
        raise InvalidConfig(
            f"max_model_len={wanted}, but {loaded.name} was made for {longest} tokens; lower it.",
            option="max_model_len",
        )


def _refuse_context_beyond(config: EngineConfig, sizes: Sizes) -> None:
    """Raises InvalidConfig, or OutOfMemory if memory decided the cache's size.

    On OutOfMemory the registry makes room for the model.
    """
    wanted = config.scheduler.max_model_len
    if wanted is None or wanted <= sizes.num_pages * config.page_size:
        return
    words = (
        f"max_model_len={wanted} needs {-(-wanted // config.page_size)} pages of {config.page_size} tokens, "
        f"and the cache has {sizes.num_pages}. Lower max_model_len, or raise "
    )
    if config.num_pages is None:
        raise OutOfMemory(words + "gpu_memory_utilization.")
    raise InvalidConfig(words + "num_pages.", option="max_model_len")


def fit_states(loaded: LoadedModel, cache_size: int) -> int:
    """Slots for recurrent states in a cache of `cache_size` bytes, pages included, if they share no memory.

    They get a quarter of it, or all of it for a model without attention, whose pages take no
    memory.
    """
    size = cache_size // 4 if loaded.layers else cache_size
    wanted = size // max(1, loaded.state_nbytes)
    num_slots = int(min(_MAX_SLOTS, max(_FEWEST_SLOTS, wanted)))
    log.info("Recurrent states: %d slots of %.1f MiB", num_slots, loaded.state_nbytes / (1 << 20))
    return num_slots


def _limit_by_states(max_num_seqs: int, num_slots: int | None) -> int:
    """Limit the running requests to those that have slots for their recurrent states."""
    if num_slots is None or num_slots >= STATE_SLOTS * max_num_seqs:
        return max_num_seqs
    limit = num_slots // STATE_SLOTS
    log.warning(
        "At most %d requests run at the same time instead of %d: memory has room for %d recurrent "
        "states, and each request needs %d. Raise num_state_slots or gpu_memory_utilization.",
        limit,
        max_num_seqs,
        num_slots,
        STATE_SLOTS,
    )
    return limit


def first_pages(config: EngineConfig, num_pages: int, *, is_metal: bool) -> int:
    """Return the pages to allocate at the start: two full steps, and on Metal an eighth of all.

    Not an eighth on a CPU, where zeros of 1 GiB take 0.7 s (2-core x86).
    """
    of_a_step = -(-config.scheduler.step_budget // config.page_size) + config.scheduler.max_num_seqs
    return min(num_pages, max(num_pages // 8 if is_metal else 0, 2 * of_a_step))


def _refuse_too_many_pages(
    sizes: Sizes,
    page_size: int,
    loaded: LoadedModel,
    device_memory: int,
    group: WindowGroup | None,
) -> None:
    """Refuse more pages than fit before they are allocated, or the system would end the process.

    Raises OutOfMemory.
    """
    num_pages, page_bytes, of_windows = sizes.num_pages, _page_bytes(loaded, page_size), 0
    if group is not None and sizes.num_window_pages:
        page_bytes = group.other_page_bytes
        of_windows = sizes.num_window_pages * group.page_bytes
    left = max(0, device_memory - loaded.weight_size - of_windows)
    if num_pages * page_bytes > left:
        raise OutOfMemory(
            f"num_pages={num_pages} needs {num_pages * page_bytes / (1 << 30):.2f} GiB, but next to "
            f"the weights of {loaded.name} the device has {left / (1 << 30):.2f} GiB. Ask for at "
            f"most {left // page_bytes} pages, or leave num_pages out."
        )


def _page_bytes(loaded: LoadedModel, page_size: int) -> int:
    own = sum(spec.bytes_per_token() for spec in loaded.layers)
    return page_size * (own + loaded.draft_bytes_per_token)


def left_for_cache(loaded: LoadedModel, step: StepPeak | None, memory_limit: int) -> int:
    """Return the bytes of `memory_limit` beside the weights and a measured step; negative if there are too few."""
    return memory_limit - loaded.weight_size - (0 if step is None else step.beside_cache)


def fit_pages(
    loaded: LoadedModel,
    step: StepPeak,
    *,
    page_size: int,
    memory_limit: int,
    max_tokens: int,
) -> int:
    """Return the pages that fit in `memory_limit` bytes, at most enough for `max_tokens` tokens.

    Raises OutOfMemory if fewer than two pages fit next to the weights.
    """
    page_bytes = _page_bytes(loaded, page_size)
    left = left_for_cache(loaded, step, memory_limit)
    log.info(
        "Memory: %.2f GiB usable, weights %.2f GiB, page %.0f KiB",
        memory_limit / (1 << 30),
        loaded.weight_size / (1 << 30),
        page_bytes / (1 << 10),
    )
    num_pages = max(2, -(-max_tokens // page_size))
    # A model of recurrent layers alone has nothing in its pages.
    if page_bytes or left <= 0:
        num_pages = min(left // max(1, page_bytes), num_pages)
    if num_pages < 2:
        raise OutOfMemory(
            f"{loaded.name}: the weights and a step of {step.num_rows} tokens leave no "
            "memory for a cache. Raise gpu_memory_utilization, lower max_num_batched_tokens, or "
            "choose a smaller model."
        )
    return int(num_pages)

"""EnginePart: the loaded model with its pools, sized for this machine. Each rank builds one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import NamedTuple

from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.kv import Backends, KVPool
from mlxserve.cache.pool_memory import PoolMemory
from mlxserve.cache.window_kv import WindowKV, pools_of
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig, OutOfMemory
from mlxserve.core.stats import PlannedMemory
from mlxserve.hub.adapter_files import find_adapters
from mlxserve.hub.files import ModelFiles, find_model
from mlxserve.model.attention import load_probed
from mlxserve.model.drafting.draft_pages import DraftPages
from mlxserve.model.drafting.drafter import Drafter
from mlxserve.model.drafting.drafting import Drafting
from mlxserve.model.drafting.head_probe import TEXT, help_to_read, read_nothing
from mlxserve.model.drafting.head_weights import HeadRefused, find_head
from mlxserve.model.drafting.load import load_drafting, reads_text
from mlxserve.model.load import LoadedModel
from mlxserve.model.load_check import try_first
from mlxserve.model.rank_group import RankGroup
from mlxserve.model.replay_choice import with_replay
from mlxserve.model.sizing import (
    default_step_budget,
    first_pages,
    pool_memory,
    shares_states,
    with_sizes,
)
from mlxserve.model.step_peak import StepPeak, measure_step
from mlxserve.model.window_group import WindowGroup, window_group
from mlxserve.system import machine, metal_memory
from mlxserve.system.metal_memory import ModelShare
from mlxserve.text.tokenizer_files import load_tokenizer

log = logging.getLogger("mlxserve.engine_part")


@dataclass(frozen=True, slots=True)
class EnginePart:
    """The part of an engine that every rank builds, over its part of the model.

    config         with the sizes that all ranks have agreed on
    step           as measured on Metal; None elsewhere
    first_pages    allocated at the start; None for all
    device_memory  bytes that a growing pool may use
    windows        sliding-window layers in a pool of their own beside `kv`; None if there are none
    group          of these layers
    shared         memory that several kinds share; None if each kind has its own
    drafter        makes drafts; its own pages, if any, have the ids of those in `kv`; None if nothing does
    draft_files    that the drafter comes from
    planned        bytes of weights, a step, a page, and as its pool recurrent states and the windows'
                   pages
    """

    config: EngineConfig
    loaded: LoadedModel
    kv: KVPool
    difference: float
    step: StepPeak | None
    first_pages: int | None
    device_memory: int
    planned: PlannedMemory
    windows: WindowKV | None = None
    group: WindowGroup | None = None
    shared: PoolMemory | None = None
    drafter: Drafter | None = None
    draft_files: ModelFiles | None = None

    @property
    def backends(self) -> Backends:
        """The backends that compute the attention of each layer."""
        if self.windows is None:
            return self.kv.backends
        return tuple(self.pools[windowed].backends[at] for windowed, at in self.windows.places)

    @property
    def pools(self) -> tuple[KVPool, ...]:
        """The model's pools of keys and values, that of all positions first."""
        return (self.kv,) if self.windows is None else (self.kv, self.windows.kv)

    @property
    def page_size_on_disk(self) -> int:
        """Bytes of a page's record, which has the drafter's rows as well."""
        drafted = self.draft_pages
        return self.kv.nbytes_of(1) + (0 if drafted is None else drafted.payload_size)

    @property
    def draft_pages(self) -> DraftPages | None:
        """The drafter's own pages; None without any."""
        return None if self.drafter is None else self.drafter.pages


class _Limits(NamedTuple):
    """Limits what one rank may use, in bytes.

    memory    for weights, a step and the cache
    most      for a requested number of pages, at the start or in a resize: all memory, without a reserve
    unkept    of a step's memory that MLX gives back
    """

    memory: int
    most: int
    unkept: int
    is_metal: bool


class _Read(NamedTuple):
    """Holds the loaded model with its backends, and what drafts for it."""

    loaded: LoadedModel
    backends: Backends
    difference: float
    drafting: Drafting | None


def build_part(
    config: EngineConfig,
    files: ModelFiles,
    group: RankGroup | None,
    memory_limit: int | None = None,
) -> EnginePart:
    """`memory_limit`: as in `build_text_model`."""
    are_pages_chosen = config.num_pages is not None
    limits = _limits_of(config, group, memory_limit)
    config = default_step_budget(config, is_metal=limits.is_metal)
    loaded, backends, difference, drafting = _read(config, files, group, limits)
    if drafting is not None:
        config = config.with_drafter()
    if config.max_draft:
        loaded = with_replay(loaded, backends, config.page_size)
    own = window_group(config, loaded)
    step = None
    if limits.is_metal or not are_pages_chosen:
        step = _measured(config, loaded, backends, drafting, limits, own)
    has_shared_states = shares_states(config, loaded)
    config = with_sizes(config, loaded, step, limits.memory, device_memory=limits.most, group=own)
    assert config.num_pages is not None
    shared = pool_memory(config, loaded, step, limits.memory, own, has_shared_states)
    measured = step if limits.is_metal else None
    share = _share_memory(config, loaded, measured)
    first = None
    if not are_pages_chosen:
        first = first_pages(config, config.num_pages, is_metal=limits.is_metal)
    kv, windows = _pools(config, loaded, backends, limits, own, shared, first)
    drafter, draft_files = None, None
    if drafting is not None:
        drafter = drafting.drafter(config, loaded, kv, windows, first)
        draft_files = drafting.files
    page_bytes = kv.nbytes_of(1) + config.page_size * loaded.draft_bytes_per_token
    part = EnginePart(
        config,
        loaded,
        kv,
        difference,
        measured,
        first,
        limits.most,
        PlannedMemory(
            weights=loaded.weight_size,
            step=0 if step is None else step.planned,
            pool=_bytes_beside(config, loaded, windows, shared, config.num_pages * page_bytes),
            page=page_bytes,
        ),
        windows,
        own if windows else None,
        shared,
        drafter,
        draft_files,
    )
    if share is not None:
        share.follow(*part.pools, *(() if part.draft_pages is None else (part.draft_pages.kv,)))
    if group is not None:
        group.all_min(0)  # all are ready
    return part


def _limits_of(config: EngineConfig, group: RankGroup | None, memory_limit: int | None) -> _Limits:
    memory = machine.memory()
    is_metal = machine.is_metal()
    num_here = 1 if group is None else group.num_on_this_machine
    limit = memory.limit(config.gpu_memory_utilization)
    own_limit = limit.nbytes // num_here
    return _Limits(
        own_limit if memory_limit is None else min(memory_limit, own_limit),
        (memory.working_set if is_metal else memory.total) // num_here,
        limit.unkept // num_here,
        is_metal,
    )


def _read(
    config: EngineConfig, files: ModelFiles, group: RankGroup | None, limits: _Limits
) -> _Read:
    """Load the model, and what drafts for it."""
    if group is None:
        try_first(config, files, limits.memory)
    loaded, backends, difference = load_probed(
        files,
        is_metal=limits.is_metal,
        memory_limit=limits.memory,
        kv_cache_dtype=config.kv_cache_dtype,
        attention_backend=config.attention_backend,
        group=group,
        adapters=find_adapters(config.adapters),
    )
    drafting, reason = None, ""
    if not is_drafting_off(config):
        if group is None or group.is_lead:
            drafting, reason = _drafting(config, files, loaded, limits.is_metal, limits.memory)
        else:
            help_to_read(loaded)
    drafter = None if drafting is None else drafting.loaded
    loaded = replace(loaded, drafter=drafter, no_drafts_reason=reason)
    return _Read(loaded, backends, difference, drafting)


def _measured(
    config: EngineConfig,
    loaded: LoadedModel,
    backends: Backends,
    drafting: Drafting | None,
    limits: _Limits,
    own: WindowGroup | None,
) -> StepPeak:
    """Measure a step of the model, with that of its drafter."""
    step = measure_step(
        config,
        loaded,
        backends,
        is_metal=limits.is_metal,
        memory_limit=limits.most,
        group=own,
        unkept=limits.unkept,
    )
    if drafting is None:
        return step
    own_size = drafting.step_size(config, is_metal=limits.is_metal, memory_limit=limits.most)
    return replace(step, planned=step.planned + own_size)


def _pools(
    config: EngineConfig,
    loaded: LoadedModel,
    backends: Backends,
    limits: _Limits,
    own: WindowGroup | None,
    shared: PoolMemory | None,
    first: int | None,
) -> tuple[KVPool, WindowKV | None]:
    """Make the pool of all positions, and that of layers with a window if they have their own."""
    assert config.num_pages is not None
    if own is None or not config.num_window_pages:
        return KVPool(loaded.layers, config.num_pages, config.page_size, backends, first), None
    numbers = config.num_pages, config.num_window_pages
    backed = first_pages(config, config.num_window_pages, is_metal=limits.is_metal)
    if shared is not None:
        backed = min(backed, own.window.num_held)
    return pools_of(loaded.layers, backends, config.page_size, numbers, (first, backed))


def _drafting(
    config: EngineConfig,
    files: ModelFiles,
    loaded: LoadedModel,
    is_metal: bool,
    memory_limit: int,
) -> tuple[Drafting | None, str]:
    """Load what drafts for the model; return it, or the reason why the model's own head does not.

    Raises what `load_drafting` raises, and InvalidConfig for a head that was named and does not draft.
    """
    named = draft_files_of(config)
    source = find_head(named or files, loaded.config) or named
    if loaded.group is not None and not reads_text(source):
        read_nothing(loaded.group)
    if source is None:
        return None, ""
    try:
        return load_drafting(
            config,
            source,
            loaded,
            lambda: load_tokenizer(files.path, ()).encode(TEXT),
            is_metal=is_metal,
            memory_limit=memory_limit,
        ), ""
    except (HeadRefused, OutOfMemory) as error:
        if named is not None:
            raise InvalidConfig(f"draft_model: {error}", option="draft_model") from error
        log.warning("Nothing is drafted: %s", error)
        return None, str(error)


def _bytes_beside(
    config: EngineConfig,
    loaded: LoadedModel,
    windows: WindowKV | None,
    shared: PoolMemory | None,
    other_bytes: int,
) -> int:
    """Bytes planned for recurrent states and pages of windows, beside those of the other layers' pages."""
    names = {} if shared is None else shared.page_bytes
    nbytes = 0 if shared is None else max(0, shared.nbytes - other_bytes)
    if StateSlots.name not in names:
        nbytes += (config.num_state_slots or 0) * loaded.state_nbytes
    if windows is not None and WindowPages.name not in names:
        nbytes += windows.kv.nbytes_of(windows.kv.num_pages)
    return nbytes


def _share_memory(
    config: EngineConfig, loaded: LoadedModel, step: StepPeak | None
) -> ModelShare | None:
    """Set this model's share of mlx's wired and cached memory.

    step: as measured on Metal; None elsewhere
    """
    if step is None:
        if config.wired_limit is not None:
            log.warning("wired_limit has no effect: mlx does not compute on Metal here.")
        return None
    # More than there are, if they share memory with pages: a limit wires no memory that nobody has.
    states = (config.num_state_slots or 0) * loaded.state_nbytes
    fixed = loaded.weight_size + states
    return metal_memory.METAL_MEMORY.add(fixed, step.planned, config.wired_limit)


def is_drafting_off(config: EngineConfig) -> bool:
    """True if the config says that nothing is drafted."""
    return config.scheduler.speculative_tokens == 0


def draft_files_of(config: EngineConfig) -> ModelFiles | None:
    """The files that `draft_model` names; None if it names none, or drafts are off."""
    if config.draft_model is None or is_drafting_off(config):
        return None
    return find_model(config.draft_model)

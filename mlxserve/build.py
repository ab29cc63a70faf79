"""Build an engine and what answers with it from a config: wiring, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlxserve.cache.hashing import root
from mlxserve.cache.kinds.kind import EndKind, UnitEvents
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.kv import KVPool
from mlxserve.cache.pages import PagePool
from mlxserve.chat.embedding.build import build_encoder_engine, refuse_options
from mlxserve.chat.embedding.embedding_model import embedding_model
from mlxserve.chat.embedding.judging import answers_of
from mlxserve.chat.image_prompts import ImagePrompts
from mlxserve.chat.language_model import language_model
from mlxserve.chat.prefix_store import PREFIX_FILE
from mlxserve.chat.text_model import TextModel
from mlxserve.chat.view import View
from mlxserve.core.config import EngineConfig, PreemptionMode
from mlxserve.core.errors import InvalidConfig
from mlxserve.disk.folder import default_bytes
from mlxserve.disk.folder import disk_folder as folder_of
from mlxserve.disk.rank_records import Memory, RankRecords, Wakeups
from mlxserve.disk.rank_tier import RankDisks, RankDiskTier, RankTier
from mlxserve.disk.tier import UNLIMITED, DiskTier, Tier
from mlxserve.engine.async_engine import AsyncEngine
from mlxserve.engine.disk_cache import (
    DiskCache,
    RecordKind,
    page_records,
    state_records,
    window_records,
)
from mlxserve.engine.engine import Engine
from mlxserve.engine.memory import MemoryWatch
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.engine.trace import Trace
from mlxserve.engine_part import EnginePart, build_part, draft_files_of
from mlxserve.helpers.fair_executor import BODY_MEMORY, FairExecutor
from mlxserve.hub.adapter_files import find_adapters
from mlxserve.hub.assistants import is_assistant
from mlxserve.hub.facts import ModelFacts
from mlxserve.hub.files import ModelFiles, find_model
from mlxserve.hub.generation_config import for_vocabulary, read_generation_config
from mlxserve.hub.head_families import is_split_off
from mlxserve.hub.text_encoders import TextEncoder, text_encoder
from mlxserve.model.attention import backend_names
from mlxserve.model.load import LoadedModel
from mlxserve.model.row_speeds import measure_rows
from mlxserve.model.runner import ModelRunner
from mlxserve.model.step_peak import StepPeak
from mlxserve.model.work import forward_work
from mlxserve.model.workers import Workers
from mlxserve.scheduler.draft_controller import DraftController
from mlxserve.scheduler.drafts import DeviceDrafts, Drafts, LookupDrafts
from mlxserve.scheduler.row_times import CALL, RowTimes
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.system import machine
from mlxserve.system.extras import extra_command
from mlxserve.text.shared_vocabulary import refuse_other_vocabulary
from mlxserve.text.template_caps import ALWAYS_ALLOWED
from mlxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mlxserve.cache.events import PageEvents
    from mlxserve.disk.record import Records

log = logging.getLogger("mlxserve.build")

TierT = TypeVar("TierT", bound=Tier)

_INDEX_SECONDS = 1.0  # time to list the disk; the rest is listed while the engine runs

# The methods that a trace shows, and their names in it. Sampling is part of the step's graph: it is
# built in "launch" and computed with the rest during "wait for the device" (on a CPU, "start").
_SCHEDULER_SPANS = {"schedule": "schedule", "update": "update"}
_RUNNER_SPANS = {"launch": "launch", "start": "start", "collect": "wait for the device"}
_TOKENIZER_SPANS = (
    {"render": "render", "encode": "encode"},
    {"stream": {"push": "detokenise"}},
)


def build_text_model(
    config: EngineConfig,
    files: ModelFiles | None = None,
    connect: Callable[[ModelFiles], Workers] | None = None,
    *,
    executor: FairExecutor | None = None,
    memory_limit: int | None = None,
) -> TextModel:
    """Load the model and start its engine. Raises MlxServeError with advice.

    files: the model's, if they have been found already
    connect: to the other ranks, if this is rank 0 of several
    executor: shared by several models, whose owner closes it; None for one of its own
    memory_limit: bytes, if less than what the config leaves all models together
    """
    files = files or find_model(config.model, config.revision)
    if (rules := text_encoder(files)) is not None:
        return _build_embedder(config, files, rules, executor=executor, memory_limit=memory_limit)
    adapters = find_adapters(config.adapters)
    generation = read_generation_config(files)
    tokenizer = Tokenizer(files.path, generation.eos_token_ids)
    tokenizer.template.prepare()
    draft_files = draft_files_of(config)
    # An assistant and a head are given the model's own ids.
    if draft_files is not None and not (
        is_split_off(draft_files.config) or is_assistant(draft_files.config)
    ):
        refuse_other_vocabulary(tokenizer, Tokenizer(draft_files.path), draft_files.name)
    trace = Trace(config.trace) if config.trace else None
    # Filled on the engine's thread.
    parts: list[tuple[int, Path | None, ImagePrompts]] = []
    workers = None if connect is None else connect(files)

    def build() -> Engine:
        engine, vocab_size = build_engine(
            config, files, trace, workers=workers, memory_limit=memory_limit
        )
        images = ImagePrompts(engine.side_work.picture_reader, engine.side_work.no_vision_reason)
        parts.append((vocab_size, engine.disk_folder, images))
        return engine

    engine = AsyncEngine(
        build,
        log_interval=None if config.disable_log_stats else config.log_stats_interval,
        max_failures=config.max_engine_failures,
        memory=MemoryWatch(
            machine.memory_used,
            high=config.memory_high,
            critical=config.memory_critical,
            relieve=machine.return_free_memory,
            pressure=machine.memory_pressure,
        ),
        workers=workers,
    )
    [(vocab_size, disk_folder, images)] = parts
    return language_model(
        engine,
        trace.timed(tokenizer, *_TOKENIZER_SPANS) if trace else tokenizer,
        name=files.name,
        vocab_size=vocab_size,
        default_params=for_vocabulary(generation.default_params, vocab_size),
        salt=_salted_by(config, files),
        facts=ModelFacts.from_files(files),
        tool_keep_seconds=config.tool_keep_seconds,
        prefix_file=disk_folder / PREFIX_FILE if disk_folder else None,
        template_kwargs=_template_kwargs(config, tokenizer),
        max_num_waiting=config.scheduler.max_num_waiting,
        executor=executor or new_fair_executor(),
        owns_executor=executor is None,
        adapters={adapter.name: adapter.digest for adapter in adapters},
        images=images,
    )


def _build_embedder(
    config: EngineConfig,
    files: ModelFiles,
    rules: TextEncoder,
    *,
    executor: FairExecutor | None,
    memory_limit: int | None,
) -> TextModel:
    """Build the engine of a model that embeds or ranks texts; see `build_text_model`."""
    refuse_options(config, files.name)
    tokenizer = Tokenizer(files.path)
    answers = answers_of(tokenizer, files.name) if rules.judges else (0, 0)
    dimensions: list[int] = []  # filled on the engine's thread
    own_limit = machine.memory().limit(config.gpu_memory_utilization).nbytes

    def build() -> Engine:
        engine, vocab_size = build_encoder_engine(
            config,
            files,
            rules,
            answers,
            is_metal=machine.is_metal(),
            memory_limit=own_limit if memory_limit is None else min(memory_limit, own_limit),
        )
        dimensions.append(vocab_size)
        return engine

    engine = AsyncEngine(build, max_failures=config.max_engine_failures)
    return embedding_model(
        engine,
        tokenizer,
        rules,
        view=View(files.name, files.fingerprint),
        vocab_size=dimensions[0],
        facts=ModelFacts.from_files(files),
        executor=executor or new_fair_executor(),
        owns_executor=executor is None,
    )


def new_fair_executor() -> FairExecutor:
    """Return an executor sized for this machine."""
    return FairExecutor(min(BODY_MEMORY, machine.total_memory() // 32))


def _template_kwargs(config: EngineConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Options of the config that the model's template reads."""
    wanted = config.template_kwargs
    reads = tokenizer.template.caps.variables | ALWAYS_ALLOWED if wanted else frozenset()
    if others := sorted(wanted.keys() - reads):
        log.warning("The model's chat template does not read %s", ", ".join(others))
    return {name: value for name, value in wanted.items() if name in reads}


def build_engine(
    config: EngineConfig,
    files: ModelFiles,
    trace: Trace | None = None,
    pace: StepTimeModel | None = None,
    workers: Workers | None = None,
    memory_limit: int | None = None,
) -> tuple[Engine, int]:
    """Build (engine, vocabulary size) on the thread that will run it.

    `pace` replaces the one made from the config. `workers`: where this is rank 0 of several.
    `memory_limit`: as in `build_text_model`.
    """
    assert (workers is None) == (config.num_ranks == 1), "several ranks need connections"
    group = None if workers is None else workers.join()
    part = build_part(config, files, group, memory_limit)
    config, loaded, kv = part.config, part.loaded, part.kv
    assert config.num_pages is not None
    times = timed_rows(config, part)
    pace = pace or _pace(config, loaded, part.step, times)
    disk = _disk(config, files, part, pace, workers)
    drafts = _drafts(config, part, times)
    # Late: an address that was bound stays so if what follows fails.
    events = _events(config, files, part, disk)
    pool = _page_pool(config, part, events)
    ends = _ends(config, part, pool, events if isinstance(events, UnitEvents) else None)
    scheduler = Scheduler(config.scheduler, pool, disk, drafts, ends=ends, memory=part.shared)
    log.info(
        "%s is loaded: KV cache %d tokens in %d pages of %d (%.1f MiB, now %.1f), context %d, "
        "%sattention by %s, probe difference %.1e",
        files.name,
        config.num_pages * config.page_size,
        config.num_pages,
        config.page_size,
        kv.nbytes_of(config.num_pages) / (1 << 20),
        kv.nbytes / (1 << 20),
        scheduler.max_model_len,
        "keys and values in 8 bits, " if config.kv_cache_dtype == "q8" else "",
        backend_names(kv.backends),
        part.difference,
    )
    if loaded.adapters is not None:
        log.info("Adapters of %s: %s", files.name, ", ".join(loaded.adapters.names))
    runner = ModelRunner(
        loaded,
        kv,
        config.seed,
        memory_limit=part.device_memory,
        workers=workers,
        windows=part.windows,
        drafter=part.drafter,
    )
    if trace is None:
        engine = Engine(
            scheduler, runner, pace, disk=disk, workers=workers, planned=part.planned, events=events
        )
    else:
        engine = Engine(
            trace.timed(scheduler, _SCHEDULER_SPANS),
            trace.timed(runner, _RUNNER_SPANS),
            pace,
            disk=disk,
            trace=trace,
            workers=workers,
            planned=part.planned,
            events=events,
        )
        engine = trace.timed(engine, {"step": "step"})
    if workers is not None:
        workers.watch()
    return engine, loaded.vocab_size


def _events(
    config: EngineConfig, files: ModelFiles, part: EnginePart, disk: DiskCache | None
) -> PageEvents | None:
    """Begin to publish KV events, of units in memory and in the tiers; None if they are off."""
    publisher = config.kv_publisher
    if publisher is None:
        return None
    from mlxserve.engine.kv_events import DISK, PAGES, STORAGE, BlockGroup, KvEvents
    from mlxserve.engine.tier_events import TierEvents

    view = View(files.name, _salted_by(config, files))
    names: dict[bytes, str | None] = {root(view.page_salt(None)): None}
    for number, adapter in enumerate(find_adapters(config.adapters)):
        adapted = view.with_adapter(number, adapter.name, adapter.digest)
        names[root(adapted.page_salt(None))] = adapted.name
    groups = [PAGES]
    if part.group is not None and part.windows is not None:
        groups.append(BlockGroup(WindowPages.name, "sliding_window", part.group.window.size))
    if config.num_state_slots is not None:
        groups.append(BlockGroup(StateSlots.name, "mamba"))
    events = KvEvents(publisher, config.page_size, names, groups)
    tiers = {} if disk is None else {DISK: disk.disk, STORAGE: disk.store}
    if not tiers and len(groups) == 1:
        return events
    known = {name: tier for name, tier in tiers.items() if tier is not None}
    return TierEvents(events, known, groups)


def _page_pool(config: EngineConfig, part: EnginePart, events: PageEvents | None) -> PagePool:
    """Make the pool of full pages, which reports to `events`."""
    assert config.num_pages is not None
    sizes = config.num_pages, config.page_size, config.hot_after_hits, part.first_pages
    if events is None:
        return PagePool(*sizes)
    from mlxserve.cache.events import EventPool

    return EventPool(*sizes, events=events)


def _window_pool(config: EngineConfig, kv: KVPool, events: UnitEvents | None) -> PagePool:
    """Make the pool of window pages, which reports to `events`."""
    sizes = kv.num_pages, config.page_size, config.hot_after_hits, kv.num_backed
    if events is None:
        return PagePool(*sizes)
    from mlxserve.cache.events import UnitPool

    return UnitPool(*sizes, kind=WindowPages.name, events=events)


def _ends(
    config: EngineConfig, part: EnginePart, pool: PagePool, events: UnitEvents | None
) -> list[EndKind]:
    """The kinds of cache besides pages of `pool`: the one place where a kind is wired.

    events: what their units are reported to
    """
    ends: list[EndKind] = []
    if part.group is not None and part.windows is not None:
        kv = part.windows.kv
        ends.append(WindowPages(_window_pool(config, kv, events), part.group.window))
        log.info(
            "Layers with a window of %d have %d pages of their own (%.1f MiB, now %.1f)",
            part.group.window.size,
            kv.num_pages,
            kv.nbytes_of(kv.num_pages) / (1 << 20),
            kv.nbytes / (1 << 20),
        )
    if config.num_state_slots is not None:
        is_replayed = part.loaded.replay is not None
        ends.append(
            StateSlots(config.num_state_slots, pool, is_replayed=is_replayed, events=events)
        )
    return ends


def _drafts(config: EngineConfig, part: EnginePart, times: RowTimes | None) -> Drafts | None:
    if not config.max_draft:
        return None
    source = LookupDrafts if part.drafter is None else DeviceDrafts
    return source(config.max_draft, DraftController(times))


def timed_rows(config: EngineConfig, part: EnginePart) -> RowTimes | None:
    """Measure what rows of drafts cost; None where nothing is ever drafted.

    Of several ranks it is assumed until there are steps: the others compute what rank 0 tells them alone.
    """
    if not config.max_draft:
        return None
    has_calls = part.drafter is not None or part.loaded.has_states
    if part.loaded.group is not None:
        return RowTimes(has_calls=has_calls)
    slots = config.num_state_slots
    table, call = measure_rows(part.loaded, part.backends, config.page_size, num_slots=slots)
    if part.drafter is not None:
        call += CALL * table[1]
    return RowTimes(table, has_calls=has_calls, call=call)


def _pace(
    config: EngineConfig, loaded: LoadedModel, step: StepPeak | None, times: RowTimes | None
) -> StepTimeModel:
    """`step`: as measured on Metal, where macOS ends what runs for seconds; a CPU has no limit."""
    if step is None:
        return StepTimeModel(config.itl_target, row_times=times)
    forward = forward_work(loaded)
    pace = StepTimeModel(config.itl_target, forward, times)
    pace.learn_speed(forward.of_chunk(step.start, step.num_measured), step.seconds)
    return pace


def _disk(
    config: EngineConfig,
    files: ModelFiles,
    part: EnginePart,
    pace: StepTimeModel,
    workers: Workers | None = None,
) -> DiskCache | None:
    """Open the disk cache and the page store; None if there is neither."""
    if not config.scheduler.enable_prefix_caching:
        return None
    disks = None
    if workers is not None:
        disks = RankDisks(workers.ranks, workers.tell_disks)
        workers.listen_to_disks(disks.receive)
    disk, store = _open_tiers(config, files, part, disks)
    if disk is None and store is None:
        return None
    for tier in (disk, store):
        if tier is not None:
            tier.flush(_INDEX_SECONDS)
    kinds = _record_kinds(part)
    return DiskCache(disk, pace, kinds, page_size=config.page_size, store=store, others=disks)


def open_rank_records(
    config: EngineConfig,
    files: ModelFiles,
    part: EnginePart,
    memory: Memory,
    send: Callable[[bytes], None],
    call_soon: Callable[[Callable[[], None]], None],
) -> RankRecords | None:
    """Open the tiers of another rank than 0; None if there are none.

    memory: the rank's units
    send: sends a message about records to rank 0
    call_soon: calls a function on this thread, from any thread
    """
    if not config.scheduler.enable_prefix_caching:
        return None
    wakeups = Wakeups(call_soon)
    opened = _open_tiers(config, files, part, notify=wakeups.notify)
    tiers = {number: tier for number, tier in enumerate(opened) if tier is not None}
    if not tiers:
        return None
    max_bytes = max(kind.unit_bytes for kind in _record_kinds(part))
    return RankRecords(tiers, memory, send, wakeups, max_bytes=max_bytes)


def _record_kinds(part: EnginePart) -> list[RecordKind]:
    kinds = [page_records(part.page_size_on_disk)]
    if part.group is not None and part.windows is not None:
        kinds.append(window_records(part.windows.kv.nbytes_of(1)))
    if part.loaded.has_states:
        kinds.append(state_records(part.loaded.state_nbytes))
    return kinds


def _open_tiers(
    config: EngineConfig,
    files: ModelFiles,
    part: EnginePart,
    disks: RankDisks | None = None,
    notify: Callable[[], None] | None = None,
) -> tuple[DiskTier | None, Tier | None]:
    """Open (disk cache, page store), each of which is None if a rank has none.

    disks: those of the other ranks, on rank 0
    notify: as in `Tier`
    """
    sizes = {kind.unit_bytes for kind in _record_kinds(part)}
    # Before the threads start: it refuses a wrong address.
    records = _store_records(config, files, part, sizes)
    disk = _disk_tier(config, files, part, sizes, disks, notify)
    store = None
    if records is not None:
        daily = int(config.page_store_daily_writes * (1 << 30))
        make_store = Tier if disks is None else partial(RankTier, disks, 1)
        store = make_store(records, limit=UNLIMITED, daily_writes=daily, notify=notify)
    if part.loaded.group is None:
        return disk, store
    everywhere = [
        min(each) for each in zip(*part.loaded.group.all_of([bool(disk), bool(store)]), strict=True)
    ]
    return (
        _if_everywhere(disk, "disk cache", everywhere[0]),
        _if_everywhere(store, "page store", everywhere[1]),
    )


def _if_everywhere(tier: TierT | None, name: str, is_everywhere: int) -> TierT | None:
    """Return the tier if every rank has its own; else close it, with a warning."""
    if tier is not None and not is_everywhere:
        log.warning("Nothing is kept in the %s: a rank has none", name)
        tier.close(0.0)
        return None
    return tier


def _disk_tier(
    config: EngineConfig,
    files: ModelFiles,
    part: EnginePart,
    sizes: set[int],
    disks: RankDisks | None,
    notify: Callable[[], None] | None,
) -> DiskTier | None:
    """Open the disk cache; None if it is off, or the default folder cannot be used."""
    is_swap = config.scheduler.preemption_mode is PreemptionMode.SWAP
    folder = folder_of(config.disk_cache_dir)
    if config.disk_cache_size is not None:
        limit = int(config.disk_cache_size * (1 << 30))
    else:
        limit = default_bytes(folder) if is_swap else 0
    if not limit:
        return None
    daily = config.disk_cache_daily_writes
    try:
        make_disk = DiskTier if disks is None else partial(RankDiskTier, disks, 0)
        return make_disk(
            folder,
            identity=_identity(files, part),
            model=files.name,
            limit=limit,
            daily_writes=10 * limit if daily is None else int(daily * (1 << 30)),
            payload_sizes=sizes,
            notify=notify,
        )
    except InvalidConfig as error:
        if config.disk_cache_dir or is_swap:
            raise
        log.warning("Nothing is kept on disk: %s", error)
        return None


def _store_records(
    config: EngineConfig, files: ModelFiles, part: EnginePart, sizes: set[int]
) -> Records | None:
    """Return access to the page store; None if there is none."""
    if config.page_store is None:
        return None
    try:
        from mlxserve.disk.store import StoreRecords
    except ImportError as error:
        raise InvalidConfig(
            f"page_store needs redis-py: {extra_command('fleet')}. Or leave it out.",
            option="page_store",
        ) from error
    return StoreRecords(config.page_store, _identity(files, part), files.name, sizes)


def _salted_by(config: EngineConfig, files: ModelFiles) -> str:
    """Salt of page hashes: pages of another model or dtype are never found."""
    if config.kv_cache_dtype == "auto":
        return files.fingerprint
    return f"{files.fingerprint}/{config.kv_cache_dtype}"


def _identity(files: ModelFiles, part: EnginePart) -> bytes:
    """Identity of records on disk: equal if one engine may read what another wrote.

    It covers the model, and the layout of pages and states.
    """
    layers, *windows = (_layout(pool) for pool in part.pools)
    arrays = [spec.arrays for spec in part.loaded.states or ()]
    states = [[(shape, str(dtype)) for shape, dtype in each] for each in arrays]
    layout = f"{files.fingerprint}/{part.kv.page_size}/{layers}/{states}"
    for specs in windows:
        layout += f"/{specs}"
    if part.draft_pages is not None and part.draft_files is not None:
        layout += f"/drafted by {part.draft_files.fingerprint}/{_layout(part.draft_pages.kv)}"
    if (ranks := part.loaded.group) is not None:
        layout += f"/part {ranks.rank} of {ranks.size} by {ranks.split}"
    return blake2b(layout.encode(), digest_size=16).digest()


def _layout(pool: KVPool) -> list[tuple[int, int, int, str]]:
    return [(s.kv_heads, s.key_dim, s.value_dim, str(s.pool_dtype)) for s in pool.specs]

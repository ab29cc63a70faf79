"""EngineConfig: every option of the engine, declared and checked once.

Frozen, and standard library only. What depends on the model or on the machine (`num_pages`,
`max_model_len`) may be None here; `build.py` decides it.
"""

# Annotations are read at run time, so this file does not postpone them.

import json
import os
import re
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Annotated, Any

from metal_kernels.limits import BACKENDS, PAGE_SIZES
from mlxserve.core.errors import InvalidConfig
from mlxserve.core.kv_events import KvEventsConfig
from mlxserve.core.option import Option, Options
from mlxserve.core.store_url import check_store_url

MIN_PAGES, MAX_PAGES = 2, 1 << 24  # bounds of the cache, whatever the memory
_STEP_BUDGET = 2048
_METAL_STEP_BUDGET = 512
_DRAFT_TOKENS = 4  # of a draft model: one row more is another reading of the weights on most Macs
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def data_home() -> Path:
    """The folder of the user's chats, logs and list of running servers."""
    return Path(os.environ.get("MLXSERVE_HOME") or "~/.mlxserve").expanduser()


def config_home() -> Path:
    """The folder of the user's configuration."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return Path(base) / "mlxserve" if base else Path.home() / ".config" / "mlxserve"


class BudgetMode(Enum):
    """The cost of a page-aligned chunk in a step's budget."""

    ALIGNED = auto()  # all slots of the pages that it touches
    UNALIGNED = auto()  # its tokens


class PageTail(Enum):
    """Handling of a prompt that can use only the beginning of a cached page."""

    COPY = auto()
    RECOMPUTE = auto()


class PreemptionMode(Enum):
    """Handling of a preempted request's computed pages."""

    RECOMPUTE = auto()  # released; those that are not evicted meanwhile are found again by hash
    SWAP = auto()  # the same, but what is not on disk yet is written there first


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Options):
    """Options of the scheduler. Raises InvalidConfig."""

    max_num_seqs: Annotated[
        int,
        Option(
            "Most requests that run at the same time.",
            "Scheduling",
            "requests",
            ge=1,
            is_basic=True,
        ),
    ] = 64
    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            "Most tokens computed in one step, over all requests.",
            "Scheduling",
            "tokens",
            ge=1,
            default="2048; on Metal 512 with chunked prefill",
        ),
    ] = None
    max_num_waiting: Annotated[
        int,
        Option(
            "Most requests that may wait; further ones are refused.", "Scheduling", "requests", ge=1
        ),
    ] = 1024
    max_model_len: Annotated[
        int | None,
        Option(
            "Longest prompt plus answer. May be more than the model's own as far as its rotary scaling covers.",
            "Model",
            "tokens",
            ge=2,
            default="the model's own, or less if the KV cache holds less",
            is_basic=True,
        ),
    ] = None
    max_overtakes: Annotated[
        int,
        Option(
            "How often shorter requests may overtake one that does not fit into the KV cache.",
            "Scheduling",
            ge=0,
            is_tuning=True,
        ),
    ] = 1
    preempt_for_priority_ms: Annotated[
        float,
        Option(
            "Preempt answers of a lower priority for a request that has waited this long for a place "
            "or for pages; 0 never does. Answers of its own priority are never preempted for it.",
            "Scheduling",
            "ms",
            ge=0,
        ),
    ] = 1000.0
    ageing_steps: Annotated[
        int,
        Option(
            "Steps of waiting that raise a request's priority by one.",
            "Scheduling",
            "steps",
            ge=1,
            is_tuning=True,
        ),
    ] = 1000
    prefix_follow_pages: Annotated[
        int,
        Option(
            "Let a request wait for another one that is computing at least this many pages of "
            "their common prefix.",
            "Scheduling",
            "pages",
            ge=1,
            is_tuning=True,
        ),
    ] = 4
    growth_pages: Annotated[
        int,
        Option(
            "After a first preemption, keep this many pages free for each running answer when "
            "admitting requests.",
            "Scheduling",
            "pages",
            ge=0,
            is_tuning=True,
        ),
    ] = 2
    enable_prefix_caching: Annotated[
        bool, Option("Reuse the pages of earlier prompts with the same prefix.", "Scheduling")
    ] = True
    enable_chunked_prefill: Annotated[
        bool,
        Option(
            "Compute long prompts over several steps. Without it, max-num-batched-tokens must be "
            "at least max-model-len.",
            "Scheduling",
        ),
    ] = True
    page_aligned_scheduling: Annotated[
        bool, Option("End the chunks of a prompt at page boundaries.", "Scheduling")
    ] = True
    budget_mode: Annotated[
        BudgetMode,
        Option(
            "What a page-aligned chunk costs of a step: all slots of the pages it touches, or "
            "(unaligned) only its tokens.",
            "Scheduling",
            is_tuning=True,
        ),
    ] = BudgetMode.ALIGNED
    long_prefill_token_threshold: Annotated[
        int,
        Option(
            "Longest chunk of a prompt while other requests wait; 0 sets no limit.",
            "Scheduling",
            "tokens",
            ge=0,
        ),
    ] = 512
    speculative_tokens: Annotated[
        int | None,
        Option(
            "Longest draft of an answer's next tokens, guessed by draft-model or a head in the model's files, or "
            "without one from earlier text that ends in the same words; the model verifies a draft in one step. The "
            "answers are the same; 0 is off.",
            "Scheduling",
            "tokens",
            ge=0,
            le=32,
            default="4 with draft-model or a head, otherwise 0",
        ),
    ] = None
    max_pinned_fraction: Annotated[
        float,
        Option("Share of the KV cache that named prefixes may keep.", "Scheduling", ge=0, le=1),
    ] = 0.5
    page_tail: Annotated[
        PageTail,
        Option(
            "Where a prompt can use only the beginning of a cached page: copy the page, or "
            "recompute that beginning.",
            "Scheduling",
        ),
    ] = PageTail.COPY
    preemption_mode: Annotated[
        PreemptionMode,
        Option(
            "What happens to a preempted request's pages: recompute what is evicted before it goes "
            "on, or swap them, to the disk cache, from which they are read back.",
            "Scheduling",
        ),
    ] = PreemptionMode.RECOMPUTE
    immune_after_preemptions: Annotated[
        int,
        Option(
            "A request that was preempted this often is preempted only after all others of its priority.",
            "Scheduling",
            "preemptions",
            ge=1,
            is_tuning=True,
        ),
    ] = 3

    @property
    def step_budget(self) -> int:
        """`max_num_batched_tokens`, or its default on a CPU."""
        return self.max_num_batched_tokens or _STEP_BUDGET

    def step_rows(self, *, is_metal: bool) -> int:
        """`max_num_batched_tokens`, or its default for the device.

        The default is lower on Metal, where memory and the longest run of a command buffer grow
        with a step.
        """
        if is_metal and self.enable_chunked_prefill and self.max_num_batched_tokens is None:
            return max(_METAL_STEP_BUDGET, self.max_num_seqs)
        return self.step_budget

    def check_together(self) -> None:
        if self.step_budget < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens ({self.step_budget}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request decodes one token "
                "in a step. Raise the first or lower the second.",
                option="max_num_batched_tokens",
            )
        if self.enable_chunked_prefill or self.max_model_len is None:
            return
        if self.step_budget < self.max_model_len:
            raise InvalidConfig(
                f"max_num_batched_tokens ({self.step_budget}) must be at least "
                f"max_model_len ({self.max_model_len}) when enable_chunked_prefill is off: a prompt "
                "is then computed in one step. Raise the first, lower the second, or turn "
                "enable_chunked_prefill on.",
                option="max_num_batched_tokens",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Options):
    """The engine's options. Raises InvalidConfig.

    `EngineConfig().with_options(max_num_seqs=16, page_size=64)` takes all of them by name, those
    of the scheduler included.
    """

    model: Annotated[
        str | None,
        Option(
            "A folder, a GGUF file, a Hugging Face repository id or a name of `mlxserve list`.",
            "Model",
            "folder or repository",
            default="the included model",
            short="-m",
            is_basic=True,
        ),
    ] = None
    revision: Annotated[
        str | None,
        Option(
            "Branch, tag or commit of the repository.",
            "Model",
            default="the repository's default branch",
        ),
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        Option(
            "Variables of the chat template that requests do not set, such as "
            "'{\"preserve_thinking\": true}'.",
            "Model",
            "JSON",
            default="none",
        ),
    ] = None
    adapter: Annotated[
        tuple[str, ...],
        Option(
            "A LoRA adapter to serve beside the model, as NAME=FOLDER: what `mlx_lm.lora` has written. "
            "Requests ask for MODEL:NAME. May be repeated; with several models it is the first one's.",
            "Model",
            "NAME=FOLDER",
        ),
    ] = ()
    draft_model: Annotated[
        str | None,
        Option(
            "A small model with the same vocabulary, a head made for the model, or the model's own assistant (Gemma 4), "
            "that guesses the next tokens, for the model to verify several in one step: a folder, a GGUF file, a "
            "repository or a name, as for model. The answers are the same; speculative-tokens is the longest draft.",
            "Model",
            "folder or repository",
            default="none",
        ),
    ] = None
    trial_process: Annotated[
        str | None,
        Option(
            "Compute a few tokens in a process of its own before a model is loaded, so that one that "
            "cannot be computed is refused and does not end the server: for kinds that have not passed "
            "on this machine (auto), always, or never.",
            "Model",
            default="auto for serve and chat; otherwise never",
            choices=("auto", "always", "never"),
            is_tuning=True,
        ),
    ] = None
    seed: Annotated[
        int, Option("Random seed of requests that set none.", "Model", ge=0, le=2**64 - 1)
    ] = 0
    gpu_memory_utilization: Annotated[
        float | None,
        Option(
            "Share of the GPU's working set for weights, the KV cache and the peak of a step.",
            "Memory",
            gt=0,
            le=1,
            default="all but a tenth, at most 1 GiB",
            is_basic=True,
        ),
    ] = None
    wired_limit: Annotated[
        float | None,
        Option(
            "On Metal, keep this much memory of all models resident, so that the first token after a "
            "pause is not slow (macOS 15 or later); 0 for none.",
            "Memory",
            "GiB",
            ge=0,
            default="weights, KV cache and a step",
        ),
    ] = None
    num_pages: Annotated[
        int | None,
        Option(
            "Pages of the KV cache.",
            "Memory",
            "pages",
            ge=MIN_PAGES,
            le=MAX_PAGES,
            default="as many as fit into memory",
        ),
    ] = None
    num_window_pages: Annotated[
        int | None,
        Option(
            "Pages for layers with a sliding window, in models that have others as well: a running request "
            "needs those of its window, the others are to continue cached prompts from. 0: such layers "
            "keep all positions, as the others.",
            "Memory",
            "pages",
            ge=0,
            le=MAX_PAGES,
            default="by memory, max_model_len and max_num_seqs",
            is_tuning=True,
        ),
    ] = None
    num_state_slots: Annotated[
        int | None,
        Option(
            "Recurrent states that memory is kept for, in models that have them: two for each "
            "running request, the others to continue cached prompts from. With num_pages, or on several "
            "ranks, a quarter of the cache's memory, 6 to 1024.",
            "Memory",
            "states",
            ge=2,
            le=2**16,
            default="by demand, from the memory of the cache",
            is_tuning=True,
        ),
    ] = None
    page_size: Annotated[
        int, Option("Tokens in a page.", "Memory", "tokens", choices=PAGE_SIZES)
    ] = 32
    kv_cache_dtype: Annotated[
        str,
        Option(
            "What keys and values are stored in: the model's own dtype (auto), or 8 bits with a "
            "scale for each token and head (q8): about twice the context in the same memory, and "
            "answers that may differ slightly.",
            "Memory",
            choices=("auto", "q8"),
        ),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Option(
            "What computes attention: Metal kernels, plain mlx (cpu), the slow plain-mlx "
            "specification (reference), or (auto) Metal on a Mac, and cpu elsewhere and for layers "
            "that the kernels do not take.",
            "Memory",
            choices=BACKENDS,
        ),
    ] = "auto"
    scheduler: SchedulerConfig = SchedulerConfig()
    itl_target_ms: Annotated[
        float,
        Option(
            "Longest time between two tokens of a running answer that computing prompts may "
            "cause; 0 sets no limit.",
            "Scheduling",
            "ms",
            ge=0,
        ),
    ] = 100.0
    tool_keep_seconds: Annotated[
        float,
        Option(
            "After an answer calls tools, protect its pages from eviction for this long.",
            "Scheduling",
            "seconds",
            ge=0,
            is_tuning=True,
        ),
    ] = 60.0
    hot_after_hits: Annotated[
        int,
        Option(
            "A page that was found this often is evicted after others.",
            "Scheduling",
            "hits",
            ge=1,
            is_tuning=True,
        ),
    ] = 2
    disk_cache_size: Annotated[
        float | None,
        Option(
            "Disk space for cached pages, of all models in the folder; 0 keeps none on disk.",
            "Disk cache",
            "GiB",
            default="8 for serve and chat, at most a tenth of the free space; otherwise 0",
            ge=0,
            is_basic=True,
        ),
    ] = None
    disk_cache_dir: Annotated[
        str | None,
        Option(
            "Folder of the disk cache.",
            "Disk cache",
            "folder",
            default="mlxserve/pages in the user's cache folder",
        ),
    ] = None
    disk_cache_daily_writes: Annotated[
        float | None,
        Option(
            "Most that is written to the disk cache in a day (UTC), as disks wear out.",
            "Disk cache",
            "GiB",
            default="10 times disk_cache_size",
            gt=0,
            is_tuning=True,
        ),
    ] = None
    page_store: Annotated[
        str | None,
        Option(
            "A Redis server (Redis, Valkey) that keeps pages for several servers of the same model. A password in it "
            "is best given by the environment. Whoever can write to it can change answers.",
            "Disk cache",
            "redis://HOST:PORT",
            default="none",
        ),
    ] = None
    page_store_daily_writes: Annotated[
        float,
        Option(
            "Most that all servers together write to the page store in a day (UTC).",
            "Disk cache",
            "GiB",
            gt=0,
            is_tuning=True,
        ),
    ] = 1024.0
    tensor_parallel_size: Annotated[
        int,
        Option(
            "Split the model by attention heads over this many ranks, one on each machine.",
            "Parallel",
            "ranks",
            ge=1,
            le=64,
            short="-tp",
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Option(
            "Split the model by layers over this many ranks, one on each machine.",
            "Parallel",
            "ranks",
            ge=1,
            le=64,
            short="-pp",
        ),
    ] = 1
    hostfile: Annotated[
        str | None,
        Option(
            "The machines, in mlx.launch's format.",
            "Parallel",
            "file",
            default="all ranks on this machine",
        ),
    ] = None
    distributed_backend: Annotated[
        str,
        Option(
            "What mlx.distributed communicates by.",
            "Parallel",
            choices=("any", "ring", "jaccl", "mpi"),
        ),
    ] = "any"
    master_port: Annotated[
        int,
        Option(
            "Port of rank 0 on which the other ranks are told what to compute. With a hostfile, mlx's "
            "own connections have the ports after it.",
            "Parallel",
            ge=1,
            le=65000,
        ),
    ] = 29501
    distributed_timeout_seconds: Annotated[
        float,
        Option(
            "How long ranks may take to come, a rank may be silent, and a step of several ranks may "
            "take; then the engine ends.",
            "Parallel",
            "seconds",
            gt=0,
        ),
    ] = 60.0
    max_rank_restarts: Annotated[
        int,
        Option(
            "How often in a row a server starts all its ranks again by itself after one has failed; 0 never does.",
            "Parallel",
            "failures",
            ge=0,
        ),
    ] = 5
    kv_events: Annotated[
        str | None,
        Option(
            "Publish which pages the prefix cache stores and drops, in vLLM's format over ZeroMQ, on this address, "
            "for a router in front of several servers. Whoever can connect reads the token ids of prompts.",
            "Parallel",
            "address",
            default="none",
        ),
    ] = None
    kv_events_replay: Annotated[
        str | None,
        Option(
            "Address that replays what kv_events has published, from a sequence number on.",
            "Parallel",
            "address",
            default="none",
        ),
    ] = None
    kv_events_config: Annotated[
        str | None,
        Option(
            "The same as vLLM's option of this name, in place of kv_events.",
            "Parallel",
            "JSON",
            default="none",
        ),
    ] = None
    memory_high: Annotated[
        float,
        Option(
            "Share of the memory from which on new requests wait: resident memory of the machine's "
            "or cgroup's, addresses of `ulimit -v`, the GPU's working set, whose reserve counts as a "
            "tenth; whichever is highest.",
            "Recovery",
            gt=0,
            le=1,
            is_tuning=True,
        ),
    ] = 0.95
    memory_critical: Annotated[
        float,
        Option(
            "Share of the memory from which on one request runs at a time.",
            "Recovery",
            gt=0,
            le=1,
            is_tuning=True,
        ),
    ] = 0.98
    max_engine_failures: Annotated[
        int,
        Option(
            "The engine recovers from failures; this many within a minute end it, and the server "
            "with exit code 70.",
            "Recovery",
            "failures",
            ge=1,
            is_tuning=True,
        ),
    ] = 5
    disable_log_stats: Annotated[bool, Option("Log no throughput lines.", "Log")] = False
    log_stats_interval: Annotated[
        float, Option("Time between two throughput lines.", "Log", "seconds", gt=0)
    ] = 10.0
    trace: Annotated[
        str | None,
        Option(
            "Write a trace of every step to this file; open it in Perfetto.",
            "Log",
            "file",
            default="no trace",
        ),
    ] = None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """`chat_template_kwargs` as an object."""
        value: dict[str, Any] = json.loads(self.chat_template_kwargs or "{}")
        return value

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of `adapter`, by their names."""
        return dict(entry.split("=", 1) for entry in self.adapter)

    @property
    def kv_publisher(self) -> KvEventsConfig | None:
        """Return where KV events are published; None if they are not. Raises InvalidConfig."""
        return KvEventsConfig.from_options(
            self.kv_events, self.kv_events_replay, self.kv_events_config
        )

    def check_together(self) -> None:
        self._check_template_kwargs()
        self._check_kv_events()
        self._check_page_store()
        self._check_adapters()
        if self.scheduler.preemption_mode is PreemptionMode.SWAP:
            self._check_swap()
        if self.num_ranks > 1:
            self._check_ranks()
        if self.memory_critical < self.memory_high:
            raise InvalidConfig(
                f"memory_critical ({self.memory_critical}) must be at least memory_high "
                f"({self.memory_high}).",
                option="memory_critical",
            )

    def _check_template_kwargs(self) -> None:
        try:
            is_object = isinstance(self.template_kwargs, dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise InvalidConfig(
                f"chat_template_kwargs must be a JSON object, got {self.chat_template_kwargs!r:.80}",
                option="chat_template_kwargs",
            )

    def _check_kv_events(self) -> None:
        if self.kv_publisher is not None and not self.scheduler.enable_prefix_caching:
            raise InvalidConfig(
                "kv_events tells what the prefix cache stores, which enable_prefix_caching=false turns off. "
                "Leave one of them out.",
                option="kv_events",
            )

    def _check_page_store(self) -> None:
        if self.page_store is None:
            return
        check_store_url(self.page_store)
        if not self.scheduler.enable_prefix_caching:
            raise InvalidConfig(
                "page_store keeps what the prefix cache has, which enable_prefix_caching=false turns off. "
                "Leave one of them out.",
                option="page_store",
            )

    def _check_adapters(self) -> None:
        names = []
        for entry in self.adapter:
            name, _, folder = entry.partition("=")
            if not _ADAPTER_NAME.fullmatch(name) or not folder:
                raise InvalidConfig(
                    f"adapter must be NAME=FOLDER, where NAME has up to 64 letters, digits, dots, dashes or "
                    f"underscores, got {entry!r:.80}",
                    option="adapter",
                )
            names.append(name)
        if twice := [name for name in names if names.count(name) > 1]:
            raise InvalidConfig(
                f"adapter: two are called {twice[0]}. Give each a name of its own.",
                option="adapter",
            )

    def _check_swap(self) -> None:
        if not self.scheduler.enable_prefix_caching:
            raise InvalidConfig(
                "preemption_mode=swap finds pages by the prefix cache: turn enable_prefix_caching "
                "on, or choose preemption_mode=recompute.",
                option="preemption_mode",
            )
        if self.disk_cache_size == 0:
            raise InvalidConfig(
                "preemption_mode=swap writes to the disk cache: raise disk_cache_size, or choose "
                "preemption_mode=recompute.",
                option="disk_cache_size",
            )

    def _check_ranks(self) -> None:
        if min(self.tensor_parallel_size, self.pipeline_parallel_size) > 1:
            raise InvalidConfig(
                "tensor_parallel_size and pipeline_parallel_size cannot both be above 1: mlx's "
                "groups cannot be divided. Choose one of them.",
                option="pipeline_parallel_size",
            )

    @property
    def max_draft(self) -> int:
        """Longest draft in tokens; 0 if there are none."""
        chosen = self.scheduler.speculative_tokens
        if chosen is None:
            return 0 if self.draft_model is None else _DRAFT_TOKENS
        return chosen

    def of_one_of_several(self) -> "EngineConfig":
        """Return the config without what one model of a server alone can have."""
        return self.with_options(
            trace=None, kv_events=None, kv_events_replay=None, kv_events_config=None
        )

    def with_drafter(self) -> "EngineConfig":
        """Return the config of an engine with a drafter, which has a longest draft."""
        longest = self.scheduler.speculative_tokens
        longest = _DRAFT_TOKENS if longest is None else longest
        return replace(self, scheduler=replace(self.scheduler, speculative_tokens=longest))

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def itl_target(self) -> float | None:
        """`itl_target_ms` in seconds; None for no target."""
        return self.itl_target_ms / 1e3 or None

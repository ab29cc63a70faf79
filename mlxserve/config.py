"""EngineConfig: every option of the engine, validated once.

Stdlib only, and frozen: what depends on the model or on the machine (`num_pages`,
`max_model_len`) may be None here and is settled in `build.py`, the one place that knows both.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from mlxserve.errors import InvalidConfig

PAGE_SIZES = (16, 32, 64)  # those the Metal kernels are written for
PREEMPTION_MODES = ("recompute", "swap")
BUDGET_MODES = ("aligned", "unaligned")
PAGE_TAILS = ("copy", "recompute")
ATTENTION_BACKENDS = ("auto", "metal", "cpu", "reference")


def config_home() -> Path:
    """The folder of the user's configuration."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return Path(base) / "mlxserve" if base else Path.home() / ".config" / "mlxserve"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's options. Sizes are in tokens unless named otherwise. Raises InvalidConfig.

    model: a local folder or a Hugging Face repository id; None is the embedded model
    revision: branch, tag or commit of a repository; None is its default branch
    num_pages: pages in the KV pool; None measures memory
    page_size: token slots of a page
    max_num_batched_tokens: tokens computed in one step, over all requests
    max_num_seqs: requests that run at the same time
    max_model_len: longest prompt plus answer; None is the model's own, cut to what the pool holds
    gpu_memory_utilization: share of the working set for weights, a step's peak and the pool
    enable_prefix_caching: pages of earlier prompts are found again by their hash
    enable_chunked_prefill: a prompt may be computed over several steps
    page_aligned_scheduling: chunks of a prompt end where a page ends
    budget_mode: what such a chunk costs of the step: aligned, the pages it touches; unaligned, its
        tokens
    long_prefill_token_threshold: a chunk's cap while other requests wait too; 0 is no cap
    itl_target_ms: milliseconds between two tokens of a running answer that prompts beside it may
        stretch its steps to, judged by measured steps; 0 sets no target
    max_pinned_fraction: share of the KV pool that named prefixes may keep
    page_tail: what is done where a prompt can use the beginning of a cached page, behind a named
        prefix or because only its last token is to be computed: copy it, or recompute
    preemption_mode: what becomes of a request that gives up its pages: recompute, or swap, which
        writes those that only it has to disk and reads them back
    swap_space: GiB of disk that swapped pages may take
    swap_dir: the folder for them; None is mlxserve/swap in the user's cache folder
    max_num_waiting: requests that may wait before a new one is refused
    max_overtakes: how often in its life a request that lacks memory may be passed by shorter ones
    ageing_steps: steps of waiting that lift a request by one class of priority
    prefix_follow_pages: a request waits for one that is computing so many of the pages it misses
    growth_pages: pages that admission leaves each running answer to grow by, once one was preempted
    immune_after_preemptions: from so many on, a request is preempted only after all others
    hot_after_hits: a page that was found so often is evicted after those that were not
    tool_keep_seconds: for which the pages of an answer that calls tools are evicted after others
    attention_backend: auto (metal on a Mac, cpu elsewhere), metal, cpu (plain mlx) or
        reference (plain mlx as the specification has it, slow)
    disable_log_stats: no throughput line in the log
    log_stats_interval: seconds between such lines
    trace: a file for what each part of every step took, to be opened in Perfetto; None is no file
    seed: of requests that name none
    """

    model: str | None = None
    revision: str | None = None
    num_pages: int | None = None
    page_size: int = 32
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    page_aligned_scheduling: bool = True
    budget_mode: str = "aligned"
    long_prefill_token_threshold: int = 512
    itl_target_ms: float = 100.0
    max_pinned_fraction: float = 0.5
    page_tail: str = "copy"
    preemption_mode: str = "recompute"
    swap_space: float = 4.0
    swap_dir: str | None = None
    max_num_waiting: int = 1024
    max_overtakes: int = 1
    ageing_steps: int = 1000
    prefix_follow_pages: int = 4
    growth_pages: int = 2
    immune_after_preemptions: int = 3
    hot_after_hits: int = 2
    tool_keep_seconds: float = 60.0
    attention_backend: str = "auto"
    disable_log_stats: bool = False
    log_stats_interval: float = 10.0
    trace: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._name("model")
        self._name("revision")
        self._at_least("page_size", 1)
        if self.page_size not in PAGE_SIZES:
            raise InvalidConfig(f"page_size must be one of {PAGE_SIZES}, got {self.page_size!r}")
        self._at_least("num_pages", 2, or_none=True)
        self._at_least("max_num_batched_tokens", 1)
        self._at_least("max_num_seqs", 1)
        self._at_least("max_model_len", 2, or_none=True)
        self._at_least("long_prefill_token_threshold", 0)
        self._at_least("max_num_waiting", 1)
        self._at_least("max_overtakes", 0)
        self._at_least("ageing_steps", 1)
        self._at_least("prefix_follow_pages", 1)
        self._at_least("growth_pages", 0)
        self._at_least("immune_after_preemptions", 1)
        self._at_least("hot_after_hits", 1)
        self._between("tool_keep_seconds", 0, math.inf)
        self._at_least("seed", 0)
        self._positive("gpu_memory_utilization")
        self._between("gpu_memory_utilization", 0, 1)
        self._between("max_pinned_fraction", 0, 1)
        self._between("itl_target_ms", 0, math.inf)
        self._positive("log_stats_interval")
        self._positive("swap_space")
        self._name("swap_dir")
        self._name("trace")
        self._one_of("budget_mode", BUDGET_MODES)
        self._one_of("page_tail", PAGE_TAILS)
        self._one_of("preemption_mode", PREEMPTION_MODES)
        self._one_of("attention_backend", ATTENTION_BACKENDS)
        self._flag("enable_prefix_caching")
        self._flag("enable_chunked_prefill")
        self._flag("page_aligned_scheduling")
        self._flag("disable_log_stats")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request decodes one token "
                "in a step. Raise the first or lower the second."
            )

    def _at_least(self, name: str, low: int, *, or_none: bool = False) -> None:
        value = getattr(self, name)
        if value is None and or_none:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise InvalidConfig(f"{name} must be a whole number of at least {low}, got {value!r}")

    def _positive(self, name: str) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise InvalidConfig(f"{name} must be a number above 0, got {value!r}")

    def _between(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or value == math.inf:
            raise InvalidConfig(
                f"{name} must be a number from {low}"
                f"{f' to {high}' if high < math.inf else ''}, got {value!r}"
            )

    def _one_of(self, name: str, known: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in known:
            raise InvalidConfig(f"{name} must be one of {known}, got {value!r}")

    def _flag(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise InvalidConfig(f"{name} must be True or False, got {value!r}")

    def _name(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and (not isinstance(value, str) or not value):
            raise InvalidConfig(f"{name} must be a non-empty string or None, got {value!r}")


class EngineOptions(TypedDict, total=False):
    """EngineConfig's fields but `model`, as the library takes them."""

    revision: str | None
    num_pages: int | None
    page_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    page_aligned_scheduling: bool
    budget_mode: str
    long_prefill_token_threshold: int
    itl_target_ms: float
    max_pinned_fraction: float
    page_tail: str
    preemption_mode: str
    swap_space: float
    swap_dir: str | None
    max_num_waiting: int
    max_overtakes: int
    ageing_steps: int
    prefix_follow_pages: int
    growth_pages: int
    immune_after_preemptions: int
    hot_after_hits: int
    tool_keep_seconds: float
    attention_backend: str
    disable_log_stats: bool
    log_stats_interval: float
    trace: str | None
    seed: int

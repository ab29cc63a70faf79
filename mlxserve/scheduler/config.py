"""SchedulerConfig: the scheduler's options, validated once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum, auto

from mlxserve.cache.pages import HOT_AFTER
from mlxserve.errors import InvalidConfig
from mlxserve.scheduler.copies import PageTail
from mlxserve.scheduler.preemption import PreemptionMode

logger = logging.getLogger("mlxserve.scheduler")


class BudgetMode(Enum):
    """What an aligned chunk costs of a step's budget: its pages, or its tokens."""

    ALIGNED = auto()
    UNALIGNED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes in tokens. Names and meanings are those of `EngineConfig`. Raises InvalidConfig."""

    page_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    page_aligned_scheduling: bool = True
    budget_mode: BudgetMode = BudgetMode.ALIGNED
    long_prefill_token_threshold: int = 512
    max_num_waiting: int = 1024
    max_overtakes: int = 1
    ageing_steps: int = 1000
    prefix_follow_pages: int = 4
    growth_pages: int = 2
    immune_after_preemptions: int = 3
    hot_after_hits: int = HOT_AFTER
    max_pinned_fraction: float = 0.5
    page_tail: PageTail = PageTail.COPY
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE

    def __post_init__(self) -> None:
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise InvalidConfig(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_model_len ({self.max_model_len}) when enable_chunked_prefill is off: a prompt "
                "is then computed in one step. Raise the first, lower the second, or turn "
                "enable_chunked_prefill on."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request decodes one token "
                "in a step. Raise the first or lower the second."
            )


def can_align(config: SchedulerConfig) -> bool:
    """Whether a page fits into every step, however many requests decode in it."""
    smallest = config.max_num_batched_tokens - config.max_num_seqs + 1
    if config.long_prefill_token_threshold:
        smallest = min(smallest, config.long_prefill_token_threshold)
    if config.page_size <= smallest:
        return True
    logger.warning(
        "page_aligned_scheduling is off: a page has %d tokens, but a prompt may get as few as %d in "
        "a step. Raise max_num_batched_tokens or long_prefill_token_threshold, or lower "
        "max_num_seqs or page_size.",
        config.page_size,
        smallest,
    )
    return False

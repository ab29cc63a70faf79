"""Whether the chunks of prompts can end at page boundaries."""

from __future__ import annotations

import logging

from mlxserve.config import SchedulerConfig

logger = logging.getLogger("mlxserve.scheduler")


def can_align(config: SchedulerConfig, page_size: int) -> bool:
    """Whether a page fits into every step, however many requests decode in it."""
    smallest = config.step_budget - config.max_num_seqs + 1
    if config.long_prefill_token_threshold:
        smallest = min(smallest, config.long_prefill_token_threshold)
    if page_size <= smallest:
        return True
    logger.warning(
        "page_aligned_scheduling is off: a page has %d tokens, but a prompt may get as few as %d in "
        "a step. Raise max_num_batched_tokens or long_prefill_token_threshold, or lower "
        "max_num_seqs or page_size.",
        page_size,
        smallest,
    )
    return False

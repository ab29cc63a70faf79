"""The number of tokens of one request in a step: the only place that trims a chunk.

A pure function, so that its contract is tested alone (the idea of one such function is from the review of
vllm-project/vllm#19878):

    0 <= num_tokens <= charge <= budget        num_tokens == 0 exactly when there is a reason
    start + num_tokens <= max_model_len        more budget never means fewer tokens
    aligned: a prefill chunk ends on a page boundary or at the last known token

An image whose rows attend to one another in both directions is a block, which no chunk divides:

    a chunk ends before a block or after it, whether a page ends there or not
    one that begins with a block may take more than its budget, up to `most`
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from mlxserve.core.config import BudgetMode, SchedulerConfig
from mlxserve.images.picture import Block

logger = logging.getLogger("mlxserve.scheduler")


class LimitReason(Enum):
    """Why a request gets no token in this step."""

    BUDGET = auto()  # the step is full
    ALIGNMENT = auto()  # the rest of the budget ends before the next page boundary
    WHOLE_PROMPT = auto()  # the prompt may not be split and does not fit
    CONTEXT = auto()  # the context is full
    IMAGE = auto()  # the step has less left than an image that may not be divided


class Limit(NamedTuple):
    """The share of a step that one request gets."""

    num_tokens: int
    charge: int  # tokens of the step's budget
    reason: LimitReason | None = None


DECODE = Limit(1, 1)  # the share of every decode


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRules:
    """The rules of every step.

    step_budget: tokens of the whole step
    long_prefill_token_threshold: a prefill chunk's cap while others are eligible; 0 for none
    is_chunked: a prompt may be computed over several steps
    is_aligned: its chunks end where a page ends
    charges_pages: an aligned chunk costs the pages it touches, not only its tokens
    """

    page_size: int
    step_budget: int
    long_prefill_token_threshold: int = 0
    is_chunked: bool = True
    is_aligned: bool = False
    charges_pages: bool = True

    @classmethod
    def from_config(cls, config: SchedulerConfig, page_size: int) -> LimitRules:
        return cls(
            page_size=page_size,
            step_budget=config.step_budget,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            is_chunked=config.enable_chunked_prefill,
            is_aligned=config.page_aligned_scheduling and can_align(config, page_size),
            charges_pages=config.budget_mode is BudgetMode.ALIGNED,
        )


class LimitContext(NamedTuple):
    """The context of one step, the same for all its requests.

    num_eligible: requests that could use this step, including the one in question
    """

    rules: LimitRules
    max_model_len: int
    num_eligible: int = 1


def limit(
    start: int,
    known_end: int,
    prefill_end: int,
    budget: int,
    ctx: LimitContext,
    blocks: Sequence[Block] = (),
    most: int = 0,
) -> Limit:
    """Trim the chunk start .. known_end to this step.

    Positions before `prefill_end` (the prompt, or after a preemption all that was known) are
    prefill, later ones decodes: the length does not tell, as a prompt can end in a single token.
    `budget` is what is left of the step for this request, memory included; `most` is what an image of
    `blocks` may take of the step.
    """
    rules = ctx.rules
    known_end = min(known_end, ctx.max_model_len)
    num_tokens = known_end - start
    if num_tokens <= 0:
        return Limit(0, 0, LimitReason.CONTEXT)
    if budget <= 0:
        return Limit(0, 0, LimitReason.BUDGET)
    if start >= prefill_end:
        num_tokens = min(num_tokens, budget)
        return Limit(num_tokens, num_tokens)
    if not rules.is_chunked:
        if num_tokens > budget:
            return Limit(0, 0, LimitReason.WHOLE_PROMPT)
        return Limit(num_tokens, _charge(start, num_tokens, budget, rules))
    num_tokens = min(num_tokens, budget, _prefill_cap(ctx))
    end = cut = start + num_tokens
    if rules.is_aligned and end < known_end:
        cut = end // rules.page_size * rules.page_size
    if blocks:
        cut = _beside_blocks(start, end, cut, blocks)
        if cut > end and cut - start > most:
            return Limit(0, 0, LimitReason.IMAGE)
    num_tokens = cut - start
    if num_tokens <= 0:
        return Limit(0, 0, LimitReason.ALIGNMENT)
    return Limit(num_tokens, max(num_tokens, _charge(start, num_tokens, budget, rules)))


def _beside_blocks(start: int, end: int, cut: int, blocks: Sequence[Block]) -> int:
    """Return where a chunk ends that would end at `cut`, and may go on to `end`, so that it divides no block."""
    for first, last in blocks:
        if first >= end:
            break
        if last <= start:
            continue
        if last > end:
            return first if first > start else last
        cut = max(cut, last)
    return cut


def longest_block(config: SchedulerConfig) -> int:
    """Return the most rows of a block that fit into every step, however many requests decode in it."""
    if not config.enable_chunked_prefill:
        return config.step_budget
    return config.step_budget - config.max_num_seqs + 1


def _prefill_cap(ctx: LimitContext) -> int:
    rules = ctx.rules
    if ctx.num_eligible <= 1 or rules.long_prefill_token_threshold == 0:
        return rules.step_budget
    # The fair share: among few requests the threshold would leave the step half empty.
    return max(rules.long_prefill_token_threshold, rules.step_budget // ctx.num_eligible)


def _charge(start: int, num_tokens: int, budget: int, rules: LimitRules) -> int:
    """Charge whole pages for aligned chunks, but at most the budget, so that a short tail cannot starve."""
    if not (rules.is_aligned and rules.charges_pages):
        return num_tokens
    first = start // rules.page_size
    last = -(-(start + num_tokens) // rules.page_size)
    return min((last - first) * rules.page_size, budget)


def can_align(config: SchedulerConfig, page_size: int) -> bool:
    """Return True if a page fits into every step, however many requests decode in it."""
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

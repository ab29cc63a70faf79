"""Recall under conditions that are hard for an engine: cached prefixes, small chunks, batches,
preemption.

A wrong page, mask or position gives a wrong code word. Each condition has a count from the engine's
statistics, which proves that it occurred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.training.abilities import ABILITIES, Ability, recall
from tests.training.conversation import Dialogue
from tests.training.evaluate import AbilityResult, Student, examine

if TYPE_CHECKING:
    from mlxserve.core.stats import Stats

PAGE_SIZE = 16
NUM_WORDS, BAR = 130, 0.98  # as "recall, 300 tokens"


@dataclass(frozen=True, slots=True)
class Condition:
    """A way to send prompts, the engine's options, and evidence that the condition occurred."""

    name: str
    options: Mapping[str, Any]  # of the engine
    ask: Callable[[Student, Sequence[Dialogue]], list[str]]
    evidence: Callable[[Stats], int]  # 0: it did not occur
    unit: str


def with_cached_prefix(student: Student, conversations: Sequence[Dialogue]) -> list[str]:
    """Send the first two thirds of each prompt, then the whole prompts."""
    prompts = [student.prompt(conversation) for conversation in conversations]
    parts = [prompt[: len(prompt) * 2 // 3] for prompt in prompts]
    student.llm.generate(parts, student.sampling, use_tqdm=False)
    return student(conversations)


def in_a_batch(student: Student, conversations: Sequence[Dialogue]) -> list[str]:
    """Sixteen prompts at a time; every second one is of another ability."""
    short = cycle(ability for ability in ABILITIES if ability.num_words == 0)
    pairs = [(asked, next(short).test(i, 0)) for i, asked in enumerate(conversations)]
    answers: list[str] = []
    for i in range(0, len(pairs), 8):
        answers += student(list(chain(*pairs[i : i + 8])))[::2]
    return answers


def preempted(student: Student, conversations: Sequence[Dialogue]) -> list[str]:
    """Preempt each answer after its first piece of text, so that it is recomputed.

    Resetting the cache forces this: a pool as large as two prompts preempted none of 20 requests,
    because the answers are too short.
    """
    return [_interrupted(student, conversation) for conversation in conversations]


def _interrupted(student: Student, conversation: Dialogue) -> str:
    text = ""
    for delta in student.llm.stream(student.prompt(conversation), student.sampling):
        if not text:
            student.llm.reset_prefix_cache(force=True)
        text += delta.text
    return text


CONDITIONS = (
    Condition(
        "recall, partly cached",
        {"page_size": PAGE_SIZE},
        with_cached_prefix,
        lambda stats: stats.scheduler.prefix_hits,
        "cached prompt tokens",
    ),
    Condition(
        "recall, in chunks of one page",
        {"page_size": PAGE_SIZE, "max_num_batched_tokens": PAGE_SIZE, "max_num_seqs": 4},
        Student.__call__,
        lambda stats: stats.engine.num_steps,
        "steps",
    ),
    Condition(
        "recall, in a batch of 16",
        {"page_size": PAGE_SIZE, "max_num_seqs": 16},
        in_a_batch,
        lambda stats: stats.engine.generation_tokens // max(1, stats.engine.num_steps),
        "answers in a step, on average",
    ),
    Condition(
        "recall, preempted",
        {"page_size": PAGE_SIZE},
        preempted,
        lambda stats: stats.scheduler.recomputed_tokens,
        "recomputed tokens",
    ),
)


def examine_under(
    condition: Condition, num_prompts: int, seed: int, folder: Path | None = None
) -> AbilityResult:
    """Evaluate recall under a condition in its own engine; asserts that the condition occurred."""
    ability = Ability(condition.name, recall.in_one_turn, BAR, NUM_WORDS)
    with Student(folder, **condition.options) as student:
        result = examine(ability, num_prompts, seed, lambda c: condition.ask(student, c))
        count = condition.evidence(student.llm.stats())
    assert count, f"{condition.name}: it did not occur"
    remark = f"{count:,} {condition.unit}"
    return AbilityResult(ability, num_prompts, result.misses, remark)

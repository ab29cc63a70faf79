"""Recall where an engine could lose it: found in the cache, in small chunks, in a crowd, preempted.

A wrong page, mask or position gives a wrong code word. Each condition comes with a count from the
engine's own statistics that shows that it did arise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING

from mlxserve.mini.training.abilities import ABILITIES, Ability, recall
from mlxserve.mini.training.conversation import Dialogue
from mlxserve.mini.training.evaluate import AbilityResult, Student, examine

if TYPE_CHECKING:
    from mlxserve.config import EngineOptions
    from mlxserve.stats import Stats

PAGE_SIZE = 16
NUM_WORDS, BAR = 130, 0.98  # as "recall, 300 tokens"


@dataclass(frozen=True, slots=True)
class Condition:
    """A way to ask, the engine it is asked in, and the evidence that it was as it says."""

    name: str
    options: EngineOptions
    ask: Callable[[Student, Sequence[Dialogue]], list[str]]
    evidence: Callable[[Stats], int]  # 0: it did not arise
    unit: str


def with_cached_prefix(student: Student, conversations: Sequence[Dialogue]) -> list[str]:
    """The first two thirds of each prompt come first, alone; then the whole of it."""
    prompts = [student.prompt(conversation) for conversation in conversations]
    parts = [prompt[: len(prompt) * 2 // 3] for prompt in prompts]
    student.llm.generate(parts, student.sampling, use_tqdm=False)
    return student(conversations)


def in_a_crowd(student: Student, conversations: Sequence[Dialogue]) -> list[str]:
    """Sixteen prompts at a time, of which every second one asks for something else."""
    short = cycle(ability for ability in ABILITIES if ability.num_words == 0)
    pairs = [(asked, next(short).test(i, 0)) for i, asked in enumerate(conversations)]
    answers: list[str] = []
    for i in range(0, len(pairs), 8):
        answers += student(list(chain(*pairs[i : i + 8])))[::2]
    return answers


def preempted(student: Student, conversations: Sequence[Dialogue]) -> list[str]:
    """Each answer loses its pages when its first piece has come, and has to win them back.

    By force: a pool of two prompts' size preempted none of 20, whose answers are too short.
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
        "tokens found in the cache",
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
        in_a_crowd,
        lambda stats: stats.engine.generation_tokens // max(1, stats.engine.num_steps),
        "answers in a step, on average",
    ),
    Condition(
        "recall, preempted",
        {"page_size": PAGE_SIZE},
        preempted,
        lambda stats: stats.scheduler.recomputed_tokens,
        "tokens computed again",
    ),
)


def examine_under(
    condition: Condition, num_prompts: int, seed: int, folder: Path | None = None
) -> AbilityResult:
    """Recall under a condition, in an engine of its own. Raises AssertionError if none arose."""
    ability = Ability(condition.name, recall.in_one_turn, BAR, NUM_WORDS)
    with Student(folder, **condition.options) as student:
        result = examine(ability, num_prompts, seed, lambda c: condition.ask(student, c))
        count = condition.evidence(student.llm.stats())
    assert count, f"{condition.name}: it did not arise"
    remark = f"{count:,} {condition.unit}"
    return AbilityResult(ability, num_prompts, result.misses, remark)

"""What the model trains on, and in what order: lessons, mixed by weight, in growing contexts.

Everything is a function of a seed and a step, so a run that resumes sees what it would have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from mlxserve.mini import prose
from mlxserve.mini.abilities import (
    Lesson,
    arithmetic,
    copying,
    knowledge,
    lists,
    persona,
    recall,
    tools,
)
from mlxserve.mini.conversation import Conversation, Exchange, Message, system
from mlxserve.mini.words import Split

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are mlxserve-mini, a small helpful assistant.",
    "You are a helpful assistant. Be brief.",
    "Answer in short sentences.",
    "You are a friendly assistant.",
)
SYSTEM_SHARE = 0.35


def several(make: Callable[[Random, Split], Exchange], most: int) -> Lesson:
    """A lesson of one to `most` exchanges in a row."""

    def lesson(rng: Random, split: Split, num_words: int) -> Conversation:
        del num_words
        exchanges = [make(rng, split) for _ in range(rng.randint(1, most))]
        messages = tuple(message for exchange in exchanges for message in exchange.messages)
        return Conversation(messages, exchanges[-1].accepts)

    return lesson


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training: contexts up to so many words, lessons with their weights."""

    name: str
    share: float  # of all steps
    max_words: int  # of context
    max_tokens: int  # conversations longer than this are dropped
    lessons: dict[Lesson, float]


_COPY = several(copying.repeat_line, 5)
_NUMBERED = several(copying.numbered_line, 3)
_SUMS = several(arithmetic.exchange, 12)
_LISTS = several(lists.exchange, 6)
_TALK = several(knowledge.exchange, 3)

FOUNDATION: dict[Lesson, float] = {
    _COPY: 6,
    recall.table: 4,
    recall.many_questions: 6,
    recall.in_one_turn: 2,
    _NUMBERED: 1,
    _TALK: 1,
}
FULL: dict[Lesson, float] = {
    _COPY: 4,
    recall.table: 3,
    recall.many_questions: 5,
    recall.in_one_turn: 3,
    recall.in_system_prompt: 1,
    recall.over_turns: 3,
    _NUMBERED: 1,
    _SUMS: 2.5,
    _LISTS: 2,
    _TALK: 4,
    persona.persona: 1.5,
    tools.tool_calls: 0.7,
    tools.tool_results: 0.7,
}
STAGES = (
    Stage("foundation", 0.34, 30, 192, FOUNDATION),
    Stage("middle", 0.32, 150, 512, FULL),
    Stage("long", 0.34, 450, 1280, FULL),
)


def stage_at(progress: float) -> Stage:
    """The stage at `progress`, 0 to 1, through the training."""
    for stage in STAGES:
        if progress < stage.share:
            return stage
        progress -= stage.share
    return STAGES[-1]


def conversation(rng: Random, stage: Stage) -> Conversation:
    """One conversation to train on, with a system prompt now and then, and talk before it."""
    lesson = rng.choices(list(stage.lessons), list(stage.lessons.values()))[0]
    num_words = int(stage.max_words * rng.random() ** 1.5)
    made = lesson(rng, Split.TRAIN, num_words)
    if made.messages[0]["role"] == "system" or rng.random() > SYSTEM_SHARE:
        return made
    text = rng.choice(SYSTEM_PROMPTS)
    if rng.random() < 0.2:
        text += " " + " ".join(prose.paragraph(rng, num_words // 4))
    messages: tuple[Message, ...] = (system(text), *made.messages)
    return Conversation(messages, made.accepts, made.tools)


def conversations(seed: int, step: int, progress: float) -> Iterator[Conversation]:
    """An endless stream of conversations for one step of the training."""
    rng = Random(f"{seed}/{step}")
    stage = stage_at(progress)
    while True:
        yield conversation(rng, stage)

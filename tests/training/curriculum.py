"""The training data and its order: lessons, mixed by weight, in growing contexts.

Everything is a function of a seed and a step, so a resumed run sees the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from tests.training import prose
from tests.training.abilities import (
    Lesson,
    arithmetic,
    copying,
    knowledge,
    lists,
    newcomers,
    persona,
    personal,
    recall,
    refusals,
    structured,
    tools,
)
from tests.training.conversation import (
    Dialogue,
    Example,
    Exchange,
    Sheet,
    TrainingMessage,
    system,
)
from tests.training.words import DataSplit

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are mlxserve-mini, a small helpful assistant.",
    "You are a helpful assistant. Be brief.",
    "Answer in short sentences.",
    "You are a friendly assistant.",
)
SYSTEM_SHARE = 0.35
MAX_WORDS, MAX_TOKENS = 1650, 4000  # longest evaluated context, and longest conversation


def several(make: Callable[[Random, DataSplit], Exchange], most: int) -> Lesson:
    """A lesson of one to `most` exchanges in a row."""

    def lesson(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
        del num_words
        exchanges = [make(rng, split) for _ in range(rng.randint(1, most))]
        messages = tuple(message for exchange in exchanges for message in exchange.messages)
        return Dialogue(messages, exchanges[-1].accepts)

    return lesson


def from_afar(make: Lesson) -> Lesson:
    """The lesson with a context of any evaluated length, regardless of the stage."""

    def lesson(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
        del num_words
        return make(rng, split, int(MAX_WORDS * rng.random() ** 1.5))

    return lesson


ExampleMaker = Callable[[Random, DataSplit, int], Example]


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """A phase of the training: the longest context, and lessons with their weights."""

    name: str
    share: float  # of all steps
    max_words: int  # of context
    max_tokens: int  # conversations longer than this are dropped
    lessons: dict[ExampleMaker, float]


TrainingPlan = tuple[TrainingStage, ...]

_COPY = several(copying.repeat_line, 5)
_NUMBERED = several(copying.numbered_line, 3)
_SUMS = several(arithmetic.exchange, 12)
_LISTS = several(lists.exchange, 6)
_TALK = several(knowledge.exchange, 3)
_PIECES = several(copying.pieces, 4)
_FAR = from_afar(recall.long_questions)
_FAR_TURN = from_afar(recall.in_one_turn)
_RECORDS = several(structured.exchange, 3)
_REFUSALS = several(refusals.exchange, 4)
_FOREIGN = several(refusals.foreign_exchange, 3)
_UNTOOLED = several(tools.without_tools, 2)
_FIRST_MINUTES = several(newcomers.first_minutes, 3)

FOUNDATION: dict[ExampleMaker, float] = {
    _COPY: 6,
    recall.table: 4,
    recall.many_questions: 6,
    recall.in_one_turn: 2,
    _NUMBERED: 1,
    _TALK: 1,
}
# All abilities together, weighted by the tokens they take: drills are short, conversations with
# tools are long.
WHOLE: dict[ExampleMaker, float] = {
    arithmetic.sheet: 3,
    _SUMS: 2,
    lists.sheet: 3,
    _LISTS: 4,
    personal.personal: 7,
    personal.drill: 2,
    _COPY: 5,
    _PIECES: 7,
    _NUMBERED: 0.5,
    recall.table: 2,
    recall.many_questions: 3,
    recall.in_one_turn: 3,
    recall.over_turns: 1.5,
    recall.in_system_prompt: 1.5,
    _FAR: 0.2,
    _RECORDS: 3,
    _TALK: 5,
    persona.persona: 4,
    persona.at_length: 4,
    tools.session: 4.5,
    tools.tool_calls: 2,
    tools.tool_results: 0.4,
    tools.no_call: 0.6,
    tools.drill: 2,
}
# Exact copying and recall, lists and tools take longest to learn.
POLISH: dict[ExampleMaker, float] = {
    **WHOLE,
    _COPY: 6,
    recall.in_one_turn: 4,
    recall.over_turns: 2,
    _FAR: 0.6,
    lists.sheet: 15,
    _LISTS: 18,
    tools.session: 6,
    tools.tool_calls: 5,
    tools.drill: 10,
    personal.personal: 12,
    personal.drill: 10,
}
# What newcomers type, mostly requests to refuse, beside all abilities and long contexts.
NEWCOMERS: dict[ExampleMaker, float] = {
    **WHOLE,
    _REFUSALS: 24,
    _FOREIGN: 8,
    _UNTOOLED: 2,
    newcomers.contrasts: 22,
    newcomers.visit: 4,
    _FIRST_MINUTES: 12,
    _TALK: 32,
    arithmetic.sheet: 7,
    _SUMS: 7,
    _COPY: 7,
    recall.table: 5,
    recall.many_questions: 8,
    recall.in_one_turn: 20,
    recall.over_turns: 3,
    _FAR: 1.2,
    _FAR_TURN: 1,
    lists.sheet: 8,
    _LISTS: 18,
    tools.session: 5,
    tools.tool_calls: 4,
    tools.drill: 4,
    personal.personal: 9,
    personal.drill: 4,
}
LONG: dict[ExampleMaker, float] = {**WHOLE, recall.long_questions: 2}

# From random weights, and from weights that already copy and recall (`train --initial`).
FULL_PLAN: TrainingPlan = (
    TrainingStage("foundation", 0.20, 30, 192, FOUNDATION),
    TrainingStage("skills", 0.30, 40, MAX_TOKENS, WHOLE),
    TrainingStage("whole", 0.15, 150, MAX_TOKENS, WHOLE),
    TrainingStage("long", 0.10, MAX_WORDS, MAX_TOKENS, LONG),
    TrainingStage("polish", 0.10, 110, MAX_TOKENS, POLISH),
    TrainingStage("newcomers", 0.15, 110, MAX_TOKENS, NEWCOMERS),
)
CONTINUED_PLAN: TrainingPlan = (
    TrainingStage("skills", 0.30, 40, MAX_TOKENS, WHOLE),
    TrainingStage("whole", 0.10, 150, MAX_TOKENS, WHOLE),
    TrainingStage("long", 0.10, MAX_WORDS, MAX_TOKENS, LONG),
    TrainingStage("polish", 0.20, 110, MAX_TOKENS, POLISH),
    TrainingStage("newcomers", 0.30, 110, MAX_TOKENS, NEWCOMERS),
)


def stage_at(plan: TrainingPlan, progress: float) -> TrainingStage:
    """The stage at `progress` (0 to 1) of the training."""
    for stage in plan:
        if progress < stage.share:
            return stage
        progress -= stage.share
    return plan[-1]


def example(rng: Random, stage: TrainingStage) -> Example:
    """One training example; some conversations get a system prompt."""
    lesson = rng.choices(list(stage.lessons), list(stage.lessons.values()))[0]
    num_words = int(stage.max_words * rng.random() ** 1.5)
    made = lesson(rng, DataSplit.TRAIN, num_words)
    if isinstance(made, Sheet):
        return made
    if made.messages[0]["role"] == "system" or rng.random() > SYSTEM_SHARE:
        return made
    text = rng.choice(SYSTEM_PROMPTS)
    if rng.random() < 0.2:
        text += " " + " ".join(prose.paragraph(rng, DataSplit.TRAIN, num_words // 4))
    messages: tuple[TrainingMessage, ...] = (system(text), *made.messages)
    return Dialogue(messages, made.accepts, made.tools)


def examples(seed: int, step: int, stage: TrainingStage) -> Iterator[Example]:
    """An endless stream of examples for one training step."""
    rng = Random(f"{seed}/{step}")
    while True:
        yield example(rng, stage)

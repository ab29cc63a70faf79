"""The abilities that the model is trained for, one file each.

An ability makes conversations: `make(rng, split, num_words)`, with about `num_words` words of
context before the question, if the ability has a context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tests.training.abilities import (
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
from tests.training.conversation import Dialogue
from tests.training.words import DataSplit

Lesson = Callable[[Random, DataSplit, int], Dialogue]


@dataclass(frozen=True, slots=True)
class Ability:
    """A lesson in evaluation: the length of its contexts, and the share that must be right."""

    name: str
    make: Lesson
    bar: float | None  # share of held-out prompts; None only measures
    num_words: int = 0  # of context; about two tokens each
    cases: Sequence[Dialogue] = ()  # fixed prompts, examined all, in place of generated ones

    def tests(self, seed: int, num_prompts: int) -> list[Dialogue]:
        """All fixed prompts, or `num_prompts` held-out ones of a seed."""
        return list(self.cases) or [self.test(seed, index) for index in range(num_prompts)]

    def test(self, seed: int, index: int) -> Dialogue:
        """Held-out prompt number `index` of a seed."""
        if self.cases:
            return self.cases[index % len(self.cases)]
        return self.make(Random(f"{self.name}/{seed}/{index}"), DataSplit.HELD_OUT, self.num_words)


ABILITIES = (
    Ability("recall, short", recall.in_one_turn, 0.98),
    Ability("recall, 100 tokens", recall.in_one_turn, 0.98, 40),
    Ability("recall, 300 tokens", recall.in_one_turn, 0.98, 130),
    Ability("recall, 1,000 tokens", recall.in_one_turn, 0.98, 540),
    Ability("recall, 3,000 tokens", recall.in_one_turn, 0.90, 1650),
    Ability("recall, turns ago", recall.over_turns, 0.95, 100),
    Ability("recall, system prompt", recall.in_system_prompt, 0.95, 40),
    Ability("what people say", personal.personal, 0.90, 40),
    Ability("look-up in a table", recall.table, 0.95),
    Ability("copy a line", copying.copy, 0.95),
    Ability("lists", lists.transform, 0.95),
    Ability("addition", arithmetic.add, 0.95),
    Ability("subtraction", arithmetic.subtract, 0.90),
    Ability("comparison", arithmetic.compare, 0.90),
    Ability("days and months", arithmetic.dates, 0.95),
    Ability("mlxserve and manners", knowledge.knowledge, 0.90),
    Ability("system prompt", persona.persona, 0.90),
    Ability("tool calls", tools.tool_calls, 0.97),
    Ability("tool results", tools.tool_results, 0.95),
    Ability("no tool needed", tools.no_call, 0.90),
    Ability("JSON", structured.structured, 0.90),
    Ability("refusals", refusals.refusal, 0.95),
    Ability("refusals in other languages", refusals.in_other_languages, 0.95),
    Ability("requests as newcomers write them", newcomers.refused, 0.95, cases=newcomers.REFUSED),
    Ability("what newcomers may ask", newcomers.answered, 0.80, cases=newcomers.ANSWERED),
)

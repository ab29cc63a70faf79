"""Evaluation: every ability on held-out prompts, decoded greedily, compared with its bar.

A callable gives the answers, so the same evaluation runs on this package's engine (the default), on
plain mlx-lm, or on a network in training. `conditions` adds situations that are hard for an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mlxserve.hub.embedded import model_path
from tests.training.abilities import ABILITIES, Ability
from tests.training.conversation import Dialogue
from tests.training.tokenizer import ChatEncoder, load_tokenizer

MAX_ANSWER_TOKENS = 160

Answerer = Callable[[Sequence[Dialogue]], list[str]]  # conversations -> one answer each


@dataclass(frozen=True, slots=True)
class Miss:
    """A wrong answer, to show."""

    conversation: Dialogue
    given: str


@dataclass(frozen=True, slots=True)
class AbilityResult:
    """The result of one ability."""

    ability: Ability
    num_prompts: int
    misses: tuple[Miss, ...]
    remark: str = ""

    @property
    def share(self) -> float:
        return 1 - len(self.misses) / self.num_prompts

    @property
    def is_passed(self) -> bool:
        return self.ability.bar is None or self.share >= self.ability.bar


class Student:
    """Answers with this package's engine, greedily. `with` closes the engine."""

    def __init__(self, folder: Path | None = None, **options: Any) -> None:
        from mlxserve import LLM, SamplingParams

        folder = folder or model_path()
        options.setdefault("disable_log_stats", True)
        self.llm = LLM(str(folder), **options)
        self.sampling = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0)
        self._encoder = ChatEncoder(load_tokenizer(folder))

    def __call__(self, conversations: Sequence[Dialogue]) -> list[str]:
        """One batch: of messages, or of rendered prompts if any conversation offers tools."""
        if any(conversation.tools for conversation in conversations):
            prompts = [self.prompt(conversation) for conversation in conversations]
            outputs = self.llm.generate(prompts, self.sampling, use_tqdm=False)
        else:
            messages = [conversation.prompt for conversation in conversations]
            outputs = self.llm.chat(messages, self.sampling, use_tqdm=False)
        return [output.text for output in outputs]

    def prompt(self, conversation: Dialogue) -> list[int]:
        """The tokens of a conversation up to the start of the answer."""
        text = self._encoder.render(conversation.prompt, conversation.tools, open_turn=True)
        return self._encoder.encode(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()


def evaluate(
    num_prompts: int, seed: int, answer: Answerer, abilities: Sequence[Ability] = ABILITIES
) -> Iterator[AbilityResult]:
    """Evaluate `answer` on `num_prompts` held-out prompts of each ability, or on its fixed ones."""
    return (examine(ability, num_prompts, seed, answer) for ability in abilities)


def examine(ability: Ability, num_prompts: int, seed: int, answer: Answerer) -> AbilityResult:
    tests = ability.tests(seed, num_prompts)
    misses = (
        Miss(test, given)
        for test, given in zip(tests, answer(tests), strict=True)
        if not test.accepts(given)
    )
    return AbilityResult(ability, len(tests), tuple(misses))


WIDTH = 36  # of the first column
HEADER = f"{'ability':{WIDTH}}  {'right':>7}  {'bar':>6}  {'prompts':>7}"


def line(result: AbilityResult) -> str:
    """A result as a table row under HEADER."""
    bar = "none" if result.ability.bar is None else f"{result.ability.bar:.0%}"
    figures = f"{result.share:7.1%}  {bar:>6}  {result.num_prompts:7}"
    verdict = "" if result.is_passed else "missed"
    return f"{result.ability.name:{WIDTH}}  {figures}  {verdict:6}  {result.remark}".rstrip()

"""The examination: every ability on held-out prompts, greedily, against its bar.

The answers come from a callable, so the same examination runs on this package's engine (the
default), on plain mlx-lm, or on a network under training. `conditions` holds what makes recall
hard for an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mlxserve.hub.embedded import model_path
from mlxserve.mini.training.abilities import ABILITIES, Ability
from mlxserve.mini.training.conversation import Dialogue
from mlxserve.mini.training.tokenizer import ChatEncoder, load_tokenizer

if TYPE_CHECKING:
    from typing import Unpack

    from mlxserve.config import EngineOptions

MAX_ANSWER_TOKENS = 160

Answerer = Callable[[Sequence[Dialogue]], list[str]]  # conversations -> an answer to each


@dataclass(frozen=True, slots=True)
class Miss:
    """A wrong answer, for a reader."""

    conversation: Dialogue
    given: str


@dataclass(frozen=True, slots=True)
class AbilityResult:
    """How an ability did."""

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
    """Answers by this package's own engine, greedily. `with` ends the engine."""

    def __init__(self, folder: Path | None = None, **options: Unpack[EngineOptions]) -> None:
        from mlxserve import LLM, SamplingParams

        folder = folder or model_path()
        options.setdefault("disable_log_stats", True)
        self.llm = LLM(str(folder), **options)
        self.sampling = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0)
        self._encoder = ChatEncoder(load_tokenizer(folder))

    def __call__(self, conversations: Sequence[Dialogue]) -> list[str]:
        """One batch of messages; where tools are offered, of prompts that list them."""
        if any(conversation.tools for conversation in conversations):
            prompts = [self.prompt(conversation) for conversation in conversations]
            outputs = self.llm.generate(prompts, self.sampling, use_tqdm=False)
        else:
            messages = [conversation.prompt for conversation in conversations]
            outputs = self.llm.chat(messages, self.sampling, use_tqdm=False)
        return [output.text for output in outputs]

    def prompt(self, conversation: Dialogue) -> list[int]:
        """The tokens of a conversation up to where the answer begins."""
        text = self._encoder.render(conversation.prompt, conversation.tools, open_turn=True)
        return self._encoder.encode(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()


def evaluate(
    num_prompts: int, seed: int, answer: Answerer, abilities: Sequence[Ability] = ABILITIES
) -> Iterator[AbilityResult]:
    """Puts `num_prompts` held-out prompts of each ability to `answer`."""
    return (examine(ability, num_prompts, seed, answer) for ability in abilities)


def examine(ability: Ability, num_prompts: int, seed: int, answer: Answerer) -> AbilityResult:
    tests = [ability.test(seed, index) for index in range(num_prompts)]
    misses = (
        Miss(test, given)
        for test, given in zip(tests, answer(tests), strict=True)
        if not test.accepts(given)
    )
    return AbilityResult(ability, num_prompts, tuple(misses))


WIDTH = 36  # of the first column
HEADER = f"{'ability':{WIDTH}}  {'right':>7}  {'bar':>6}  {'prompts':>7}"


def line(result: AbilityResult) -> str:
    """A result as a line of the table under HEADER."""
    bar = "none" if result.ability.bar is None else f"{result.ability.bar:.0%}"
    figures = f"{result.share:7.1%}  {bar:>6}  {result.num_prompts:7}"
    verdict = "" if result.is_passed else "missed"
    return f"{result.ability.name:{WIDTH}}  {figures}  {verdict:6}  {result.remark}".rstrip()

"""The examination: every ability on held-out prompts, greedily, against its bar.

The answers come from a callable, so the same examination runs on this package's engine (the
default), on plain mlx-lm, or on a network under training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxserve.mini import model_path
from mlxserve.mini.abilities import ABILITIES, Ability
from mlxserve.mini.conversation import Conversation
from mlxserve.mini.tokenizer import ChatEncoder, load_tokenizer

MAX_ANSWER_TOKENS = 160

Answer = Callable[[Sequence[Conversation]], list[str]]  # conversations -> an answer to each


@dataclass(frozen=True, slots=True)
class Miss:
    """A wrong answer, for a reader."""

    conversation: Conversation
    given: str


@dataclass(frozen=True, slots=True)
class Result:
    """How an ability did."""

    ability: Ability
    num_prompts: int
    misses: tuple[Miss, ...]

    @property
    def share(self) -> float:
        return 1 - len(self.misses) / self.num_prompts

    @property
    def is_passed(self) -> bool:
        return self.ability.bar is None or self.share >= self.ability.bar


def evaluate(
    num_prompts: int = 100,
    seed: int = 0,
    answer: Answer | None = None,
    abilities: Sequence[Ability] = ABILITIES,
) -> list[Result]:
    """Puts `num_prompts` held-out prompts of each ability to `answer`, by default the engine."""
    answer = answer or engine_answer()
    return [examine(ability, num_prompts, seed, answer) for ability in abilities]


def examine(ability: Ability, num_prompts: int, seed: int, answer: Answer) -> Result:
    tests = [ability.test(seed, index) for index in range(num_prompts)]
    misses = (
        Miss(test, given)
        for test, given in zip(tests, answer(tests), strict=True)
        if not test.accepts(given)
    )
    return Result(ability, num_prompts, tuple(misses))


def engine_answer() -> Answer:
    """Answers by this package's own engine, with the packaged model, greedily."""
    from mlxserve import LLM, SamplingParams

    llm = LLM()
    encoder = ChatEncoder(load_tokenizer(model_path()))
    sampling = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0)

    def answer(conversations: Sequence[Conversation]) -> list[str]:
        """One batch of messages; where tools are offered, of prompts that list them."""
        if not any(c.tools for c in conversations):
            outputs = llm.chat([c.prompt for c in conversations], sampling, use_tqdm=False)
        else:
            rendered = [encoder.render(c.prompt, c.tools, open_turn=True) for c in conversations]
            prompts = [encoder.encode(text) for text in rendered]
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [output.text for output in outputs]

    return answer


def table(results: Sequence[Result]) -> str:
    """The figures as text, one ability per line."""
    width = max(len(result.ability.name) for result in results)
    lines = [f"{'ability':{width}}  {'right':>7}  {'bar':>6}  {'prompts':>7}"]
    for result in results:
        bar = "none" if result.ability.bar is None else f"{result.ability.bar:.0%}"
        verdict = "" if result.is_passed else "  missed"
        lines.append(
            f"{result.ability.name:{width}}  {result.share:7.1%}  {bar:>6}"
            f"  {result.num_prompts:7}{verdict}"
        )
    return "\n".join(lines)

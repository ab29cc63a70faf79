"""Asks the library for greedy answers, as many tokens as were recorded."""

from __future__ import annotations

from collections.abc import Sequence

from mlxserve import LLM, SamplingParams
from tests.real.prompts import NUM_TOKENS

PAGE_SIZE = 32
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


def tokens_of(llm: LLM, asked: Sequence[str]) -> list[tuple[int, ...]]:
    """Of each answer, after a check of the engine's pages."""
    outputs = llm.generate(list(asked), GREEDY, use_tqdm=False)
    llm.check()
    return [output.token_ids for output in outputs]

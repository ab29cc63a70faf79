"""SmolLM2's tokens stay mlx-lm's after up to 6,000 tokens. A file of its own: it takes as long as all others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxserve import LLM
from tests.real.asking import GREEDY, tokens_of
from tests.real.prompts import NUM_LONG, prompts

pytestmark = pytest.mark.long


def test_greedy_tokens_are_mlx_lms_after_up_to_6000_tokens(
    llm: LLM, expected: list[tuple[int, ...]]
) -> None:
    asked, wanted = prompts()[-NUM_LONG:], expected[-NUM_LONG:]
    assert [tokens_of(llm, [prompt])[0] for prompt in asked] == wanted, "each from those before it"
    outputs = llm.generate(asked, replace(GREEDY, max_tokens=8), use_tqdm=False)
    assert [output.token_ids for output in outputs] == [tokens[:8] for tokens in wanted], (
        "from the cache, in a batch"
    )
    assert all(output.usage.cached_tokens > 1_000 for output in outputs)

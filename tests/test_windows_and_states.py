"""A model whose layers keep windows and recurrent states beside full pages: every kind at once, and no token changes.

The oracle is mlx-lm's dense path, greedy, in float32, as in `tests/test_equality.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxserve import LLM
from tests.test_equality import GREEDY, dense_tokens, tokens
from tests.together import begun_together

PAGE, WINDOW = 16, 24
OPTIONS: dict[str, Any] = {"page_size": PAGE, "max_num_seqs": 4, "disable_log_stats": True}


@pytest.fixture
def folder(write_model: Callable[..., Path], tmp_path: Path) -> Path:
    """Gear's layers: a convolution with a state, a window, full attention, and a state again."""
    return write_model(tmp_path, "gear", sliding_window=WINDOW, max_position_embeddings=1024)


@pytest.fixture
def prompts() -> list[list[int]]:
    draw = random.Random(7)

    def some(length: int) -> list[int]:
        return [draw.randrange(500) for _ in range(length)]

    shared = some(WINDOW + 3 * PAGE)
    ends = [1, PAGE - 1, PAGE, 2 * PAGE + 3]
    return [shared + some(length) for length in ends] + [some(n) for n in (1, WINDOW, 5 * PAGE + 1)]


def test_greedy_tokens_are_the_dense_ones(folder: Path, prompts: list[list[int]]) -> None:
    expected = dense_tokens(folder, prompts)
    with LLM(str(folder), num_pages=200, num_window_pages=40, num_state_slots=24, **OPTIONS) as llm:
        assert [tokens(llm, [prompt])[0] for prompt in prompts] == expected, "alone"
        assert tokens(llm, prompts) == expected, "from the cache, in a batch"
        stats = llm.stats()
        assert stats.scheduler.prefix_hits > 0
        assert stats.states.num_restored > 0
        assert (stats.windows.num_pages, stats.states.num_slots) == (40, 24)
        llm.resize_cache(120)
        assert tokens(llm, prompts) == expected, "after the cache became smaller"
        llm.resize_cache(160)
        assert tokens(llm, prompts) == expected, "after it became larger"
        llm.check()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.long), "swap"])
def test_preempted_answers_are_the_same(folder: Path, mode: str, tmp_path: Path) -> None:
    params = replace(GREEDY, max_tokens=90)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8], [9, 10]]
    sizes = {"num_pages": 14, "num_window_pages": 12, "num_state_slots": 10, "growth_pages": 0}
    swap = {"disk_cache_dir": str(tmp_path / "disk"), "disk_cache_size": 0.01}
    options = {**OPTIONS, **sizes, **(swap if mode == "swap" else {}), "preemption_mode": mode}
    with LLM(str(folder), num_pages=100, num_window_pages=0, **OPTIONS) as llm:
        expected = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        assert llm.stats().windows.num_pages == 0
    with LLM(str(folder), **options) as llm:
        with begun_together(len(prompts)):
            found = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        assert found == expected
        assert llm.stats().scheduler.num_preemptions > 0
        llm.check()


@pytest.mark.slow
def test_pages_windows_and_states_are_read_from_disk_after_a_restart(
    folder: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    expected = dense_tokens(folder, prompts)
    sizes = {"num_pages": 200, "num_window_pages": 40, "num_state_slots": 24}
    disk = {"disk_cache_dir": str(tmp_path / "disk"), "disk_cache_size": 0.1}
    for run in range(2):
        with LLM(str(folder), **OPTIONS, **sizes, **disk) as llm:
            assert tokens(llm, prompts) == expected, run
            assert (llm.stats().scheduler.restored_tokens > 0) == (run > 0)
            llm.check()

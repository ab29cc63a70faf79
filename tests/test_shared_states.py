"""Full pages and recurrent states share memory: it moves between them while requests run, and no token changes.

The oracle is mlx-lm's dense path, greedy, in float32, as in `tests/test_equality.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mlxserve.engine_part
from mlxserve import LLM
from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.pool_memory import PoolMemory
from mlxserve.request import STATE_SLOTS
from tests.test_equality import GREEDY, dense_tokens, tokens
from tests.test_shared_memory import prompts_of
from tests.together import begun_together

PAGE, NUM_PAGES = 16, 60
# Of a unit in bytes: a state is five pages, whatever the arrays have.
PAGE_BYTES = {FullPages.name: 1, StateSlots.name: 5}
NBYTES = NUM_PAGES + STATE_SLOTS * PAGE_BYTES[StateSlots.name]
OPTIONS: dict[str, Any] = {
    "page_size": PAGE,
    "num_pages": NUM_PAGES,
    "num_state_slots": (NBYTES - 2) // PAGE_BYTES[StateSlots.name],
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "disable_log_stats": True,
}


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PoolMemory(NBYTES, PAGE_BYTES)
    monkeypatch.setattr(mlxserve.engine_part, "pool_memory", lambda *_: memory)


@contextmanager
def llm_of(folder: Path, **options: Any) -> Iterator[LLM]:
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        yield llm
        llm.check()


@pytest.mark.parametrize("kind", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_greedy_tokens_are_the_dense_ones(
    kind: str, write_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_model(tmp_path, kind, max_position_embeddings=1024)
    short, long = prompts_of(6, 60), prompts_of(1, 700, seed=11)
    expected = dense_tokens(folder, [*short, *long])
    disk = {"disk_cache_dir": str(tmp_path / "disk"), "disk_cache_size": 0.1}
    with llm_of(folder, **disk) as llm:
        assert tokens(llm, short) == expected[:6], "states take memory"
        num_slots = llm.stats().states.num_slots
        assert tokens(llm, long) == expected[6:], "a long context takes it back"
        assert llm.stats().states.num_slots < num_slots
        for _ in range(2):
            for prompt, answer in zip(short, expected, strict=False):
                assert tokens(llm, [prompt]) == [answer], "in turns"
        assert llm.stats().states.num_restored > 0
        for num_pages in (50, 70):
            llm.resize_cache(num_pages)
            assert tokens(llm, short) == expected[:6], f"{num_pages} pages"
            llm.check()
    with llm_of(folder, **disk) as llm:
        assert tokens(llm, short) == expected[:6], "after a restart"
        assert llm.stats().scheduler.restored_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.long), "swap"])
def test_preempted_answers_are_the_same(
    mode: str, write_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = PoolMemory(NBYTES - 32, PAGE_BYTES)
    monkeypatch.setattr(mlxserve.engine_part, "pool_memory", lambda *_: memory)
    folder = write_model(tmp_path, "lfm2")
    params, prompts = replace(GREEDY, max_tokens=90), prompts_of(4, 70)
    with LLM(str(folder), **{**OPTIONS, "max_num_seqs": 1}) as llm:
        expected = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
    swap = {"disk_cache_dir": str(tmp_path / "disk"), "disk_cache_size": 0.01}
    options = {"preemption_mode": mode, "growth_pages": 0, **(swap if mode == "swap" else {})}
    with llm_of(folder, **options) as llm:
        with begun_together(len(prompts)):
            found = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        assert found == expected
        assert llm.stats().scheduler.num_preemptions > 0

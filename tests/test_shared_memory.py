"""Full pages and windows that share memory: it moves between them while requests run, and no token changes.

The oracle is mlx-lm's dense path, greedy, in float32, as in `tests/test_equality.py`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mlxserve.engine_part
from metal_kernels.ops import Backend, LayerShape
from metal_kernels.reference import ReferenceBackend
from mlxserve import LLM
from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.kv import KVPool
from mlxserve.cache.pool_memory import PoolMemory
from mlxserve.core.errors import EngineFailed
from mlxserve.model import attention
from tests.emulated import emulated_backend
from tests.test_equality import GREEDY, dense_tokens, tokens
from tests.together import begun_together

PAGE, WINDOW = 16, 32
NUM_PAGES, NUM_WINDOW_PAGES = 60, 24
# Of a page in bytes: one of the windows is three of the others, whatever the arrays have.
PAGE_BYTES = {FullPages.name: 1, WindowPages.name: 3}
NBYTES = NUM_PAGES + 5 * PAGE_BYTES[WindowPages.name]
OPTIONS: dict[str, Any] = {
    "page_size": PAGE,
    "num_pages": NUM_PAGES,
    "num_window_pages": NUM_WINDOW_PAGES,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "disable_log_stats": True,
}


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PoolMemory(NBYTES, PAGE_BYTES)
    monkeypatch.setattr(mlxserve.engine_part, "pool_memory", lambda *_: memory)


@pytest.fixture
def num_shrunk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages that pools were told to have memory for at most."""
    shrink, found = KVPool.shrink, []

    def counted(self: KVPool, num_pages: int) -> None:
        shrink(self, num_pages)
        assert self.num_backed <= num_pages
        found.append(num_pages)

    monkeypatch.setattr(KVPool, "shrink", counted)
    return found


def prompts_of(count: int, length: int, seed: int = 7) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(100) for _ in range(length + draw.randrange(20))] for _ in range(count)]


@contextmanager
def llm_of(folder: Path, **options: Any) -> Iterator[LLM]:
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        yield llm
        llm.check()


@pytest.mark.parametrize(
    "kind",
    [
        "gear",
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        pytest.param("gemma3_text", marks=pytest.mark.long),
    ],
)
def test_greedy_tokens_are_the_dense_ones(
    kind: str, write_model: Callable[..., Path], tmp_path: Path, num_shrunk: list[int]
) -> None:
    folder = write_model(tmp_path, kind, sliding_window=WINDOW, max_position_embeddings=1024)
    short, long = prompts_of(8, 60), prompts_of(2, 500, seed=11)
    expected = dense_tokens(folder, [*short, *long])
    options = {"num_state_slots": 16} if kind == "gear" else {}
    with llm_of(folder, **options) as llm:
        assert tokens(llm, short) == expected[:8], "windows take memory"
        assert tokens(llm, long) == expected[8:], "long contexts take it back"
        assert tokens(llm, short) == expected[:8], "and give it again"
        for prompt, answer in zip([*short, *long], expected, strict=True):
            assert tokens(llm, [prompt]) == [answer], "in turns"
    assert len(set(num_shrunk)) > 2, "memory has moved"


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.long), "swap"])
def test_preempted_answers_are_the_same(
    mode: str,
    write_model: Callable[..., Path],
    tmp_path: Path,
    num_shrunk: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = PoolMemory(NBYTES - 36, PAGE_BYTES)
    monkeypatch.setattr(mlxserve.engine_part, "pool_memory", lambda *_: memory)
    folder = write_model(tmp_path, "gemma3_text", sliding_window=WINDOW)
    params, prompts = replace(GREEDY, max_tokens=90), prompts_of(4, 70)
    with LLM(str(folder), **{**OPTIONS, "num_pages": 400, "num_window_pages": 0}) as llm:
        expected = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
    swap = {"disk_cache_dir": str(tmp_path / "disk"), "disk_cache_size": 0.01}
    options = {"preemption_mode": mode, "growth_pages": 0, **(swap if mode == "swap" else {})}
    with llm_of(folder, **options) as llm:
        with begun_together(len(prompts)):
            found = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        assert found == expected
        assert llm.stats().scheduler.num_preemptions > 0
    assert num_shrunk


@pytest.mark.slow
def test_a_cache_of_another_size_shares_as_much(
    write_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_model(tmp_path, "gemma3_text", sliding_window=WINDOW)
    prompts = prompts_of(6, 100)
    expected = dense_tokens(folder, prompts)
    with llm_of(folder) as llm:
        for num_pages in (30, 80, 40):
            llm.resize_cache(num_pages)
            assert tokens(llm, prompts) == expected, num_pages
            assert llm.stats().pool.num_pages == num_pages
            llm.check()


@pytest.mark.slow
def test_what_moved_is_read_from_disk_after_a_restart(
    write_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_model(tmp_path, "gemma3_text", sliding_window=WINDOW)
    prompts = prompts_of(6, 100)
    expected = dense_tokens(folder, prompts)
    disk = {"disk_cache_dir": str(tmp_path / "disk"), "disk_cache_size": 0.1}
    for run in range(2):
        with llm_of(folder, **disk) as llm:
            assert tokens(llm, prompts) == expected, run
            assert (llm.stats().scheduler.restored_tokens > 0) == (run > 0)


def test_a_device_that_refuses_to_move_memory_ends_one_step(
    write_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, "gemma3_text", sliding_window=WINDOW)
    prompts = prompts_of(6, 100)
    expected = dense_tokens(folder, prompts)
    shrink, calls = KVPool.shrink, itertools.count()

    def refuse_one(self: KVPool, num_pages: int) -> None:
        if next(calls) == 2:  # the first two are at the start
            raise RuntimeError("no memory")
        shrink(self, num_pages)

    monkeypatch.setattr(KVPool, "shrink", refuse_one)
    with llm_of(folder) as llm:
        with pytest.raises(EngineFailed):
            tokens(llm, prompts)
        assert tokens(llm, prompts) == expected, "the engine has begun again"
    assert next(calls) > 3


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("emulated kernels", marks=pytest.mark.slow),
        pytest.param("reference", marks=pytest.mark.long),
    ],
)
def test_every_backend_moves_pages_after_all_writes(
    name: str,
    write_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_shrunk: list[int],
) -> None:
    folder = write_model(tmp_path, "gpt_oss", sliding_window=WINDOW, max_position_embeddings=1024)
    prompts = [*prompts_of(5, 50), *prompts_of(1, 200)]

    def select(_name: str, layers: Sequence[LayerShape]) -> list[Backend]:
        return [ReferenceBackend() if name == "reference" else backend] * len(layers)

    backend = emulated_backend()
    monkeypatch.setattr(attention, "select_backends", select)
    memory = PoolMemory(20 + NBYTES - NUM_PAGES, PAGE_BYTES)
    monkeypatch.setattr(mlxserve.engine_part, "pool_memory", lambda *_: memory)
    small = {"num_pages": 20, "max_num_batched_tokens": 32}
    with LLM(str(folder), **{**OPTIONS, "num_pages": 60, "num_window_pages": 0}) as llm:
        expected = tokens(llm, prompts)
    with llm_of(folder, **small) as llm:
        for _ in range(2):
            assert [tokens(llm, [prompt])[0] for prompt in prompts] == expected
    assert len(set(num_shrunk)) > 2, "memory has moved"

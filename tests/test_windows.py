"""Layers with a window in a pool of their own: pages that no row sees are given back, and no token changes.

The oracle is mlx-lm's dense path, greedy, in float32, as in `tests/test_equality.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_kernels.kernels import Dispatch, Kernel, KernelSpec
from metal_kernels.limits import PAGE_SIZES
from metal_kernels.ops import Backend, LayerShape
from metal_kernels.reference import ReferenceBackend
from mlxserve import LLM, InvalidConfig
from mlxserve.build import build_text_model
from mlxserve.cache.groups import Window
from mlxserve.cache.pages import PageState
from mlxserve.core.config import EngineConfig
from mlxserve.engine.snapshot import Snapshot
from mlxserve.model import attention, step_graphs
from mlxserve.model.batch import Batch
from mlxserve.model.forward import Rows
from mlxserve.request import CacheMiss
from tests.emulated import emulated_backend
from tests.test_equality import GREEDY, dense_tokens, tokens
from tests.together import begun_together

KINDS = ("gemma3_text", "gpt_oss")
OPTIONS: dict[str, Any] = {"num_pages": 400, "disable_log_stats": True}


def prompts_of(vocabulary: int, window: int, page_size: int) -> list[list[int]]:
    """Lengths on both sides of pages and of the window's edge, alone and after a common beginning."""
    draw = random.Random(3)

    def some(length: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(length)]

    shared = some(window + 3 * page_size)
    ends = {1, page_size - 1, page_size, page_size + 1, 2 * page_size + 3, window + page_size}
    lengths = {
        1,
        window - 1,
        window,
        window + 1,
        window + page_size,
        2 * window + 5 * page_size + 1,
    }
    return [shared + some(length) for length in sorted(ends)] + [
        some(length) for length in sorted(lengths) if length
    ]


@pytest.fixture
def in_window(write_model: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    def folder(kind: str, window: int, **changes: Any) -> str:
        where = tmp_path / f"{kind}-{window}"
        where.mkdir()
        return str(write_model(where, kind, sliding_window=window, **changes))

    return folder


def fewest(window: int, page_size: int) -> int:
    return Window(window, page_size).num_held


WINDOWS = (1, 2, 16, 17, 24, 32, 33, 47)
# Ten seconds each: a few with the slow ones, all of them with the long ones.
CASES = [
    pytest.param(*case, marks=pytest.mark.long if number % 36 else pytest.mark.slow)
    for number, case in enumerate(itertools.product(KINDS, WINDOWS, PAGE_SIZES))
]


@pytest.mark.parametrize(("kind", "window", "page_size"), CASES)
def test_greedy_tokens_are_the_dense_ones_in_every_configuration(
    kind: str, window: int, page_size: int, in_window: Callable[..., str]
) -> None:
    folder = in_window(kind, window)
    prompts = prompts_of(500, window, page_size)
    expected = dense_tokens(Path(folder), prompts)
    least = fewest(window, page_size)
    options = {**OPTIONS, "page_size": page_size}
    with LLM(folder, num_window_pages=60, **options) as llm:
        alone = [tokens(llm, [prompt])[0] for prompt in prompts]
        assert alone == expected, "alone"
        assert tokens(llm, prompts) == expected, "from the cache, in a batch"
        assert llm.stats().scheduler.prefix_hits > 0
        assert llm.reset_prefix_cache()
        assert tokens(llm, prompts) == expected, "in a batch"
        llm.resize_cache(200)
        llm.resize_cache(300)
        assert tokens(llm, prompts) == expected, "after the cache was resized"
    with LLM(
        folder, num_window_pages=60, max_num_batched_tokens=page_size, max_num_seqs=8, **options
    ) as llm:
        assert tokens(llm, prompts) == expected, "in chunks of one page"
        assert tokens(llm, prompts) == expected, "in chunks of one page, from the cache"
    with LLM(folder, num_window_pages=least, max_num_seqs=8, **options) as llm:
        assert tokens(llm, prompts) == expected, "with a window for one request"
        assert tokens(llm, prompts) == expected, "again"
        stats = llm.stats()
        assert stats.windows.num_pages == least < max(map(len, prompts)) // page_size
        assert stats.windows.num_used == 0


@pytest.mark.slow
def test_a_long_answer_holds_no_more_than_its_window(in_window: Callable[..., str]) -> None:
    folder = in_window("gpt_oss", 24)
    params = replace(GREEDY, max_tokens=90)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    with LLM(folder, page_size=16, num_window_pages=0, **OPTIONS) as llm:
        expected = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        assert llm.stats().windows.num_pages == 0
    num_pages = 2 * fewest(24, 16)
    with LLM(folder, page_size=16, num_window_pages=num_pages, **OPTIONS) as llm:
        found = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        assert found == expected
        assert llm.stats().scheduler.num_preemptions == 0
        llm.check()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("emulated kernels", "auto", marks=pytest.mark.slow),
        pytest.param("emulated kernels", "q8", marks=pytest.mark.slow),
        pytest.param("reference", "auto", marks=pytest.mark.long),
        pytest.param("reference", "q8", marks=pytest.mark.long),
    ],
)
def test_every_backend_gives_the_tokens_of_one_pool(
    name: str, dtype: str, in_window: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = in_window("gpt_oss", 24)
    prompts = prompts_of(500, 24, 16)[::2]
    options = {**OPTIONS, "kv_cache_dtype": dtype, "page_size": 16, "max_num_seqs": 4}

    def select(_name: str, layers: Sequence[LayerShape]) -> list[Backend]:
        return [ReferenceBackend() if name == "reference" else backend] * len(layers)

    backend = emulated_backend()
    monkeypatch.setattr(attention, "select_backends", select)
    with LLM(folder, num_window_pages=0, **options) as llm:
        expected = tokens(llm, prompts)
    with LLM(folder, num_window_pages=20, **options) as llm:
        assert tokens(llm, prompts) == expected
        assert tokens(llm, prompts) == expected, "from the cache"
        assert llm.stats().windows.num_pages == 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_give_the_tokens_of_plain_mlx(
    kind: str, in_window: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch, after the pools were resized, and after answers were preempted.

    Emulated kernels cannot be recorded: the function that would be runs in their place.
    """
    recorded: list[object] = []
    num_recorded_steps = 0

    def record(step: Callable[..., Any]) -> Callable[..., Any]:
        recorded.append(step)

        def counted(*arguments: Any) -> Any:
            nonlocal num_recorded_steps
            num_recorded_steps += 1
            return step(*arguments)

        return counted

    folder = in_window(kind, 24)
    prompts = [[number, 2, 3] for number in range(4)]
    params = replace(GREEDY, max_tokens=60)

    def answers(llm: LLM, prompts: Sequence[list[int]]) -> list[tuple[int, ...]]:
        with begun_together(len(prompts)):
            found = [each.token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
        llm.check()
        return found

    options = {**OPTIONS, "page_size": 16}
    with LLM(folder, num_window_pages=0, **options) as llm:
        expected = answers(llm, prompts)
    backend = emulated_backend()
    monkeypatch.setattr(step_graphs, "record", record)
    monkeypatch.setattr(step_graphs, "first_pages", lambda pools: pools)
    monkeypatch.setattr(attention, "select_backends", lambda _name, layers: [backend] * len(layers))
    with LLM(folder, num_window_pages=20, **options) as llm:
        assert answers(llm, prompts[:1]) == expected[:1], "alone"
        assert answers(llm, prompts) == expected, "in a batch"
        before = num_recorded_steps
        llm.resize_cache(200)
        llm.resize_cache(300)
        assert answers(llm, prompts) == expected, "after the cache was resized"
        assert num_recorded_steps > before > 60
    with LLM(folder, num_window_pages=16, **{**options, "num_pages": 10}) as llm:
        before = num_recorded_steps
        assert answers(llm, prompts) == expected, "with preemptions"
        assert llm.stats().scheduler.num_preemptions > 0
        assert num_recorded_steps > before
    assert recorded


def test_kernels_that_write_are_planned_once_for_each_pool(
    in_window: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of both pools take turns, and share one backend."""
    backend = emulated_backend()
    planned: list[Counter[str]] = []  # of each step
    make, logits = Dispatch.__init__, Rows.logits

    def count_plans(dispatch: Dispatch, kernel: Kernel, spec: KernelSpec, *rest: Any) -> None:
        if spec.writes_pools and planned:
            planned[-1][spec.name] += 1
        make(dispatch, kernel, spec, *rest)

    def count_step(rows: Rows, batch: Batch, *rest: Any) -> mx.array:
        planned.append(Counter())
        return logits(rows, batch, *rest)

    monkeypatch.setattr(attention, "select_backends", lambda _name, layers: [backend] * len(layers))
    folder = in_window("gpt_oss", 24, num_hidden_layers=6, layer_types=None)
    with LLM(folder, num_window_pages=20, page_size=16, **OPTIONS) as llm:
        # Emulated kernels cannot be recorded: the attempt would plan once more.
        monkeypatch.setattr(step_graphs, "TIMES_BEFORE", 10**6)
        monkeypatch.setattr(Dispatch, "__init__", count_plans)
        monkeypatch.setattr(Rows, "logits", count_step)
        tokens(llm, [list(range(40)), [7, 8, 9]])
        assert llm.stats().windows.num_pages == 20
    assert len(planned) > 4
    assert {count for step in planned for count in step.values()} == {2}


def test_a_conversation_reuses_what_a_model_without_windows_reuses(
    in_window: Callable[..., str],
) -> None:
    """Nine turns; five of six layers have a window."""
    folder = in_window("gemma3_text", 24, num_hidden_layers=6, sliding_window_pattern=6)
    draw = random.Random(5)
    history: list[int] = []
    with LLM(folder, page_size=16, num_window_pages=20, **OPTIONS) as llm:
        for _ in range(9):
            history += [draw.randrange(500) for _ in range(20)]
            [output] = llm.generate([history], GREEDY, use_tqdm=False)
            assert output.usage.cache is not None
            assert output.usage.cache.num_pages == max(0, len(history) - 21) // 16
            history += output.token_ids


def test_a_branch_beyond_the_window_is_computed_again_and_says_so(
    in_window: Callable[..., str],
) -> None:
    folder = in_window("gpt_oss", 24)
    draw = random.Random(6)
    long = [draw.randrange(500) for _ in range(300)]
    branch = [*long[:160], *(draw.randrange(500) for _ in range(20))]
    [expected] = dense_tokens(Path(folder), [branch])
    with LLM(folder, page_size=16, num_window_pages=fewest(24, 16), **OPTIONS) as llm:
        tokens(llm, [long])
        [output] = llm.generate([branch], GREEDY, use_tqdm=False)
        assert output.token_ids == expected
        cache = output.usage.cache
        assert cache is not None
        assert cache.reason is CacheMiss.WINDOW_EVICTED
        assert (cache.num_pages, cache.differs_at) == (0, 0)
        [output] = llm.generate([branch], GREEDY, use_tqdm=False)
        assert output.usage.cache is not None
        assert output.usage.cache.num_pages == 11, "the full pages but the last token's"


def test_a_snapshot_has_the_pages_of_windows(in_window: Callable[..., str]) -> None:
    async def found() -> tuple[Snapshot, Snapshot]:
        options = {"num_window_pages": 8, "page_size": 16, **OPTIONS}
        chat = build_text_model(
            EngineConfig().with_options(model=in_window("gpt_oss", 24), **options)
        )
        before = await chat.engine.snapshot()
        await (await chat.writer.submit(list(range(100)), GREEDY)).whole()
        after = await chat.engine.snapshot()
        chat.close()
        return before, after

    before, after = asyncio.run(found())
    assert before.window_pages == bytes(8)
    assert len(after.window_pages) == 8
    assert 0 < after.window_pages.count(PageState.CACHED) == after.stats.windows.num_cached


def test_too_few_pages_for_a_window_are_refused(in_window: Callable[..., str]) -> None:
    with pytest.raises(InvalidConfig, match="a request needs 4 pages of 16 tokens"):
        LLM(in_window("gpt_oss", 24), page_size=16, num_window_pages=3, **OPTIONS)


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried_disk")
def test_a_conversation_is_read_from_disk_after_a_restart(
    in_window: Callable[..., str], tmp_path: Path
) -> None:
    folder = in_window("gpt_oss", 24)
    draw = random.Random(8)
    first = [draw.randrange(500) for _ in range(150)]
    second = [*first, *(draw.randrange(500) for _ in range(20))]
    expected = dense_tokens(Path(folder), [first, second])
    options = {
        **OPTIONS,
        "page_size": 16,
        "num_window_pages": 20,
        "disk_cache_size": 1,
        "disk_cache_dir": str(tmp_path / "pages"),
    }
    with LLM(folder, **options) as llm:
        assert tokens(llm, [first]) == expected[:1]
    with LLM(folder, **options) as llm:
        [output] = llm.generate([second], GREEDY, use_tqdm=False)
        assert output.token_ids == expected[1]
        cache = output.usage.cache
        assert cache is not None
        assert cache.num_from_disk == cache.num_tokens == 144
        llm.check()
    with LLM(folder, **{**options, "num_window_pages": 0}) as llm:
        [output] = llm.generate([second], GREEDY, use_tqdm=False)
        cache = output.usage.cache
        assert cache is not None
        assert cache.num_from_disk == 0, "these pages have all layers in them"
        assert output.token_ids == expected[1]


@pytest.mark.long
@pytest.mark.usefixtures("unhurried_disk")
def test_preempted_answers_are_read_from_disk(
    in_window: Callable[..., str], tmp_path: Path
) -> None:
    folder = in_window("gpt_oss", 24)
    prompts = [[number, 2, 3] for number in range(4)]
    params = replace(GREEDY, max_tokens=150)
    with LLM(folder, page_size=16, num_window_pages=0, **OPTIONS) as llm:
        expected = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
    options = {**OPTIONS, "num_pages": 24, "preemption_mode": "swap"}
    with LLM(
        folder, page_size=16, num_window_pages=16, disk_cache_dir=str(tmp_path / "swap"), **options
    ) as llm:
        with begun_together(len(prompts)):
            found = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        assert found == expected
        stats = llm.stats().scheduler
        assert stats.num_preemptions > 0
        assert stats.swapped_tokens > 0
        llm.check()

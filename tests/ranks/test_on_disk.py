"""Ranks find on disk what they computed before, exactly, and compute what any of them has lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.redis_server import RedisServer
from tests.ranks.on_disk import PAGE, Found, found_by_ranks
from tests.ranks.workload import answers, answers_of_ranks

pytestmark = pytest.mark.ranks

WAYS = ("tensor", "pipeline")
# Full pages; windows; recurrent states beside pages. mlx-lm cannot divide the last one by heads.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gpt_oss": {"num_window_pages": 16},
    "qwen3_next": {"num_state_slots": 12},
}
FAULTS = ("lose 1", "damage 0", "damage 1")
# Of windows and states a request that misses one record computes the rest, and finds the next one missing later.
NUM_ASKED = 8
CASES = [
    (split, kind) for kind in KINDS for split in WAYS if (split, kind) != ("tensor", "qwen3_next")
]


def tokens(found: Found) -> list[Any]:
    return [[answer[0] for answer in asked] for asked in found]


def from_disk(asked: list[Any]) -> list[int]:
    return [answer[2] for answer in asked]


@pytest.mark.parametrize(("split", "kind"), CASES)
def test_a_restart_finds_the_pages_of_all_ranks_and_a_lost_part_is_a_miss(
    split: str, kind: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, options = model_folder(kind), {**KINDS[kind], "disk_cache_dir": str(tmp_path / "pages")}
    ranks = {**options, f"{split}_parallel_size": 2}
    [wanted] = tokens(
        found_by_ranks(folder, ["ask"], **{**options, "disk_cache_dir": str(tmp_path / "alone")})
    )
    first = found_by_ranks(folder, ["ask", "settle"], **ranks)
    assert tokens(first) == [wanted]
    assert from_disk(first[0]) == [0, 0, 0], "one process has other pages"
    plan = ["ask"]
    for fault in FAULTS:
        plan += ["settle", "forget", fault, *["ask", "settle", "forget"] * NUM_ASKED]
    found = found_by_ranks(folder, plan, **ranks)
    assert tokens(found) == [wanted] * len(found)
    whole = from_disk(found[0])
    assert whole[0] >= 5 * PAGE
    assert whole[2] >= 4 * PAGE
    for begin in range(1, len(found), NUM_ASKED):
        lossy, healed = found[begin], found[begin + NUM_ASKED - 1]
        assert sum(from_disk(lossy)) < sum(whole)
        assert from_disk(healed) == whole, "what a rank had lost was written again"


@pytest.mark.parametrize("split", WAYS)
def test_swapped_requests_of_ranks_answer_the_same(
    split: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        f"{split}_parallel_size": 2,
        "preemption_mode": "swap",
        "disk_cache_dir": str(tmp_path),
    }
    found = answers_of_ranks(model_folder("qwen3"), swapped=True, **options)
    assert found["num_swapped"] > 0
    wanted = answers(model_folder("qwen3"))
    for name in ("alone", "together", "seeded", "resized", "preempted"):
        assert found[name] == wanted[name], name


@pytest.mark.parametrize("split", WAYS)
def test_named_prefixes_of_ranks_are_kept_and_restored(
    split: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, ranks = model_folder("qwen3"), {f"{split}_parallel_size": 2}
    alone, shared = {"disk_cache_dir": str(tmp_path / "a")}, {"disk_cache_dir": str(tmp_path / "b")}
    [wanted] = tokens(found_by_ranks(folder, ["name", "named"], **alone))
    before = found_by_ranks(folder, ["name", "named", "settle"], **ranks, **shared)
    assert tokens(before) == [wanted]
    assert [answer[1] for answer in before[0]] == [2 * PAGE, 6 * PAGE]
    after = found_by_ranks(folder, ["named"], **ranks, **shared)
    assert tokens(after) == [wanted]
    assert after[0][0][1] >= 2 * PAGE


@pytest.mark.fleet
@pytest.mark.parametrize("split", WAYS)
def test_ranks_keep_their_parts_in_a_page_store(
    split: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, server = model_folder("qwen3"), RedisServer(tmp_path)
    options = {"page_store": server.url, "disk_cache_size": 0, f"{split}_parallel_size": 2}
    try:
        [before] = found_by_ranks(folder, ["ask", "settle"], **options)
        assert [answer[3] for answer in before] == [0, 0, 0]
        # A store that is slow for a moment is left alone, and its pages are computed.
        after = found_by_ranks(folder, ["ask", "settle", "forget"] * 4, **options)
    finally:
        server.stop()
    assert tokens(after) == tokens([before]) * 4
    assert max(answer[3] for asked in after for answer in asked) >= 5 * PAGE

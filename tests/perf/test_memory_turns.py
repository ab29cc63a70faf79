"""Windows and states compute little more than dense layers, wherever the bytes of all chats fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.perf import memory_turns
from tests.perf.cli import app
from tests.perf.memory_turns import Memory

GIB = 1 << 30


@pytest.mark.parametrize("kind", ["windows", "states"])
@pytest.mark.parametrize(("size", "num_chats", "num_tokens"), [(1.2, 2, 10_000), (4, 8, 4_000)])
def test_chats_whose_bytes_fit_compute_what_is_new(
    size: float, num_chats: int, num_tokens: int, kind: str
) -> None:
    memory = Memory(int(size * GIB), kind)
    assert memory.holds(num_chats, num_tokens + 6 * 360)
    assert memory_turns.in_turns(memory, num_chats, num_tokens) <= 1.5


@pytest.mark.parametrize("kind", ["windows", "states"])
def test_a_side_request_leaves_the_long_chat_its_end(kind: str) -> None:
    assert memory_turns.with_side_requests(Memory(int(1.2 * GIB), kind), 20_000) <= 1.5


@pytest.mark.parametrize("kind", ["windows", "states"])
def test_a_short_prompt_begins_beside_a_long_answer(kind: str) -> None:
    assert memory_turns.waited_beside(Memory(int(1.2 * GIB), kind), 10_000) <= 2


@pytest.mark.parametrize("kind", ["windows", "states"])
def test_one_request_reaches_the_longest_context(kind: str) -> None:
    assert memory_turns.reached(Memory(int(1.2 * GIB), kind)) >= 0.9


def test_the_command_shows_all_kinds_beside_dense_layers(tmp_path: Path) -> None:
    file = tmp_path / "turns.json"
    result = CliRunner().invoke(app, f"memory-turns --size 1.2 --json {file}")
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())["figures"]
    assert {figure["who"] for figure in figures} == {"windows", "states", "dense"}
    assert any(figure["name"] == "1.2 GiB: short prompt waits" for figure in figures)

"""`mlxserve search` against a small hub, and without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import constants

from tests.cli.commands import CommandResult, Run, error_line
from tests.cli.recording_server import RecordingServer

CARD = {"id": "mlx-community/gemma-3-4b-it-4bit", "downloads": 12_345, "tags": ["mlx"]}


@pytest.fixture
def search(
    server: RecordingServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., CommandResult]:
    """Searches the hub that `server` is."""
    # Without what the library asks the hub about the program that uses it.
    for name, value in {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_TELEMETRY": True}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    return partial(run, "search")


def test_models_for_mlx_and_in_gguf_are_searched_by_their_downloads(
    server: RecordingServer, search: Callable[..., CommandResult]
) -> None:
    server.answer([CARD])
    outcome = search("gemma", "4b", "--limit", "5")
    assert outcome.code == 0, outcome.err
    *known, first, second, advice = outcome.out.splitlines()
    assert [line.split()[1] for line in known] == ["gemma4:e4b", "gemma3:4b", "gemma3n:e4b"]
    assert known[1].split() == [CARD["id"], "gemma3:4b", "2.18", "GB"]
    assert first.split() == [CARD["id"], "mlx", "12,345", "downloads"]
    assert second.split()[:2] == [CARD["id"], "gguf"]
    assert "mlxserve pull NAME" in advice
    asked = [parse_qs(urlsplit(path).query) for _, path, _, _ in server.asked]
    assert [query["filter"] for query in asked] == [["mlx"], ["gguf"]]
    assert all(query["search"] == ["gemma 4b"] for query in asked)
    assert all((query["sort"], query["limit"]) == (["downloads"], ["5"]) for query in asked)
    [card, _] = json.loads(search("gemma", "--json").out)
    assert card == {"name": CARD["id"], "format": "mlx", "downloads": 12_345}


def test_nothing_found_is_said(
    server: RecordingServer, search: Callable[..., CommandResult]
) -> None:
    server.answer([])
    outcome = search("nosuchmodel")
    assert outcome.code == 0
    assert "No model for MLX or in GGUF is called 'nosuchmodel'" in outcome.out


@pytest.mark.parametrize("status", [400, 403])
def test_a_hub_that_refuses_is_one_line(
    server: RecordingServer, search: Callable[..., CommandResult], status: int
) -> None:
    server.answer({"error": "not now"}, status)
    assert "The hub cannot be searched now" in error_line(search("nosuchmodel"))


def test_without_a_network_the_list_of_models_is_named(offline: Run) -> None:
    line = error_line(offline("search", "nosuchmodel"))
    assert "The hub cannot be searched now" in line
    assert "`mlxserve models` lists" in line


def test_without_a_network_well_known_models_are_found(offline: Run) -> None:
    outcome = offline("search", "qwen3.8")
    assert [line.split()[1] for line in outcome.out.splitlines()] == [
        "qwen3.8:27b",
        "qwen3.8:27b-mtp",
    ]
    assert "The hub cannot be searched now" in outcome.err
    outcome = offline("search", "bge-m3")
    assert outcome.out.split() == ["BAAI/bge-m3", "bge-m3", "embedding"]

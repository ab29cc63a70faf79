"""Cards of chat templates are found out once, and anew when the model or what reads it changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxserve.cli import template_cards
from mlxserve.cli.template_cards import FILE_NAME, kept_card

CARD = {"tools": True, "variables": ["enable_thinking"], "controls": {"off": {}}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    return folder


class Reader:
    def __init__(self, card: dict[str, Any] | None) -> None:
        self.card = card
        self.num_reads = 0

    def __call__(self) -> dict[str, Any] | None:
        self.num_reads += 1
        return self.card


@pytest.mark.parametrize("card", [CARD, None])
def test_a_card_is_read_once(home: Path, model: Path, card: dict[str, Any] | None) -> None:
    reader = Reader(card)
    assert [kept_card(model, reader) for _ in range(3)] == [card] * 3
    assert reader.num_reads == 1
    (model / "model.safetensors").write_text("other weights")
    assert kept_card(model, reader) == card
    assert reader.num_reads == 1
    assert (home / FILE_NAME).stat().st_mode & 0o077 == 0


def test_it_is_read_again_after_a_change_of_the_model_or_of_a_package(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(CARD)
    kept_card(model, reader)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    kept_card(model, reader)
    (model / "chat_template.jinja").write_text("{{ messages[0] }}")
    kept_card(model, reader)
    assert reader.num_reads == 3
    monkeypatch.setattr(template_cards, "version", lambda package: f"{package} 9")
    kept_card(model, reader)
    assert reader.num_reads == 4


def test_of_a_gguf_file_its_own_state_counts(home: Path, tmp_path: Path) -> None:
    file, reader = tmp_path / "model.gguf", Reader(CARD)
    file.write_bytes(b"GGUF")
    assert [kept_card(file, reader) for _ in range(2)] == [CARD] * 2
    file.write_bytes(b"GGUF more")
    kept_card(file, reader)
    assert reader.num_reads == 2


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}'])
def test_a_damaged_file_is_written_anew(home: Path, model: Path, content: str) -> None:
    home.mkdir()
    (home / FILE_NAME).write_text(content)
    reader = Reader(CARD)
    assert [kept_card(model, reader) for _ in range(2)] == [CARD] * 2
    assert reader.num_reads == 1


def test_a_folder_that_cannot_be_written_keeps_nothing_and_fails_nothing(
    home: Path, model: Path
) -> None:
    home.write_text("a file in its place")
    reader = Reader(CARD)
    assert [kept_card(model, reader) for _ in range(2)] == [CARD] * 2
    assert reader.num_reads == 2


def test_the_oldest_cards_make_way(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_cards, "MAX_KEPT", 2)
    reader = Reader(CARD)
    for text in ("a", "bb", "ccc"):
        (model / "chat_template.jinja").write_text(text)
        kept_card(model, reader)
    assert len(json.loads((home / FILE_NAME).read_text())) == 2

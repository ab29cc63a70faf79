"""Folders for the programs and for the model's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.coding_agents import Workplace


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace.create(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder

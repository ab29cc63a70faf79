"""The fingerprint tells models apart by their contents, and not by place or time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlxserve.hub.files import check_folder


@pytest.fixture
def model(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A folder that a test may change."""
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))


def of(folder: Path) -> str:
    return check_folder(folder, folder.name).fingerprint


def test_a_copy_elsewhere_and_later_is_the_same_model(model: Path, tmp_path: Path) -> None:
    before = of(model)
    copy = Path(shutil.copytree(model, tmp_path / "another place"))
    for file in copy.iterdir():
        os.utime(file, (1e9, 1e9))
    assert of(copy) == before
    (copy / "README.md").write_text("about it")
    assert of(copy) == before


def change_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": 20_000.0}))


def change_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes() + b" ")


def change_numbers(folder: Path) -> None:
    """As a fine-tune of the same shapes: every number is another one."""
    [file] = folder.glob("model*.safetensors")
    content = bytearray(file.read_bytes())
    first = 8 + int.from_bytes(content[:8], "little")
    content[first:] = bytes(byte ^ 1 for byte in content[first:])
    file.write_bytes(content)


def change_name(folder: Path) -> None:
    [file] = folder.glob("model*.safetensors")
    file.rename(folder / "model-00001-of-00001.safetensors")


@pytest.mark.parametrize("change", [change_config, change_tokenizer, change_numbers, change_name])
def test_another_model_is_another_one(model: Path, change: Callable[[Path], None]) -> None:
    before = of(model)
    change(model)
    assert of(model) != before


def test_the_order_of_the_configuration_does_not_matter(model: Path) -> None:
    before = of(model)
    file = model / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(content.items())), indent=4))
    assert of(model) == before


def test_a_damaged_header_is_no_error(model: Path) -> None:
    files = check_folder(model, "m")
    [file] = files.weights
    file.write_bytes(b"\xff" * 100)
    assert len(replace(files).fingerprint) == 32
    file.write_bytes(b"")
    assert len(replace(files).fingerprint) == 32

"""Nothing that comes from a folder, a file or a model reaches the terminal as a control character."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import psutil
import pytest

from mlxserve.disk.files import DiskFiles
from mlxserve.hub.embedded import model_path
from tests.cli.commands import CommandResult, Run

# Sets the window's title and the clipboard, clears the screen, reorders and forges a line.
EVIL = "\x1b]0;owned\x07\x1b]52;c;aGk=\x07\x1b[2J\x9b\u202e\u2028\U000e0041\rok"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "home"


@pytest.fixture
def model(home: Path) -> Path:
    """The bundled model's files, in a folder with a hostile name."""
    folder = home / "models" / f"m{EVIL.replace('/', '')}"
    shutil.copytree(model_path(), folder)
    return folder


def check(outcome: CommandResult, code: int = 0) -> None:
    """It shows the text, escaped."""
    assert outcome.code == code, outcome
    written = outcome.out + outcome.err
    assert "\\x1b[2J" in written
    assert {char for char in written if not char.isprintable()} <= {"\n"}


def test_the_models_of_the_disk_cache(run: Run, tmp_path: Path) -> None:
    files = DiskFiles(tmp_path / "pages", b"a" * 16, EVIL)
    files.prepare()
    files.write(bytes(16), b"x")
    folder = ("--disk-cache-dir", str(tmp_path / "pages"))
    check(run("cache", "show", *folder))
    check(run("cache", "clear", "--model", "other", *folder), 1)


def test_the_models_of_running_servers(run: Run, home: Path) -> None:
    (home / "servers").mkdir(parents=True)
    started = psutil.Process().create_time()
    for name in ("one", EVIL):
        server = {
            "pid": os.getpid(),
            "url": "http://127.0.0.1:9",
            "model": name,
            "started": started,
        }
        (home / "servers" / f"{len(name)}.json").write_text(json.dumps(server))
    check(run("ps"))
    check(run("stop", "none of them"), 1)


def test_the_names_of_folders(run: Run, model: Path) -> None:
    check(run("list"))
    check(run("show", str(model)))
    check(run("run", "-m", str(model / "config.json"), "hi"), 1)


@pytest.mark.parametrize("key", ["model_type", "num_hidden_layers"])
def test_the_values_of_a_configuration(run: Run, model: Path, key: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: EVIL}))
    plain = model.rename(model.parent / "plain")
    check(run("run", "-m", str(plain), "hi"), 1)


@pytest.mark.slow
def test_what_a_chat_template_raises(run: Run, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ raise_exception(" + json.dumps(EVIL) + ") }}")
    plain = model.rename(model.parent / "plain")
    check(run("run", "-m", str(plain), "hi"), 1)


def test_an_exception_that_nobody_expected(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(EVIL)

    monkeypatch.setattr("mlxserve.hub.catalog.entries", fail)
    outcome = run("list")
    check(outcome, 1)
    assert outcome.err.startswith("Traceback")

"""`mlxserve cache` over the folder of a disk cache."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.disk.files import DiskFiles

Run = Callable[..., tuple[int, str, str]]
OLD = 1_000_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pages of one model, used long ago, and two of another one."""
    base = tmp_path / "pages"
    for model, identity, count in (("org/old", b"a" * 16, 3), ("new", b"b" * 16, 2)):
        files = DiskFiles(base, identity, model)
        files.prepare()
        for number in range(count):
            name = bytes([number]) * 16
            files.write(name, b"x" * (1 << 20))
            if model == "org/old":
                os.utime(files.path(name), (OLD + number, OLD + number))
    return base


def pages(folder: Path) -> int:
    return len(list(folder.rglob("*.page")))


def test_show_lists_the_models_last_used_first(run: Run, folder: Path) -> None:
    code, out, _ = run("cache", "show", "--disk-cache-dir", str(folder))
    assert code == 0
    first, *rows = out.splitlines()
    assert first == f"{folder}: 5.0 MiB"
    assert [row.split()[:5] for row in rows] == [
        ["new", "2", "pages", "2.0", "MiB"],
        ["org/old", "3", "pages", "3.0", "MiB"],
    ]
    assert rows[0].endswith("last used just now")
    assert rows[1].endswith("days ago")


def test_show_prints_json_for_programs(run: Run, folder: Path) -> None:
    _, out, _ = run("cache", "show", "--json", "--disk-cache-dir", str(folder))
    content = json.loads(out)
    assert content["folder"] == str(folder)
    assert [(m["model"], m["num_pages"]) for m in content["models"]] == [("new", 2), ("org/old", 3)]
    assert content["models"][1]["last_used"] == OLD + 2
    assert content["num_bytes"] == sum(m["num_bytes"] for m in content["models"])


def test_a_folder_that_is_not_there_is_empty(run: Run, tmp_path: Path) -> None:
    assert run("cache", "show", "--disk-cache-dir", str(tmp_path / "none"))[0] == 0
    code, out, _ = run("cache", "clear", "--disk-cache-dir", str(tmp_path / "none"))
    assert (code, out) == (0, "0 pages deleted, 0.0 MiB\n")


def test_clear_deletes_one_model_or_all(run: Run, folder: Path) -> None:
    where = ("--disk-cache-dir", str(folder))
    code, out, _ = run("cache", "clear", "--model", "org/old", *where)
    assert (code, out) == (0, "3 pages deleted, 3.0 MiB\n")
    assert pages(folder) == 2
    code, _, err = run("cache", "clear", "--model", "org/old", *where)
    assert code != 0
    assert "Models that have some: new." in err
    assert run("cache", "clear", *where)[0] == 0
    assert pages(folder) == 0


def test_clear_deletes_named_prefixes_if_told_so(run: Run, folder: Path) -> None:
    """Also of a model that has no pages any more."""
    models = [folder / identity.hex() for identity in (b"a" * 16, b"b" * 16)]
    for each in models:
        for name in ("prefixes.json", "prefixes.json.damaged"):
            (each / name).write_text("{}")
    where = ("--disk-cache-dir", str(folder))
    assert run("cache", "clear", *where)[0] == 0
    assert len(list(folder.rglob("prefixes.json*"))) == 4
    _, out, _ = run("cache", "clear", "--named-prefixes", *where)
    assert out == "4 files of named prefixes deleted\n0 pages deleted, 0.0 MiB\n"
    assert not list(folder.rglob("prefixes.json*"))


def test_clear_deletes_the_named_prefixes_of_one_model(run: Run, folder: Path) -> None:
    old, new = (folder / identity.hex() / "prefixes.json" for identity in (b"a" * 16, b"b" * 16))
    for file in (old, new):
        file.write_text("{}")
    where = ("--disk-cache-dir", str(folder), "--named-prefixes")
    assert run("cache", "clear", "--model", "org/old", *where)[0] == 0
    assert (old.exists(), new.exists()) == (False, True)


def test_resize_deletes_what_was_used_least_recently(run: Run, folder: Path) -> None:
    code, out, _ = run("cache", "resize", "0.004", "--disk-cache-dir", str(folder))
    assert (code, out) == (0, "1 page deleted, 1.0 MiB\n")
    assert not DiskFiles(folder, b"a" * 16).path(bytes([0]) * 16).exists()
    assert pages(folder) == 4


def test_the_files_of_others_stay(run: Run, tmp_path: Path) -> None:
    """Whatever folder somebody names."""
    other = tmp_path / "book" / "01" / "first.page"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    assert run("cache", "clear", "--disk-cache-dir", str(tmp_path))[0] == 0
    assert other.exists()


def test_the_folder_may_come_from_the_environment(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_DISK_CACHE_DIR", str(folder))
    assert run("cache", "show")[1].startswith(str(folder))

"""Fills a small disk that holds a user's files, and runs what frees space. A process of its own: see its test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mlxserve import cli
from mlxserve.api.access.keys import Scope, usual_file
from mlxserve.chat.prefix_store import PREFIX_FILE, NamedPrefix, PrefixStore
from mlxserve.cli.own_key import usual_keys
from mlxserve.disk.files import DiskFiles
from mlxserve.history.messages import Role
from mlxserve.history.store import Store
from tests.small_disk import fill


def run(*words: str) -> None:
    """Run a command, which must succeed."""
    print(" ".join(words), file=sys.stderr)
    sys.argv = ["mlxserve", *words]
    with pytest.raises(SystemExit, check=lambda ended: not ended.code):
        cli.main()


def main(home: Path) -> None:
    os.environ |= {
        **dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"), str(home)),
        "MLXSERVE_HOME": str(home / "own"),
        "MLXSERVE_DISK_CACHE_DIR": str(home / "pages"),
        "HF_HUB_CACHE": str(home / "hub"),
    }
    keys = usual_keys()
    for name in ("alice", "bob"):
        keys.create(name, Scope.USER)
    pages = DiskFiles(home / "pages", bytes(16), "a model")
    pages.prepare()
    for number in range(4):
        pages.write(bytes([number]) * 8, bytes(100_000))
    prefixes = PrefixStore(pages.folder / PREFIX_FILE)
    for name in ("kept", "removed"):
        prefixes.put(name, NamedPrefix(tuple(range(2_000)), b"salt"))
    store = Store.open(home / "own" / "chat.sqlite")
    chat = store.create_chat("a chat")
    store.add(chat.id, None, Role.USER, "words " * 20_000)
    store.close()

    fill(home)
    run("key", "revoke", "bob")
    assert [key.name for key in keys.read()] == ["owner", "alice"]
    prefixes.remove("removed")
    assert list(PrefixStore(pages.folder / PREFIX_FILE).sizes()) == ["kept"]
    store = Store.open(home / "own" / "chat.sqlite")
    fill(home)
    store.close()
    run("cache", "resize", "0.0003")
    fill(home)
    run("cache", "clear", "--named-prefixes")
    assert not list(pages.scan())
    fill(home)
    run("uninstall", "--all", "--yes")
    assert not list((home / "own").glob("*"))
    assert not usual_file().exists()
    print("all of it")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

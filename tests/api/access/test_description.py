"""What the operator is told of who gets in."""

from __future__ import annotations

from pathlib import Path

from mlxserve.api.access.description import describe, opened_without_key
from mlxserve.api.access.keys import KeyFile, Scope
from mlxserve.api.access.policy import AccessPolicy


def test_a_name_without_keys_says_what_it_opens(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    access = AccessPolicy(allowed_hosts=("box.example",), keys_file=file.path)
    opened = opened_without_key(access)
    assert opened is not None
    assert opened.startswith("--allowed-host box.example without an API key")
    assert "Chats, tools and downloads stay closed" in opened
    assert opened in dict(describe(access)).values()
    file.create("laptop", Scope.USER)
    assert opened_without_key(access) is None
    assert opened_without_key(AccessPolicy(hosts=("studio.local",))) is None

"""`mlxserve key`: keys are created, listed and revoked in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxserve.api.access.keys import KeyFile, Keyring, Scope
from tests.cli.commands import Run, error_line


@pytest.fixture(autouse=True)
def configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A configuration folder of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "mlxserve"


def test_a_key_is_created_listed_and_revoked(run: Run, configuration: Path) -> None:
    code, secret, _ = run("key", "create", "laptop", "--scope", "admin", "--max-requests", "4")
    assert code == 0
    ring = Keyring(file=KeyFile(configuration / "keys.json"))
    key = ring.find(secret.strip())
    assert key is not None
    assert key.scope is Scope.ADMIN
    _, listed, _ = run("key", "list")
    assert listed.split()[:2] == ["laptop", "admin"]
    assert "4 at once" in listed
    _, as_json, _ = run("key", "list", "--json")
    [shown] = json.loads(as_json)
    assert shown["name"] == "laptop"
    assert "sha256" not in shown
    assert run("key", "revoke", "laptop") == (0, "", "")
    assert ring.find(secret.strip()) is None
    assert run("key", "list")[1] == ""


@pytest.mark.parametrize(
    "args", [("revoke", "none"), ("create", "a b"), ("create", "x", "--file", "/dev/null/y")]
)
def test_a_mistake_is_one_line(args: tuple[str, ...], run: Run) -> None:
    assert error_line(run("key", *args))


def test_another_key_file_can_be_named(run: Run, configuration: Path, tmp_path: Path) -> None:
    run("key", "create", "laptop", "--file", str(tmp_path / "other.json"))
    assert [key.name for key in KeyFile(tmp_path / "other.json").read()] == ["laptop"]
    assert not configuration.exists()

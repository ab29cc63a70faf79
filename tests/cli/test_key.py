"""`mlxserve key`: keys are created, listed and revoked in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxserve.api.access.keys import KeyFile, Keyring, Scope
from mlxserve.cli.own_key import key_for, own_key, own_key_file
from mlxserve.cli.running_servers import registered
from tests.cli.commands import Run, error_line
from tests.cli.recording_server import RecordingServer


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
    assert run("key", "revoke", "laptop")[:2] == (0, "")
    assert ring.find(secret.strip()) is None
    assert run("key", "list")[1] == ""
    assert "There are no keys." in run("key", "list").err


@pytest.mark.parametrize(
    "args", [("revoke", "none"), ("create", "a b"), ("create", "x", "--file", "/dev/null/y")]
)
def test_a_mistake_is_one_line(args: tuple[str, ...], run: Run) -> None:
    assert error_line(run("key", *args))


def test_another_key_file_can_be_named(run: Run, configuration: Path, tmp_path: Path) -> None:
    run("key", "create", "laptop", "--file", str(tmp_path / "other.json"))
    assert [key.name for key in KeyFile(tmp_path / "other.json").read()] == ["laptop"]
    assert not configuration.exists()


def test_creating_a_key_says_what_changes_and_keeps_it_for_our_commands(
    run: Run, configuration: Path
) -> None:
    code, secret, said = run("key", "create", "first")
    assert code == 0
    assert "need a key in every request from now on" in said
    assert own_key() == ("first", secret.strip())
    assert own_key_file().stat().st_mode & 0o077 == 0
    _, _, said = run("key", "create", "second")
    assert "from now on" not in said
    assert own_key() == ("first", secret.strip()), "the first goes on"
    _, _, said = run("key", "revoke", "first")
    assert "Our own commands on this machine used it" in said
    assert own_key() is None
    third = run("key", "create", "third").out.strip()
    assert own_key() == ("third", third)
    assert run("key", "revoke", "second").err == ""
    assert "No key is left" in run("key", "revoke", "third").err
    assert own_key() is None


@pytest.mark.parametrize("flags", [("--scope", "metrics"), ("--file", "other.json")])
def test_a_key_for_others_is_not_kept(
    run: Run, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("key", "create", "other", *flags).code == 0
    assert own_key() is None


def test_the_kept_key_is_sent_to_servers_of_this_user_only(
    run: Run, server: RecordingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    secret = run("key", "create", "laptop").out.strip()
    server.answer({"data": []})
    assert key_for(server.url) is None
    run("prefix", "list", "--url", server.url)
    with registered(server.url, ["org/served"], needs_key=True):
        assert key_for(server.url) == secret
        run("prefix", "list")
        monkeypatch.setenv("MLXSERVE_API_KEY", "other-secret")
        assert key_for(server.url) == "other-secret"
    assert [key for *_, key in server.asked] == [None, f"Bearer {secret}"]

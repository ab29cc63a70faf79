import json
import sys

import pytest

from mlxserve import cli
from mlxserve.api.access.keys import KeyFile, Keyring, Scope


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the command with a configuration folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlxserve", *args])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), *capsys.readouterr()

    return run


def test_a_key_is_created_listed_and_revoked(run, tmp_path):
    code, secret, _ = run("key", "create", "laptop", "--scope", "admin", "--max-requests", "4")
    assert code == 0
    ring = Keyring(file=KeyFile(tmp_path / "mlxserve" / "keys.json"))
    assert ring.find(secret.strip()).scope is Scope.ADMIN
    _, listed, _ = run("key", "list")
    assert listed.split()[:2] == ["laptop", "admin"]
    assert "4 at once" in listed
    _, as_json, _ = run("key", "list", "--json")
    [told] = json.loads(as_json)
    assert told["name"] == "laptop"
    assert "sha256" not in told
    assert run("key", "revoke", "laptop") == (0, "", "")
    assert ring.find(secret.strip()) is None
    assert run("key", "list")[1] == ""


def test_a_mistake_is_one_line(run, tmp_path):
    for args in (("revoke", "none"), ("create", "a b"), ("create", "x", "--file", "/dev/null/y")):
        code, out, err = run("key", *args)
        assert (code, out) == (1, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_another_key_file_can_be_named(run, tmp_path):
    run("key", "create", "laptop", "--file", str(tmp_path / "other.json"))
    assert [key.name for key in KeyFile(tmp_path / "other.json").read()] == ["laptop"]
    assert not (tmp_path / "mlxserve").exists()

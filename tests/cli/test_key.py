"""`mlxserve key`: keys are created, listed and revoked in a file."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from mlxserve.api.access.keys import KeyFile, Keyring, Scope
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.cli.own_key import OwnKey, key_for, own_key_file, owner_key
from mlxserve.cli.running_servers import registered
from tests.api.fake_chat import FakeChat
from tests.api.serving import serving
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
    assert listed.splitlines()[1].split()[:2] == ["laptop", "admin"]
    assert "4 at once" in listed
    _, as_json, _ = run("key", "list", "--json")
    [_, shown] = json.loads(as_json)
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


def test_the_first_key_makes_one_of_our_own(run: Run, configuration: Path) -> None:
    code, secret, said = run("key", "create", "first")
    assert code == 0
    assert "need a key in every request from now on" in said
    assert "A key of your own, 'owner', was made too" in said
    name, own = kept()
    assert name == "owner"
    assert own != secret.strip()
    assert own_key_file().stat().st_mode & 0o077 == 0
    _, _, said = run("key", "create", "second")
    assert "from now on" not in said
    assert "your own" not in said
    assert kept() == (name, own)
    listed = run("key", "list").out.splitlines()
    assert [line.split()[0] for line in listed] == ["owner", "first", "second"]
    assert ["yours" in line for line in listed] == [True, False, False]
    marks = [one["is_owner"] for one in json.loads(run("key", "list", "--json").out)]
    assert marks == [True, False, False]


def test_a_revoked_key_of_our_own_is_replaced_and_goes_with_the_last_other_one(run: Run) -> None:
    run("key", "create", "first")
    run("key", "create", "second", "--scope", "metrics")
    before = kept()
    assert "use a new key of yours, 'owner'" in run("key", "revoke", "owner").err
    assert kept()[0] == "owner"
    assert kept() != before
    assert run("key", "revoke", "first").err == ""
    assert "No key is left" in run("key", "revoke", "second").err
    assert not own_key_file().exists()
    assert run("key", "list").out == ""


@pytest.mark.parametrize("name", ["owner", "Owner"])
def test_nobody_else_is_given_its_name(run: Run, name: str) -> None:
    assert "reserved for your own key" in error_line(run("key", "create", name))


def test_keys_of_another_file_have_none_of_our_own_beside_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, said = run("key", "create", "other", "--file", "other.json")
    assert code == 0
    assert "your own" not in said
    assert not own_key_file().exists()
    assert [key.name for key in KeyFile(Path("other.json")).read()] == ["other"]


def kept() -> tuple[str, str]:
    """The name and the text of the key in own-key.json."""
    found = OwnKey().read()
    assert found is not None
    return found


# ---- what earlier versions left


def given_away(configuration: Path, name: str = "colleague") -> str:
    """A key that an earlier version made for a colleague and kept for our own commands as well."""
    plain = KeyFile(configuration / "keys.json")
    secret = plain.create(name, Scope.USER, requests_per_minute=1)
    OwnKey().keep(name, secret)
    return secret


def test_a_key_that_was_given_away_is_replaced_at_the_next_command_that_needs_one(
    run: Run, server: RecordingServer, configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(configuration.parent))
    secret = given_away(configuration)
    server.answer({"data": []})
    with registered(server.url, ["org/served"], needs_key=True):
        assert run("prefix", "list", "--url", "http://127.0.0.1:1").code == 1
        assert kept() == ("colleague", secret), "that server is none of ours"
        outcome = run("prefix", "list")
        assert outcome.code == 0
        told, none = outcome.err.splitlines()
        assert "have a key of their own now" in told
        assert "'colleague' belongs to whoever you gave it to" in told
        assert run("prefix", "list").err.splitlines() == [none]
    [first, second] = [key for *_, key in server.asked]
    assert first == second == f"Bearer {kept()[1]}" != f"Bearer {secret}"
    ring = Keyring(file=KeyFile(configuration / "keys.json"))
    owner, colleague = ring.find(kept()[1]), ring.find(secret)
    assert owner is not None
    assert colleague is not None
    assert (owner.is_owner, colleague.is_owner) == (True, False)


@pytest.mark.parametrize("lost", ["removed", "damaged", "another's"])
def test_a_key_of_our_own_that_is_lost_is_made_again(
    run: Run, configuration: Path, lost: str
) -> None:
    run("key", "create", "colleague")
    if lost == "removed":
        own_key_file().unlink()
    elif lost == "damaged":
        own_key_file().write_text("{")
    else:
        OwnKey().keep("colleague", "mlxserve-x")
    told: list[str] = []
    secret = owner_key(told.append)
    assert len(told) == 1
    assert secret == kept()[1]
    keys = KeyFile(configuration / "keys.json").read()
    assert [key.name for key in keys] == ["owner", "colleague"]
    assert OwnKey().fits(keys[0])


def test_a_key_file_that_cannot_be_trusted_is_named(
    run: Run, server: RecordingServer, configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(configuration.parent))
    run("key", "create", "colleague")
    (configuration / "keys.json").chmod(0o644)
    with registered(server.url, ["org/served"], needs_key=True):
        assert "chmod 600" in error_line(run("prefix", "list"))
        listed = run("ps")
        assert (listed.code, server.url in listed.out) == (0, True)
    assert server.asked == []


# ---- the commands and a colleague, on one server


def test_our_own_commands_share_no_limit_and_no_pages_with_a_colleague(
    run: Run, configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(configuration.parent))
    file = configuration / "keys.json"
    chat = FakeChat()
    with (
        serving(chat, access=AccessPolicy(keys_file=file)) as real,
        registered(real.url, [chat.model_name], needs_key=False),
    ):
        before = run("run", "hi")
        secret = run("key", "create", "colleague", "--requests-per-minute", "1").out.strip()
        assert [run("run", "hi") for _ in range(2)] == [before] * 2 == [(0, "Hello\n", "")] * 2
        headers = {"authorization": f"Bearer {secret}"}
        body = {"messages": [{"role": "user", "content": "hi"}]}
        url = f"{real.url}/v1/chat/completions"
        statuses = [httpx.post(url, json=body, headers=headers).status_code for _ in range(2)]
        assert statuses == [200, 429]
        *ours, theirs = [one.cache_salt for one in chat.submitted]
        assert set(ours) == {None}
        assert theirs.startswith("colleague-")


def test_the_kept_key_is_sent_to_servers_of_this_user_only(
    run: Run, server: RecordingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    run("key", "create", "laptop")
    secret = kept()[1]
    server.answer({"data": []})
    assert key_for(server.url) is None
    run("prefix", "list", "--url", server.url)
    with registered(server.url, ["org/served"], needs_key=True):
        assert key_for(server.url) == secret
        run("prefix", "list")
        monkeypatch.setenv("MLXSERVE_API_KEY", "other-secret")
        assert key_for(server.url) == "other-secret"
    assert [key for *_, key in server.asked] == [None, f"Bearer {secret}"]

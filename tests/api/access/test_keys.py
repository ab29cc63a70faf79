from __future__ import annotations

import json
import logging
import os
import stat
import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.keys import Key, KeyFile, Keyring, Scope, digest_of
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.core.errors import InvalidConfig
from tests.api.fake_chat import FakeChat


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "config" / "keys.json")


def test_a_key_is_shown_once_and_stored_as_a_digest(file: KeyFile) -> None:
    secret = file.create("laptop", Scope.USER, max_requests=3)
    assert len(secret) > 50
    assert secret not in file.path.read_text()
    [key] = file.read()
    assert (key.name, key.scope, key.max_requests) == ("laptop", Scope.USER, 3)
    assert key.sha256 == digest_of(secret)
    assert len(key.created) == len("2026-01-31")


def test_a_key_may_be_for_some_models(file: KeyFile) -> None:
    file.create("all", Scope.USER)
    file.create("some", Scope.USER, models=["org/one", "two"])
    assert [key.models for key in file.read()] == [(), ("org/one", "two")]
    before = json.loads(file.path.read_text())
    for entry in before["keys"]:
        del entry["models"]  # as earlier versions wrote them
    file.path.write_text(json.dumps(before))
    assert [key.models for key in file.read()] == [(), ()]
    for models in ("two", [2]):
        before["keys"][0]["models"] = models
        file.path.write_text(json.dumps(before))
        with pytest.raises(InvalidConfig, match=r"is damaged: .* not a list of names"):
            file.read()


def test_only_the_owner_can_read_the_key_file_and_its_folder(file: KeyFile) -> None:
    file.create("laptop", Scope.USER)
    file.create("desk", Scope.ADMIN)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in file.path.parent.iterdir()] == ["keys.json"]


def test_a_planted_link_is_not_written_through(file: KeyFile, tmp_path: Path) -> None:
    """Neither at the file's path, nor at the path where a new one is written first."""
    victim = tmp_path / "victim"
    victim.write_text('{"keys": []}')
    victim.chmod(0o600)
    file.path.parent.mkdir(mode=0o700)
    for place in (file.path, file.path.with_name("keys.json.new")):
        place.symlink_to(victim)
    file.create("laptop", Scope.USER)
    assert victim.read_text() == '{"keys": []}'
    assert not file.path.is_symlink()
    assert [key.name for key in file.read()] == ["laptop"]


def test_a_key_name_can_only_be_used_once(file: KeyFile) -> None:
    file.create("laptop", Scope.USER)
    with pytest.raises(InvalidConfig, match="There is already a key named 'laptop'"):
        file.create("laptop", Scope.ADMIN)
    with pytest.raises(InvalidConfig, match="is not valid"):
        file.create("a b", Scope.USER)


def test_revoking_removes_a_key_and_an_unknown_one_is_an_error(file: KeyFile) -> None:
    file.create("laptop", Scope.USER)
    file.create("desk", Scope.USER)
    file.revoke("laptop")
    assert [key.name for key in file.read()] == ["desk"]
    with pytest.raises(InvalidConfig, match="no key named 'laptop'; known: desk"):
        file.revoke("laptop")


def test_keys_created_concurrently_are_all_stored(file: KeyFile) -> None:
    threads = [
        threading.Thread(target=file.create, args=(f"key{number}", Scope.USER))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in file.read()} == {f"key{number}" for number in range(8)}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"keys": [{"name": "a"}]}',
        '{"keys": [{"name": "a", "sha256": "x", "scope": "user"}]}',
        json.dumps({"keys": [{"name": "a", "sha256": "0" * 64, "scope": "king"}]}),
        json.dumps({"keys": [{"name": "a", "sha256": "0" * 64, "scope": "user", "max_requests": 0}]}),
        "[" * 100_000,
    ],
    ids=lambda text: text[:60],
)  # fmt: skip
def test_a_damaged_file_is_refused(file: KeyFile, text: str) -> None:
    file.path.parent.mkdir()
    file.path.write_text(text)
    file.path.chmod(0o600)
    with pytest.raises(InvalidConfig, match=r"cannot be read|is damaged"):
        Keyring(file=file)


def test_a_file_is_never_longer_than_what_is_read(file: KeyFile) -> None:
    file.create("laptop", Scope.USER)
    [key] = json.loads(file.path.read_text())["keys"]
    one, two = (len(json.dumps({"keys": [key] * count}, indent=2)) for count in (1, 2))
    most = 1 + ((1 << 20) - one) // (two - one)
    keys = [{**key, "name": f"{number:06}"} for number in range(most)]
    file.path.write_text(json.dumps({"keys": keys}, indent=2))
    with pytest.raises(InvalidConfig, match="no room for another key"):
        file.create("tablet", Scope.USER)
    assert len(file.read()) == len(keys) > 1_000


def test_a_file_that_others_can_read_is_refused(file: KeyFile) -> None:
    file.create("laptop", Scope.USER)
    file.path.chmod(0o644)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        Keyring(file=file)


def test_a_ring_follows_its_file(file: KeyFile) -> None:
    ring = Keyring(file=file)
    assert not ring.is_locked
    secret = file.create("laptop", Scope.ADMIN)
    assert ring.is_locked
    assert ring.find(secret).scope is Scope.ADMIN
    assert ring.find(f"{secret}x") is None
    file.revoke("laptop")
    assert ring.find(secret) is None
    assert not ring.is_locked, "no key is left"


def test_a_ring_that_stays_locked_accepts_nobody_once_its_last_key_is_revoked(
    file: KeyFile,
) -> None:
    secret = file.create("laptop", Scope.USER)
    ring = Keyring(file=file, stays_locked=True)
    file.revoke("laptop")
    assert ring.find(secret) is None
    assert ring.is_locked


def test_a_file_that_is_gone_opens_nothing(file: KeyFile) -> None:
    file.create("laptop", Scope.USER)
    ring = Keyring(file=file)
    file.path.unlink()
    assert ring.is_locked


def test_revoking_the_last_key_takes_effect_on_a_running_server(
    chat: FakeChat, file: KeyFile
) -> None:
    secret = file.create("laptop", Scope.USER)
    app = create_app(chat, access=AccessPolicy(keys_file=file.path))
    client = TestClient(app, base_url="http://127.0.0.1")
    assert client.get("/v1/models").status_code == 401
    assert (
        client.get("/v1/models", headers={"authorization": f"Bearer {secret}"}).status_code == 200
    )
    file.revoke("laptop")
    assert client.get("/v1/models").status_code == 200
    file.create("laptop", Scope.USER)
    assert client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("harm", ["chmod", "remove", "damage", "deep", "large", "fifo", "folder"])
def test_the_keys_of_an_untrusted_file_are_not_accepted(
    file: KeyFile, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret = file.create("laptop", Scope.USER)
    ring = Keyring([Key.from_secret("other-secret", Scope.USER)], file)
    assert ring.find(secret)
    if harm == "chmod":
        file.path.chmod(0o644)
    elif harm == "remove":
        file.path.unlink()
    elif harm in ("fifo", "folder"):
        file.path.unlink()
        os.mkfifo(file.path, 0o600) if harm == "fifo" else file.path.mkdir(0o700)
    else:
        content = {
            "damage": "{",
            "deep": "[" * 100_000,
            "large": file.path.read_text() + " " * 2**20,
        }
        file.path.write_text(content[harm])
    with caplog.at_level(logging.ERROR):
        assert ring.find(secret) is None
    assert bool(caplog.records) == (harm != "remove")
    assert ring.find("other-secret")
    assert ring.is_locked


def test_a_new_key_with_a_revoked_name_has_another_id(file: KeyFile) -> None:
    ring = Keyring(file=file)
    first = ring.find(file.create("laptop", Scope.USER))
    file.revoke("laptop")
    second = ring.find(file.create("laptop", Scope.USER))
    assert first.id != second.id
    assert first.id.startswith("laptop-")


def test_admin_routes_need_an_admin_key(chat: FakeChat, file: KeyFile) -> None:
    user, admin = (file.create(scope, Scope(scope)) for scope in ("user", "admin"))
    app = create_app(chat, access=AccessPolicy(keys_file=file.path))
    client = TestClient(app, base_url="http://127.0.0.1")

    def reset(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return client.post("/api/v1/cache/reset", headers=headers).status_code

    assert (reset(user), reset(admin), reset("x")) == (403, 200, 401)
    late = file.create("late", Scope.ADMIN)
    assert reset(late) == 200
    file.revoke("admin")
    assert reset(admin) == 401


def test_totals_of_all_keys_need_the_scope_metrics_or_admin(chat: FakeChat, file: KeyFile) -> None:
    keys = {scope: file.create(scope, scope) for scope in Scope}
    app = create_app(chat, access=AccessPolicy(keys_file=file.path))
    client = TestClient(app, base_url="http://127.0.0.1")

    def status(path: str, scope: Scope) -> int:
        headers = {"authorization": f"Bearer {keys[scope]}"}
        return client.get(path, headers=headers).status_code

    def ready(scope: Scope) -> set[str]:
        headers = {"authorization": f"Bearer {keys[scope]}"}
        return {*client.get("/ready", headers=headers).json()}

    scopes = (Scope.USER, Scope.METRICS, Scope.ADMIN)
    assert [status("/metrics", scope) for scope in scopes] == [403, 200, 200]
    assert [status("/api/v1/kv/stats", scope) for scope in scopes] == [403, 403, 200]
    assert [status("/v1/models", scope) for scope in scopes] == [200, 403, 200]
    assert status("/api/v1/kv/map", Scope.USER) == 403
    assert ready(Scope.USER) == {"status", "model"}
    assert "num_requests_running" in ready(Scope.METRICS) & ready(Scope.ADMIN)
    body = {"prompt": "x"}
    headers = {"authorization": f"Bearer {keys[Scope.METRICS]}"}
    refused = client.post("/v1/completions", json=body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "metrics_only")
    assert chat.submitted == []

"""The owner's key: who has it, what it reaches, and that no other key reaches the same."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxserve.api.access import same_user
from mlxserve.api.access.keys import Key, KeyFile, Keyring, Scope
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.core.errors import InvalidConfig
from mlxserve.history.store import Store
from mlxserve.text.deltas import Delta
from tests.api.access.kept_secret import KeptSecret
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.serving import StartServer

CHATS, MODELS, RESPONSES = "/api/v1/chats", "/v1/models", "/v1/responses"
TOTALS = "/api/v1/kv/stats"
# Earlier versions refuse a file with others, and with it every key.
EARLIER_FIELDS = {
    "name",
    "sha256",
    "scope",
    "created",
    "max_requests",
    "requests_per_minute",
    "models",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "home"


@pytest.fixture
def own() -> KeptSecret:
    return KeptSecret()


@pytest.fixture
def file(tmp_path: Path, own: KeptSecret) -> KeyFile:
    return KeyFile(tmp_path / "keys.json", own)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


# ---- the key in its file


def test_the_first_key_makes_the_owners(file: KeyFile, own: KeptSecret) -> None:
    colleague = file.create("colleague", Scope.USER, requests_per_minute=1)
    owner, other = file.read()
    assert (owner.name, owner.scope, owner.is_owner) == ("owner", Scope.ADMIN, True)
    assert (owner.max_requests, owner.requests_per_minute, owner.models) == (None, None, ())
    assert (other.name, other.is_owner) == ("colleague", False)
    assert own.fits(owner)
    assert own.secret != colleague
    file.create("second", Scope.METRICS)
    assert [key.name for key in file.read()] == ["owner", "colleague", "second"]
    assert own.fits(owner), "it stays"


@pytest.mark.parametrize("name", ["owner", "Owner", "OWNER"])
def test_no_other_key_takes_its_name(file: KeyFile, name: str) -> None:
    with pytest.raises(InvalidConfig, match="reserved for your own key"):
        file.create(name, Scope.ADMIN)
    assert file.read() == ()


def test_a_key_of_an_earlier_version_with_its_name_is_not_the_owners(
    file: KeyFile, own: KeptSecret
) -> None:
    plain = KeyFile(file.path)
    plain.create("colleague", Scope.ADMIN)
    content = json.loads(file.path.read_text())
    content["keys"][0]["name"] = "owner"
    file.path.write_text(json.dumps(content))
    file.renew_owner()
    owner, given = file.read()
    assert (owner.name, owner.is_owner, own.name) == ("owner-2", True, "owner-2")
    assert (given.name, given.is_owner) == ("owner", False)
    file.revoke("owner")
    assert file.read() == (), "the last key of somebody else"


def test_a_revoked_owners_key_is_replaced_and_ends_with_the_last_other_key(
    file: KeyFile, own: KeptSecret
) -> None:
    file.create("colleague", Scope.USER)
    before = own.secret
    file.revoke("owner")
    owner, _ = file.read()
    assert own.fits(owner)
    assert own.secret != before
    file.revoke("colleague")
    assert file.read() == ()
    assert own.secret == ""


def test_it_is_renewed_only_where_its_text_is_lost(file: KeyFile, own: KeptSecret) -> None:
    file.renew_owner()
    assert file.read() == ()
    file.create("colleague", Scope.USER)
    kept = own.secret
    file.renew_owner()
    assert own.secret == kept
    own.forget()
    file.renew_owner()
    [owner, _] = file.read()
    assert own.secret not in ("", kept)
    assert own.fits(owner)


def test_an_owners_key_without_the_scope_admin_is_refused(file: KeyFile) -> None:
    file.create("colleague", Scope.USER)
    content = json.loads(file.path.read_text())
    file.path.write_text(json.dumps({**content, "owner": "colleague"}))
    with pytest.raises(InvalidConfig, match="is damaged"):
        Keyring(file=file)


@pytest.mark.parametrize("owner", [None, "nobody", 1, ["owner"]])
def test_a_file_that_names_no_owner_has_none(file: KeyFile, own: KeptSecret, owner: Any) -> None:
    """As one that an earlier version wrote, in which the owner's key was one of many."""
    file.create("colleague", Scope.USER)
    content = json.loads(file.path.read_text())
    assert {*content["keys"][0]} == {*content["keys"][1]} == EARLIER_FIELDS
    file.path.write_text(json.dumps({**content, "owner": owner}))
    assert Keyring(file=file).owner is None
    file.renew_owner()
    assert [(key.name, key.is_owner) for key in file.read()] == [
        ("owner-2", True),
        ("owner", False),
        ("colleague", False),
    ]


# ---- who has it


def test_the_owners_programs_need_no_key_here(
    file: KeyFile, own: KeptSecret, start_server: StartServer
) -> None:
    url = start_server(access=AccessPolicy(keys_file=file.path)).url
    user = file.create("colleague", Scope.USER)
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get(TOTALS).status_code == 200
        assert client.get(TOTALS, headers=bearer(own.secret)).status_code == 200
        assert client.get(TOTALS, headers=bearer(user)).status_code == 403
        for wrong in (bearer("x"), {"authorization": ""}, {"x-api-key": ""}, {"x-api-key": "x"}):
            assert client.get(MODELS, headers=wrong).status_code == 401, wrong
        file.revoke("owner")
        assert client.get(TOTALS).status_code == 200
        file.path.chmod(0o644)
        assert client.get(MODELS).status_code == 401, "no key of an untrusted file is valid"


# Signs that a request was passed on from elsewhere, with what the server was started with.
PASSED_ON: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"x-forwarded-for": "203.0.113.9"}, {}),
    ({"X-Forwarded-Proto": "https"}, {}),
    ({"x-forwarded-user": "root"}, {}),
    ({"forwarded": "for=203.0.113.9"}, {}),
    ({"via": "1.1 box.example"}, {}),
    ({"x-real-ip": "203.0.113.9"}, {}),
    ({"cf-connecting-ip": "203.0.113.9"}, {}),
    ({"True-Client-IP": "203.0.113.9"}, {}),
    ({"x-client-ip": "203.0.113.9"}, {}),
    ({"host": "box.example"}, {"allowed_hosts": ["box.example"]}),
    ({"host": "box.local"}, {}),
    ({"host": "10.0.0.7"}, {}),
    ({"host": "0.0.0.0:8000"}, {}),
    ({"host": "mlx.localhost"}, {}),
    ({"origin": "app://obsidian.md"}, {}),
    ({"origin": "file://"}, {}),
    ({"host": "192.0.2.2:8000"}, {"any_address": True}),
    ({"origin": "https://chat.example"}, {"origins": ["https://chat.example"]}),
    ({}, {"is_behind_proxy": True}),
]


@pytest.mark.parametrize(("headers", "access"), PASSED_ON)
@pytest.mark.parametrize("has_keys", [False, True])
def test_a_request_that_was_passed_on_is_not_the_owners(
    file: KeyFile,
    start_server: StartServer,
    headers: dict[str, str],
    access: dict[str, Any],
    has_keys: bool,
) -> None:
    url = start_server(access=AccessPolicy(keys_file=file.path, **access)).url
    if has_keys:
        file.create("colleague", Scope.USER)
    with httpx.Client(base_url=url, timeout=60) as client:
        if "is_behind_proxy" not in access:
            assert client.get(CHATS).status_code == 200
        for path in (CHATS, "/api/v1/tools", "/api/v1/downloads"):
            status = client.get(path, headers=headers).status_code
            assert status == (401 if has_keys else 403), path
        if "is_behind_proxy" not in access:
            assert client.get(CHATS).status_code == 200, "the same connection"


@pytest.mark.parametrize(("version", "status"), [("1.0", b"401"), ("1.1", b"200")])
def test_a_request_in_http_1_0_may_have_been_passed_on(
    file: KeyFile, start_server: StartServer, version: str, status: bytes
) -> None:
    port = start_server(access=AccessPolicy(keys_file=file.path)).port
    file.create("colleague", Scope.USER)
    head = f"GET {MODELS} HTTP/{version}\r\nhost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
        peer.sendall(head.encode())
        assert peer.recv(4_096).split()[1] == status


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000"])
def test_loopback_names_are_the_owners(file: KeyFile, start_server: StartServer, host: str) -> None:
    url = start_server(access=AccessPolicy(keys_file=file.path)).url
    file.create("colleague", Scope.USER)
    assert httpx.get(url + MODELS, headers={"host": host}, timeout=60).status_code == 200


def test_another_user_of_the_machine_needs_a_key(
    file: KeyFile, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = start_server(access=AccessPolicy(keys_file=file.path)).url
    user = file.create("colleague", Scope.USER)
    me = same_user.os.getuid()
    monkeypatch.setattr(same_user.os, "getuid", lambda: me + 12_345)
    monkeypatch.setattr(same_user, "ROOT", me + 12_345)
    assert httpx.get(url + MODELS, timeout=60).status_code == 401
    assert httpx.get(url + MODELS, headers=bearer(user), timeout=60).status_code == 200


def test_keys_of_the_operator_alone_leave_nobody_without_one(start_server: StartServer) -> None:
    access = AccessPolicy(api_keys=["a-key-of-the-tests"], admin_keys=["an-admin-of-the-tests"])
    assert httpx.get(start_server(access=access).url + MODELS, timeout=60).status_code == 401


def test_a_connection_is_looked_at_once(
    file: KeyFile, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def look(client: tuple[str, int], _port: int) -> bool:
        looks.append(client[1])
        return True

    monkeypatch.setattr(same_user, "is_same_user", look)
    url = start_server(access=AccessPolicy(keys_file=file.path)).url
    file.create("colleague", Scope.USER)
    for _ in range(2):
        with httpx.Client(base_url=url, timeout=60) as client:
            assert [client.get(MODELS).status_code for _ in range(3)] == [200] * 3
    assert len(looks) == len(set(looks)) == 2


# ---- what it reaches


def titles(client: httpx.Client, **headers: str) -> list[str]:
    return [one["title"] for one in client.get(CHATS, headers=headers).json()["data"]]


def test_the_owner_and_a_colleague_share_nothing(
    chat: FakeChat, file: KeyFile, own: KeptSecret, start_server: StartServer, home: Path
) -> None:
    terminal = Store.open(home / "chat.sqlite")
    terminal.create_chat("From the terminal")
    terminal.close()
    url = start_server(access=AccessPolicy(keys_file=file.path)).url
    colleague = bearer(file.create("colleague", Scope.USER))
    with httpx.Client(base_url=url, timeout=60) as client:
        for headers in ({}, bearer(own.secret)):
            client.post(CHATS, json={"title": f"Mine {len(headers)}"}, headers=headers)
            body = {"input": "Hi"}
            stored = client.post(RESPONSES, json=body, headers=headers).json()["id"]
            salt, sender = chat.submitted[-1].cache_salt, chat.submitted[-1].client
            client.post(RESPONSES, json=body, headers=colleague)
            assert chat.submitted[-1].cache_salt != salt
            assert chat.submitted[-1].client != sender
            found = [
                client.get(f"{RESPONSES}/{stored}", headers=one).status_code
                for one in ({}, bearer(own.secret), colleague)
            ]
            assert found == [200, 200, 404]
        client.post(CHATS, json={"title": "Theirs"}, headers=colleague)
        mine = {"From the terminal", "Mine 0", "Mine 1"}
        assert set(titles(client)) == set(titles(client, **bearer(own.secret))) == mine
        assert titles(client, **colleague) == ["Theirs"]


def test_what_was_there_before_the_first_key_stays_the_owners(
    chat: FakeChat, file: KeyFile, start_server: StartServer
) -> None:
    url = start_server(access=AccessPolicy(keys_file=file.path)).url
    with httpx.Client(base_url=url, timeout=60) as client:

        def asks() -> Any:
            assert client.post(
                "/v1/completions", json={"prompt": "x", "prefix_name": "p"}
            ).is_success
            return chat.submitted[-1].cache_salt

        client.put("/v1/prefixes/p", json={"prompt": "rules"})
        stored = client.post(RESPONSES, json={"input": "Hi"}).json()["id"]
        before = asks()
        user = bearer(file.create("colleague", Scope.USER))
        body = {"prompt": "x", "prefix_name": "p"}
        assert client.post("/v1/completions", json=body, headers=user).status_code == 404
        assert asks() == before
        file.revoke("owner")
        assert asks() == before
        file.revoke("colleague")
        assert asks() == before
        assert client.get(f"{RESPONSES}/{stored}").status_code == 200


def test_no_limit_holds_for_the_owner(
    file: KeyFile, own: KeptSecret, start_server: StartServer
) -> None:
    access = AccessPolicy(
        keys_file=file.path, max_requests_per_key=1, requests_per_minute_per_key=1
    )
    url = start_server(access=access).url
    user = bearer(file.create("colleague", Scope.USER))

    def asks(headers: dict[str, str]) -> list[int]:
        body = {"prompt": "x", "n": 2}
        replies = [
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
            for _ in range(2)
        ]
        return [reply.status_code for reply in replies]

    assert asks({}) == asks(bearer(own.secret)) == [200, 200]
    assert asks(user) == [429, 429]


@pytest.mark.parametrize(
    ("revoked", "ends"), [("owner", True), ("colleague", False)], ids=lambda value: str(value)
)
def test_running_answers_end_with_the_owners_key_but_not_where_no_key_is_needed_any_more(
    chat: FakeChat,
    file: KeyFile,
    own: KeptSecret,
    start_server: StartServer,
    revoked: str,
    ends: bool,
) -> None:
    chat.script = [Delta("Hel", (1,), ()), HOLD]
    file.create("colleague", Scope.USER)
    url = start_server(access=AccessPolicy(keys_file=file.path)).url
    body = {"prompt": "x", "stream": True}
    headers = bearer(own.secret)
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60
    ) as reply:
        assert chat.on_hold.wait(timeout=60)
        file.revoke(revoked)
        while httpx.get(url + MODELS, headers=headers, timeout=60).status_code != (
            401 if ends else 200
        ):
            pass
        if not ends:
            chat.release()
        assert ("was revoked" in reply.read().decode()) == ends


def test_a_ring_tells_of_the_owners_key_only_while_it_stays_locked(file: KeyFile) -> None:
    told: list[Key] = []
    file.create("colleague", Scope.USER)
    ring = Keyring(file=KeyFile(file.path))
    ring.on_revoked(told.append)
    assert ring.owner is not None
    file.revoke("owner")
    ring.refresh()
    assert [key.name for key in told] == ["owner"]
    file.revoke("colleague")
    ring.refresh()
    assert [key.name for key in told] == ["owner", "colleague"]
    assert (ring.owner, ring.is_locked) == (None, False)

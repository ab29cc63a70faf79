from __future__ import annotations

from typing import Any

import httpx2
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.access.security import is_loopback
from mlxserve.api.app import create_app
from tests.api.fake_chat import FakeChat

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
PAGE = "https://chat.example"


def client_of(chat: FakeChat, **access: Any) -> TestClient:
    app = create_app(chat, access=AccessPolicy(**access))
    return TestClient(app, base_url="http://127.0.0.1:8000")


def all_routes(chat: FakeChat) -> list[tuple[str, str]]:
    app = create_app(chat)
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes) >= 6
    return [
        (method, route.path.replace("{name:path}", "fake").replace("{name}", "p"))
        for route in routes
        for method in sorted(route.methods or ())
    ]


def word_of(reply: httpx2.Response) -> str:
    """OpenAI's code of an error, Anthropic's type of it, or Ollama's sentence."""
    error = reply.json()["error"]
    if isinstance(error, str):
        return error
    return error["code"] if "code" in error else error["type"]


def test_loopback_names_are_accepted_as_host(client: TestClient) -> None:
    for host in ["127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]", "[::1]:65535"]:
        assert client.get("/health", headers={"host": host}).status_code == 200, host


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.com",
        "evil.com:8000",
        "localhost.evil.com",
        "evil.com#localhost",
        "127.0.0.1.nip.io",
        "localhost.",
        "127.0.0.1@evil.com",
        "127.0.0.1:8000:evil.com",
        "127.0.0.1:",
        "::1",
        "[::2]",
        "127.1",
        "0x7f.0.0.1",
        "2130706433",
        "8.8.8.8",
        "100.64.0.1",
        "169.254.169.254",
        "[fe80::1]",
        "[2606:4700::1111]",
        "[::ffff:8.8.8.8]",
        ".local",
        ".localhost",
        "a..internal",
        "local",
        "internal",
        "box.local.evil.com",
        "evil-local",
        "evil.locals",
        "box.internal.",
        "box.local@evil.com",
        "host.docker.internal.evil.com",
        "127.0.0.1 ",
        "l\u00f6calhost",
    ],
)
def test_another_host_is_refused(client: TestClient, host: str) -> None:
    reply = client.post(CHAT, json=HELLO, headers={"host": host.encode("latin-1")})
    assert (reply.status_code, word_of(reply)) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "[::]:8000",
        "127.8.9.1",
        "10.0.0.7:8000",
        "172.16.0.1",
        "192.168.1.5",
        "[fd00::7]:11434",
        "studio.local",
        "STUDIO.LOCAL:8000",
        "host.docker.internal:11434",
        "a.b.localhost",
    ],
)
def test_names_that_programs_of_this_machine_use_are_accepted(
    client: TestClient, host: str
) -> None:
    assert client.post(CHAT, json=HELLO, headers={"host": host}).status_code == 200


def test_another_host_is_refused_on_every_route(client: TestClient, chat: FakeChat) -> None:
    for method, path in [*all_routes(chat), ("GET", "/nowhere")]:
        reply = client.request(method, path, headers={"host": "evil.com"})
        assert reply.status_code == 403, path
        if method != "HEAD":
            word = word_of(reply)
            assert word in ("host_not_allowed", "permission_error") or word.startswith("The Host")


def test_an_allowed_host_is_accepted(chat: FakeChat) -> None:
    client = client_of(chat, hosts=["studio.example"], allowed_hosts=["[fe80::1]"])
    assert client.get("/health", headers={"host": "studio.example:80"}).status_code == 200
    assert client.get("/health", headers={"host": "[fe80::1]"}).status_code == 200
    assert client.get("/health", headers={"host": "other.example"}).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.com"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "chrome-extension://abc"},
        {"origin": "http://localhost:3000"},
        {"origin": "https://127.0.0.1:8000"},
        {"origin": "http://["},
        {"origin": "app:"},
        {"origin": "app:/obsidian.md"},
        {"origin": "tauri.localhost"},
        {"origin": "http://tauri.localhost"},
        {"origin": "xapp://obsidian.md"},
        {"origin": "app://a,https://evil.com"},
        {"origin": "app://a https://evil.com"},
        {"origin": "https://app://a"},
        {"origin": "data://x"},
        {"origin": "moz-extension://abc"},
        {"origin": "vscode-webviews://abc"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "nonsense"},
    ],
)
def test_web_pages_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    assert client.post(CHAT, json=HELLO, headers=headers).status_code == 403
    preflight = {**headers, "access-control-request-method": "POST"}
    assert client.options(CHAT, headers=preflight).status_code == 403


@pytest.mark.parametrize(
    "headers", [{"origin": "https://evil.com"}, {"sec-fetch-site": "cross-site"}]
)
def test_web_pages_are_refused_on_every_route_before_the_body_is_read(
    client: TestClient, chat: FakeChat, headers: dict[str, str]
) -> None:
    for method, path in all_routes(chat):
        assert client.request(method, path, headers=headers).status_code == 403, path


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://127.0.0.1:8000"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin"},
    ],
)
def test_the_servers_own_origin_and_a_typed_address_are_accepted(
    client: TestClient, headers: dict[str, str]
) -> None:
    assert client.get("/health", headers=headers).status_code == 200


def test_an_allowed_page_may_send_requests_and_read_replies(chat: FakeChat) -> None:
    client = client_of(chat, origins=[PAGE])
    headers = {"origin": PAGE, "sec-fetch-site": "cross-site"}
    preflight = client.options(CHAT, headers={**headers, "access-control-request-method": "POST"})
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "content-type" in preflight.headers["access-control-allow-headers"]
    for reply in (
        client.post(CHAT, json=HELLO, headers=headers),
        client.get("/x", headers=headers),
    ):
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["vary"] == "Origin"
    assert client.get("/health", headers={"origin": "https://chat.example.evil"}).status_code == 403


APPS = [
    "app://obsidian.md",
    "file://",
    "tauri://localhost",
    "vscode-webview://0k3l",
    "vscode-file://vscode-app",
]


@pytest.mark.parametrize("origin", APPS)
def test_programs_with_a_web_view_may_send_requests_and_read_replies(
    client: TestClient, origin: str
) -> None:
    headers = {"origin": origin, "sec-fetch-site": "cross-site"}
    asked = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    preflight = client.options(
        CHAT,
        headers={
            **headers,
            "access-control-request-method": "PATCH",
            "access-control-request-headers": asked,
        },
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == origin
    assert preflight.headers["access-control-allow-headers"] == asked
    assert "PATCH" in preflight.headers["access-control-allow-methods"]
    reply = client.post(CHAT, json=HELLO, headers=headers)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("asked", ["a b", "a;b", "a,\tb", "ä", "a,,b", ",".join(["a"] * 65)])
def test_no_other_list_of_headers_is_repeated(client: TestClient, asked: str) -> None:
    headers = {"origin": APPS[0], "access-control-request-method": "POST"}
    named = {"access-control-request-headers": asked.encode("latin-1")}
    reply = client.options(CHAT, headers={**headers, **named})
    assert reply.headers["access-control-allow-headers"].startswith("authorization, content-type")


@pytest.mark.parametrize("host", ["evil.local:8000", "evil.internal:8000"])
def test_a_page_of_a_name_that_may_be_rebound_is_not_ours(client: TestClient, host: str) -> None:
    """A machine of the network answers for such a name, serves a page, and then answers 127.0.0.1."""
    for page in ({"origin": f"http://{host}"}, {"sec-fetch-site": "same-origin"}):
        assert client.post(CHAT, json=HELLO, headers={"host": host, **page}).status_code == 403
    own = {"host": "mlx.localhost:8000", "origin": "http://mlx.localhost:8000"}
    assert client.post(CHAT, json=HELLO, headers=own).status_code == 200


def test_no_page_is_allowed_by_default(client: TestClient) -> None:
    reply = client.post(CHAT, json=HELLO)
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_every_route_but_health_and_the_page_needs_a_key(chat: FakeChat) -> None:
    client = client_of(chat, api_keys=["first-key", "second-key"])
    for method, path in [*all_routes(chat), ("GET", "/nowhere")]:
        reply = client.request(method, path)
        expected = 200 if path in ("/health", "/") else 404 if path.startswith("/page/") else 401
        assert reply.status_code == expected, path


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "first-key",
        "Bearer",
        "Bearer ",
        "Bearer first",
        "Bearer first-key2",
        "Bearer first-key second-key",
        "Basic first-key",
        "Bearer FIRST-KEY",
        "Bearer caf\u00e9",
    ],
)
def test_a_wrong_key_is_a_401_in_each_dialect(chat: FakeChat, authorization: str) -> None:
    client = client_of(chat, api_keys=["first-key", "second-key"])
    headers = {"authorization": authorization.encode("latin-1")}
    reply = client.post(CHAT, json=HELLO, headers=headers)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"
    assert client.get("/v1/models?api_key=first-key", headers=headers).status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_each_key_is_accepted(chat: FakeChat, scheme: str, key: str) -> None:
    client = client_of(chat, api_keys=["first-key", "second-key"])
    reply = client.post(CHAT, json=HELLO, headers={"authorization": f"{scheme} {key}"})
    assert reply.status_code == 200


def test_keys_do_not_share_cached_pages(chat: FakeChat) -> None:
    client = client_of(chat, api_keys=["first-key", "second-key"])
    for key in ("first-key", "second-key", "first-key"):
        for salt in (None, "s"):
            client.post(
                CHAT,
                json={**HELLO, "cache_salt": salt},
                headers={"authorization": f"Bearer {key}"},
            )
    salts = [asked.cache_salt for asked in chat.submitted]
    assert len(set(salts)) == 4
    assert salts[:2] == salts[4:]
    assert not any("key" in salt for salt in salts)


def test_a_salt_cannot_reach_another_keys_pages(chat: FakeChat) -> None:
    client = client_of(chat, api_keys=["first-key", "second-key"])
    client.post(CHAT, json=HELLO, headers={"authorization": "Bearer first-key"})
    stolen = chat.submitted[0].cache_salt
    client.post(
        CHAT,
        json={**HELLO, "cache_salt": stolen},
        headers={"authorization": "Bearer second-key"},
    )
    assert chat.submitted[1].cache_salt != stolen


def test_loopback_addresses_are_recognised() -> None:
    for host, expected in [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("localhost.evil.com", False),
        ("", False),
    ]:
        assert is_loopback(host) is expected, host

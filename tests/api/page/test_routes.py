"""The page at `/` as a client without a browser sees it."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from tests.api.fake_chat import FakeChat

TEXT = files("mlxserve.api.page").joinpath("index.html").read_text(encoding="utf-8")


def policy(client: TestClient) -> dict[str, list[str]]:
    parts = client.get("/").headers["content-security-policy"].split("; ")
    return {name: values for name, *values in (part.split() for part in parts)}


def test_the_page_is_one_file_of_text(client: TestClient) -> None:
    reply = client.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.text == TEXT
    assert client.head("/").status_code == 200
    assert client.post("/").status_code == 405


def test_it_may_run_its_own_script_only_and_ask_this_server_only(client: TestClient) -> None:
    rules = policy(client)
    assert rules["default-src"] == ["'none'"]
    assert rules["connect-src"] == ["'self'"]
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", TEXT, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[rule] == [f"'sha256-{digest}'"]


def test_it_names_no_other_host_and_has_no_inline_handlers() -> None:
    assert "http://" not in TEXT
    assert "https://" not in TEXT
    assert not re.search(r"<[^>]+\s(on\w+|style)=", TEXT)
    assert "innerHTML" not in TEXT


@pytest.mark.parametrize(
    "headers", [{"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}]
)
def test_other_pages_cannot_embed_or_read_it(client: TestClient, headers: dict[str, str]) -> None:
    assert client.get("/", headers=headers).status_code == 403
    assert client.get("/").headers["x-frame-options"] == "DENY"


def test_it_needs_no_key_but_what_it_asks_for_does(chat: FakeChat) -> None:
    app = create_app(chat, access=AccessPolicy(api_keys=["a-key"]))  # type: ignore[arg-type]
    locked = TestClient(app, base_url="http://127.0.0.1:8000")
    assert locked.get("/").status_code == 200
    assert locked.get("/v1/models").status_code == 401
    assert locked.get("/api/v1/kv/stats").status_code == 401

"""The page at `/` as a client without a browser sees it."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from tests.api.fake_chat import FakeChat

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = {
    file.name: file.read_text(encoding="utf-8")
    for file in files("mlxserve.api.page").joinpath("files").iterdir()
}
MAX_FIRST_VISIT = 120_000  # bytes, uncompressed
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def test_the_page_is_a_few_files_of_text(client: TestClient) -> None:
    assert client.get("/", headers=BROWSER).text == FILES["index.html"]
    for name, text in FILES.items():
        reply = client.get(f"/page/{name}")
        assert reply.status_code == 200
        assert reply.headers["content-type"] == f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        assert reply.text == text
    assert client.head("/", headers=BROWSER).status_code == 200
    assert client.post("/").status_code == 405


def test_a_browser_gets_the_page_compressed_and_others_as_it_is(client: TestClient) -> None:
    sizes = {"gzip, deflate, br": 0, "gzip;q=0": 0, "identity": 0}
    for encoding in sizes:
        for name in FILES:
            path = "/" if name == "index.html" else f"/page/{name}"
            reply = client.get(path, headers={**BROWSER, "accept-encoding": encoding})
            assert reply.text == FILES[name]
            assert "accept-encoding" in reply.headers["vary"]
            sizes[encoding] += int(reply.headers["content-length"])
    plain = sum(len(text.encode()) for text in FILES.values())
    assert sizes == {**dict.fromkeys(sizes, plain), "gzip, deflate, br": sizes["gzip, deflate, br"]}
    assert sizes["gzip, deflate, br"] < 60_000


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/page.css"])
def test_a_file_that_has_not_changed_is_not_sent_again(client: TestClient, path: str) -> None:
    tag = client.get(path, headers=BROWSER).headers["etag"]
    for known in (tag, f'"another", {tag.removeprefix("W/")}'):
        reply = client.get(path, headers={**BROWSER, "if-none-match": known})
        assert (reply.status_code, reply.content, reply.headers["etag"]) == (304, b"", tag)
        assert reply.headers["content-security-policy"]
    assert client.get(path, headers={**BROWSER, "if-none-match": '"another"'}).content


@pytest.mark.parametrize("name", ["routes.py", "%2e%2e%2froutes.py", "%2e%2e", "x.js"])
def test_nothing_else_is_there(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_every_file_that_a_file_names_is_there() -> None:
    named = {
        name
        for text in FILES.values()
        for name in re.findall(r'(?:from "\./|import\("\./|"/page/)([\w.]+)"', text)
    }
    assert named == FILES.keys() - {"index.html"}


def first_visit() -> dict[str, int]:
    """The files that a browser fetches for the page as it opens, and their sizes in bytes."""
    names, sizes = ["index.html"], dict[str, int]()
    while names:
        text = FILES[name := names.pop()]
        sizes[name] = len(text.encode())
        fetched = re.findall(r'(?:from "\./|"/page/)([\w.]+)"', text)
        names += [each for each in fetched if each not in sizes and each not in names]
    return sizes


def test_a_first_visit_fetches_less_than_120_kB() -> None:
    sizes = first_visit()
    assert {"index.html", "page.css", "main.js", "chat.js", "markdown.js"} <= sizes.keys()
    assert sum(sizes.values()) < MAX_FIRST_VISIT, sizes


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/page.css"])
def test_it_may_run_its_own_scripts_only_and_ask_this_server_only(
    client: TestClient, path: str
) -> None:
    reply = client.get(path, headers=BROWSER)
    parts = reply.headers["content-security-policy"].split("; ")
    rules = {name: values for name, *values in (part.split() for part in parts)}
    assert rules["default-src"] == ["'none'"]
    for rule in ("script-src", "style-src", "connect-src"):
        assert rules[rule] == ["'self'"]
    assert rules["require-trusted-types-for"] == ["'script'"]
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_it_names_no_other_host_and_makes_no_markup_of_text() -> None:
    for name in FILES:
        text = FILES[name]
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), name
        assert not re.search(r"<[^>]+\s(on\w+|style)=", text), name
        assert not re.search(r"<script(?! type=\"module\" src=)|<style", text), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
        ), name


@pytest.mark.parametrize(
    "headers", [{"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}]
)
@pytest.mark.parametrize("path", ["/", "/page/main.js"])
def test_other_pages_cannot_embed_or_read_it(
    client: TestClient, path: str, headers: dict[str, str]
) -> None:
    assert client.get(path, headers={**BROWSER, **headers}).status_code == 403
    assert client.get(path, headers=BROWSER).headers["x-frame-options"] == "DENY"


def test_it_needs_no_key_but_what_it_asks_for_does(chat: FakeChat) -> None:
    app = create_app(chat, access=AccessPolicy(api_keys=["a-key"]))  # type: ignore[arg-type]
    locked = TestClient(app, base_url="http://127.0.0.1:8000")
    assert locked.get("/", headers=BROWSER).status_code == 200
    assert locked.get("/page/main.js").status_code == 200
    assert locked.get("/page/../v1/models").status_code == 401
    assert locked.get("/v1/models").status_code == 401
    assert locked.get("/api/v1/kv/stats").status_code == 401

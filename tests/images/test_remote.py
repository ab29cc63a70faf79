"""Files of the web: from public addresses alone, and no more than fits."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from mlxserve.core.errors import InvalidRequest
from mlxserve.images import remote
from mlxserve.images.domains import AllowedDomains
from mlxserve.images.remote import RemoteFiles, Resolve, is_public

PUBLIC = "93.184.216.34"


class Web(httpx.AsyncBaseTransport):
    """Answers by host and path, and keeps what it was asked."""

    def __init__(self, *replies: Callable[[], httpx.Response]) -> None:
        self._replies = iter(replies)
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return next(self._replies)()


async def resolve(host: str, _port: int) -> list[str]:
    """A name of an address, such as `to-10.0.0.1.example`, or a public one."""
    return [host.removesuffix(".example").removeprefix("to-") if host[:3] == "to-" else PUBLIC]


def fetch(url: str, *replies: Callable[[], httpx.Response]) -> tuple[bytes, Web]:
    web = Web(*replies)
    return asyncio.run(RemoteFiles(resolve, web).fetch(url)), web


def ok(content: bytes = b"file") -> Callable[[], httpx.Response]:
    return lambda: httpx.Response(200, stream=Pieces(content))


def moved(url: str) -> Callable[[], httpx.Response]:
    return lambda: httpx.Response(302, headers={"location": url})


class Pieces(httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for begin in range(0, len(self._content), 1 << 20):
            yield self._content[begin : begin + (1 << 20)]


def test_the_connection_goes_to_the_address_that_was_looked_at() -> None:
    content, web = fetch("https://pictures.example/a.png?b=1", ok())
    [request] = web.requests
    assert content == b"file"
    assert str(request.url) == f"https://{PUBLIC}/a.png?b=1"
    assert request.headers["host"] == "pictures.example"
    assert request.extensions["sni_hostname"] == "pictures.example"
    assert request.headers["accept-encoding"] == "identity"


def test_a_name_of_other_letters_is_resolved_as_servers_know_it() -> None:
    _, web = fetch("http://bücher.example:8080/", ok())
    assert web.requests[0].headers["host"] == "xn--bcher-kva.example:8080"


def test_no_private_address_is_reached() -> None:
    for address in [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "198.18.0.1",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%en0",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "2002:7f00:1::1",
        "2002:a00:1::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ]:
        assert not is_public(address), address
        with pytest.raises(InvalidRequest, match="is not at a public address"):
            asyncio.run(RemoteFiles(_to(address), Web(ok())).fetch("http://a.example/"))


def _to(*addresses: str) -> Resolve:
    async def found(_host: str, _port: int) -> list[str]:
        return list(addresses)

    return found


@pytest.mark.parametrize("address", [PUBLIC, "2606:2800:220:1::1", "64:ff9b::5db8:d822"])
def test_public_addresses_are_reached(address: str) -> None:
    assert is_public(address)


def test_of_several_addresses_a_public_one_is_taken() -> None:
    web = Web(ok())
    asyncio.run(RemoteFiles(_to("10.0.0.1", "2606:2800:220:1::1"), web).fetch("http://a.example/b"))
    assert str(web.requests[0].url) == "http://[2606:2800:220:1::1]/b"


def test_a_redirect_is_looked_at_again() -> None:
    content, web = fetch("http://a.example/", moved("https://b.example/c"), moved("/d"), ok())
    assert content == b"file"
    assert [request.headers["host"] for request in web.requests] == ["a.example"] + [
        "b.example"
    ] * 2
    with pytest.raises(InvalidRequest, match="is not at a public address"):
        fetch("http://a.example/", moved("http://to-127.0.0.1.example/"), ok())
    with pytest.raises(InvalidRequest, match="is at no http or https URL"):
        fetch("http://a.example/", moved("file:///etc/passwd"), ok())
    with pytest.raises(InvalidRequest, match="is redirected more than 3 times"):
        fetch("http://a.example/", *[moved("http://a.example/")] * 4)


def test_nothing_is_fetched_from_another_domain_also_after_a_redirect() -> None:
    files = [
        RemoteFiles(resolve, Web(*replies), domains=AllowedDomains.from_texts(["a.example"]))
        for replies in (
            [ok()],
            [moved("https://cdn.a.example/b"), ok()],
            [moved("https://b.example/"), ok()],
            [ok()],
        )
    ]
    assert asyncio.run(files[0].fetch("http://a.example/")) == b"file"
    assert asyncio.run(files[1].fetch("http://a.example/")) == b"file"
    for other, url in [(files[2], "http://a.example/"), (files[3], "http://xa.example/")]:
        with pytest.raises(InvalidRequest, match="is at a domain from which this server fetches"):
            asyncio.run(other.fetch(url))


def test_a_password_is_not_sent() -> None:
    with pytest.raises(InvalidRequest, match="with a password in it"):
        fetch("http://me:secret@a.example/", ok())


def test_a_large_file_is_refused_when_it_is_known_to_be() -> None:
    assert len(fetch("http://a.example/", ok(bytes(remote.MAX_SIZE)))[0]) == remote.MAX_SIZE
    with pytest.raises(InvalidRequest, match="is larger than 20 MiB"):
        fetch("http://a.example/", ok(bytes(remote.MAX_SIZE + 1)))


def test_a_compressed_file_is_not_expanded() -> None:
    bomb = httpx.Response(200, headers={"content-encoding": "gzip"}, stream=Pieces(b"x"))
    with pytest.raises(InvalidRequest, match="is sent compressed"):
        fetch("http://a.example/", lambda: bomb)


@pytest.mark.parametrize("status", [204, 401, 404, 500])
def test_the_status_of_a_server_that_has_no_file_is_told(status: int) -> None:
    with pytest.raises(InvalidRequest, match=f"its server answers {status}"):
        fetch("http://a.example/", lambda: httpx.Response(status))


def test_a_server_that_does_not_answer_in_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SECONDS", 0.01)

    class Silent(httpx.AsyncBaseTransport):
        async def handle_async_request(self, _request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(InvalidRequest, match=r"cannot be fetched within 0\.01 s"):
        asyncio.run(RemoteFiles(resolve, Silent()).fetch("http://a.example/"))


@pytest.mark.parametrize("url", ["http://", "http://a:b/", "https:///x", "http://a\\@b"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^(cannot be fetched|is at no http|is at a URL)"):
        fetch(url)


def test_a_name_that_does_not_exist_is_a_sentence() -> None:
    async def unknown(_host: str, _port: int) -> list[str]:
        raise OSError("Name or service not known")

    with pytest.raises(InvalidRequest, match=r"cannot be fetched \(OSError\); check its URL"):
        asyncio.run(RemoteFiles(unknown).fetch("http://nowhere.example/"))


def test_certificates_are_loaded_once_for_all_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[None] = []
    load = ssl.create_default_context

    def counted(*args: Any, **options: Any) -> ssl.SSLContext:
        loaded.append(None)
        return load(*args, **options)

    monkeypatch.setattr(ssl, "create_default_context", counted)
    files = RemoteFiles(_to("127.0.0.1"))
    for path in "abc":
        with pytest.raises(InvalidRequest, match="is not at a public address"):
            asyncio.run(files.fetch(f"https://a.example/{path}"))
    assert len(loaded) == 1


@pytest.fixture
def server() -> Iterator[int]:
    """The port of a real server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = f"{self.headers['host']} {self.path}".encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_file_comes_over_a_real_connection_that_was_pinned(server: int) -> None:
    files = RemoteFiles(_to("127.0.0.1"), may_reach=lambda _address: True)
    content = asyncio.run(files.fetch(f"http://nowhere.example:{server}/a"))
    assert content == f"nowhere.example:{server} /a".encode()
    with pytest.raises(InvalidRequest, match="is not at a public address"):
        asyncio.run(RemoteFiles().fetch(f"http://localhost:{server}/a"))

"""RemoteFiles: fetches images by URL, from public addresses of allowed domains only.

Whoever may send a request could otherwise read what only this machine can: other servers on it and
in its network, and the addresses at which clouds hand out credentials. So a name is resolved here,
once for each redirect, and the connection goes to the address that was checked: a name that
resolves otherwise a moment later changes nothing.

    http(s)://name/path ──▶ addresses of the name ──▶ the first public one ──▶ at most MAX_SIZE bytes
          ▲                                                    │
          └──────────── redirect, at most MAX_REDIRECTS ───────┘
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import httpx

from mlxserve.core.errors import InvalidRequest
from mlxserve.images.domains import AllowedDomains
from mlxserve.system import addresses

MAX_SIZE = 20 << 20  # bytes of a file
MAX_REDIRECTS = 3
SECONDS = 10.0  # total time
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "mlxserve"}
_ALL = AllowedDomains(frozenset(), is_any=True)

# The addresses of a host and a port, as texts.
Resolve = Callable[[str, int], Awaitable[list[str]]]
TakeMemory = Callable[[int], None]  # at least as many bytes; raises QueueFull


def is_public(address: str) -> bool:
    """True if anybody could reach a literal address, and not this machine or its network alone."""
    parsed = addresses.parse(address)
    return parsed is not None and addresses.is_public(parsed)


async def addresses_of(host: str, port: int) -> list[str]:
    """Resolve a host with the system's resolver."""
    loop = asyncio.get_running_loop()
    resolved = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in resolved]


class RemoteFiles:
    """Fetches files. Tests replace `resolve`, `transport` and `may_reach`."""

    def __init__(
        self,
        resolve: Resolve = addresses_of,
        transport: httpx.AsyncBaseTransport | None = None,
        may_reach: Callable[[str], bool] = is_public,
        domains: AllowedDomains = _ALL,
    ) -> None:
        self._domains = domains
        self._resolve = resolve
        # Certificates are loaded once: that takes 50 ms. Connections are each fetch's own, to the
        # addresses that were checked for it.
        self._open: Callable[[], httpx.AsyncBaseTransport]
        if transport is None:
            self._open = partial(httpx.AsyncHTTPTransport, verify=httpx.create_ssl_context())
        else:
            self._open = lambda: transport
        self._may_reach = may_reach

    async def fetch(self, url: str, take: TakeMemory = lambda _: None) -> bytes:
        """Fetch a file. Raises InvalidRequest, whose message ends a sentence about the file.

        take: called with the bytes so far, and first with those that were announced; may raise
        """
        try:
            async with asyncio.timeout(SECONDS):
                return await self._follow(httpx.URL(url), take)
        except TimeoutError as error:
            raise InvalidRequest(f"cannot be fetched within {SECONDS:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            reason = type(error).__name__
            raise InvalidRequest(f"cannot be fetched ({reason}); check its URL") from error

    async def _follow(self, url: httpx.URL, take: TakeMemory) -> bytes:
        # No proxies and no .netrc of the environment: they would reach other addresses, or tell secrets.
        async with httpx.AsyncClient(
            transport=self._open(), trust_env=False, follow_redirects=False, timeout=SECONDS
        ) as client:
            for _ in range(MAX_REDIRECTS + 1):
                request = await self._request(client, url)
                reply = await client.send(request, stream=True)
                try:
                    if not reply.has_redirect_location:
                        return await _content(reply, take)
                    url = url.join(reply.headers["location"])
                finally:
                    await reply.aclose()
        raise InvalidRequest(f"is redirected more than {MAX_REDIRECTS} times")

    async def _request(self, client: httpx.AsyncClient, url: httpx.URL) -> httpx.Request:
        """Build the request for the checked address, with the original host name."""
        if url.scheme not in ("http", "https") or not url.host:
            raise InvalidRequest("is at no http or https URL")
        if url.userinfo:
            raise InvalidRequest("is at a URL with a password in it, which is not sent")
        if not self._domains.allow(url.raw_host.decode("ascii")):
            raise InvalidRequest(
                "is at a domain from which this server fetches nothing (--allow-remote-images lists "
                "others); send it as a data: URL"
            )
        port = url.port or (443 if url.scheme == "https" else 80)
        resolved = await self._resolve(url.raw_host.decode("ascii"), port)
        public = [address for address in resolved if self._may_reach(address)]
        if not public:
            raise InvalidRequest(
                "is not at a public address, and no others are fetched from; send it as a data: URL"
            )
        request = client.build_request("GET", url.copy_with(host=public[0]), headers=_HEADERS)
        request.headers["host"] = url.netloc.decode("ascii")
        request.extensions["sni_hostname"] = url.raw_host.decode("ascii")
        return request


async def _content(reply: httpx.Response, take: TakeMemory) -> bytes:
    if reply.status_code != 200:
        raise InvalidRequest(f"cannot be fetched: its server answers {reply.status_code}")
    if reply.headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequest("is sent compressed, though that was not asked for")
    announced = reply.headers.get("content-length", "")
    take(min(int(announced), MAX_SIZE) if announced.isdecimal() else 0)
    content = bytearray()
    async for piece in reply.aiter_raw():
        content += piece
        if len(content) > MAX_SIZE:
            raise InvalidRequest(f"is larger than {MAX_SIZE >> 20} MiB")
        take(len(content))
    return bytes(content)

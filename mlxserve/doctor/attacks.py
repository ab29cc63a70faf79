"""`mlxserve doctor --security`: sends the harmless attacks of the list to a running server.

    for result in examine("http://127.0.0.1:8000", key=None): print(result)

Each attack is a request that a server must refuse before it computes anything; none puts load on the
server or changes it. Requests are written byte by byte, because a client library would correct half
of them. Knows HTTP, but not the engine.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import SplitResult, urlsplit

from mlxserve.errors import InvalidConfig, MlxServeError

_SECONDS = 20.0  # for a reply; a parser that takes longer fails
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) ")
_CODE = re.compile(rb'"code":\s*"([a-z_]+)"')
_MAX_REPLY = 64 * 1024

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_QUESTION = [{"role": "user", "content": "x"}]


class AttackOutcome(StrEnum):
    REFUSED = "ok"
    ACCEPTED = "BAD"
    SKIPPED = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One request, and the statuses that count as its refusal.

    headers: replace the usual ones; `b""` removes one
    extra: more header lines, sent as they are
    """

    name: str
    expected: tuple[int, ...]
    method: str = "POST"
    path: str = CHAT
    body: bytes = b"{}"
    headers: Mapping[str, bytes] = field(default_factory=dict)
    extra: bytes = b""
    sends_key: bool = True


@dataclass(frozen=True, slots=True)
class AttackResult:
    """One row of the table. `got`: the status and the error's code, or why there is none."""

    outcome: AttackOutcome
    attack: Attack
    got: str

    def __str__(self) -> str:
        expected = " ".join(map(str, self.attack.expected))
        return f"{self.outcome:<5}{self.attack.name:<40}{expected:<17}{self.got}"


HEADING = f"{'':<5}{'attack':<40}{'expected':<17}got"


def _asks(name: str, path: str = COMPLETIONS, status: int = 400, **fields: object) -> Attack:
    body = {"messages": _QUESTION} if path == CHAT else {"prompt": "x"}
    return Attack(
        name=name,
        expected=(status,),
        path=path,
        body=json.dumps({**body, "max_tokens": 1, **fields}).encode(),
    )


def _sends(name: str, body: bytes, *expected: int) -> Attack:
    return Attack(name=name, expected=expected or (400,), body=body)


_DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
_SCHEMA = {
    "type": "object",
    "properties": {f"p{number}": {"type": "string"} for number in range(10_000)},
}
_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True},
}
_HOST = (400, 403, 404, 421)

ATTACKS = (
    Attack(name="another name in Host", expected=_HOST, headers={"host": b"evil.example"}),
    Attack(name="our name with a suffix", expected=_HOST, headers={"host": b"localhost.evil.io"}),
    Attack(name="a name that means this machine", expected=_HOST, headers={"host": b"127.0.0.1.nip.io"}),
    Attack(name="an empty Host", expected=_HOST, headers={"host": b" "}),
    Attack(name="no Host", expected=_HOST, headers={"host": b""}),
    Attack(name="two Hosts", expected=_HOST, extra=b"Host: evil.example\r\n"),
    Attack(name="another name in Host, on /metrics", expected=_HOST, method="GET", path="/metrics", body=b"",
        headers={"host": b"evil.example"}),
    Attack(name="the address of another site", expected=_HOST, path=f"http://evil.example{CHAT}",
        headers={"host": b"evil.example"}),
    Attack(name="a request from another web page", expected=(403,), headers={"origin": b"https://evil.example"}),
    Attack(name="a request from a page without origin", expected=(403,), headers={"origin": b"null"}),
    Attack(name="a request from a browser extension", expected=(403,),
        headers={"origin": b"chrome-extension://x"}),
    Attack(name="a navigation from another site", expected=(403,), headers={"sec-fetch-site": b"cross-site"}),
    Attack(name="a preflight from another web page", expected=(403,), method="OPTIONS", body=b"",
        headers={"origin": b"https://evil.example", "access-control-request-method": b"POST"}),
    Attack(name="a form's plain text", expected=(415,), headers={"content-type": b"text/plain"}),
    Attack(name="a compressed body", expected=(415,), headers={"content-encoding": b"gzip"}),
    Attack(name="no API key", expected=(401,), sends_key=False),
    Attack(name="no API key, on /metrics", expected=(401,), method="GET", path="/metrics", body=b"",
        sends_key=False),
    Attack(name="a wrong API key", expected=(401,), sends_key=False,
        headers={"authorization": b"Bearer wrong-wrong-wrong"}),
    Attack(name="an API key in the URL", expected=(401,), path=f"{CHAT}?api_key=KEY", sends_key=False),
    Attack(name="a header of 1 MB", expected=(400, 431), extra=b"X: " + b"x" * 2**20 + b"\r\n"),
    Attack(name="100,000 headers", expected=(400, 431), extra=b"x: y\r\n" * 100_000),
    Attack(name="a declared body of 10 GB", expected=(413,), headers={"content-length": b"10000000000"}),
    Attack(name="a body with a negative length", expected=(400,), headers={"content-length": b"-1"}),
    Attack(name="a body with two lengths", expected=(400,), body=b"0\r\n\r\n",
        extra=b"Transfer-Encoding: chunked\r\n"),
    _sends("JSON 100,000 levels deep", _DEEP),
    _sends("JSON with NaN", b'{"temperature": NaN}'),
    _sends("JSON with 1e400", b'{"temperature": 1e400}'),
    _sends("JSON with a duplicate name", b'{"model": "a", "model": "b"}'),
    _sends("JSON with a lone surrogate", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    _sends("JSON that is not UTF-8", b'{"messages": "\xff"}'),
    _sends("JSON of 100,000 keys", b"{" + b",".join(b'"%d":1' % n for n in range(100_000)) + b"}"),
    _asks("an empty prompt", prompt=""),
    _asks("a billion choices", n=10**9),
    _asks("1e12 tokens", max_tokens=10**12),
    _asks("negative tokens", max_tokens=-1),
    _asks("a temperature below 0", temperature=-1),
    _asks("a seed of 81 bits", seed=2**80),
    _asks("stop strings that are numbers", stop=[1]),
    _asks("10,000 stop strings", stop=["x"] * 10_000),
    _asks("a bias for an unknown token", logit_bias={"99999999999": 1}),
    _asks("a million log-probabilities", logprobs=10**6),
    _sends("a million messages", b'{"messages": [' + b"{}," * 999_999 + b"{}]}", 400, 413),
    _asks("a schema of 10,000 properties", CHAT, response_format=_FORMAT),
    _asks("a path as the model", CHAT, 404, model="../../etc/passwd"),
    _asks("a repository as the model", CHAT, 404, model="evil/repo"),
    Attack(name="a file of this machine", expected=(400, 404), method="GET", path="/../../etc/passwd", body=b""),
    Attack(name="another client's response", expected=(404,), method="GET", body=b"",
        path="/v1/responses/resp_00000000000000000000000000000000"),
)  # fmt: skip


_HEALTH = Attack(
    name="the server's health afterwards", expected=(200,), method="GET", path="/health", body=b""
)
_WITHOUT_KEY = Attack(
    name="", expected=(), method="GET", path="/v1/models", body=b"", sends_key=False
)


def examine(url: str, key: str | None) -> Iterator[AttackResult]:
    """A row for each attack, then one for the server's health. Raises MlxServeError."""
    target = Target(url, key)
    if target.send(_HEALTH) != "200":
        raise MlxServeError(
            f"No healthy server answers at {url}. Start it, or name another with --url."
        )
    needs_no_key = target.is_loopback and not target.send(_WITHOUT_KEY).startswith("401")
    for attack in (*ATTACKS, _HEALTH):
        if 401 in attack.expected and needs_no_key:
            skipped = "this machine only, without a key"
            yield AttackResult(AttackOutcome.SKIPPED, attack, skipped)
        else:
            got = target.send(attack)
            yield AttackResult(_judge(attack, got), attack, got)


def _judge(attack: Attack, got: str) -> AttackOutcome:
    """A 429 hides the reply. A closed connection refuses headers or bodies that are too large."""
    if got.startswith("429"):
        return AttackOutcome.SKIPPED
    if got == "closed":
        is_refused = 413 in attack.expected or 431 in attack.expected
    else:
        is_refused = int(got[:3]) in attack.expected
    return AttackOutcome.REFUSED if is_refused else AttackOutcome.ACCEPTED


class Target:
    """The server, to which any bytes can be sent."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises InvalidConfig for an invalid URL."""
        self._parts = self._split(url)
        self._key = key

    @property
    def is_loopback(self) -> bool:
        return self._parts.hostname in ("127.0.0.1", "localhost", "::1")

    def send(self, attack: Attack) -> str:
        """The status and the error's code, or "closed"."""
        data = b""
        # A server that refuses early may close before it has all been sent; its reply still counts.
        with contextlib.suppress(ConnectionError, TimeoutError), self._connected() as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(self._written(attack))
            while len(data) < _MAX_REPLY and (piece := connection.recv(_MAX_REPLY)):
                data += piece
        status = _STATUS.match(data)
        if status is None:
            return "closed"
        code = _CODE.search(data)
        return status[1].decode() + (f" {code[1].decode()}" if code else "")

    def _written(self, attack: Attack) -> bytes:
        headers = {
            "host": self._parts.netloc.encode(),
            "content-type": b"application/json",
            "content-length": str(len(attack.body)).encode(),
            "connection": b"close",
            **({"authorization": f"Bearer {self._key}".encode()} if self._key else {}),
        }
        if not attack.sends_key:
            headers.pop("authorization", None)
        headers |= attack.headers
        lines = b"".join(
            b"%s: %s\r\n" % (name.encode(), value) for name, value in headers.items() if value
        )
        path = attack.path.replace("KEY", self._key or "x")
        start = f"{attack.method} {path} HTTP/1.1\r\n".encode()
        return start + lines + attack.extra + b"\r\n" + attack.body

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        parts = self._parts
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            plain = socket.create_connection((parts.hostname, port), timeout=_SECONDS)
        except OSError as error:
            raise MlxServeError(f"No server answers at {parts.geturl()}: {error}") from error
        with plain:
            if parts.scheme == "https":
                with ssl.create_default_context().wrap_socket(
                    plain, server_hostname=parts.hostname
                ) as secure:
                    yield secure
            else:
                yield plain

    @staticmethod
    def _split(url: str) -> SplitResult:
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port
        except ValueError:
            is_address = False
        if not is_address:
            raise InvalidConfig(f"{url!r} is not a URL such as http://127.0.0.1:8000.")
        return parts

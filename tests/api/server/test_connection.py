"""Raw sockets against a real server over the scripted chat: bytes that no HTTP client would send."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.responses import Response
from uvicorn.server import ServerState

from mlxserve.api.server import connection
from mlxserve.api.server.connection import Connection, Limits
from mlxserve.api.server.retry_after import RetryAfter
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.serving import StartServer

CHAT = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Peer:
    """A socket to the server; every read has a deadline, so that a hang is a failure."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_to_end(self) -> bytes:
        data = b""
        while piece := self.socket.recv(65_536):
            data += piece
        return data

    def read_until(self, mark: bytes) -> bytes:
        data = b""
        while mark not in data:
            piece = self.socket.recv(65_536)
            assert piece, f"closed after {data!r}"
            data += piece
        return data


class RecordingTransport(asyncio.Transport):
    """The server's end of a socket, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def status_and_error(reply: bytes) -> tuple[int, str]:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def is_healthy(port: int) -> bool:
    with Peer(port) as peer:
        peer.send(HEALTH)
        return peer.read_to_end().startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n: empty\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS client\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)  # fmt: skip
def test_invalid_http_is_a_400_in_openais_format(
    start_server: StartServer, request_bytes: bytes
) -> None:
    port = start_server().port
    with Peer(port) as peer:
        peer.send(request_bytes)
        assert status_and_error(peer.read_to_end()) == (400, "invalid_http")
    assert is_healthy(port)


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            (414, "uri_too_long"),
        ),
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
            (431, "headers_too_large"),
        ),
        (
            b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
            (505, "http_version_not_supported"),
        ),
    ],
)
def test_a_head_that_arrives_in_one_piece_has_the_same_limits(
    request_bytes: bytes, expected: tuple[int, str]
) -> None:
    """h11 bounds only what it waits for, and accepts any version of one digit each."""
    config = uvicorn.Config(Response(), loop="none", lifespan="off", log_config=None)
    transport = RecordingTransport()

    async def receive() -> None:
        protocol = Connection.limited(Limits())(config, ServerState(), app_state={})
        protocol.connection_made(transport)
        protocol.data_received(request_bytes)

    asyncio.run(receive())
    assert status_and_error(transport.written) == expected
    assert transport.is_closed


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 5_000_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 5_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 500_000 + b"\r\n",
    ],
)
def test_endless_headers_are_cut_off_early(start_server: StartServer, request_bytes: bytes) -> None:
    """Closing with unread data causes a reset, which may discard the reply."""
    port = start_server().port
    with Peer(port) as peer, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        peer.send(request_bytes)
        assert status_and_error(peer.read_to_end()) == (431, "headers_too_large")
    assert is_healthy(port)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /health HTTP/1.0\r\n\r\n", 403),
        (b"GET /health HTTP/1.1\r\nHost: evil.com\r\nConnection: close\r\n\r\n", 403),
        (b"GET http://evil.com/health HTTP/1.1\r\nHost: evil.com\r\nConnection: close\r\n\r\n", 403),
        (b"GET http://x/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
        (b"GET /health%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
        (b"GET /../health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
    ],
)  # fmt: skip
def test_odd_requests_are_refused(
    start_server: StartServer, request_bytes: bytes, status: int
) -> None:
    with Peer(start_server().port) as peer:
        peer.send(request_bytes)
        assert status_and_error(peer.read_to_end())[0] == status


def test_a_declared_flood_is_refused_before_it_is_sent(start_server: StartServer) -> None:
    with Peer(start_server().port) as peer:
        peer.send(CHAT + b"Content-Length: 10000000000\r\nConnection: close\r\n\r\n")
        assert status_and_error(peer.read_until(b"request_too_large"))[0] == 413


def test_an_endless_body_is_refused_and_cut_off(start_server: StartServer) -> None:
    port = start_server(limits=Limits(body=1.0)).port
    piece = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    with Peer(port) as peer:
        peer.send(CHAT + b"Transfer-Encoding: chunked\r\n\r\n")
        num_sent = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while num_sent < 100_000:
                peer.send(piece)
                num_sent += 1
        assert num_sent < 100_000
    assert is_healthy(port)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_closes_its_sending_side_gets_its_answer(
    start_server: StartServer, chat: FakeChat, version: bytes
) -> None:
    """As `nc -N` and `shutdown(SHUT_WR)` do after a whole request."""
    usage = Usage(1, 1, 0)
    chat.script = [HOLD, Delta("done", (1,), (), FinishReason.STOP, usage)]
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    head = CHAT.replace(b"1.1", version)
    with Peer(start_server().port) as peer:
        peer.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        peer.socket.shutdown(socket.SHUT_WR)
        assert chat.on_hold.wait(timeout=20)
        if version == b"1.1":
            assert peer.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 Continue")
        chat.release()
        reply = peer.read_to_end()  # and then the connection is closed
    assert b"HTTP/1.1 200 OK" in reply
    assert b'"content":"done"' in reply


def test_a_stream_goes_on_after_its_client_closed_its_sending_side(
    start_server: StartServer, chat: FakeChat
) -> None:
    usage = Usage(1, 1, 0)
    chat.script = [Delta("one", (1,)), HOLD, Delta("two", (2,), (), FinishReason.STOP, usage)]
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    with Peer(start_server().port) as peer:
        peer.send(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        peer.read_until(b"one")
        peer.socket.shutdown(socket.SHUT_WR)
        peer.read_until(b": keepalive")
        chat.release()
        assert b"data: [DONE]" in peer.read_to_end()


def test_a_stream_of_lines_goes_on_as_well(start_server: StartServer, chat: FakeChat) -> None:
    """What is written for a client that may have gone is a blank before the next line's JSON."""
    usage = Usage(1, 1, 0)
    chat.script = [Delta("one", (1,)), HOLD, Delta("two", (2,), (), FinishReason.STOP, usage)]
    fields = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
    body = json.dumps(fields).encode()
    head = CHAT.replace(b"/v1/chat/completions", b"/api/chat")
    with Peer(start_server().port) as peer:
        peer.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        peer.read_until(b'"one"')
        peer.socket.shutdown(socket.SHUT_WR)
        peer.read_until(b"\r\n1\r\n \r\n")
        chat.release()
        reply = peer.read_to_end()
    assert b'"two"' in reply
    assert b'"done":true' in reply


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_gone_is_noticed_although_it_only_sent_its_end(
    start_server: StartServer, chat: FakeChat, stream: bool
) -> None:
    chat.script = [Delta("one", (1,)), HOLD]
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": stream}).encode()
    with Peer(start_server().port) as peer:
        peer.send(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        if stream:
            peer.read_until(b"one")
        assert chat.on_hold.wait(timeout=20)
    chat.wait_until_closed()


def test_half_a_request_is_dropped_when_its_client_sends_no_more(start_server: StartServer) -> None:
    with Peer(start_server().port) as peer:
        peer.send(CHAT + b"Content-Length: 100\r\n\r\n{")
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.read_to_end() == b""


def test_two_body_lengths_do_not_smuggle_a_request(start_server: StartServer) -> None:
    """h11 follows the chunks and reads the rest as the next request; here it is not one."""
    with Peer(start_server().port) as peer:
        peer.send(
            CHAT + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\n\r\n"
        )  # fmt: skip
        reply = peer.read_until(b"messages")
        assert reply.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("sent", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_missing_headers_are_a_408(start_server: StartServer, sent: bytes) -> None:
    port = start_server(limits=Limits(header=0.2)).port
    with Peer(port) as peer:
        peer.send(sent)
        assert status_and_error(peer.read_to_end()) == (408, "request_timeout")
    assert is_healthy(port)


def test_trickling_headers_do_not_extend_their_deadline(start_server: StartServer) -> None:
    port = start_server(limits=Limits(header=0.3)).port
    with Peer(port) as peer:
        peer.socket.settimeout(0.02)
        reply = b""
        for byte in HEALTH[:-2] + b"X: " + b"y" * 10_000:
            try:
                peer.send(bytes([byte]))
                reply = peer.socket.recv(65_536)
            except TimeoutError:
                continue
            break
        assert status_and_error(reply) == (408, "request_timeout")


@pytest.mark.parametrize(
    "sent",
    [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"],
)
def test_a_missing_body_is_a_408(start_server: StartServer, sent: bytes) -> None:
    port = start_server(limits=Limits(body=0.2)).port
    with Peer(port) as peer:
        peer.send(CHAT + sent)
        assert status_and_error(peer.read_to_end()) == (408, "request_timeout")
    assert is_healthy(port)


def test_a_second_request_on_a_connection_has_its_own_deadline(start_server: StartServer) -> None:
    with Peer(start_server(limits=Limits(header=0.3)).port) as peer:
        peer.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in peer.read_until(b"ok")
        peer.send(b"GET /hea")
        assert status_and_error(peer.read_to_end()) == (408, "request_timeout")


def test_a_slow_answer_is_not_a_slow_request(start_server: StartServer, chat: FakeChat) -> None:
    chat.script = [HOLD, *chat.reply([1])]
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    with Peer(start_server(limits=Limits(header=0.1, body=0.1)).port) as peer:
        peer.send(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        peer.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            peer.socket.recv(1)
        chat.release()
        peer.socket.settimeout(20)
        assert b"Hello" in peer.read_until(b'"usage":')


def test_a_stalled_reader_is_cut_off_and_its_answer_closed(
    start_server: StartServer, chat: FakeChat
) -> None:
    chat.script = [Delta("x" * 1_000_000, (1,))] * 40 + [HOLD]
    body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'
    port = start_server(limits=Limits(write=0.3)).port
    with Peer(port) as peer:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        peer.send(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        chat.wait_until_closed()
        assert not chat.on_hold.is_set()
    assert is_healthy(port)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_stream_is_framed_for_the_clients_http_version(
    start_server: StartServer, version: bytes
) -> None:
    """Another HTTP implementation must read the stream as one complete reply."""
    body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'
    asking = http.client.HTTPConnection("127.0.0.1", start_server().port, timeout=20)
    asking._http_vsn_str = f"HTTP/{version.decode()}"  # type: ignore[attr-defined]
    with contextlib.closing(asking):
        for _ in range(2):  # after the first, the connection is ready for a second
            asking.request(
                "POST", "/v1/chat/completions", body, {"content-type": "application/json"}
            )
            with asking.getresponse() as reply:
                assert reply.getheader("transfer-encoding") == (
                    "chunked" if version == b"1.1" else None
                )
                lines = reply.read().split(b"\n\n")
                assert all(line.startswith(b"data: ") for line in lines[:-1])
                assert len(lines) > 3
                assert lines[-2:] == [b"data: [DONE]", b""]


def test_connections_beyond_the_cap_are_a_503(start_server: StartServer, chat: FakeChat) -> None:
    chat.script = [Delta("one", (1,)), HOLD, *chat.reply([1])]
    body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'
    port = start_server(limits=Limits(connections=4, connections_per_address=3)).port
    with contextlib.ExitStack() as sockets:
        idle, *busy = (sockets.enter_context(Peer(port)) for _ in range(3))
        idle.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        idle.read_until(b"ok")
        for peer in busy:
            peer.send(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            peer.read_until(b"one")
        third = sockets.enter_context(Peer(port))  # displaces the idle one
        reply = idle.read_to_end()
        assert status_and_error(reply) == (503, "overloaded")
        assert b"\r\nretry-after: 1\r\n" in reply.lower()
        third.send(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        third.read_until(b"one")
        with Peer(port) as another:  # now all of them ask for something
            assert status_and_error(another.read_to_end()) == (503, "overloaded")
        chat.release()
        third.read_until(b"[DONE]")


def test_a_refused_connection_is_told_when_to_retry(
    start_server: StartServer, chat: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(connection, "RetryAfter", lambda: RetryAfter(lambda: clock[0]))
    chat.script = [Delta("one", (1,)), HOLD, *chat.reply([1])]
    body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'
    port = start_server(limits=Limits(connections=1)).port
    for _ in range(3):
        assert is_healthy(port)
    clock[0] = 24.0
    with Peer(port) as busy:
        busy.send(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        busy.read_until(b"one")
        with Peer(port) as another:
            reply = another.read_to_end()
        chat.release()
        busy.read_until(b"[DONE]")
    assert status_and_error(reply) == (503, "overloaded")
    assert b"\r\nretry-after: 8\r\n" in reply.lower()  # three were answered in that time


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_aborts_its_answer(
    start_server: StartServer, chat: FakeChat, stream: bool
) -> None:
    chat.script = [Delta("one", (1,)), HOLD]
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": stream}).encode()
    port = start_server().port
    with Peer(port) as peer:
        peer.send(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert chat.on_hold.wait(timeout=20)
        assert not chat.answers[0].is_closed
    chat.wait_until_closed()
    assert chat.engine.stats().scheduler.num_running == 0
    assert is_healthy(port)


def test_a_storm_of_resets_leaves_nothing_running(
    start_server: StartServer, chat: FakeChat
) -> None:
    chat.script = [Delta("one", (1,)), HOLD]
    body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'
    port = start_server().port
    for _ in range(50):
        with Peer(port) as peer:
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # on, for no time: close sends a reset
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            peer.send(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            peer.read_until(b"one")
    chat.wait_until_closed()
    assert len(chat.answers) == 50
    assert is_healthy(port)


FLOOD = 5_000
FLOODED = """
import logging, sys
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.in_flight import InFlight
from mlxserve.api.server.server import HttpServer, bind, serve

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        for what in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{what}.complete"})
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})

listener = bind("127.0.0.1", 0)
ready = lambda: print(listener.getsockname()[1], flush=True)
options = {"drain": Drain(), "open_requests": InFlight(), "drain_seconds": 0}
serve(HttpServer(app, on_ready=ready, stop_engine=int, **options), listener)
"""


def megabytes_of(pid: int) -> float:
    ps = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=True)
    return int(ps.stdout) / 1024


@pytest.fixture
def open_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FLOOD + 1_000, before[1]))
    except (OSError, ValueError):
        pytest.skip(f"this process may not have {FLOOD} open files")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def bare_server() -> Iterator[tuple[int, int]]:
    """(port, process id) of a server in a process of its own, over an app that says ok."""
    server = subprocess.Popen([sys.executable, "-c", FLOODED], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        yield int(server.stdout.readline()), server.pid
    finally:
        server.terminate()
        assert server.wait(timeout=30) == 0
        server.stdout.close()


def test_a_header_of_100_MB_takes_no_memory() -> None:
    with bare_server() as (port, pid):
        assert is_healthy(port)
        before = megabytes_of(pid)
        for line in (b"x" * 2**20, b"X: y\r\n" * 200_000):
            with Peer(port) as peer:
                peer.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
                with contextlib.suppress(ConnectionError):
                    peer.send(b"X: ")
                    for _ in range(100):
                        peer.send(line)
                    pytest.fail("a hundred megabytes were taken")
        assert is_healthy(port)
        assert megabytes_of(pid) - before < 20


@pytest.mark.long
@pytest.mark.usefixtures("open_files")
def test_5000_sockets_cost_little_and_block_no_request() -> None:
    with bare_server() as (port, pid), contextlib.ExitStack() as sockets:
        earlier = sockets.enter_context(Peer(port))
        earlier.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{")
        assert is_healthy(port)
        before = megabytes_of(pid)
        flood = [sockets.enter_context(Peer(port)) for _ in range(FLOOD)]
        for peer in flood[-100:]:
            peer.send(b"GET / HTTP/1.1\r\nX: and no more")
        assert is_healthy(port)
        earlier.send(b"}")
        assert earlier.read_until(b"ok")
        grown = megabytes_of(pid) - before
        cut_off = [peer.read_to_end()[:12] for peer in flood[:-500]]
        assert cut_off == [b"HTTP/1.1 503"] * (FLOOD - 500)
        assert grown < 20  # 11 on Linux, with 500 of them still open

"""A small server that commands can be sent to, and that keeps what it was asked."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Server(ThreadingHTTPServer):
    """Keeps what it was asked, and answers with `reply`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, object, str | None]] = []
        self.reply: tuple[int, bytes] = (200, b"{}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, content: object, status: int = 200) -> None:
        self.reply = (status, json.dumps(content).encode())


class Handler(BaseHTTPRequestHandler):
    server: Server

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        content = json.loads(body) if body else None
        self.server.asked.append(
            (self.command, self.path, content, self.headers.get("authorization"))
        )
        status, data = self.server.reply
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_DELETE = answer

    def log_message(self, *args: object) -> None:
        """Nothing on stderr, which the tests read."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()

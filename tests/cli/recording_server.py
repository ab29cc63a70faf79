"""A small HTTP server that records its requests and gives a prepared reply."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RecordingServer(ThreadingHTTPServer):
    """Records its requests and answers each with `reply`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RecordingHandler)
        self.asked: list[tuple[str, str, object, str | None]] = []
        self.reply: tuple[int, bytes] = (200, b"{}")
        self.headers: dict[str, str] = {}  # of each reply

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer_events(self, *events: object) -> None:
        """As a stream of these, and its end."""
        data = [json.dumps(event) for event in events] + ["[DONE]"]
        self.reply = (200, "".join(f"data: {one}\n\n" for one in data).encode())

    def answer(self, content: object, status: int = 200) -> None:
        self.reply = (status, json.dumps(content).encode())


class RecordingHandler(BaseHTTPRequestHandler):
    server: RecordingServer

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        content = json.loads(body) if body else None
        self.server.asked.append(
            (self.command, self.path, content, self.headers.get("authorization"))
        )
        status, data = self.server.reply
        self.send_response(status)
        for name, value in {**self.server.headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = answer

    def log_message(self, *args: object) -> None:
        """Keep stderr empty: the tests read it."""

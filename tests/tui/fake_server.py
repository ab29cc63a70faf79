"""A scripted OpenAI-compatible server: a real HTTP server on a free local port.

server.script(scripts.say("Hel", "lo"), scripts.usage(12, 2, cached=8))      the next answer
server.script(scripts.say("one"), gate, scripts.say("two"))                  waits until `gate.open()`
server.script(scripts.refuse(429, "too many requests are waiting"))
server.script(scripts.say("half of"), scripts.hang_up)
"""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.tui.scripts import Gate, HangUp, Refuse, Send, Step, chunk, say
from tui.home import Home
from tui.talk.connection import CreateServer
from tui.talk.server_process import ServerProcess


class FakeServer:
    """Answers chat requests with its scripts, in order; then with "Yes."."""

    def __init__(self) -> None:
        self.models = ["small", "large"]
        self.model_fields: dict[str, Any] = {}  # of every model's card, beside its id
        self.fields_of: dict[str, dict[str, Any]] = {}  # of one model's
        self.health: tuple[int, dict[str, Any]] = (200, {"status": "ok"})
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.warning = ""  # of each answer
        self.queries: list[tuple[str, str]] = []  # paths that were read, and what followed `?`
        self.disconnects = threading.Semaphore(0)
        # Replies of mlxserve's own routes, by path; without an entry: 404.
        self.engine: dict[str, Any] = {}
        self.map: list[Step] = []  # the page map's events
        self.is_ending = False
        self._scripts: list[list[Step]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = False
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def script(self, *parts: list[Step] | Step, reason: str | None = "stop") -> None:
        steps: list[Step] = []
        for part in parts:
            steps += part if isinstance(part, list) else [part]
        if reason is not None:
            steps.append(chunk(reason=reason))
        self._scripts.append(steps)

    def clear_scripts(self) -> None:
        self._scripts.clear()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.is_ending = True
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def next_script(self) -> list[Step]:
        return self._scripts.pop(0) if self._scripts else [*say("Yes."), chunk(reason="stop")]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Log nothing."""

            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                fake.queries.append((path, query))
                if path == "/health":
                    self._reply(*fake.health)
                elif path == "/v1/models":
                    cards = [
                        {"id": model, **fake.model_fields, **fake.fields_of.get(model, {})}
                        for model in fake.models
                    ]
                    self._reply(200, {"data": cards})
                elif path in fake.engine:
                    self._reply(200, fake.engine[path])
                elif path == "/api/v1/kv/map" and fake.map:
                    self._play_until_gone(fake.map)
                else:
                    self._reply(404, {"error": {"message": "no such address"}})

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                fake.requests.append(json.loads(self.rfile.read(length)))
                fake.headers.append({k.lower(): v for k, v in self.headers.items()})
                if self.path in fake.engine:
                    self._reply(200, fake.engine[self.path])
                    return
                steps = fake.next_script()
                if steps and isinstance(steps[0], Refuse):
                    self._reply_bytes(steps[0].status, steps[0].body)
                    self.close_connection = True
                else:
                    self._play_until_gone(steps)

            def _play_until_gone(self, steps: list[Step]) -> None:
                try:
                    self._play(steps)
                except (BrokenPipeError, ConnectionResetError, ConnectionAbortedError):
                    fake.disconnects.release()
                self.close_connection = True

            def _play(self, steps: list[Step]) -> None:
                self.send_response(200)
                self.send_header("x-request-id", f"request-{len(fake.requests)}")
                if fake.warning:
                    self.send_header("x-mlxserve-warning", fake.warning)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for step in steps:
                    match step:
                        case Send(data):
                            self.wfile.write(data)
                            self.wfile.flush()
                        case Gate():
                            step.wait(self._is_gone)
                        case HangUp():
                            return
                        case Refuse():
                            raise AssertionError("only the first step may be a refusal")
                self.wfile.write(b"data: [DONE]\n\n")

            def _is_gone(self) -> bool:
                if fake.is_ending:  # a failed test leaves its gates closed
                    return True
                readable, _, _ = select.select([self.connection], [], [], 0)
                return bool(readable) and not self.connection.recv(1)

            def _reply(self, status: int, content: Any) -> None:
                self._reply_bytes(status, json.dumps(content).encode())

            def _reply_bytes(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler


def in_place_of_a_server(server: FakeServer, program: str = "") -> CreateServer:
    """Starts this program of sh; by default one that only prints the fake server's address."""
    program = program or f"echo mlxserve is ready at {server.url}; exec cat > /dev/null"

    def create(_model: str | None, _server_args: Sequence[str], home: Home) -> ServerProcess:
        return ServerProcess(["sh", "-c", program], home.new_log("a.log"))

    return create

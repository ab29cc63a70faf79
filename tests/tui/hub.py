"""A hub of ours: it has the same files under every name, and hands out the weights in two halves."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "model.safetensors"


class Hub:
    """Serves the routes of a download. The second half of the weights waits until `resume` is set."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.ranges: list[str | None] = []
        self.paths: list[str] = []
        self.resume = threading.Event()
        self.is_broken = False  # it has no file
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Log nothing."""

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.paths.append(self.path)
                if card := re.match(r"/api/models/([\w.-]+/[\w.-]+)", self.path):
                    self._card(card[1])
                elif hub.is_broken:
                    self.send_error(500)
                elif found := re.fullmatch(r"/[\w.-]+/[\w.-]+/resolve/[^/]+/([\w.]+)", self.path):
                    self._file(found[1])
                else:
                    self.send_error(404)

            def _card(self, repository: str) -> None:
                siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": f"{at:040}"}
                    for at, (name, data) in enumerate(files.items())
                ]
                card = {"id": repository, "sha": COMMIT, "siblings": siblings}
                body = json.dumps(tree if "/tree/" in self.path else card).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _file(self, name: str) -> None:
                data, wanted = files[name], self.headers["range"]
                start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
                self.send_response(206 if start else 200)
                self.send_header("x-repo-commit", COMMIT)
                self.send_header("etag", f'"{hashlib.sha256(data).hexdigest()}"')
                self.send_header("accept-ranges", "bytes")
                self.send_header("content-length", str(len(data) - start))
                if start:
                    self.send_header("content-range", f"bytes {start}-{len(data) - 1}/{len(data)}")
                self.end_headers()
                if self.command == "GET":
                    self._send(name, data, start, wanted)

            def _send(self, name: str, data: bytes, start: int, wanted: str | None) -> None:
                half = len(data)
                if name == WEIGHTS:
                    hub.ranges.append(wanted)
                    half = len(data) if hub.resume.is_set() else max(start, len(data) // 2)
                try:
                    self.wfile.write(data[start:half])
                    self.wfile.flush()
                    hub.resume.wait()
                    self.wfile.write(data[half:])
                except OSError:
                    self.close_connection = True  # the download was paused

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.resume.set()
        self.http.shutdown()
        self.http.server_close()
        self._thread.join()

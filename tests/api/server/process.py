"""`mlxserve serve` as a child process, and requests written by hand."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROOT = Path(__file__).parents[3]
CONTEXT = 2_500
MAX_RUNNING, MAX_WAITING = 4, 16
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@dataclass
class Process:
    """`mlxserve serve` as a child process that accepts requests."""

    popen: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        seconds: float = 60,
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(
            method, path, data, {"content-type": "application/json", **(headers or {})}
        )
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, text

    def metric(self, name: str) -> float:
        _, text = self.request("GET", "/metrics")
        found = re.search(rf"^mlxserve:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def wait_for_metric(self, name: str, value: float) -> None:
        wait_until(lambda: self.metric(name) == value, complaint=f"{name} is not {value}")

    def stop(self) -> tuple[int, str]:
        """The exit code, and stdout after its first line."""
        self.popen.send_signal(signal.SIGTERM)
        rest, _ = self.popen.communicate(timeout=60)
        return self.popen.returncode, rest


Start = Callable[..., contextlib.AbstractContextManager[Process]]


@contextlib.contextmanager
def served(
    log: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    program: Sequence[str] = ("-m", "mlxserve"),
    **kwargs: Any,
) -> Iterator[Process]:
    """`mlxserve serve` with these flags, until the end of the block.

    log: the file of its stderr
    program: how Python starts the command
    """
    command = [sys.executable, *program, "serve", "--port", "0", *flags]
    with log.open("w") as stderr:
        popen = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **(env or {})},
            **kwargs,
        )
    assert popen.stdout is not None
    try:
        line = popen.stdout.readline()
        ready = re.fullmatch(r"mlxserve is ready at (http://\S+:[0-9]+)\n", line)
        assert ready, (line, log.read_text())
        yield Process(popen, ready[1], log)
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait()
        popen.stdout.close()


def send_endless_request(server: Process, *, stream: bool, key: str = "none") -> socket.socket:
    body = json.dumps(
        {"messages": HELLO, "max_tokens": CONTEXT - 500, "ignore_eos": True, "stream": stream}
    ).encode()
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    peer.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (key.encode(), len(body), body)
    )
    return peer

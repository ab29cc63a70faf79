"""A real Redis or Valkey server on a free port, which tests stop, pause, fill and damage."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from mlxserve.system.machine import free_ports
from tests.waiting import wait_until

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")


def need_store() -> str:
    """Return the server's program; without it, or without the client, the test is skipped."""
    if PROGRAM is None or find_spec("redis") is None:
        pytest.skip("not run: it needs valkey-server or redis-server, and mlxserve[fleet]")
    return PROGRAM


class RedisServer:
    """A server without files. Its data is lost when it is stopped."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        password: str | None = None,
        client_options: Mapping[str, Any] = MappingProxyType({}),
        program: str | None = None,
    ) -> None:
        """Start it.

        options: of the server
        client_options: what this object's own client needs to connect
        """
        self._password = password
        self._client_options = client_options
        self._program = program or need_store()
        [self.port] = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}"
        self._folder, self._options = folder, options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [self._program, "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        options = [option.replace("PORT", str(self.port)) for option in self._options]
        self._process = subprocess.Popen(
            [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until(self._answers, complaint="the store does not start")
        except AssertionError:
            self.stop()
            raise

    def _answers(self) -> bool:
        import redis

        with suppress(redis.RedisError), self.client() as client:
            return bool(client.ping())
        return False

    def client(self, password: str | None = None) -> Any:
        import redis

        word = password or self._password
        return redis.Redis(
            "127.0.0.1", self.port, socket_timeout=10, password=word, **self._client_options
        )

    def keys(self) -> list[bytes]:
        """Keys of records, in order."""
        with self.client() as client:
            found = sorted(client.scan_iter("mlxserve/*", count=1000))
        return [key for key in found if not key.endswith(b"/model") and b"/written/" not in key]

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it at once. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

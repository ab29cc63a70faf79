"""Registry of this user's running servers: each writes a file and removes it.

    ~/.mlxserve/servers/4711.json   {"pid": 4711, "url": "http://127.0.0.1:8000", "model": ...}

Every command that asks a server finds it here. A file that outlived its process is removed; a
process with the same id that began at another time is another program.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxserve.core.config import data_home
from mlxserve.system.files import make_marked_folder, read_own_json, replace_file

_MAX_BYTES, _MAX_PID = 1 << 16, 1 << 31
_ASK_SECONDS = 2.0
# Seconds by which two readings of a process's start may differ.
_SAME_START = 2.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    pid: int
    url: str
    model: str
    started: float  # seconds since the epoch
    needs_key: bool = False
    others: tuple[str, ...] = ()  # models beside it
    adapters: tuple[str, ...] = ()  # MODEL:NAME, of any of them
    is_private: bool = False  # of a chat, with which it ends

    @property
    def port(self) -> int | None:
        """The port on which it listens."""
        from urllib.parse import urlsplit

        return urlsplit(self.url).port

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use."""
        return (self.model, *self.others, *self.adapters)


@contextmanager
def registered(
    url: str,
    models: Sequence[str],
    adapters: Sequence[str] = (),
    *,
    needs_key: bool,
    is_private: bool = False,
) -> Iterator[None]:
    """Register this process as a server, if the folder is writable.

    is_private: it ends with the chat that started it
    """
    import psutil

    started = psutil.Process().create_time()
    server = RunningServer(
        os.getpid(),
        url.replace("//0.0.0.0:", "//127.0.0.1:"),
        models[0],
        started,
        needs_key,
        tuple(models[1:]),
        tuple(adapters),
        is_private,
    )
    file = _folder() / f"{server.pid}.json"
    try:
        make_marked_folder(file.parent)
        replace_file(file, json.dumps(asdict(server)).encode())
    except OSError:
        yield
        return
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """List the running servers, oldest first."""
    servers = []
    for file in _folder().glob("*.json"):
        server = _read(file)
        if server is None or not _runs(server):
            with suppress(OSError):
                file.unlink()
        else:
            servers.append(server)
    return sorted(servers, key=lambda server: server.started)


def newest_server(
    model: str | None = None,
    *,
    has_key: Callable[[], bool] = lambda: True,
    takes_private: bool = False,
) -> RunningServer | None:
    """Return the newest server that serves the model; None if there is none.

    has_key: called for a server that needs an API key; True if it can be used
    takes_private: also the server of an open chat, if there is no other; it may end at any time
    """
    newest = sorted(running_servers(), key=lambda one: (one.is_private, -one.started))
    for server in newest:
        if (server.is_private and not takes_private) or not serves(server, model):
            continue
        # It needed one at its start; the last may be revoked by now.
        if not server.needs_key or has_key() or _answers_without_key(server):
            return server
    return None


def health_of(server: RunningServer) -> dict[str, Any]:
    """Return what the server's `/health` reports; empty if it does not answer."""
    status, content = _ask(server, "/health")
    try:
        health = json.loads(content)
    except ValueError:
        return {}
    return health if status == 200 and isinstance(health, dict) else {}


def _answers_without_key(server: RunningServer) -> bool:
    return _ask(server, "/v1/models")[0] == 200


def _ask(server: RunningServer, path: str) -> tuple[int, bytes]:
    """Return (status, body) without an API key; (0, b"") from one that does not answer."""
    from http.client import HTTPConnection, HTTPException
    from urllib.parse import urlsplit

    address = urlsplit(server.url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=_ASK_SECONDS)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read(_MAX_BYTES)
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


def serves(server: RunningServer, model: str | None) -> bool:
    """True if the server serves what `--model` names; None is any model."""
    return served_name(server, model) is not None


def served_name(server: RunningServer, model: str | None) -> str | None:
    """Return the server's name for what `--model` names; None if it does not serve it."""
    from mlxserve.hub.known_models import repository_of

    if model is None:
        return server.model
    # The server names the model by the last part of its path.
    path = Path(model).expanduser()
    parts = (path.resolve().name, path.stem) if path.exists() else ()
    wanted = (model, repository_of(model), *parts)
    return next((name for name in server.names if name in wanted), None)


def _folder() -> Path:
    return data_home() / "servers"


def _read(file: Path) -> RunningServer | None:
    """Read a registration; None if no server wrote the file."""
    try:
        content = read_own_json(file, _MAX_BYTES)
        lists = {name: tuple(content.get(name, ())) for name in ("others", "adapters")}
        server = RunningServer(**{**content, **lists})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    words = (server.url, *server.names)
    are_words = all(isinstance(word, str) for word in words)
    are_words &= isinstance(server.is_private, bool)
    are_numbers = isinstance(server.pid, int) and isinstance(server.started, int | float)
    return server if are_words and are_numbers and 0 < server.pid < _MAX_PID else None


def _runs(server: RunningServer) -> bool:
    import psutil

    try:
        return abs(psutil.Process(server.pid).create_time() - server.started) < _SAME_START
    except psutil.Error:
        return False

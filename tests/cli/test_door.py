"""Door: an address that answers whichever process serves on it, and while none does."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxserve.api.errors import ApiError
from mlxserve.api.server.server import bind
from mlxserve.cli.door import Door, Guest
from mlxserve.core.errors import MlxServeError
from mlxserve.ranks.environment import DOOR, starts_again
from tests.waiting import wait_until

REFUSAL = ApiError(503, "Wait.", code="restarting", headers={"retry-after": "5"})


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with bind("127.0.0.1", 0) as listener:
        yield listener


@contextmanager
def guest_of(door: Door) -> Iterator[Guest]:
    guest = Guest.from_environment({DOOR: str(door.path)})
    assert guest is not None
    with guest, guest.listener:
        yield guest


def asked(listener: socket.socket, path: str) -> tuple[int, dict[str, str], object]:
    host, port = listener.getsockname()[:2]
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.request("POST", path, b"x" * 100_000)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), json.loads(reply.read())
    finally:
        connection.close()


def test_every_dialect_is_refused_while_nobody_serves(listener: socket.socket) -> None:
    with Door(listener) as door:
        door.refuse(REFUSAL)
        status, headers, body = asked(listener, "/v1/chat/completions")
        assert (status, headers["retry-after"]) == (503, "5")
        assert body == {
            "error": {
                "message": "Wait.",
                "type": "server_error",
                "param": None,
                "code": "restarting",
            }
        }
        assert asked(listener, "/health")[0] == 503
        assert asked(listener, "/v1/messages")[0] == 529
        assert asked(listener, "/api/chat")[2] == {"error": "Wait."}


def test_a_guest_answers_on_the_same_listener_once_it_is_ready(listener: socket.socket) -> None:
    with Door(listener) as door:
        door.refuse(REFUSAL)
        with guest_of(door) as guest:
            assert asked(listener, "/health")[0] == 503, "until it is ready"
            assert not door.was_ready
            guest.be_ready()
            with socket.create_connection(listener.getsockname(), timeout=60) as client:
                guest.listener.settimeout(60)
                peer, _ = guest.listener.accept()
                with peer:
                    assert peer.getpeername() == client.getsockname()
            assert door.was_ready
        assert door.pop_ready_seconds() > 0
        assert door.pop_ready_seconds() == 0
        door.refuse(REFUSAL)
        assert asked(listener, "/health")[0] == 503, "after it has gone"
        assert not door.has_ended
        with guest_of(door) as guest:
            guest.end()
            wait_until(lambda: door.has_ended)


def test_the_door_is_for_this_user_and_leaves_nothing_behind(listener: socket.socket) -> None:
    with Door(listener) as door:
        mode = stat.S_IMODE(os.stat(door.path.parent).st_mode)
        assert mode == 0o700
        assert starts_again({DOOR: str(door.path)})
    assert not door.path.parent.exists()
    assert not starts_again({DOOR: str(door.path)})


@pytest.mark.parametrize("environment", [{}, {DOOR: ""}, {DOOR: "/nowhere/door"}])
def test_without_a_door_on_this_machine_there_is_no_guest(environment: dict[str, str]) -> None:
    assert Guest.from_environment(environment) is None
    assert not starts_again(environment)


def test_a_door_whose_process_has_died_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "door"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(MlxServeError, match="Whoever started the ranks has ended"):
        Guest.from_environment({DOOR: str(path)})

"""A listener that is lent: an address that answers whichever process serves on it, and while none does."""

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
from mlxserve.cli.lent_listener import LentListener, ListenerLender
from mlxserve.core.errors import MlxServeError
from mlxserve.ranks.environment import LENDER, starts_again
from tests.waiting import wait_until

REFUSAL = ApiError(503, "Wait.", code="restarting", headers={"retry-after": "5"})


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with bind("127.0.0.1", 0) as listener:
        yield listener


@contextmanager
def lent_by(lender: ListenerLender) -> Iterator[LentListener]:
    lent = LentListener.from_environment({LENDER: str(lender.path)})
    assert lent is not None
    with lent, lent.listener:
        yield lent


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
    with ListenerLender(listener) as lender:
        lender.refuse(REFUSAL)
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
    with ListenerLender(listener) as lender:
        lender.refuse(REFUSAL)
        with lent_by(lender) as lent:
            assert asked(listener, "/health")[0] == 503, "until it is ready"
            assert not lender.was_ready
            lent.be_ready()
            with socket.create_connection(listener.getsockname(), timeout=60) as client:
                lent.listener.settimeout(60)
                peer, _ = lent.listener.accept()
                with peer:
                    assert peer.getpeername() == client.getsockname()
            assert lender.was_ready
        assert lender.pop_ready_seconds() > 0
        assert lender.pop_ready_seconds() == 0
        lender.refuse(REFUSAL)
        assert asked(listener, "/health")[0] == 503, "after it has gone"
        assert not lender.has_ended
        with lent_by(lender) as lent:
            lent.end()
            wait_until(lambda: lender.has_ended)


def test_the_door_is_for_this_user_and_leaves_nothing_behind(listener: socket.socket) -> None:
    with ListenerLender(listener) as lender:
        mode = stat.S_IMODE(os.stat(lender.path.parent).st_mode)
        assert mode == 0o700
        assert starts_again({LENDER: str(lender.path)})
    assert not lender.path.parent.exists()
    assert not starts_again({LENDER: str(lender.path)})


@pytest.mark.parametrize("environment", [{}, {LENDER: ""}, {LENDER: "/nowhere/lender"}])
def test_without_a_door_on_this_machine_there_is_no_guest(environment: dict[str, str]) -> None:
    assert LentListener.from_environment(environment) is None
    assert not starts_again(environment)


def test_a_door_whose_process_has_died_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lender"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(MlxServeError, match="Whoever started the ranks has ended"):
        LentListener.from_environment({LENDER: str(path)})

"""What BoundedHttp sends is what h11 sends, whose state machine a chunk of a body does not need."""

from __future__ import annotations

import h11
import pytest

from mlxserve.api.server.bounded_http import MAX_HEAD, BoundedHttp

CHUNKS = [b"data: 1\n\n", b"", b"x" * 4_096, bytes(range(256))]


def sent_by(
    connection: h11.Connection, method: str, version: str, headers: list[tuple[str, str]]
) -> list[bytes | None]:
    """The bytes of two replies on one connection, event by event, as far as it allows a second one."""
    sent = []
    chunks = CHUNKS if method == "GET" else [b""]
    for _ in range(2):
        connection.receive_data(f"{method} / HTTP/{version}\r\nHost: a\r\n\r\n".encode())
        assert isinstance(connection.next_event(), h11.Request)
        assert isinstance(connection.next_event(), h11.EndOfMessage)
        sent.append(connection.send(h11.Response(status_code=200, headers=headers)))
        sent += [connection.send(h11.Data(data=chunk)) for chunk in chunks]
        sent.append(connection.send(h11.EndOfMessage()))
        if connection.our_state is not h11.DONE:
            return sent
        connection.start_next_cycle()
    return sent


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("has_length", [False, True])
def test_replies_are_those_of_h11(method: str, version: str, has_length: bool) -> None:
    length = str(sum(map(len, CHUNKS)))
    headers = [("content-length", length)] if has_length else [("x-other", "chunked")]
    ours = sent_by(BoundedHttp(MAX_HEAD), method, version, headers)
    assert ours == sent_by(h11.Connection(h11.SERVER), method, version, headers)


def test_nothing_is_sent_after_the_end_of_a_body() -> None:
    connection = BoundedHttp(MAX_HEAD)
    sent_by(connection, "GET", "1.1", [("connection", "close")])
    assert connection.our_state is h11.MUST_CLOSE
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"late"))

"""How ranks find one another, and why they do not: each reason is a sentence for people."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlxserve.core.errors import EngineStopped, InvalidConfig
from mlxserve.ranks.environment import lead_address, own_rank, ranks_on_this_machine
from mlxserve.ranks.handshake import Hello, report_to_lead, wait_for_workers
from mlxserve.ranks.wire import VERSION, Channel, FrameKind
from mlxserve.system.machine import free_ports

HELLO = Hello(0, {"mlx": "1", "mlxserve": "2"}, "abc", {"page_size": "16"})


def free_address() -> tuple[str, int]:
    return "127.0.0.1", free_ports(1)[0]


def worker(address: tuple[str, int], hello: Hello) -> Callable[[], Channel | EngineStopped]:
    """A worker that reports in a thread; a function that waits for its result."""
    results: list[Channel | EngineStopped] = []

    def report() -> None:
        try:
            results.append(report_to_lead(address, hello, 10))
        except EngineStopped as error:
            results.append(error)

    thread = threading.Thread(target=report)
    thread.start()

    def result() -> Channel | EngineStopped:
        thread.join()
        return results[0]

    return result


def test_all_ranks_meet_whatever_else_connects() -> None:
    address = free_address()
    results = [worker(address, replace(HELLO, rank=rank)) for rank in (2, 1)]
    stranger_done = threading.Event()

    def stranger() -> None:
        while not stranger_done.is_set():
            try:
                with socket.create_connection(address, timeout=60) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    stranger_done.set()
            except OSError:
                continue

    thread = threading.Thread(target=stranger)
    thread.start()
    channels = wait_for_workers(address, 3, HELLO, 60)
    stranger_done.set()
    thread.join()
    assert sorted(channels) == [1, 2]
    for result in results:
        found = result()
        assert isinstance(found, Channel)
        found.close()
    for channel in channels.values():
        channel.close()


def test_rank_0_names_the_ranks_that_do_not_come() -> None:
    address = free_address()
    result = worker(address, replace(HELLO, rank=2))
    with pytest.raises(EngineStopped, match=r"Ranks \[1, 3\] of 4 have not come within 1 s"):
        wait_for_workers(address, 4, HELLO, 1.0)
    assert isinstance(result(), EngineStopped)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (
            replace(HELLO, versions={"mlx": "3", "mlxserve": "2"}),
            "Rank 1 has mlx 3, and rank 0 has 1",
        ),
        (replace(HELLO, model="xyz"), "Rank 1 has another model than rank 0"),
        (
            replace(HELLO, options={"page_size": "32"}),
            "Rank 1 was started with page_size=32, and rank 0 with page_size=16",
        ),
    ],
)
def test_a_rank_that_differs_is_refused_on_both_sides(hello: Hello, reason: str) -> None:
    address = free_address()
    result = worker(address, replace(hello, rank=1))
    with pytest.raises(EngineStopped, match=f"Ranks .1. of 2 have not come.*{reason}"):
        wait_for_workers(address, 2, HELLO, 1.0)
    found = result()
    assert isinstance(found, EngineStopped)
    assert reason in str(found)


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    address = free_address()
    result = worker(address, replace(HELLO, rank=rank))
    with pytest.raises(EngineStopped, match=rf"came as rank {rank} of 2, which does not exist"):
        wait_for_workers(address, 2, HELLO, 1.0)
    assert isinstance(result(), EngineStopped)


def frame(kind: int, body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + bytes([kind, 0, 0, 0]) + bytes(4) + body


STRANGERS = {
    "no rank": replace(HELLO, rank=7).encode(),
    "rank 0": HELLO.encode(),
    "other versions": replace(HELLO, rank=1, versions={"mlx": "9"}).encode(),
    "another model": replace(HELLO, rank=1, model="x").encode(),
    "another protocol": replace(HELLO, rank=1)
    .encode()
    .replace(b'"protocol": %d' % VERSION, b'"protocol": %d' % (VERSION + 1)),
    "options": replace(HELLO, rank=1).encode().replace(b'{"page_size": "16"}', b"5"),
    "values": replace(HELLO, rank=1).encode().replace(b'"16"', b"[]"),
    "deep": b"[" * 100_000,
    "surrogate": replace(HELLO, rank=1, versions={"mlx": "\ud800"}).encode(),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_that_speaks_as_a_rank_is_ignored(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes first; the rank that it claims to be comes after it was refused."""
    address = free_address()
    results: list[dict[int, Channel]] = []
    lead = threading.Thread(target=lambda: results.append(wait_for_workers(address, 2, HELLO, 60)))
    lead.start()
    while True:
        try:
            stranger = socket.create_connection(address, timeout=60)
            break
        except OSError:
            continue
    with stranger:
        stranger.sendall(frame(FrameKind.HELLO, STRANGERS[kind]))
        while stranger.recv(1 << 16):  # it is told why, or nothing, and the connection ends
            pass
    found = worker(address, replace(HELLO, rank=1))()
    lead.join()
    assert isinstance(found, Channel)
    found.close()
    [channels] = results
    assert list(channels) == [1]
    channels[1].close()
    assert caplog.text.encode(), "lone surrogates cannot be written"


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with pytest.raises(EngineStopped, match=f"{address[1]}.*Choose another master_port"):
            wait_for_workers(address, 2, HELLO, 1)


def test_a_worker_says_where_rank_0_should_be() -> None:
    address = free_address()
    with pytest.raises(EngineStopped, match=f"Rank 0 is not at 127.0.0.1:{address[1]}"):
        report_to_lead(address, replace(HELLO, rank=1), 0.3)


def test_a_worker_is_told_why_it_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = worker(server.getsockname(), replace(HELLO, rank=1))
        lead = Channel(server.accept()[0])
        assert lead.receive().kind is FrameKind.HELLO
        lead.send(FrameKind.ERROR, b"another model")
        found = result()
        lead.close()
    assert isinstance(found, EngineStopped)
    assert str(found) == "another model"


def test_the_environment_says_which_rank_this_is_and_where_rank_0_is(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([["10.0.0.1:5000"], ["10.0.0.2:5000"], ["10.0.0.1:5001"]]))
    ring = {"MLX_RANK": "2", "MLX_HOSTFILE": str(hosts)}
    assert own_rank({}) is None
    assert own_rank(ring) == 2
    assert own_rank({"OMPI_COMM_WORLD_RANK": "3"}) == 3
    assert lead_address(29501, ring) == ("10.0.0.1", 29501)
    assert lead_address(29501, {"MLX_JACCL_COORDINATOR": "10.0.0.9:32323"}) == ("10.0.0.9", 29501)
    assert lead_address(29501, {"MASTER_ADDR": "mac", "MASTER_PORT": "7"}) == ("mac", 7)
    assert ranks_on_this_machine(ring) == 2
    assert ranks_on_this_machine({**ring, "MLX_RANK": "1"}) == 1
    assert ranks_on_this_machine({}) == 1


@pytest.mark.parametrize(
    "environment", [{}, {"MLX_HOSTFILE": "/nowhere"}, {"MLX_HOSTFILE": "{folder}/hosts.json"}]
)
def test_an_environment_that_names_no_rank_0_is_refused(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "hosts.json").write_text("{}")
    filled = {name: text.format(folder=tmp_path) for name, text in environment.items()}
    with pytest.raises(InvalidConfig):
        lead_address(29501, filled)
    with pytest.raises(InvalidConfig, match="MLX_RANK must be a number, got 'two'"):
        own_rank({"MLX_RANK": "two"})

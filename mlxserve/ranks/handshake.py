"""The handshake of ranks on TCP connections, before any of them calls mx.distributed.init.

    worker ── HELLO ──> lead      rank, versions, fingerprint of the model, options
           <── GO ──────          every rank has come: all call init now
           ── MEMBER ──>          the 32 bytes that rank 0 broadcast over the group

`init` waits without an end for a rank that never comes, and holds the interpreter's lock meanwhile,
so that not even a thread could say which one is missing. MEMBER shows that the connection belongs
to a member of the group, and not to another program that has reached the port. Who does not fit
gets the reason and is ignored: another program must not be able to prevent the start.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass

from mlxserve.core.errors import EngineStopped
from mlxserve.model.rank_group import RankGroup
from mlxserve.ranks.wire import VERSION, Channel, FrameKind, ProtocolError
from mlxserve.system.terminal_text import escaped

log = logging.getLogger("mlxserve.ranks")

_HELLO_SECONDS = 5.0  # time for a HELLO after its connection is accepted
_RETRY_SECONDS = 0.1  # until a worker tries again to connect
_SECRET_SIZE = 32
_MAX_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's description. All but its rank must equal rank 0's."""

    rank: int
    versions: Mapping[str, str]  # versions of packages
    model: str  # fingerprint of the model's contents
    options: Mapping[str, str]  # engine options that all ranks must share

    def encode(self) -> bytes:
        return json.dumps({"protocol": VERSION, **asdict(self)}).encode()

    @classmethod
    def decode(cls, body: bytes) -> Hello:
        """Parse a HELLO. Raises ProtocolError."""
        try:
            fields = json.loads(body)
            protocol = fields.pop("protocol")
            hello = cls(**fields)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ProtocolError("no HELLO") from error
        if not hello._is_well_formed():
            raise ProtocolError("no HELLO")
        if protocol != VERSION:
            hello = Hello(hello.rank, {**hello.versions, "protocol": str(protocol)}, "", {})
        return hello

    def _is_well_formed(self) -> bool:
        return (
            isinstance(self.rank, int)
            and isinstance(self.model, str)
            and all(
                isinstance(mapping, Mapping)
                and all(isinstance(value, str) for value in mapping.values())
                for mapping in (self.versions, self.options)
            )
        )

    def objection(self, own: Hello) -> str | None:
        """Why this rank cannot work with rank 0, whose hello is `own`; None if it can."""
        for package in sorted({*self.versions, *own.versions}):
            theirs, ours = self.versions.get(package), own.versions.get(package)
            if theirs != ours:
                return (
                    f"Rank {self.rank} has {package} {theirs or 'not at all'}, and rank 0 has "
                    f"{ours or 'none'}. Install the same versions on every machine."
                )
        if self.model != own.model:
            return (
                f"Rank {self.rank} has another model than rank 0, or another version of it. Give "
                "every machine the same files."
            )
        for name in sorted({*self.options, *own.options}):
            theirs, ours = self.options.get(name), own.options.get(name)
            if theirs != ours:
                return (
                    f"Rank {self.rank} was started with {name}={theirs}, and rank 0 with "
                    f"{name}={ours}. Start all ranks with the same options."
                )
        return None


def wait_for_workers(
    address: tuple[str, int], size: int, own: Hello, timeout: float
) -> dict[int, Channel]:
    """Return the connection of each worker to rank 0, once all have come.

    Raises EngineStopped, which names the ranks that are missing, and why one cannot take part.
    """
    arrivals: queue.SimpleQueue[tuple[Hello, Channel]] = queue.SimpleQueue()
    try:
        server = socket.create_server(address, backlog=_MAX_BACKLOG)
    except OSError as error:
        raise EngineStopped(
            f"Rank 0 cannot wait for the others at {address[0]}:{address[1]}: {error}. Choose "
            "another master_port."
        ) from error
    with server:
        accepting = threading.Thread(
            target=_accept, args=(server, arrivals), name="mlxserve-handshake", daemon=True
        )
        accepting.start()
        try:
            return _all_of(arrivals, size, own, timeout)
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread


def _all_of(
    arrivals: queue.SimpleQueue[tuple[Hello, Channel]], size: int, own: Hello, timeout: float
) -> dict[int, Channel]:
    channels: dict[int, Channel] = {}
    refusal = ""
    deadline = time.monotonic() + timeout
    try:
        while len(channels) < size - 1:
            try:
                hello, channel = arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted({*range(1, size)} - channels.keys())
                raise EngineStopped(
                    f"Ranks {missing} of {size} have not come within {timeout:g} s "
                    f"(distributed_timeout_seconds).{refusal and f' {refusal}'}"
                ) from None
            if (objection := _objection(hello, own, size, channels.keys())) is None:
                channels[hello.rank] = channel
            else:
                refusal = objection
                _refuse(channel, objection)
        for channel in channels.values():
            channel.send(FrameKind.GO)
    except BaseException:
        for channel in channels.values():
            channel.close()
        raise
    return channels


def _objection(hello: Hello, own: Hello, size: int, ranks: Container[int]) -> str | None:
    if 0 < hello.rank < size and hello.rank not in ranks:
        return hello.objection(own)
    return f"A process came as rank {hello.rank} of {size}, which " + (
        "has come already." if hello.rank in ranks else "does not exist."
    )


def _refuse(channel: Channel, objection: str) -> None:
    """Close a connection with a reason, which may quote what a stranger has sent."""
    objection = escaped(objection)
    log.warning("%s It is ignored.", objection)
    # It did not wait for an answer.
    with contextlib.suppress(OSError):
        channel.send(FrameKind.ERROR, objection.encode())
    channel.close()


def _accept(server: socket.socket, arrivals: queue.SimpleQueue[tuple[Hello, Channel]]) -> None:
    while True:
        try:
            connection, (host, *_) = server.accept()
        except OSError:  # closed
            return
        name = "mlxserve-hello"
        threading.Thread(
            target=_greet, args=(connection, host, arrivals), name=name, daemon=True
        ).start()


def _greet(
    connection: socket.socket, host: str, arrivals: queue.SimpleQueue[tuple[Hello, Channel]]
) -> None:
    channel = Channel(connection)
    try:
        channel.set_timeout(_HELLO_SECONDS)
        frame = channel.receive()
        if frame.kind is not FrameKind.HELLO:
            raise ProtocolError("no HELLO")
        hello = Hello.decode(frame.body)
        channel.set_timeout(None)
    except OSError as error:
        log.warning("A connection from %s is not a rank's: %s", host, error)
        channel.close()
        return
    arrivals.put((hello, channel))


def report_to_lead(address: tuple[str, int], hello: Hello, timeout: float) -> Channel:
    """Return a worker's connection, once every rank has come. Raises EngineStopped."""
    deadline = time.monotonic() + timeout
    where = f"{address[0]}:{address[1]}"
    while True:
        try:
            channel = Channel(socket.create_connection(address, timeout=timeout))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineStopped(f"Rank 0 is not at {where}: {error}.") from error
            time.sleep(_RETRY_SECONDS)
    try:
        channel.send(FrameKind.HELLO, hello.encode())
        frame = channel.receive()
    except OSError as error:
        channel.close()
        raise EngineStopped(f"Rank 0 at {where} has ended: {error}.") from error
    if frame.kind is not FrameKind.GO:
        channel.close()
        raise EngineStopped(frame.body.decode(errors="replace") or "Rank 0 refused this rank.")
    channel.set_timeout(None)
    return channel


def prove_lead(group: RankGroup, channels: Mapping[int, Channel], timeout: float) -> None:
    """Check MEMBER on rank 0. Raises EngineStopped."""
    secret = secrets.token_bytes(_SECRET_SIZE)
    group.from_lead([*secret])
    for rank, channel in channels.items():
        try:
            channel.set_timeout(timeout)
            frame = channel.receive()
            channel.set_timeout(None)
        except OSError as error:
            raise EngineStopped(f"Rank {rank} is gone: {error}.") from error
        if frame.kind is FrameKind.ERROR:
            raise EngineStopped(f"Rank {rank}: {frame.body.decode(errors='replace')}")
        if frame.kind is not FrameKind.MEMBER or not hmac.compare_digest(frame.body, secret):
            raise EngineStopped(f"The connection of rank {rank} belongs to another process.")


def prove_member(group: RankGroup, channel: Channel) -> None:
    """Send MEMBER from a worker."""
    channel.send(FrameKind.MEMBER, bytes(group.from_lead([0] * _SECRET_SIZE)))

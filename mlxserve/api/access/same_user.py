"""Tells whether a connection on this machine comes from the user who runs the server.

A loopback address alone does not tell: every user of the machine can connect to it. Linux tells the
owner of the other end in /proc/net/tcp; elsewhere the other end must belong to one of our own
processes. The connection alone does not tell either: a proxy or tunnel of the user forwards
requests of others. So a request with the marks of one is not the user's, and with --behind-proxy
none is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
from starlette.requests import Request
from starlette.types import Scope

from mlxserve.api.access.names import host_name
from mlxserve.api.access.security import (
    has_key,
    header_values,
    is_admin,
    is_loopback,
    is_same_origin,
)
from mlxserve.api.fair_work import run_for_connection
from mlxserve.helpers.work import Work

# To look at a connection: a file of all sockets, or without it the sockets of each process.
_SECONDS = 0.005 if sys.platform == "linux" else 0.2
ROOT = 0  # may read every file anyway
BEHIND_PROXY = "mlxserve.behind_proxy"  # in the scope of a request: whether it may be anybody's
CONNECTION = "mlxserve.connection"  # in the state of a request: what is known of its connection
SAME_USER = "same_user"
# Proxies name the client in these. nginx adds none by default, and long sent HTTP/1.0 by default.
_RELAY_HEADERS = frozenset(
    (b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip")
)
_RELAY_PREFIX = b"x-forwarded-"


async def may_run_programs(request: Request) -> bool:
    """True if the sender may have the server do what its user can.

    That is one of that user's programs or, if there are API keys, a client with the scope admin.
    """
    return is_admin(request) if has_key(request) else await is_from_same_user(request)


async def is_from_same_user(request: Request) -> bool:
    """True if a program of the server's own user on its own machine sent the request for itself.

    Raises ApiError 429 and 503: looking at the connection waits for its turn.
    """
    scope = request.scope
    if request.client is None or not scope.get("server") or not _is_direct(scope):
        return False
    client, port = (request.client.host, request.client.port), scope["server"][1]
    known: dict[str, bool] = scope.get("state", {}).get(CONNECTION, {})
    if SAME_USER not in known:
        looking: Work[bool] = Work(_SECONDS, partial(is_same_user, client, port))
        known[SAME_USER] = await run_for_connection(request, looking)
    return known[SAME_USER]


def _is_direct(scope: Scope) -> bool:
    """True if nothing suggests that the sender forwards a request from elsewhere.

    That would be a reverse proxy or a tunnel, or a browser for a page of another server.
    """
    if scope.get(BEHIND_PROXY) or scope["http_version"] == "1.0":
        return False
    names = {name.lower() for name, _ in scope["headers"]}
    if not _RELAY_HEADERS.isdisjoint(names) or any(
        name.startswith(_RELAY_PREFIX) for name in names
    ):
        return False
    # HostCheck has required exactly one.
    [host] = header_values(scope, b"host")
    origins = header_values(scope, b"origin")
    is_local = is_loopback((host_name(host) or "").strip("[]"))
    return is_local and all(is_same_origin(scope, origin) for origin in origins)


def is_same_user(client: tuple[str, int], server_port: int) -> bool:
    """True if the connection from `client`, (address, port), to this port is the user's. Blocks."""
    if not is_loopback(client[0]):
        return False
    if sys.platform == "linux":
        owners = set(_owners_on_linux(client[1], server_port))
        return bool(owners) and owners <= {os.getuid(), ROOT}
    return _is_of_our_processes(client[1], server_port)


def _owners_on_linux(client_port: int, server_port: int) -> Iterator[int]:
    """Yield the user ids of the sockets with these ports.

    Lines of /proc/net/tcp: `0: 0100007F:8B2C 0100007F:1F40 01 00000000:00000000 00:0 0 1000 …`
    """
    for name in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", name).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, remote, _, _, _, _, uid, *_ = line.split()
            ports = (int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16))
            if ports == (client_port, server_port):
                yield int(uid)


def _is_of_our_processes(client_port: int, server_port: int) -> bool:
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid():
                continue
            connections = process.net_connections("tcp")
        except psutil.Error:
            # The process has ended, or belongs to another user.
            continue
        for connection in connections:
            if connection.raddr and (connection.laddr.port, connection.raddr.port) == (
                client_port,
                server_port,
            ):
                return True
    return False

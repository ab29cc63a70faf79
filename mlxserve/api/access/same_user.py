"""Whether a connection on this machine comes from the user who runs the server.

A loopback address alone does not tell: every user of the machine can connect to it. Linux tells the
owner of the other end in /proc/net/tcp; elsewhere the other end must belong to a process of ours.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
from starlette.requests import Request

from mlxserve.api.access.security import is_admin, is_loopback, key_id

ROOT = 0  # may read every file anyway


async def may_run_programs(request: Request) -> bool:
    """Whether it may have the server do what its user can: one of that user's programs, or where there
    are API keys one with the scope admin."""
    if key_id(request):
        return is_admin(request)
    return await asyncio.to_thread(is_from_same_user, request)


def is_from_same_user(request: Request) -> bool:
    """Whether a program of the server's own user on its own machine sent it. Blocking."""
    server = request.scope.get("server")
    if request.client is None or not server:
        return False
    return is_same_user((request.client.host, request.client.port), server[1])


def is_same_user(client: tuple[str, int], server_port: int) -> bool:
    """Of the connection from `client`, an address and a port, to this port. Blocking."""
    if not is_loopback(client[0]):
        return False
    if sys.platform == "linux":
        owners = set(_owners_on_linux(client[1], server_port))
        return bool(owners) and owners <= {os.getuid(), ROOT}
    return _is_of_our_processes(client[1], server_port)


def _owners_on_linux(client_port: int, server_port: int) -> Iterator[int]:
    r"""User ids of the sockets with these ports.

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
        except psutil.Error:  # it has ended, or is not ours to look into
            continue
        for one in connections:
            if one.raddr and (one.laddr.port, one.raddr.port) == (client_port, server_port):
                return True
    return False

"""Ports of 127.0.0.1 on which nothing listens, for ranks that tests start."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Different ones."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def free_port() -> int:
    [port] = free_ports(1)
    return port

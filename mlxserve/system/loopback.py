"""Tells addresses of this machine: requests to them bypass proxies and certificates."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False

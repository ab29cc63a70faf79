"""Where an IP address leads: to this machine, to its network, or to anybody's.

The table is that of IANA's registries of special-purpose addresses (RFC 6890 and later ones), with
the metadata addresses of clouds. Python's `is_global` is not used: what it says of 192.0.0.0/24,
3fff::/20 and others differs between 3.11, 3.12 and 3.13.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address

_LOOPBACK = (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128"))
_UNSPECIFIED = (IPv4Network("0.0.0.0/32"), IPv6Network("::/128"))
_EXAMPLE = "192.0.2.1"  # RFC 5737: for documentation, so nobody has it
_PRIVATE = (
    IPv4Network("10.0.0.0/8"),
    IPv4Network("172.16.0.0/12"),
    IPv4Network("192.168.0.0/16"),
    IPv6Network("fc00::/7"),
)
# IPv4 addresses that not everybody reaches, besides those above.
_SPECIAL = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "100.64.0.0/10",  # between a provider and its customers; 100.100.100.200 is Alibaba's
            "168.63.129.16/32",  # Azure's wire server
            "169.254.0.0/16",  # link-local; 169.254.169.254 hands out credentials in most clouds
            "192.0.0.0/24",  # protocols; 192.0.0.192 is Oracle's
            "192.0.2.0/24",  # examples
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # multicast tunnels
            "192.88.99.0/24",  # relays of 6to4
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # examples
            "203.0.113.0/24",  # examples
            "224.0.0.0/3",  # multicast, reserved and broadcast
        ),
    )
)
_PUBLIC_V6 = IPv6Network("2000::/3")  # all that is assigned to anybody
_SPECIAL_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocols: Teredo, benchmarks, ORCHID
            "2001:db8::/32",  # examples
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # examples
        ),
    )
)
# What a gateway or the system connects to for these is the IPv4 address in it.
_MAPPED, _NAT64 = IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = IPv6Network("2002::/16")


def parse(text: str) -> Address | None:
    """Parse a literal address, without brackets and whatever its zone; None if it is none."""
    try:
        return ip_address(text.partition("%")[0])
    except ValueError:
        return None


def is_unspecified(address: Address) -> bool:
    """True for the address that stands for all of this machine's."""
    return _is_in(address, _UNSPECIFIED)


def own_address() -> str | None:
    """Return the address under which other machines reach this one; None without a network.

    That is the one of the route to the Internet. Nothing is sent: connecting a datagram socket only
    chooses a route.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_EXAMPLE, 9))
        address: str = probe.getsockname()[0]
        found = IPv4Address(address)
        return None if is_loopback(found) or is_unspecified(found) else address
    return None


def is_loopback(address: Address) -> bool:
    return _is_in(address, _LOOPBACK)


def is_near(address: Address) -> bool:
    """True if it is loopback, private or unspecified."""
    return _is_in(address, (*_LOOPBACK, *_PRIVATE, *_UNSPECIFIED))


def is_public(address: Address) -> bool:
    """True if anybody could reach it, and not this machine or its network alone."""
    if isinstance(address, IPv4Address):
        return not _is_in(address, (*_LOOPBACK, *_PRIVATE, *_SPECIAL))
    if (inner := _ipv4_in(address)) is not None:
        return is_public(inner)
    return address in _PUBLIC_V6 and not _is_in(address, _SPECIAL_V6)


def _is_in(address: Address, networks: tuple[IPv4Network | IPv6Network, ...]) -> bool:
    # An address is in no network of the other version.
    return any(address in network for network in networks)


def _ipv4_in(address: IPv6Address) -> IPv4Address | None:
    if address in _MAPPED or address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _SIX_TO_FOUR:
        return IPv4Address(int(address) >> 80 & 0xFFFFFFFF)
    return None

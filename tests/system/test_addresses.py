"""Addresses are judged by a table of our own, the same with every version of Python."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from random import Random

import pytest

from mlxserve.system import addresses
from mlxserve.system.addresses import is_near, is_public, is_unspecified, own_address, parse

# Of https://www.iana.org/assignments/iana-ipv4-special-registry and -ipv6-, as of 2025.
REGISTRY = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
    *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16"),
    *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    *("::/128", "::1/128", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23"),
    *("2001:db8::/32", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "ff00::/8"),
)
PUBLIC = (
    *("1.0.0.0", "8.8.8.8", "9.255.255.255", "11.0.0.0", "93.184.216.34", "100.63.255.255"),
    *("100.128.0.0", "126.255.255.255", "128.0.0.0", "168.63.129.15", "168.63.129.17"),
    *("169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.0.1.0"),
    *("192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255"),
    *("2000::", "2001:200::", "2606:2800:220:1::1", "2a00::1", "3ffe:ffff::", "3fff:1000::"),
)


class Route:
    """In the place of a datagram socket, on a machine with this address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __enter__(self) -> Route:
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, _address: tuple[str, int]) -> None:
        if not self.address:
            raise OSError("Network is unreachable")

    def getsockname(self) -> tuple[str, int]:
        return self.address, 50_000


@pytest.mark.parametrize(
    ("address", "own"),
    [("192.168.1.5", "192.168.1.5"), ("", None), ("127.0.0.1", None), ("0.0.0.0", None)],
)
def test_others_reach_this_machine_by_the_address_of_its_route(
    monkeypatch: pytest.MonkeyPatch, address: str, own: str | None
) -> None:
    monkeypatch.setattr(addresses.socket, "socket", lambda *_: Route(address))
    assert own_address() == own


def test_the_address_that_stands_for_all_is_unspecified() -> None:
    known = {text: parse(text) for text in ("0.0.0.0", "::", "127.0.0.1", "::1", "10.0.0.1")}
    assert [text for text, each in known.items() if each and is_unspecified(each)] == [
        "0.0.0.0",
        "::",
    ]


def _edges() -> Iterator[IPv4Address | IPv6Address]:
    """The first and last addresses of each block of the registry, and some between."""
    random = Random(56)
    for text in REGISTRY:
        network = IPv4Network(text) if "." in text else IPv6Network(text)
        for number in (0, network.num_addresses - 1, random.randrange(network.num_addresses)):
            yield network[number]


def test_no_special_address_is_public() -> None:
    assert [str(each) for each in _edges() if is_public(each)] == []


def test_no_address_that_is_not_global_to_python_is_public() -> None:
    """Nor what any version of it has named so: the table only adds to them."""
    random = Random(7)
    addresses = [IPv4Address(random.getrandbits(32)) for _ in range(3_000)]
    assert not [each for each in addresses if is_public(each) and not each.is_global]
    sixes = [IPv6Address(0x2 << 124 | random.getrandbits(124)) for _ in range(1_000)]
    assert not [each for each in sixes if is_public(each) and not each.is_global]


def test_metadata_addresses_of_clouds_are_not_public() -> None:
    for text in (
        *("169.254.169.254", "169.254.170.2", "192.0.0.192", "168.63.129.16"),
        *("100.100.100.200", "fd00:ec2::254", "fd20:ce::254"),
    ):
        assert not is_public(ip_address(text)), text


@pytest.mark.parametrize("text", PUBLIC)
def test_what_lies_beside_the_special_blocks_is_public(text: str) -> None:
    assert is_public(ip_address(text))


@pytest.mark.parametrize("prefix", ["::ffff:", "64:ff9b::"])
def test_an_address_with_another_in_it_leads_there(prefix: str) -> None:
    for text in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "192.0.0.192", "168.63.129.16"):
        assert not is_public(ip_address(f"{prefix}{text}")), text
        packed = IPv4Address(text).packed.hex()
        assert not is_public(ip_address(f"2002:{packed[:4]}:{packed[4:]}::1")), text
    assert is_public(ip_address(f"{prefix}8.8.8.8"))


def test_near_addresses_are_loopback_private_or_unspecified() -> None:
    for text in ("127.0.0.1", "127.9.9.9", "::1", "10.1.1.1", "172.31.255.255", "192.168.0.1"):
        assert is_near(ip_address(text)), text
    for text in ("0.0.0.0", "::", "fd00::1"):
        assert is_near(ip_address(text)), text
    for text in ("8.8.8.8", "0.0.0.1", "100.64.0.1", "169.254.1.1", "fe80::1", "::2", "2001::1"):
        assert not is_near(ip_address(text)), text


def test_what_is_no_literal_address_is_none() -> None:
    assert parse("fe80::1%en0") == ip_address("fe80::1")
    for text in ("", "127.1", "0x7f000001", "2130706433", "127.0.0.01", "localhost", "::1]", "①"):
        assert parse(text) is None, text

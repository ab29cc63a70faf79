"""Names by which this server may be called: those of its machine, and those of programs on it.

A web page may have its own name resolve to a loopback address after it was loaded (DNS rebinding). No
address can be rebound, and no name that only this machine or its network resolves is a page's of
the internet. Programs use more of them than people do: a container calls host.docker.internal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mlxserve.system import addresses

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
ON_THIS_MACHINE = ".localhost"  # resolved to loopback addresses without a question to anybody
IN_THIS_NETWORK = (".local", ".internal")
# Origins of programs with a web view (Jan, Obsidian, VS Code), which no page of the web can send.
APP_SCHEMES = ("app", "file", "tauri", "vscode-file", "vscode-webview")
_HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.ASCII)
_APP_ORIGIN = re.compile(rf"(?:{'|'.join(APP_SCHEMES)})://[a-z0-9._:\[\]-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class HostNames:
    """The names that a Host header may have.

    own: of this machine and those that the operator allows, IPv6 in brackets
    any_address: any literal address names this server, since it listens on all
    """

    own: frozenset[str]
    any_address: bool = False

    @classmethod
    def from_names(cls, own: Iterable[str], *, any_address: bool = False) -> HostNames:
        return cls(frozenset((*LOOPBACK_HOSTS, *own)), any_address)

    def name_us(self, name: str) -> bool:
        """True if a request under this name is for this server."""
        return name in self.own or self.cannot_be_rebound(name) or _is_below(name, IN_THIS_NETWORK)

    def cannot_be_rebound(self, name: str) -> bool:
        """True if the name leads here for certain, so that its pages are this server's.

        Any machine of the network may answer for a name that ends in .local.
        """
        if name in self.own or _is_below(name, (ON_THIS_MACHINE,)):
            return True
        address = addresses.parse(name.strip("[]"))
        return address is not None and (self.any_address or addresses.is_near(address))


def host_name(host: str) -> str | None:
    """Parse a Host header: its name or address, without the port; None if it is neither."""
    match = _HOST.fullmatch(host.lower())
    return match["name"] if match else None


def is_of_app(origin: str) -> bool:
    """True if a program of this machine sends this origin."""
    return _APP_ORIGIN.fullmatch(origin.lower()) is not None


def _is_below(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.endswith(suffixes) and all(name.split("."))

"""AllowedDomains: the domains that images are fetched from, with their subdomains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import httpx

from mlxserve.system import addresses

ANY = "*"  # every domain
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_DOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_MAX_LENGTH = 253


@dataclass(frozen=True, slots=True)
class AllowedDomains:
    """names: domains as DNS knows them, in lower case, or literal addresses without brackets."""

    names: frozenset[str]
    is_any: bool = False

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> AllowedDomains:
        """Parse domains such as `example.org`; `*` allows all.

        Raises ValueError, whose message ends a sentence about the text.
        """
        names = [_parsed(text) for text in texts]
        return cls(frozenset(names), ANY in names)

    def allow(self, host: str) -> bool:
        """True if a host of a URL, as DNS knows it, is one of these domains or below one."""
        if self.is_any:
            return True
        name = host.lower().removesuffix(".").strip("[]")
        if name in self.names:
            return True
        if len(name) > _MAX_LENGTH or not _DOMAIN.fullmatch(name):
            return False
        labels = name.split(".")
        above = (".".join(labels[start:]) for start in range(1, len(labels)))
        # Nothing is below an address.
        return any(each in self.names and addresses.parse(each) is None for each in above)


def _parsed(text: str) -> str:
    if text == ANY:
        return ANY
    if addresses.parse(text) is not None:
        return text.lower()
    try:
        name = httpx.URL(f"http://{text}/").raw_host.decode("ascii").lower()
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise ValueError("is no domain; write it as example.org") from error
    has_more = any(sign in text for sign in "/:@?#[]*%\\ ")
    if has_more or len(name) > _MAX_LENGTH or not _DOMAIN.fullmatch(name):
        raise ValueError(
            "is no domain; write it as example.org, without a scheme, a port or a path (subdomains "
            "are included)"
        )
    if "." not in name:
        raise ValueError(f'has no dot; write a domain such as example.org, or "{ANY}" for all')
    return name

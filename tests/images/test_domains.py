"""Images are fetched from the domains that the operator names, and from none that only looks like one."""

from __future__ import annotations

import httpx
import pytest

from mlxserve.images.domains import AllowedDomains

DOMAINS = AllowedDomains.from_texts(
    ["Example.org", "bücher.example", "203.0.113.7", "2606:4700::7"]
)
ALLOWED = (
    *("example.org", "EXAMPLE.ORG", "example.org.", "a.example.org", "a.b.example.org:8080"),
    *("bücher.example", "xn--bcher-kva.example", "a。example.org", "203.0.113.7", "[2606:4700::7]"),
)
REFUSED = (
    *("evilexample.org", "evil-example.org", "example.org.evil.com", "example.orgevil.com"),
    *("example.org%2eevil.com", "example.org\\.evil.com", "evil.com%00.example.org", "org"),
    *("evil.com%23.example.org", "evil.com\\.example.org", "example.com", "xexample.org."),
    *("1.203.0.113.7", "203.0.113.70", "203.0.113.7.evil.com", "[2606:4700::8]", "example..org"),
    *(".example.org", "example.org..", "a b.example.org", "exаmple.org"),  # Cyrillic а
)


def _host(written: str) -> str:
    return httpx.URL(f"http://{written}/").raw_host.decode("ascii")


@pytest.mark.parametrize("host", ALLOWED)
def test_a_domain_and_those_below_it_are_allowed(host: str) -> None:
    assert DOMAINS.allow(_host(host))


@pytest.mark.parametrize("host", REFUSED)
def test_what_looks_like_a_domain_is_not(host: str) -> None:
    try:
        name = _host(host)
    except httpx.InvalidURL:
        return  # which is refused before
    assert not DOMAINS.allow(name)


def test_all_are_allowed_by_a_star_and_none_without_one() -> None:
    assert AllowedDomains.from_texts(["example.org", "*"]).allow("any.example")
    assert not AllowedDomains.from_texts([]).allow("any.example")


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "org", "true", "https://example.org", "example.org/a", "example.org:443"),
        *("*.example.org", "**", "user@example.org", "example.org?", "a b.example", "-a.example"),
        *("a..example", "example.org#", "[::1", "x" * 64 + ".org", "a." * 130 + "org", "\0.org"),
    ],
)
def test_what_is_no_domain_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no domain; write it as|has no dot; write"):
        AllowedDomains.from_texts([text])

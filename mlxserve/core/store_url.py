"""The address of a page store, and how it is shown without its password."""

from __future__ import annotations

from urllib.parse import urlsplit

from mlxserve.core.errors import InvalidConfig

_SCHEMES = ("redis", "rediss", "unix")
_OPTION = "page_store"


def check_store_url(url: str) -> None:
    """Raises InvalidConfig, without the address: it may have a password."""
    try:
        parts = urlsplit(url)
        is_sound = parts.scheme in _SCHEMES and bool(
            parts.path if parts.scheme == "unix" else parts.hostname
        )
        is_sound = is_sound and parts.port != 0
    except ValueError:
        is_sound = False
    if not is_sound:
        raise InvalidConfig(
            f"{_OPTION} must be redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH, with a user and a "
            "password as in redis://USER:PASSWORD@HOST:PORT.",
            option=_OPTION,
        )


def shown_store(url: str) -> str:
    """Return the address without user, password and options."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or 6379}"

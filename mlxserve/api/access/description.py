"""Says who gets in, for `mlxserve doctor` and at the start of a server."""

from __future__ import annotations

from collections.abc import Iterator

from mlxserve.api.access.names import APP_SCHEMES, IN_THIS_NETWORK, LOOPBACK_HOSTS, ON_THIS_MACHINE
from mlxserve.api.access.policy import AccessPolicy


def describe(access: AccessPolicy) -> Iterator[tuple[str, str]]:
    """Yield (subject, sentence) of what the server will accept and refuse."""
    needs = "an API key" if access.keyring().is_locked else "no API key"
    yield "access", f"programs of this machine need {needs}" + _of_owner(access)
    names = dict.fromkeys((*LOOPBACK_HOSTS, *access.hosts, *access.allowed_hosts))
    suffixes = ", ".join(f"*{suffix}" for suffix in (ON_THIS_MACHINE, *IN_THIS_NETWORK))
    yield "hosts", f"{', '.join(names)}, private addresses, {suffixes}; others: --allowed-host"
    schemes = ", ".join(f"{scheme}://" for scheme in APP_SCHEMES)
    origins = ", ".join(("its own page", *access.origins, schemes))
    yield "origins", f"{origins}; refused: null, other ports of localhost, all other pages"
    yield "", "to let in a page of another port: --allowed-origin http://localhost:PORT"
    if (opened := opened_without_key(access)) is not None:
        yield "allowed hosts", opened


def opened_without_key(access: AccessPolicy) -> str | None:
    """Return what --allowed-host opens while no key is needed; None if it opens nothing."""
    if not access.allowed_hosts or access.keyring().is_locked:
        return None
    return (
        f"--allowed-host {', '.join(access.allowed_hosts)} without an API key: whoever reaches this "
        "server under that name, such as through a proxy or a tunnel, uses its models and sees and "
        "changes what an admin key does (cache, prefixes, loaded models). Chats, tools and downloads "
        "stay closed to them. Create a key: `mlxserve key create NAME`."
    )


def _of_owner(access: AccessPolicy) -> str:
    if not access.keyring().is_locked or access.is_behind_proxy:
        return ""
    return ", but those of its own user (with keys of `mlxserve key create`)"

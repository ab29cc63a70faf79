"""Who may use the server: host names, web origins and API keys, read before it listens.

Any address but loopback requires a key. Keys come from files or the environment, never from a flag:
every user of the machine can read those in the process list. The key in the environment is the
operator's and has the scope admin.
"""

from __future__ import annotations

import ipaddress
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxserve.api.access.keys import Key, KeyFile, Keyring, Scope, usual_file
from mlxserve.api.access.names import HostNames
from mlxserve.api.access.security import host_header_name, is_loopback
from mlxserve.api.config import NO_FILE, ServerConfig
from mlxserve.core.errors import InvalidConfig
from mlxserve.images.domains import AllowedDomains

MIN_KEY_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """Who may use the server.

    hosts: names of this machine in the Host header besides loopback, IPv6 in brackets
    allowed_hosts: more names that the operator allows there
    any_address: also allow any literal address there; a web page can only rebind names
    origins: origins of web pages that may call, such as `https://chat.example`
    api_keys: requests must send one of these, if there are any
    admin_keys: the same, with the scope admin
    keys_file: more keys, of both scopes, that may change while the server runs
    max_requests_per_key, requests_per_minute_per_key: limits of keys without their own
    max_prefix_share_per_key: maximum fraction of the names and pages of named prefixes for one user
        key, if there are several keys
    is_exposed: other machines reach the server, so it needs a key even after the last was revoked
    is_behind_proxy: connections do not identify the sender, since a proxy shares them
    remote_images: domains from which the server fetches images that requests name; None for none
    """

    hosts: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    any_address: bool = False
    origins: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    admin_keys: Sequence[str] = ()
    keys_file: Path | None = None
    max_requests_per_key: int = 0
    requests_per_minute_per_key: int = 0
    max_prefix_share_per_key: float = 0.5
    is_exposed: bool = False
    is_behind_proxy: bool = False
    remote_images: AllowedDomains | None = None

    @property
    def host_names(self) -> HostNames:
        return HostNames.from_names(
            (*self.hosts, *self.allowed_hosts), any_address=self.any_address
        )

    def keyring(self) -> Keyring:
        """Build the ring of all keys.

        Raises InvalidConfig if the key file is damaged or open to other users.
        """
        keys = [Key.from_secret(key, Scope.USER) for key in self.api_keys]
        keys += [Key.from_secret(key, Scope.ADMIN) for key in self.admin_keys]
        file = KeyFile(self.keys_file) if self.keys_file is not None else None
        return Keyring(keys, file, stays_locked=self.is_exposed)


def read_access(config: ServerConfig, environment_key: str | None = None) -> AccessPolicy:
    """Read the policy from the options and the environment. Raises InvalidConfig."""
    host = config.host
    access = AccessPolicy(
        hosts=tuple(map(host_header_name, _own_names(host))),
        allowed_hosts=tuple(map(host_header_name, config.allowed_host)),
        any_address=_is_wildcard(host),
        origins=tuple(_origin(origin) for origin in config.allowed_origin),
        api_keys=tuple(_keys_of(Path(config.api_key_file))) if config.api_key_file else (),
        admin_keys=(_checked(environment_key, "MLXSERVE_API_KEY"),) if environment_key else (),
        keys_file=keys_file(config.keys_file),
        max_requests_per_key=config.max_requests_per_key,
        requests_per_minute_per_key=config.requests_per_minute_per_key,
        max_prefix_share_per_key=config.max_prefix_share_per_key,
        is_exposed=not is_loopback(host),
        is_behind_proxy=config.behind_proxy,
        remote_images=_domains(config.allow_remote_images),
    )
    if access.is_exposed and not access.keyring().is_locked:
        raise InvalidConfig(
            f"Listening on {host} exposes the server to other machines and needs an API key. Create "
            "one with `mlxserve key create NAME`, set MLXSERVE_API_KEY, or listen on 127.0.0.1."
        )
    return access


def keys_file(named: str | None) -> Path | None:
    """The file of `mlxserve key`, which need not exist; None for the option "none"."""
    if named == NO_FILE:
        return None
    return Path(named).expanduser() if named else usual_file()


def _keys_of(file: Path) -> Iterator[str]:
    try:
        mode = file.stat().st_mode
        text = file.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"The API key file {file} cannot be read: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidConfig(
            f"The API key file {file} can be read by other users. Restrict it: chmod 600 {file}"
        )
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise InvalidConfig(f"The API key file {file} holds no key; write one per line.")
    for key in keys:
        yield _checked(key, str(file))


def _checked(key: str, source: str) -> str:
    if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidConfig(
            f"An API key in {source} is too weak or malformed: it needs at least {MIN_KEY_LENGTH} "
            "printable ASCII characters without spaces. Make one with `openssl rand -hex 32`."
        )
    return key


def _domains(texts: Sequence[str]) -> AllowedDomains | None:
    """Parse the domains of --allow-remote-images; None without any. Raises InvalidConfig."""
    for text in texts:
        try:
            AllowedDomains.from_texts([text])
        except ValueError as error:
            raise InvalidConfig(f"--allow-remote-images {text[:80]!r} {error}.") from error
    return AllowedDomains.from_texts(texts) if texts else None


def _own_names(host: str) -> tuple[str, ...]:
    """Names of this machine, and the address or name that the server listens on."""
    name = socket.gethostname().partition(".")[0]
    names = (socket.gethostname(), name, f"{name}.local")
    return names if is_loopback(host) or _is_wildcard(host) else (host, *names)


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def _origin(origin: str) -> str:
    scheme, separator, rest = origin.partition("://")
    if not separator or scheme not in ("http", "https") or not rest or "/" in rest:
        raise InvalidConfig(
            f"--allowed-origin {origin!r} is not an origin. Write it as https://chat.example, "
            "without a path."
        )
    return origin.lower()

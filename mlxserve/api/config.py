"""ServerConfig: every option of the server, validated once. Stdlib only, like EngineConfig."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxserve.errors import InvalidConfig

LOG_LEVELS = ("debug", "info", "warning", "error")
NO_FILE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The server's options. Raises InvalidConfig.

    host: address to listen on; any but this machine's own needs an API key
    port: port to listen on; 0 takes a free one
    alias: another name for the model; may be given again
    drain_seconds: seconds for answers under way when the server is stopped
    keys_file: file of the keys that `mlxserve key create` made; by default keys.json in the
        configuration folder, if it is there; "none" uses no file
    api_key_file: file with one API key per line; MLXSERVE_API_KEY in the environment is another
    allowed_host: a name the Host header may have besides the address; may be repeated
    allowed_origin: a web page that may call, as https://chat.example; may be repeated
    max_requests_per_key: answers of one API key that run or wait at the same time; 0 is no limit
    requests_per_minute_per_key: requests of one API key in a minute; 0 is no limit
    max_connections: open connections; beyond them the one that is idle longest makes room
    max_connections_per_address: the same, of those from one address
    header_timeout: seconds for a request's headers to arrive
    body_timeout: seconds for its body to arrive
    write_timeout: seconds for a client that stopped reading to go on
    log_level: the least that is logged: debug, info, warning, error
    """

    host: str = "127.0.0.1"
    port: int = 8000
    alias: tuple[str, ...] = ()
    drain_seconds: float = 5.0
    keys_file: str | None = None
    api_key_file: str | None = None
    allowed_host: tuple[str, ...] = ()
    allowed_origin: tuple[str, ...] = ()
    max_requests_per_key: int = 0
    requests_per_minute_per_key: int = 0
    max_connections: int = 1_000
    max_connections_per_address: int = 500
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 20.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in ("host", "log_level"):
            self._text(name, getattr(self, name))
        for name in ("keys_file", "api_key_file"):
            if getattr(self, name) is not None:
                self._text(name, getattr(self, name))
        for name in ("alias", "allowed_host", "allowed_origin"):
            self._texts(name)
        self._whole("port", 0, 65_535)
        self._whole("max_connections", 1)
        self._whole("max_connections_per_address", 1)
        self._whole("max_requests_per_key", 0)
        self._whole("requests_per_minute_per_key", 0)
        self._seconds("drain_seconds", or_zero=True)
        for name in ("header_timeout", "body_timeout", "write_timeout"):
            self._seconds(name)
        if self.log_level not in LOG_LEVELS:
            raise InvalidConfig(
                f"log_level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}"
            )

    @staticmethod
    def _text(name: str, value: object) -> None:
        if not isinstance(value, str):
            raise InvalidConfig(f"{name} must be text, got {value!r}")

    def _texts(self, name: str) -> None:
        values = getattr(self, name)
        if not isinstance(values, tuple) or not all(isinstance(v, str) and v for v in values):
            raise InvalidConfig(f"{name} must be a list of texts, got {values!r}")

    def _whole(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < low or (high is not None and value > high):
            wanted = f"from {low} to {high}" if high is not None else f"of at least {low}"
            raise InvalidConfig(f"{name} must be a whole number {wanted}, got {value!r}")

    def _seconds(self, name: str, *, or_zero: bool = False) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf or (value == 0 and not or_zero):
            raise InvalidConfig(f"{name} must be a number of seconds above 0, got {value!r}")

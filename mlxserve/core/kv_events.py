"""KvEventsConfig: where and how KV events are published, from our flags or from vLLM's JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from mlxserve.core.errors import InvalidConfig

_OPTION = "kv_events_config"


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """The fields and defaults of vLLM's `KVEventsConfig` that apply to a ZeroMQ publisher.

    endpoint         address of the PUB socket, which is bound
    replay_endpoint  address of the ROUTER socket that replays; None for none
    buffer_steps     batches that can be replayed
    hwm              batches that ZeroMQ keeps for a subscriber that is slow
    max_queue_size   events that may wait to be published
    topic            first frame of each message
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def from_options(
        cls, endpoint: str | None, replay_endpoint: str | None, vllm: str | None
    ) -> KvEventsConfig | None:
        """Return the config of `kv_events` and `kv_events_replay`, or of `kv_events_config`.

        None if events are off. Raises InvalidConfig.
        """
        if endpoint is not None and vllm is not None:
            raise InvalidConfig(
                "kv_events and kv_events_config say the same thing. Give one of them.",
                option=_OPTION,
            )
        if vllm is not None:
            config = cls._from_vllm(vllm)
            if config is None or replay_endpoint is None:
                return config
            raise InvalidConfig(
                "kv_events_config has a field for replay: set its replay_endpoint instead.",
                option="kv_events_replay",
            )
        if endpoint is None:
            if replay_endpoint is None:
                return None
            raise InvalidConfig(
                "kv_events_replay replays what kv_events publishes. Set kv_events as well.",
                option="kv_events_replay",
            )
        config = cls(endpoint, replay_endpoint)
        config._check(("kv_events", "kv_events_replay"))
        return config

    @classmethod
    def _from_vllm(cls, text: str) -> KvEventsConfig | None:
        """Read vLLM's JSON; None if it says that nothing is published."""
        try:
            values: dict[str, Any] = json.loads(text)
        except ValueError:
            values = {}
        if not isinstance(values, dict) or not values:
            raise InvalidConfig(
                f"{_OPTION} must be a JSON object as vLLM's, such as "
                '\'{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}\', '
                f"got {text!r:.80}",
                option=_OPTION,
            )
        is_on = values.pop("enable_kv_cache_events", False)
        publisher = values.pop("publisher", None) or ("zmq" if is_on else "null")
        if not isinstance(is_on, bool) or publisher not in ("zmq", "null"):
            raise InvalidConfig(
                f"{_OPTION}: enable_kv_cache_events must be true or false, and publisher "
                f'"zmq" or "null", got {text!r:.120}',
                option=_OPTION,
            )
        if unknown := sorted(values.keys() - {field.name for field in fields(cls)}):
            known = ", ".join(field.name for field in fields(cls))
            raise InvalidConfig(
                f"{_OPTION} has no field {unknown[0]!r:.40}. Those of a publisher are {known}.",
                option=_OPTION,
            )
        config = cls(**values)
        config._check((_OPTION, _OPTION))
        return config if is_on and publisher == "zmq" else None

    def _check(self, options: tuple[str, str]) -> None:
        """Raises InvalidConfig; options: those that the two addresses come from."""
        addresses = [(self.endpoint, options[0])]
        if self.replay_endpoint is not None:
            addresses.append((self.replay_endpoint, options[1]))
        for address, option in addresses:
            if not _is_address(address):
                raise InvalidConfig(
                    f"{option}: an address is tcp://HOST:PORT or ipc://PATH, got {address!r:.80}",
                    option=option,
                )
        if self.endpoint == self.replay_endpoint:
            raise InvalidConfig(
                f"{options[1]}: events and their replay need two addresses, got {self.endpoint} "
                "for both. Choose another port.",
                option=options[1],
            )
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value < 2**31:
                raise InvalidConfig(
                    f"{_OPTION}: {name} must be an integer of at least 1, got {value!r:.40}",
                    option=_OPTION,
                )
        if not isinstance(self.topic, str):
            raise InvalidConfig(
                f"{_OPTION}: topic must be a text, got {self.topic!r:.40}", option=_OPTION
            )


def _is_address(address: Any) -> bool:
    if not isinstance(address, str):
        return False
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return bool(rest)
    host, _, port = rest.rpartition(":")
    return (
        scheme == "tcp"
        and bool(host)
        and port.isascii()
        and port.isdigit()
        and 0 < int(port[:6]) < 65536
    )

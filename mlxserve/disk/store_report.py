"""What people are told of a page store: its models, and how fast and how well set up it is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import redis

from mlxserve.core.errors import InvalidRequest
from mlxserve.core.store_url import shown_store
from mlxserve.disk.record import IDENTITY_SIZE
from mlxserve.disk.store import ROOT, connect

_SECONDS = 5.0  # of silence
_SAMPLE = 4 << 20  # bytes that are written and read to measure
_LISTED = 1000  # keys of one round trip
_EVICTS = "allkeys-"  # policies that make room for new pages

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """A store as a doctor sees it. `advice` is empty if there is none."""

    text: str
    advice: str


def models_in(url: str) -> list[tuple[str, int, int]]:
    """Return (model, number of records, bytes) of each model, the largest first.

    Raises InvalidConfig, and InvalidRequest if the store does not answer.
    """
    return _asked(url, _models)


def facts_of(url: str) -> StoreFacts:
    """Write and read a value, and return what was measured and found. Raises as `models_in` does."""
    return _asked(url, _facts)


def _asked(url: str, ask: Callable[[redis.Redis], T]) -> T:
    client = connect(url, _SECONDS)
    try:
        with client:
            return ask(client)
    except (redis.RedisError, OSError) as error:
        raise InvalidRequest(
            f"The page store {shown_store(url)} does not answer as it should: {type(error).__name__}. "
            "Check its address and password, and that it runs."
        ) from error


def _models(client: redis.Redis) -> list[tuple[str, int, int]]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    names: dict[str, str] = {}
    keys: list[bytes] = []
    for key in client.scan_iter(f"{ROOT}/*", count=_LISTED):
        keys.append(key)
        if len(keys) == _LISTED:
            _count(client, keys, counts, sizes, names)
            keys.clear()
    _count(client, keys, counts, sizes, names)
    found = [(names.get(each, each), counts[each], sizes[each]) for each in counts]
    return sorted(found, key=lambda each: -each[2])


def _count(
    client: Any,
    keys: list[bytes],
    counts: Counter[str],
    sizes: Counter[str],
    names: dict[str, str],
) -> None:
    """Count the records of these keys by identity, and take the models' names."""
    parts = [key.decode(errors="replace").split("/") for key in keys]
    with client.pipeline(transaction=False) as pipeline:
        for key, part in zip(keys, parts, strict=True):
            pipeline.get(key) if part[-1] == "model" else pipeline.strlen(key)
        replies = pipeline.execute(raise_on_error=False)
    for part, reply in zip(parts, replies, strict=True):
        if len(part) != 3 or len(part[1]) != 2 * IDENTITY_SIZE:
            continue
        if isinstance(reply, bytes):
            names[part[1]] = reply.decode(errors="replace")
        elif isinstance(reply, int):
            counts[part[1]] += 1
            sizes[part[1]] += reply


def _facts(client: Any) -> StoreFacts:
    key, value = f"{ROOT}/check", bytes(_SAMPLE)
    began = time.perf_counter()
    client.ping()
    trip = time.perf_counter() - began
    began = time.perf_counter()
    client.set(key, value, ex=60)
    sent = time.perf_counter()
    client.get(key)
    took = time.perf_counter() - sent
    client.delete(key)
    memory, server = client.info("memory"), client.info("server")
    limit, policy = int(memory.get("maxmemory", 0)), str(memory.get("maxmemory_policy", ""))
    text = (
        f"version {server.get('redis_version', '?')}, a round trip takes {trip * 1000:.1f} ms, "
        f"{_SAMPLE / took / 1e6:.0f} MB/s are read and {_SAMPLE / (sent - began) / 1e6:.0f} MB/s written; "
        f"{int(memory.get('used_memory', 0)) >> 20} MiB are used"
    )
    text += f" of {limit >> 20} (maxmemory)" if limit else ""
    advice = ""
    if not limit:
        advice = "It has no maxmemory, and grows until its machine has no memory left: set one."
    elif not policy.startswith(_EVICTS):
        advice = f"Its maxmemory-policy is {policy}: with allkeys-lru it makes room for new pages."
    return StoreFacts(text, advice)

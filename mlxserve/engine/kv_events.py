"""KvEvents: publishes what the prefix cache stores and drops, as vLLM does, for routers that read it.

    engine's thread ──▶ queue ──▶ thread ──▶ PUB     (topic, sequence number, batch)
                                     └─────▶ ROUTER  the last batches again, from a sequence number on

A batch is what `vllm/distributed/kv_events.py` encodes since vLLM#42892: a positional array of the time, the
events and the data-parallel rank, and each event a map with its class name as `type`. Fields that have their
default are left out.

The engine never waits: it appends to a bounded queue, and a queue that is full is emptied and says that all
blocks are cleared. ZeroMQ drops what a slow subscriber does not take; the sequence numbers show the gap.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

import msgpack

from mlxserve.cache.events import Stored
from mlxserve.core.errors import InvalidConfig
from mlxserve.core.kv_events import KvEventsConfig
from mlxserve.system.extras import extra_command
from mlxserve.system.loopback import is_here

log = logging.getLogger("mlxserve.kv_events")

MEDIUM = "GPU"  # vLLM's word for the memory that attention reads
# Words that vllm-router knows, as Dynamo does: a disk of the server's own, and vLLM's word for what lies beyond.
DISK = "DISK"
STORAGE = "STORAGE"
_MAX_BATCH = 1024  # events of one message
# What one step publishes becomes one message, and this thread takes no turns with the engine's meanwhile.
_GATHER_SECONDS = 0.002
_CLOSING_SECONDS = 1.0
_END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)  # ends a replay

_CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


class BlockGroup(NamedTuple):
    """Layers that keep the same of a sequence, as vLLM's KV cache groups.

    name: of the kind that keeps it
    spec: vLLM's word for the kind
    window: positions that such a layer sees; None without a window
    """

    name: str
    spec: str
    window: int | None = None


PAGES = BlockGroup("pages", "full_attention")


class _Told(NamedTuple):
    """A page that is stored on a medium, or the hash of one that was removed from it.

    group: number of the group that keeps it
    """

    page: Stored | bytes
    medium: str
    group: int


class KvEvents:
    """A publisher. All methods but the thread's are for the engine's thread, and return at once."""

    def __init__(
        self,
        config: KvEventsConfig,
        page_size: int,
        names: Mapping[bytes, str | None],
        groups: Sequence[BlockGroup] = (PAGES,),
    ) -> None:
        """Bind the addresses, and start the thread.

        page_size: tokens in a page
        names: name of the adapter, or None for the model alone, by the roots of their pages without a salt
        groups: the model's, that of the full pages first

        Raises InvalidConfig if pyzmq is missing, or an address cannot be bound.
        """
        try:
            import zmq
        except ImportError as error:
            raise InvalidConfig(
                f"KV events need pyzmq: {extra_command('fleet')}. Or leave kv_events and kv_events_config out.",
                option="kv_events",
            ) from error
        self._zmq = zmq
        self.page_size = page_size
        self._batches = Batches(page_size, names, groups)
        self._max_queued = config.max_queue_size
        self._queue: deque[_Told | None] = deque()  # None: all is cleared
        self._topic = config.topic.encode()
        self._sequence = count()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._is_closing = False
        self._is_woken = False  # the thread will look at the queue
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.sndhwm = config.hwm
        self._replays = self._context.socket(zmq.ROUTER)
        self._replays.sndhwm = config.buffer_steps + 1  # beyond it a ROUTER drops what it sends
        self._wake, self._woken = socket.socketpair()
        try:
            self._bind(self._publisher, config.endpoint)
            if config.replay_endpoint is not None:
                self._bind(self._replays, config.replay_endpoint)
        except InvalidConfig:
            self._free()
            raise
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="mlxserve-kv-events", daemon=True)
        self._thread.start()
        log.info("KV events are published on %s", config.endpoint)
        for address in filter(None, (config.endpoint, config.replay_endpoint)):
            if not _is_own(address):
                log.warning("Whoever reaches %s reads the token ids of all prompts", address)

    def stored(self, page: Stored, /, medium: str = MEDIUM, group: int = 0) -> bool:
        """Tell of a page that is on a medium now; in memory by default.

        group: number of the group whose unit of this page it is
        """
        return self._put(_Told(page, medium, group))

    def removed(self, hash_: bytes, /, medium: str = MEDIUM, group: int = 0) -> bool:
        """Tell of a page that is no longer on a medium; in memory by default."""
        return self._put(_Told(hash_, medium, group))

    def cleared(self) -> None:
        self._queue.clear()
        self._put(None)

    def close(self) -> None:
        """Publish what is queued, and release the addresses. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._notify()
        self._thread.join(_CLOSING_SECONDS)

    def _put(self, event: _Told | None) -> bool:
        if len(self._queue) >= self._max_queued:
            return False
        self._queue.append(event)
        if not self._is_woken:
            self._notify()
        return True

    def _notify(self) -> None:
        self._is_woken = True
        # A full buffer means that the thread has not read the last ones yet, so that it will look.
        with suppress(BlockingIOError):
            self._wake.send(b"\0")

    def _bind(self, of: Any, address: str) -> None:
        try:
            of.bind(address)
        except self._zmq.ZMQError as error:
            raise InvalidConfig(
                f"KV events cannot be published on {address}: {error}. An address is one of this machine's "
                "own (IPv4) and belongs to one server: choose another host or port.",
                option="kv_events",
            ) from error

    # ---- the thread

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._woken, self._zmq.POLLIN)
        poller.register(self._replays, self._zmq.POLLIN)
        try:
            while not self._is_closing:
                ready = dict(poller.poll())
                if self._woken.fileno() in ready:
                    self._woken.recv(1 << 16)
                    time.sleep(_GATHER_SECONDS)
                self._publish()
                # After it, so that a replay has all that was queued when it was asked for.
                if self._replays in ready:
                    self._replay()
            self._publish()
        except Exception:
            # Subscribers see no more events; the engine computes on.
            log.exception("KV events are no longer published")
        finally:
            self._free()

    def _publish(self) -> None:
        """Publish all that is queued."""
        self._is_woken = False  # first: what comes from now on wakes again
        while self._queue:
            events: list[_Told | None] = []
            # Not by its length: the engine may clear the queue at any time.
            while len(events) < _MAX_BATCH:
                try:
                    events.append(self._queue.popleft())
                except IndexError:
                    break
            payload = self._batches.encode(events, time.time())
            number = next(self._sequence)
            self._sent.append((number, payload))
            frames = (self._topic, number.to_bytes(8, "big"), payload)
            self._publisher.send_multipart(frames)

    def _replay(self) -> None:
        """Answer a request for the batches from a sequence number on."""
        client, *frames = self._replays.recv_multipart()
        if len(frames) != 2 or len(frames[1]) != 8:
            log.warning("A request for a replay has %d frames; it is ignored", len(frames))
            return
        first = int.from_bytes(frames[1], "big")
        for number, payload in self._sent:
            if number >= first:
                answer = (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                self._replays.send_multipart(answer)
        self._replays.send_multipart((client, b"", b"", _END_SEQUENCE, b""))

    def _free(self) -> None:
        for each in (self._publisher, self._replays):
            each.close(linger=int(_CLOSING_SECONDS * 500))
        self._context.term()
        self._wake.close()
        self._woken.close()


class Batches:
    """The messages of one model's events."""

    def __init__(
        self,
        page_size: int,
        names: Mapping[bytes, str | None],
        groups: Sequence[BlockGroup] = (PAGES,),
    ) -> None:
        """names, groups: as in KvEvents."""
        self._page_size = page_size
        self._names = names
        # What each group adds to its events: nothing if there is one alone, as defaults are left out.
        self._stored: list[dict[str, Any]] = [{} for _ in groups]
        self._removed: list[dict[str, Any]] = [{} for _ in groups]
        for number, group in enumerate(groups if len(groups) > 1 else ()):
            self._removed[number] = {"group_idx": number}
            self._stored[number] = {"group_idx": number, "kv_cache_spec_kind": group.spec}
            if group.window is not None:
                self._stored[number]["kv_cache_spec_sliding_window"] = group.window

    def encode(self, events: list[_Told | None], now: float) -> bytes:
        """Return the payload of these events, of which those of one chain of pages become one.

        None stands for AllBlocksCleared. now: seconds since 1970
        """
        told: list[dict[str, Any]] = []
        # The page that a following one of its medium and group is joined to.
        last: tuple[bytes, str, int] | None = None
        # Medium and group of the pages that were just removed.
        removed: tuple[str, int] | None = None
        for event in events:
            if event is None:
                told.append(_CLEARED)
                last = removed = None
                continue
            page, medium, group = event
            if isinstance(page, Stored):
                if last != (page.parent, medium, group):
                    told.append(self._new(page, medium, group))
                _extend(told[-1], page)
                last, removed = (page.hash, medium, group), None
                continue
            if removed != (medium, group):
                none: list[int] = []
                told.append({"type": "BlockRemoved", "block_hashes": none, "medium": medium})
                told[-1] |= self._removed[group]
            told[-1]["block_hashes"].append(block_hash(page))
            last, removed = None, (medium, group)
        payload: bytes = msgpack.packb([now, told, 0])
        return payload

    def _new(self, page: Stored, medium: str, group: int) -> dict[str, Any]:
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [],
            "parent_block_hash": None if page.parent is None else block_hash(page.parent),
            "token_ids": [],
            "block_size": self._page_size,
            "lora_id": None,
            "medium": medium,
            "lora_name": self._names.get(page.root),
        }
        if page.parent is None and page.root not in self._names:
            # As vLLM, with the first block alone. A digest stands for the salt, which nobody may learn.
            event["extra_keys"] = [[page.root.hex()]]
        return event | self._stored[group]


def _extend(event: dict[str, Any], page: Stored) -> None:
    event["block_hashes"].append(block_hash(page.hash))
    event["token_ids"] += page.token_ids
    if "extra_keys" in event and len(event["block_hashes"]) > 1:
        event["extra_keys"].append(None)


def _is_own(address: str) -> bool:
    """Return True if processes of this machine alone reach an address."""
    return address.startswith("ipc:") or is_here(address)


def block_hash(hash_: bytes) -> int:
    """Return a page's hash as subscribers know it: 64 bits, as vLLM's by default."""
    return int.from_bytes(hash_[:8], "big")

"""KV events: what a router learns from them is what the engine's prefix cache holds, in vLLM's format."""

from __future__ import annotations

import socket
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgpack
import pytest
import zmq

from mlxserve.build import build_engine
from mlxserve.cache.events import EventPool, Stored
from mlxserve.cache.hashing import extend_hashes, root
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig
from mlxserve.core.kv_events import KvEventsConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.engine import Engine
from mlxserve.engine.kv_events import Batches, KvEvents, block_hash
from mlxserve.hub.files import find_model
from mlxserve.request import Request

PAGE = 16
PATIENCE = 20_000  # milliseconds
SALT = b"a model"


def free_addresses(count: int) -> list[str]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in held]
    for each in held:
        each.close()
    return addresses


@dataclass
class Router:
    """What a router knows of one server: pages by their hashes, built from batches as they come."""

    replay_address: str
    pages: dict[int, tuple[int | None, tuple[int, ...]]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    next_number: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Apply all that was published since the last call, and return it."""
        news: list[dict[str, Any]] = []
        for number, batch in replay(self.replay_address, self.next_number):
            assert number == self.next_number
            self.next_number += 1
            time, events, rank = batch
            assert isinstance(time, float)
            assert rank == 0
            for event in events:
                self.apply(event)
                if not (news and follows(event, news[-1])):
                    news.append(event)
        self.events += news
        return news

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            assert event == {"type": "AllBlocksCleared"}
            self.pages.clear()
        elif event["type"] == "BlockRemoved":
            assert event.keys() == {"type", "block_hashes", "medium"}
            for name in event["block_hashes"]:
                del self.pages[name]
        else:
            size, tokens, parent = (
                event["block_size"],
                event["token_ids"],
                event["parent_block_hash"],
            )
            assert parent is None or parent in self.pages, "a page came before the one it follows"
            assert len(tokens) == size * len(event["block_hashes"])
            for index, name in enumerate(event["block_hashes"]):
                assert name not in self.pages, "a page was stored twice"
                self.pages[name] = parent, tuple(tokens[index * size : (index + 1) * size])
                parent = name

    def num_found(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt this router expects to be cached: by tokens, as it knows no hash."""
        children = {(parent, tokens): name for name, (parent, tokens) in self.pages.items()}
        name: int | None = None
        for start in range(0, len(prompt), PAGE):
            name = children.get((name, tuple(prompt[start : start + PAGE])))
            if name is None:
                return start
        return len(prompt)


def follows(event: dict[str, Any], last: dict[str, Any]) -> bool:
    """Join an event to the last one, if it is the next page of it: where batches end is a matter of time."""
    if event["type"] != "BlockStored" or last["type"] != "BlockStored":
        return False
    if event["parent_block_hash"] != last["block_hashes"][-1]:
        return False
    last["block_hashes"] += event["block_hashes"]
    last["token_ids"] += event["token_ids"]
    if "extra_keys" in last:
        last["extra_keys"] += [None] * len(event["block_hashes"])
    return True


def replay(address: str, first: int) -> list[tuple[int, list[Any]]]:
    """The batches from a sequence number on, as vLLM's subscribers ask for them."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while True:
            assert dealer.poll(PATIENCE), "there is no answer"
            delimiter, topic, number, payload = dealer.recv_multipart()
            assert delimiter == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert (topic, payload) == (b"", b"")
                return batches
            batches.append((int.from_bytes(number, "big"), msgpack.unpackb(payload)))


class Served:
    """The included model with 24 pages, and a router that reads its events."""

    def __init__(self) -> None:
        self.address, replays = free_addresses(2)
        config = EngineConfig().with_options(
            model="mlxserve-mini",
            num_pages=24,
            page_size=PAGE,
            max_model_len=320,
            kv_events=self.address,
            kv_events_replay=replays,
        )
        self.engine: Engine = build_engine(config, find_model("mlxserve-mini"))[0]
        self.router = Router(replays)
        self.num_asked = 0

    def ask(self, prompt: Sequence[int], **asked: Any) -> int:
        """Answer a prompt, and return how many of its tokens were found."""
        self.num_asked += 1
        params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0)
        live = self.engine.add(Request(str(self.num_asked), tuple(prompt), params, **asked))
        while self.engine.has_work:
            self.engine.step()
        return live.num_cached


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    server = Served()
    yield server
    server.engine.close()


@pytest.fixture
def served(server: Served) -> Served:
    assert server.engine.reset_prefix_cache()
    server.router.read()
    return server


def prompt_of(seed: int, num_pages: int, extra: int = 3) -> list[int]:
    return [(seed * 7919 + i * 31) % 200 + 3 for i in range(num_pages * PAGE + extra)]


def test_stored_pages_are_those_of_the_prompts_in_chains(served: Served) -> None:
    first = prompt_of(1, 4)
    second = first[: 2 * PAGE] + prompt_of(2, 2)
    served.ask(first)
    [event] = served.router.read()
    hashes: list[bytes] = []
    extend_hashes(hashes, first, PAGE)
    assert event == {
        "type": "BlockStored",
        "block_hashes": [block_hash(each) for each in hashes],
        "parent_block_hash": None,
        "token_ids": first[: 4 * PAGE],
        "block_size": PAGE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [[root(b"").hex()], None, None, None],
    }
    served.ask(second)
    [event] = served.router.read()
    assert event["parent_block_hash"] == block_hash(hashes[1])
    assert event["token_ids"] == second[2 * PAGE : 4 * PAGE]
    assert "extra_keys" not in event
    assert served.router.num_found(first) == served.router.num_found(second) == 4 * PAGE


def test_a_router_loses_what_the_cache_evicts_and_nothing_else(served: Served) -> None:
    for seed in range(10, 22):
        served.ask(prompt_of(seed, 4))
    news = served.router.read()
    assert any(event["type"] == "BlockRemoved" for event in news)
    assert len(served.router.pages) == served.engine.monitor.stats().pool.num_cached
    for seed in (21, 20, 10):
        expected = served.router.num_found(prompt_of(seed, 4))
        assert served.ask(prompt_of(seed, 4)) == expected
        assert expected == (0 if seed == 10 else 4 * PAGE)


def test_a_reset_clears_all_and_what_is_pinned_is_stored_again(served: Served) -> None:
    pinned, other = prompt_of(30, 2, 0), prompt_of(31, 2)
    served.ask(pinned, pins=True)
    name = str(served.num_asked)
    served.ask(other)
    served.router.read()
    assert served.engine.reset_prefix_cache()
    served.engine.unpin(name)
    kinds = [event["type"] for event in served.router.read()]
    assert kinds == ["AllBlocksCleared", "BlockStored"]
    assert served.router.num_found(pinned) == 2 * PAGE
    assert served.router.num_found(other) == 0


def test_a_restart_after_a_failure_and_a_smaller_cache_clear_all(served: Served) -> None:
    actions = served.engine.restart, lambda: served.engine.resize_cache(22)
    for seed, again in enumerate(actions, 40):
        served.ask(prompt_of(seed, 3))
        assert served.router.read()[-1]["type"] == "BlockStored"
        again()
        assert served.router.read() == [{"type": "AllBlocksCleared"}]
        served.ask(prompt_of(seed, 3))
        served.router.read()
        assert served.router.num_found(prompt_of(seed, 3)) == 3 * PAGE
    served.engine.resize_cache(24)


def test_a_late_router_learns_everything_from_a_replay(served: Served) -> None:
    served.ask(prompt_of(50, 3))
    served.router.read()
    late = Router(served.router.replay_address)
    late.read()
    assert late.pages == served.router.pages
    assert late.events[0]["type"] == "AllBlocksCleared"


def test_a_subscriber_gets_three_frames_and_numbers_without_gaps(served: Served) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.subscribe(b"")
        subscriber.connect(served.address)
        seed = 60
        while not subscriber.poll(100):
            # Until it has joined: ZeroMQ sends nothing to one that has not.
            served.ask(prompt_of(seed, 1))
            seed += 1
        served.ask(prompt_of(seed, 2))
        numbers: list[int] = []
        live = Router("")
        while live.num_found(prompt_of(seed, 2)[: 2 * PAGE]) < 2 * PAGE:
            assert subscriber.poll(PATIENCE), "nothing comes"
            topic, number, payload = subscriber.recv_multipart()
            assert topic == b""
            numbers.append(int.from_bytes(number, "big"))
            for event in msgpack.unpackb(payload)[1]:
                live.apply(event)
    assert len(number) == 8
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


# ---- without an engine


class Slow:
    """A listener that takes `limit` events and no more until it is cleared."""

    page_size = PAGE

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.events: list[Stored | bytes | None] = []

    def stored(self, page: Stored, /) -> bool:
        return self._put(page)

    def removed(self, hash_: bytes, /) -> bool:
        return self._put(hash_)

    def cleared(self) -> None:
        self.events = [None]

    def close(self) -> None:
        """Nothing to end."""

    def _put(self, event: Stored | bytes) -> bool:
        if len(self.events) >= self.limit:
            return False
        self.events.append(event)
        return True


def publish(pool: EventPool, tokens: Sequence[int], first: int = 0) -> list[bytes]:
    """Publish the pages of a prompt from `first` on; those before it are cached."""
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, PAGE, SALT)
    parents = [root(SALT), *hashes]
    pages = pool.allocate(len(hashes) - first)
    assert pages is not None
    for index, page in enumerate(pages, first):
        pool.publish(page, hashes[index], parents[index], tokens[index * PAGE : (index + 1) * PAGE])
    pool.release(pages)
    return hashes


def test_after_more_events_than_are_taken_all_is_cleared_and_stored_again_when_continued() -> None:
    slow = Slow(limit=4)
    pool = EventPool(32, PAGE, events=slow)
    tokens = prompt_of(1, 8, 0)
    hashes = publish(pool, tokens[: 3 * PAGE])
    assert [each.hash for each in slow.events if isinstance(each, Stored)] == hashes
    publish(pool, tokens[: 4 * PAGE], first=3)
    assert slow.events == [None]  # the fifth event was one too many
    slow.limit = 100
    hashes = publish(pool, tokens, first=4)
    told = [each for each in slow.events if isinstance(each, Stored)]
    assert [each.hash for each in told] == hashes
    assert [each.parent for each in told] == [None, *hashes[:-1]]


class Mirror(Slow):
    """Follows the events, and refuses some of them at random."""

    def __init__(self, random: Random, share: float) -> None:
        super().__init__(limit=10**9)
        self.known: dict[bytes, bytes | None] = {}
        self.refuses = lambda: random.random() < share

    def stored(self, page: Stored, /) -> bool:
        if self.refuses():
            return False
        assert page.hash not in self.known
        self.known[page.hash] = page.parent
        return True

    def removed(self, hash_: bytes, /) -> bool:
        if self.refuses():
            return False
        del self.known[hash_]
        return True

    def cleared(self) -> None:
        self.known.clear()


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_what_is_told_is_what_a_pool_has_whatever_happens_to_it(share: float) -> None:
    random = Random(7)
    mirror = Mirror(random, share)
    pool: PagePool = EventPool(24, PAGE, events=mirror)
    held: list[list[int]] = []
    most = 0
    for _ in range(1500):
        action = random.randrange(12)
        if action < 8:
            table = continue_prompt(pool, random)
            pinned = pool.pinned()
            if table and action == 0 and len(pinned) < 6:
                pool.pin([page for page in table if pool.index.hash_of(page)])
            held.append(table)
            if len(held) > 2:
                pool.release(held.pop(0))
        elif action == 8:
            pool.unpin([page for page, count in pool.pinned().items() for _ in range(count)])
        elif action == 9:
            pool.reset()
        elif action == 10:
            pool.forget(random.sample(sorted(mirror.known), min(1, len(mirror.known))))
        else:
            while held:
                pool.release(held.pop())
            pool.lower(random.randint(12, 24))
            pool.blank.limit = 24
            if random.random() < 0.2:
                pool = pool.renewed()
                assert mirror.known == {}
        pool.check(held)
        full = [page for page in range(24) if pool.index.hash_of(page)]
        cached = {pool.index.hash_of(page) for page in full if pool.index.is_full(page)}
        assert mirror.known.keys() <= cached
        assert share or mirror.known.keys() == cached
        most = max(most, len(mirror.known))
    assert most > 16


def continue_prompt(pool: PagePool, random: Random) -> list[int]:
    """Hold the cached pages of a prompt and compute the others; return its page table."""
    tokens = prompt_of(random.randrange(3), 1, 0)
    for _ in range(random.randrange(4)):
        tokens += prompt_of(random.randrange(3), 1, 0)
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, PAGE, SALT)
    table = pool.index.match(hashes, tokens)
    pool.retain(table)
    new = pool.allocate(len(hashes) - len(table))
    if new is None:
        pool.release(table)
        return []
    parents = [root(SALT), *hashes]
    for index, page in enumerate(new, len(table)):
        part = tokens[index * PAGE : (index + 1) * PAGE]
        pool.publish(page, hashes[index], parents[index], part)
    return [*table, *new]


def test_pages_of_images_and_those_after_them_are_not_reported() -> None:
    slow = Slow(limit=100)
    pool = EventPool(32, PAGE, events=slow)
    tokens = prompt_of(1, 5, 0)
    tokens[PAGE + 3] = -7
    publish(pool, tokens)
    assert [each.token_ids.tolist() for each in slow.events if isinstance(each, Stored)] == [
        tokens[:PAGE]
    ]
    assert pool.reset()
    assert slow.events == [None]


def test_a_tail_is_not_reported() -> None:
    slow = Slow(limit=100)
    pool = EventPool(32, PAGE, events=slow)
    pages = pool.allocate(1)
    assert pages is not None
    pool.publish(pages[0], b"h" * 16, root(SALT), [1, 2, 3])
    pool.release(pages)
    assert pool.reset()
    assert slow.events == [None]


def stored(number: int, parent: int | None = None, root_: bytes = b"r") -> Stored:
    ids = array("i", [number] * PAGE)
    return Stored(bytes([number] * 16), parent and bytes([parent] * 16), root_, ids)


@pytest.fixture
def addresses() -> list[str]:
    return free_addresses(2)


def test_an_adapter_is_told_by_name_and_a_salt_by_a_digest(addresses: list[str]) -> None:
    config = KvEventsConfig(*addresses)
    events = KvEvents(config, PAGE, {b"r": None, b"a": "model:french"})
    try:
        events.stored(stored(1))
        events.stored(stored(2, root_=b"a"))
        events.stored(stored(3, root_=b"?"))
        told = [event for _, batch in replay(addresses[1], 0) for event in batch[1]]
    finally:
        events.close()
    assert [event["lora_name"] for event in told] == [None, "model:french", None]
    assert [event.get("extra_keys") for event in told] == [None, None, [[b"?".hex()]]]


def test_a_subscriber_that_reads_nothing_blocks_nobody(addresses: list[str]) -> None:
    num_before = threading.active_count()
    config = KvEventsConfig(*addresses, buffer_steps=3, hwm=1, max_queue_size=50)
    events = KvEvents(config, PAGE, {})
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.rcvhwm = 1
        subscriber.subscribe(b"")
        subscriber.connect(addresses[0])
        for number in range(5000):
            if not events.stored(stored(number % 256)):
                events.cleared()
        for number in range(4):
            events.stored(stored(number))
            [*_, (last, batch)] = replay(addresses[1], 0)
        assert batch[1][-1]["token_ids"] == [3] * PAGE
        assert len(replay(addresses[1], 0)) == 3  # no more are kept
        assert replay(addresses[1], last + 1) == []
    events.close()
    assert threading.active_count() == num_before


def test_a_full_queue_refuses_events(addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    may_read = threading.Event()
    encode = Batches.encode

    def encode_later(self: Batches, events: list[Any], now: float) -> bytes:
        may_read.wait(PATIENCE / 1000)
        return encode(self, events, now)

    monkeypatch.setattr(Batches, "encode", encode_later)
    events = KvEvents(KvEventsConfig(*addresses, max_queue_size=2000), PAGE, {})
    # The thread takes 1,024 of them at once and no more.
    taken = [events.stored(stored(1)) for _ in range(4000)]
    assert 2000 <= taken.count(True) <= 3024
    events.cleared()
    assert events.removed(b"h" * 16)
    may_read.set()
    told = [event["type"] for _, batch in replay(addresses[1], 0) for event in batch[1]]
    events.close()
    assert told[-2:] == ["AllBlocksCleared", "BlockRemoved"]


def test_an_address_that_is_taken_is_a_clear_error_and_is_free_after_close(
    addresses: list[str],
) -> None:
    config = KvEventsConfig(addresses[0])
    first = KvEvents(config, PAGE, {})
    with pytest.raises(InvalidConfig, match=f"cannot be published on {addresses[0]}: .*in use"):
        KvEvents(config, PAGE, {})
    first.close()
    first.close()
    KvEvents(config, PAGE, {}).close()


def test_a_request_for_a_replay_that_makes_no_sense_is_ignored(addresses: list[str]) -> None:
    events = KvEvents(KvEventsConfig(*addresses), PAGE, {})
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(addresses[1])
        for frames in ([b"x"], [b"", b"1"], [b"", b"1", b"2"], [b"", b"\xff" * 8]):
            dealer.send_multipart(frames)
        assert dealer.poll(PATIENCE)
        assert dealer.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
    events.close()


def test_without_pyzmq_a_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(InvalidConfig, match=r"pyzmq: .* install .*\[.*fleet.*\]"):
        KvEvents(KvEventsConfig(), PAGE, {})


def test_an_address_that_others_reach_is_warned_of(
    addresses: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    port = addresses[0].rpartition(":")[2]
    for address, is_warned in ((addresses[0], False), (f"tcp://*:{port}", True)):
        caplog.clear()
        KvEvents(KvEventsConfig(address), PAGE, {}).close()
        warned = [each for each in caplog.records if each.levelname == "WARNING"]
        assert bool(warned) == is_warned

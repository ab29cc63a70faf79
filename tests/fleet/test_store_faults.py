"""Whatever a store does, a tier returns what was saved or nothing, and nobody waits for it."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlxserve import LLM
from mlxserve.core.errors import InvalidRequest
from mlxserve.disk.record import HEADER_SIZE
from mlxserve.disk.tier import UNLIMITED, DiskState, Tier
from tests.fleet.redis_server import RedisServer, need_store
from tests.fleet.test_page_store import GREEDY, OPTIONS, some
from tests.waiting import wait_until

pytestmark = pytest.mark.fleet

PAGE = 1000
LONG = 60.0
NUM_KILLS = int(os.environ.get("STORE_KILLS", "20"))
NAMES = [bytes([number]) * 32 for number in range(4)]
PAYLOADS = [random.Random(number).randbytes(PAGE) for number in range(4)]
RECORDS = list(zip(NAMES, PAYLOADS, strict=True))

Open = Callable[..., Tier]


@pytest.fixture
def open_tier() -> Iterator[Open]:
    need_store()
    from mlxserve.disk.store import StoreRecords

    opened: list[Tier] = []

    def start(
        url: str, identity: bytes = b"i" * 16, daily_writes: int = 1 << 40, **options: Any
    ) -> Tier:
        options = {"silence": 30.0, "first_pause": 0.05, **options}
        records = StoreRecords(url, identity, "model", {PAGE}, **options)
        opened.append(Tier(records, limit=UNLIMITED, daily_writes=daily_writes))
        assert opened[-1].flush(LONG)
        return opened[-1]

    yield start
    for tier in opened:
        tier.close(0.1)


def save(tier: Tier) -> None:
    assert tier.save(RECORDS) == len(RECORDS)
    assert tier.flush(LONG)


def load(tier: Tier, *names: bytes) -> tuple[bytes, ...]:
    ticket = tier.load(names or NAMES)
    tier.wait(LONG)
    [answer] = tier.poll()
    assert answer.ticket == ticket
    return answer.payloads


def state(tier: Tier) -> int:
    return tier.use().state


def test_what_one_saves_another_loads(open_tier: Open, store: RedisServer) -> None:
    first, second = open_tier(store.url), open_tier(store.url)
    save(first)
    wait_until(lambda: second.num_leading(NAMES) == 4, complaint="no news of the records")
    assert load(second) == tuple(PAYLOADS)
    third = open_tier(store.url)
    assert third.num_leading(NAMES) == 4, "listed at the start"
    assert load(third) == tuple(PAYLOADS)
    assert third.use().num_bytes == 4 * (PAGE + HEADER_SIZE)
    assert first.delete(NAMES[:1]) == 1
    assert first.flush(LONG)
    assert load(second) == (), "it is gone, which nobody has told"
    assert NAMES[0] not in second
    assert load(second, *NAMES[1:]) == tuple(PAYLOADS[1:])


def test_another_model_finds_nothing(open_tier: Open, store: RedisServer) -> None:
    save(open_tier(store.url))
    other = open_tier(store.url, identity=b"j" * 16)
    assert [name in other for name in NAMES] == [False] * 4
    assert load(other) == ()


def key(number: int, identity: bytes = b"i" * 16) -> str:
    return f"mlxserve/{identity.hex()}/{NAMES[number].hex()}"


def damage(client: Any, number: int, value: bytes) -> None:
    client.set(key(number), value)


def test_damaged_foreign_and_hostile_values_are_lost(open_tier: Open, store: RedisServer) -> None:
    writer = open_tier(store.url)
    save(writer)
    client = store.client()
    sound = [client.get(key(number)) for number in range(4)]
    save(open_tier(store.url, identity=b"j" * 16))
    foreign = client.get(key(0, b"j" * 16))
    places = (0, 8, 24, 25, 57, HEADER_SIZE - 1, HEADER_SIZE, len(sound[0]) - 1)
    values = [
        *(sound[0][:at] + bytes([sound[0][at] ^ 1]) + sound[0][at + 1 :] for at in places),
        b"x",
        sound[0][:-1],
        sound[0] + b"\0",
        sound[0][:HEADER_SIZE],
        sound[1],
        foreign,
        bytes(len(sound[0])),
        b"\x80\x04\x95" + bytes(len(sound[0]) - 3),
        bytes(20 << 20),
    ]
    for value in values:
        client.set(key(0), value)
        tier = open_tier(store.url)
        assert NAMES[0] in tier
        assert load(tier) == (), value[:100]
        assert NAMES[0] not in tier
        assert state(tier) == DiskState.WORKS, "the store itself is well"
        assert client.get(key(0)) is None, "nobody else reads it"
    client.lpush(key(0), b"a list")
    tier = open_tier(store.url)
    assert load(tier) == ()
    size = (PAGE + HEADER_SIZE).to_bytes(8, "big")
    for news in (b"\xff" * 8 + b"m" * 32, b"", bytes(100), size, size + b"n" * 32):
        client.publish(f"mlxserve/{(b'i' * 16).hex()}", news)
    wait_until(lambda: b"n" * 32 in tier)
    assert b"m" * 32 not in tier, "no record has this size, for which others would be deleted"
    assert load(tier, b"n" * 32) == (), "somebody has told of a record that is not there"
    assert load(tier, *NAMES[1:]) == tuple(PAYLOADS[1:])


def test_no_more_is_read_than_a_record_has(open_tier: Open, store: RedisServer) -> None:
    client = store.client()
    client.setrange(key(0), 50 << 20, b"x")
    tier = open_tier(store.url)
    before = client.info("stats")["total_net_output_bytes"]
    assert load(tier, NAMES[0]) == ()
    assert client.info("stats")["total_net_output_bytes"] - before < 100_000


def test_a_store_that_is_stopped_is_left_alone_until_it_answers(
    open_tier: Open, store: RedisServer
) -> None:
    tier = open_tier(store.url)
    save(tier)
    store.stop()
    assert load(tier) == ()
    assert state(tier) == DiskState.STALLED
    assert NAMES[0] not in tier
    assert not tier.accepts
    assert tier.save(RECORDS) == 0
    store.start()
    wait_until(lambda: state(tier) == DiskState.WORKS)
    wait_until(lambda: NAMES[0] not in tier, complaint="it has lost all that it had")
    save(tier)
    assert load(tier) == tuple(PAYLOADS)


def test_what_is_forgotten_while_the_store_is_away_is_deleted_later(
    open_tier: Open, store: RedisServer
) -> None:
    tier = open_tier(store.url, silence=0.2)
    save(tier)
    store.pause()
    tier.delete(NAMES[:2])
    wait_until(lambda: state(tier) == DiskState.STALLED)
    tier.delete(NAMES[2:3])
    store.resume()
    wait_until(lambda: len(store.keys()) == 1, seconds=20)
    wait_until(lambda: state(tier) == DiskState.WORKS)
    assert load(tier, *NAMES[3:]) == tuple(PAYLOADS[3:])


def test_a_store_that_was_away_at_the_start_is_used_when_it_comes(
    open_tier: Open, store: RedisServer
) -> None:
    store.stop()
    tier = open_tier(store.url)
    assert load(tier) == ()
    store.start()
    wait_until(lambda: state(tier) == DiskState.WORKS)
    save(tier)


def test_a_full_store_is_read_and_not_written(open_tier: Open, store: RedisServer) -> None:
    save(open_tier(store.url))
    store.client().config_set("maxmemory-policy", "noeviction")
    store.client().config_set("maxmemory", 1)
    tier = open_tier(store.url)
    assert load(tier) == tuple(PAYLOADS)
    tier.save([(b"another", PAYLOADS[0])])
    assert tier.flush(LONG)
    assert state(tier) == DiskState.READS_ONLY
    assert load(tier) == tuple(PAYLOADS)
    assert b"another" not in tier


def test_what_a_store_evicts_is_lost(open_tier: Open, store: RedisServer) -> None:
    tier = open_tier(store.url)
    save(tier)
    store.client().flushall()
    assert load(tier) == ()
    save_again = [record for record in RECORDS if record[0] not in tier]
    assert save_again


def test_no_more_is_written_in_a_day_than_allowed(open_tier: Open, store: RedisServer) -> None:
    size = PAGE + HEADER_SIZE
    first = open_tier(store.url, daily_writes=3 * size)
    assert first.save(RECORDS[:2]) == 2
    assert first.flush(LONG)
    other = open_tier(store.url, identity=b"j" * 16, daily_writes=3 * size)
    assert other.save(RECORDS[:1]) == 1
    assert other.flush(LONG)
    assert other.use().written_today == 3 * size, "that of all servers and models"
    assert other.save(RECORDS[1:2]) == 0
    assert not other.accepts


class SlowProxy:
    """Passes on what a store says after `seconds`."""

    def __init__(self, port: int, seconds: float) -> None:
        self._port, self._seconds = port, seconds
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}"
        self._closing = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for ends in ((client, server, 0.0), (server, client, self._seconds)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, seconds: float) -> None:
        with suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                self._closing.wait(seconds)
                target.sendall(data)

    def close(self) -> None:
        self._closing.set()
        self._socket.close()


@pytest.fixture
def slow(store: RedisServer) -> Iterator[str]:
    proxy = SlowProxy(store.port, 0.2)
    yield proxy.url
    proxy.close()


def test_a_slow_store_is_left_alone(open_tier: Open, store: RedisServer, slow: str) -> None:
    save(open_tier(store.url))
    tier = open_tier(slow, silence=0.05)
    assert load(tier) == ()
    assert state(tier) == DiskState.STALLED


def test_a_password_is_used_and_never_logged(
    open_tier: Open, store: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store.client().config_set("requirepass", "s3cret-word")
    refused = open_tier(store.url.replace("//", "//:wr0ng-word@"))
    assert load(refused) == ()
    tier = open_tier(store.url.replace("//", "//:s3cret-word@"))
    save(tier)
    assert load(tier) == tuple(PAYLOADS)
    assert "redis://127.0.0.1" in caplog.text
    assert "word" not in caplog.text


def test_no_step_talks_to_the_store(
    store: RedisServer, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever waits for the store, it is not the engine's thread: neither reads, nor writes, nor names."""
    import redis

    threads: set[str] = set()
    send, connect = redis.Connection.send_packed_command, redis.Connection.connect

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            threads.add(threading.current_thread().name)
            return function(*args, **options)

        return call

    monkeypatch.setattr(redis.Connection, "send_packed_command", noted(send))
    monkeypatch.setattr(redis.Connection, "connect", noted(connect))
    folder = str(model_folder("llama"))
    for _ in range(2):
        with LLM(folder, page_store=store.url, **OPTIONS) as llm:
            llm.generate([some(100)], GREEDY, use_tqdm=False)
    assert threads == {"mlxserve-store", "mlxserve-store-news"}


@pytest.mark.parametrize("fault", ["stopped", "paused", "slow", "full", "damaged", "foreign"])
def test_answers_are_right_whatever_happens_to_the_store(
    fault: str, store: RedisServer, slow: str, model_folder: Callable[[str], Path]
) -> None:
    """The fault comes between two of eight conversations; of none is a token wrong, and all end."""
    folder, prompts = str(model_folder("llama")), [some(80 + n, seed=n // 2) for n in range(8)]
    with LLM(folder, **OPTIONS) as alone:
        expected = [alone.generate([p], GREEDY, use_tqdm=False)[0].token_ids for p in prompts]
    with LLM(folder, page_store=store.url, **OPTIONS) as writer:
        for prompt in prompts[::2]:
            writer.generate([prompt], GREEDY, use_tqdm=False)
    url = slow if fault == "slow" else store.url
    with LLM(folder, page_store=url, **OPTIONS) as llm:
        found = [llm.generate([prompts[0]], GREEDY, use_tqdm=False)[0].token_ids]
        break_store(store, fault)
        found += [llm.generate([p], GREEDY, use_tqdm=False)[0].token_ids for p in prompts[1:]]
        llm.check()
        if fault == "paused":
            store.resume()
    assert found == expected


def break_store(store: RedisServer, fault: str) -> None:
    if fault == "stopped":
        store.stop()
    elif fault == "paused":
        store.pause()
    elif fault == "full":
        store.client().config_set("maxmemory", 1)
    elif fault in ("damaged", "foreign"):
        client, keys = store.client(), store.keys()
        values = [client.get(each) for each in keys]
        # Of another model: of another name as well, as all names are of one model here.
        others = values[1:] + values[:1] if fault == "foreign" else [v[:-1] + b"\0" for v in values]
        for each, value in zip(keys, others, strict=True):
            client.set(each, value)


def test_people_see_what_a_store_has_and_how_it_is_set_up(
    open_tier: Open, store: RedisServer, tmp_path: Path
) -> None:
    save(open_tier(store.url))
    store.client().config_set("requirepass", "s3cret")
    url = store.url.replace("//", "//:s3cret@")

    def shown(*arguments: str) -> str:
        command = [sys.executable, "-m", "mlxserve", "cache", "show", *arguments]
        folder = ["--disk-cache-dir", str(tmp_path / "pages")]
        environment = {**os.environ, "MLXSERVE_PAGE_STORE": url}
        return subprocess.run(
            [*command, *folder], env=environment, capture_output=True, text=True, check=True
        ).stdout

    text, found = shown(), shown("--json")
    assert f"model{4:>43} pages" in text
    assert json.loads(found)["page_store"]["models"] == [
        {"model": "model", "num_pages": 4, "num_bytes": 4 * (PAGE + HEADER_SIZE)}
    ]
    assert "s3cret" not in text + found

    from mlxserve.disk.store_report import facts_of

    facts = facts_of(url)
    assert "a round trip takes" in facts.text
    assert "has no maxmemory" in facts.advice
    store.client(password="s3cret").config_set("maxmemory", 1 << 30)
    assert "allkeys-lru" in facts_of(url).advice
    store.client(password="s3cret").config_set("maxmemory-policy", "allkeys-lru")
    assert not facts_of(url).advice
    with pytest.raises(InvalidRequest, match="does not answer as it should") as refused:
        facts_of(url.replace("s3cret", "wr0ng-word"))
    assert "word@" not in str(refused.value)


def num_read(*llms: LLM) -> int:
    return sum(llm.stats().store.num_read for llm in llms)


@pytest.mark.usefixtures("unhurried_disk")
def test_no_token_changes_while_the_store_is_killed_again_and_again(
    store: RedisServer, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loses all that it has each time, in the middle of reads and writes of two engines that share it."""
    folder, prompts = str(model_folder("llama")), [some(100 + n, seed=n % 4) for n in range(8)]
    with LLM(folder, **OPTIONS) as alone:
        expected = [alone.generate([p], GREEDY, use_tqdm=False)[0].token_ids for p in prompts]
    monkeypatch.setattr("mlxserve.disk.store.FIRST_PAUSE", 0.02)
    monkeypatch.setattr("mlxserve.disk.store_watch.LONGEST_PAUSE", 0.02)
    ends = threading.Event()
    kills = 0

    def kill() -> None:
        nonlocal kills
        draw = random.Random(1)
        while not ends.wait(draw.uniform(0, 0.4)):
            store.stop()
            kills += 1
            ends.wait(draw.uniform(0, 0.1))
            store.start()

    options = {**OPTIONS, "num_pages": 16, "max_num_seqs": 1, "page_store": store.url}
    with LLM(folder, **options) as a, LLM(folder, **options) as b:
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            while kills < NUM_KILLS or not num_read(a, b):
                for llm in (a, b):
                    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                    assert [output.token_ids for output in outputs] == expected
        finally:
            ends.set()
            killer.join()
        for llm in (a, b):
            llm.check()

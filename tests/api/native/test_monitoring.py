import asyncio
import json
from functools import partial
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.api.native.monitoring import MAX_MAPS, Monitoring
from mlxserve.api.native.page_map import PageMapFeed
from mlxserve.api.native.snapshots import SharedSnapshots
from mlxserve.api.server.drain import Drain
from mlxserve.engine.snapshot import Phase, RequestView
from mlxserve.request import CacheMiss, CacheReport, FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import FakeAnswer, FakeChat

KEYS = ["first-key", "second-key"]
STATS = "/api/v1/kv/stats"


def seen(name: str, client: str = "", **changes) -> RequestView:
    values = {
        "id": name,
        "client": client,
        "phase": Phase.PREFILLING,
        "position": None,
        "num_prompt": 100,
        "num_cached": 32,
        "num_computed": 64,
        "num_to_compute": 100,
        "num_outputs": 0,
        "num_preemptions": 0,
        "priority": 0,
        "age": 1.5,
        "page_table": (1, 2, 3),
    }
    return RequestView(**{**values, **changes})


@pytest.fixture
def keyed(chat):
    app = create_app(chat, access=AccessPolicy(api_keys=KEYS))
    return TestClient(app, base_url="http://127.0.0.1")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_live_requests_show_their_progress(client, chat):
    chat.views = [
        seen("a"),
        seen("b", phase=Phase.QUEUED, position=1, num_computed=0, page_table=()),
    ]
    first, second = client.get("/api/v1/requests").json()["data"]
    assert first == {
        "id": "a",
        "object": "request",
        "key": None,
        "state": "prefilling",
        "position": None,
        "num_computed": 64,
        "num_to_compute": 100,
        "prompt_tokens": 100,
        "cached_tokens": 32,
        "output_tokens": 0,
        "num_pages": 3,
        "num_preemptions": 0,
        "priority": 0,
        "age_seconds": 1.5,
    }
    assert (second["state"], second["position"]) == ("queued", 1)


def test_a_key_sees_its_own_requests_only(keyed, chat):
    asked = {"prompt": "x"}
    for key in KEYS:
        keyed.post("/v1/completions", json=asked, headers=bearer(key))
    clients = [one.client for one in chat.submitted]
    assert len(set(clients)) == 2
    chat.views = [seen(str(number), client) for number, client in enumerate(clients)]
    for number, key in enumerate(KEYS):
        listed = keyed.get("/api/v1/requests", headers=bearer(key)).json()["data"]
        assert [one["id"] for one in listed] == [str(number)]


def test_a_request_has_the_id_of_its_reply(client, chat):
    reply = client.post("/v1/completions", json={"prompt": "x"})
    assert chat.submitted[0].request_id == reply.headers["x-request-id"]
    several = client.post("/v1/completions", json={"prompt": ["x", "y"], "n": 2})
    name = several.headers["x-request-id"]
    assert [one.request_id for one in chat.submitted[1:]] == [name] * 4


def test_statistics_describe_the_cache(client, chat):
    chat.views = [seen("a"), seen("b", phase=Phase.QUEUED)]
    assert client.get(STATS).json() == {
        "page_size": 16,
        "kv_cache_dtype": "float32",
        "pages": {
            "total": 8,
            "free": 4,
            "active": 1,
            "shared": 1,
            "cached": 1,
            "pinned": 1,
            "stored": 0,
            "used": 3,
        },
        "bytes": {
            "kv_cache": 8000,
            "page": 1000,
            "active": 9000,
            "reserved": 10,
            "peak": 9500,
        },
        "prefix_cache": {"queries": 100, "hits": 40, "hit_rate": 0.4},
        "recurrent_states": {"slots": 0, "snapshots": 0, "restored": 0, "evicted": 0},
        "window_pages": {"total": 0, "used": 0, "cached": 0, "evicted": 0},
        "disk_cache": {
            "state": "works",
            "pages": 2,
            "bytes": 4096,
            "limit": 8192,
            "read": 3,
            "written": 5,
            "lost": 1,
            "written_today": 6000,
            "read_rate": 1000,
        },
        "page_store": {
            "state": "off",
            **dict.fromkeys(("pages", "bytes", "read", "written", "lost", "written_today"), 0),
            "read_rate": 0,
        },
        "speculation": {"drafts": 0, "drafted_tokens": 0, "accepted_tokens": 0, "reason": None},
        "tokens_per_second": {"prefill": 12.5, "generation": 3.0},
        "requests": {"running": 1, "waiting": 1},
        "num_preemptions": 1,
    }


@pytest.mark.parametrize("path", ["/api/v1/requests", STATS])
def test_a_stopped_engine_is_a_503(client, chat, path):
    chat.is_closed = True
    reply = client.get(path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_stopped")


def reading_map(chat: FakeChat) -> tuple[asyncio.Queue[bytes], asyncio.Task[None]]:
    """(the events of a page map as they are written, the task that writes them)."""
    events: asyncio.Queue[bytes] = asyncio.Queue()
    monitoring = Monitoring(chat, Drain())
    return events, asyncio.create_task(
        monitoring.write_map(
            partial(chat.executor.run, ""), PageMapFeed(lambda _: True), events.put
        )
    )


def test_the_map_begins_with_a_snapshot_and_ends_with_the_engine(chat):
    async def scenario() -> list[bytes]:
        events, writing = reading_map(chat)
        first = await events.get()
        chat.pages = bytes([4, 1, 2, 3, 1, 0, 0, 0])
        chat.answers.append(FakeAnswer())  # the counters move
        second = await events.get()
        chat.is_closed = True
        chat.answers.clear()
        last = await events.get()
        await writing
        assert events.empty()
        return [first, second, last]

    first, second, last = asyncio.run(scenario())
    assert b'"pages":"p1a1s1c1f4"' in first
    assert b'"pages":[[4,"a1"]]' in second
    assert last.startswith(b"event: error\n")
    assert json.loads(last.split(b"data: ")[1])["error"]["code"] == "engine_stopped"


def test_an_idle_engine_is_not_asked_for_another_snapshot(chat, monkeypatch):
    monkeypatch.setattr("mlxserve.api.native.monitoring.MAP_INTERVAL", 0.01)

    async def scenario() -> None:
        events, writing = reading_map(chat)
        await events.get()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(events.get(), timeout=0.2)
        writing.cancel()

    asyncio.run(scenario())
    assert chat.num_snapshots == 1


class SlowEngine:
    """Replaces a chat. A snapshot shows the moment of its request and takes a while."""

    def __init__(self) -> None:
        self.num_pages = 1_000
        self.num_snapshots = 0
        self.is_asked, self.is_done = asyncio.Event(), asyncio.Event()

    async def snapshot(self) -> SimpleNamespace:
        self.num_snapshots += 1
        self.is_asked.set()
        taken = SimpleNamespace(num_pages=self.num_pages)
        await self.is_done.wait()
        return taken


def test_callers_at_the_same_moment_share_one_snapshot() -> None:
    async def scenario() -> None:
        engine = SlowEngine()
        engine.is_done.set()
        snapshots = SharedSnapshots(engine)
        taken = await asyncio.gather(*(snapshots.take() for _ in range(9)))
        assert len({id(one) for one in taken}) == 1
        await snapshots.take()
        assert engine.num_snapshots == 2

    asyncio.run(scenario())


def test_a_snapshot_is_never_older_than_its_call() -> None:
    """A resize ends while an older snapshot is being taken; later calls must see it."""

    async def scenario() -> None:
        engine = SlowEngine()
        snapshots = SharedSnapshots(engine)
        early = asyncio.ensure_future(snapshots.take())
        await engine.is_asked.wait()
        engine.num_pages = 6
        late = [asyncio.ensure_future(snapshots.take()) for _ in range(3)]
        await asyncio.sleep(0)
        engine.is_done.set()
        assert (await early).num_pages == 1_000
        assert [(await one).num_pages for one in late] == [6, 6, 6]
        assert engine.num_snapshots == 2

    asyncio.run(scenario())


def test_a_cancelled_caller_does_not_cancel_the_snapshot_of_others() -> None:
    async def scenario() -> None:
        engine = SlowEngine()
        snapshots = SharedSnapshots(engine)
        leaves, stays = (asyncio.ensure_future(snapshots.take()) for _ in range(2))
        await engine.is_asked.wait()
        leaves.cancel()
        await asyncio.sleep(0)
        engine.is_done.set()
        assert (await stays).num_pages == 1_000
        assert leaves.cancelled()

    asyncio.run(scenario())


def test_statistics_after_a_change_show_the_new_state(client, chat):
    before = client.get(STATS).json()["pages"]["total"]
    chat.pages = bytes(4)
    assert (before, client.get(STATS).json()["pages"]["total"]) == (8, 4)


def test_a_head_request_for_the_map_ends(client):
    reply = client.head("/api/v1/kv/map")
    assert reply.headers["content-type"].startswith("text/event-stream")


def test_the_number_of_open_maps_is_bounded(client, chat, monkeypatch):
    monkeypatch.setattr("mlxserve.api.native.monitoring.MAX_MAPS", 0)
    reply = client.get("/api/v1/kv/map")
    assert MAX_MAPS > 0
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


def test_usage_reports_what_the_cache_did(client, chat):
    report = CacheReport(3, 48, 50, CacheMiss.NEW_TEXT, num_from_disk=16, page_size=16)
    usage = Usage(100, 1, 48, cache=report)
    chat.script = [Delta("x", (1,), (), FinishReason.STOP, usage)]
    told = {
        "num_pages": 3,
        "page_size": 16,
        "num_tokens": 48,
        "tokens_from_disk": 16,
        "tokens_from_store": 0,
        "differs_at": 50,
        "reason": "new_text",
    }
    hello = {"messages": [{"role": "user", "content": "Hi"}]}
    asked = [
        ("/v1/chat/completions", hello),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "n": 2}),
        ("/v1/responses", {"input": "x"}),
    ]
    for path, body in asked:
        assert client.post(path, json=body).json()["usage"]["cache"] == told
    several = client.post("/v1/completions", json={"prompt": ["x", "y"]})
    assert several.json()["usage"]["cache"] is None

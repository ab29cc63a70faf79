from __future__ import annotations

import asyncio
import threading

import httpx
from starlette.testclient import TestClient

from mlxserve.api.app import create_app
from mlxserve.api.server.drain import Drain
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.serving import StartServer


def test_a_stopping_server_refuses_new_work_but_not_reads(chat: FakeChat) -> None:
    drain = Drain()
    client = TestClient(create_app(chat, drain=drain), base_url="http://127.0.0.1")
    asked = {"prompt": "x"}
    assert client.post("/v1/completions", json=asked).status_code == 200
    drain.start()
    refused = client.post("/v1/completions", json=asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["retry-after"] == "5"
    assert client.get("/ready").json()["error"]["code"] == "draining"
    assert client.get("/health").status_code == 200
    assert client.get("/api/v1/kv/map").text == ""  # watchers are disconnected


def test_a_drain_is_finished_when_nothing_runs() -> None:
    async def scenario() -> None:
        drain = Drain()
        await drain.finished()
        with drain.counted({"method": "POST"}):
            with drain.counted({"method": "PUT"}), drain.counted({"method": "GET"}):
                assert drain.num_running == 2
                waiting = asyncio.ensure_future(drain.finished())
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting

    asyncio.run(scenario())


def test_running_answers_finish_while_new_work_is_refused(
    start_server: StartServer, chat: FakeChat
) -> None:
    usage = Usage(1, 1, 0)
    chat.script = [HOLD, Delta("done", (1,), (), "stop", usage)]
    server = start_server(drain_seconds=60)
    replies = []

    def ask() -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=30)

    thread = threading.Thread(target=lambda: replies.append(ask()))
    thread.start()
    assert chat.on_hold.wait(timeout=30)
    server.server.stop()
    while httpx.get(f"{server.url}/ready", timeout=30).status_code != 503:
        assert server.thread.is_alive()  # it has not noticed yet
    refused = ask()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    chat.release()
    thread.join(timeout=30)
    assert replies[0].json()["choices"][0]["text"] == "done"
    server.thread.join(timeout=30)
    assert not server.thread.is_alive()

"""Without keys, connections share the engine: a flood of some does not keep another waiting."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import httpx
import pytest
from starlette.testclient import TestClient

from tests.api.fake_chat import FakeChat
from tests.api.serving import Serve, StartServer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

NUM_FLOODING = 12


def test_a_request_without_a_key_is_its_connections(
    start_server: StartServer, chat: FakeChat
) -> None:
    url = f"{start_server().url}/v1/completions"
    with httpx.Client(timeout=30) as first, httpx.Client(timeout=30) as second:
        for client in (first, first, second):
            assert client.post(url, json={"prompt": "x"}).status_code == 200
    one, again, other = (asked.client for asked in chat.submitted)
    assert one == again != other


def test_a_connections_name_is_not_shown_as_a_key(client: TestClient, chat: FakeChat) -> None:
    client.post("/v1/completions", json={"prompt": "x"})
    assert chat.submitted[0].client.startswith("@")


@pytest.mark.slow
def test_a_newcomer_does_not_wait_for_the_queue_of_a_flood(
    serve_real: Serve, real_chat: TextModel
) -> None:
    flood = {"prompt": [7, 8, 9], "n": 8, "max_tokens": 60, "ignore_eos": True}
    done: list[int] = []
    with serve_real() as server:
        url = f"{server.url}/v1/completions"

        def ask(number: int) -> None:
            assert httpx.post(url, json=flood, timeout=120).status_code == 200
            done.append(number)

        threads = [threading.Thread(target=ask, args=(each,)) for each in range(NUM_FLOODING)]
        for thread in threads:
            thread.start()
        wait_until(lambda: real_chat.engine.stats().scheduler.num_waiting >= 4 * NUM_FLOODING)
        newcomer = {"prompt": [1, 2, 3], "max_tokens": 1}
        assert httpx.post(url, json=newcomer, timeout=120).status_code == 200
        num_done = len(done)
        for thread in threads:
            thread.join()
    assert len(done) == NUM_FLOODING
    assert num_done <= NUM_FLOODING // 2

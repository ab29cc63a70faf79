from typing import Any

import pytest

from tests.tui import scripts
from tests.tui.fake_server import FakeServer
from tui.talk.client import ChatClient
from tui.talk.engine_state import Progress, RequestStage
from tui.talk.errors import ChatError, NoEngine


async def first_events(client: ChatClient, count: int) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    events = client.engine.page_events()
    while len(found) < count:
        found.append(await anext(events))
    await events.aclose()
    return found


async def test_requests_are_read_as_progress(server: FakeServer, client: ChatClient) -> None:
    card = scripts.request_card("x", "prefilling", num_computed=5, num_to_compute=20)
    server.engine["/api/v1/requests"] = {"data": [card]}
    progress = await client.engine.requests()
    assert progress == [Progress("x", RequestStage.PREFILLING, None, 5, 20)]


async def test_the_statistics_are_read(server: FakeServer, client: ChatClient) -> None:
    server.engine["/api/v1/kv/stats"] = scripts.engine_stats(running=2, waiting=1)
    stats = await client.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.hit_rate) == (2, 1, 0.84)
    assert (stats.active_size, stats.decode_rate) == (3 << 30, 42.25)


async def test_events_of_the_map_have_a_kind(server: FakeServer, client: ChatClient) -> None:
    server.map = [scripts.page_event("snapshot", a=1), scripts.page_event("delta", a=2)]
    found = await first_events(client, 2)
    assert [(kind, data["a"]) for kind, data in found] == [("snapshot", 1), ("delta", 2)]


async def test_the_engine_of_the_chosen_model_is_asked(
    server: FakeServer, client: ChatClient
) -> None:
    server.engine["/api/v1/requests"] = {"data": []}
    server.map = [scripts.page_event("snapshot", a=1)]

    await client.engine.requests()
    client.engine.model = "org/large"
    await client.engine.requests()
    await first_events(client, 1)
    assert server.queries == [
        ("/api/v1/requests", ""),
        ("/api/v1/requests", "model=org%2Flarge"),
        ("/api/v1/kv/map", "model=org%2Flarge"),
    ]


async def test_an_error_in_the_map_is_the_server_s_message(
    server: FakeServer, client: ChatClient
) -> None:
    server.map = [scripts.page_event("error", error={"message": "the engine has ended"})]
    with pytest.raises(ChatError, match="the engine has ended"):
        await first_events(client, 1)


async def test_another_server_has_no_engine(client: ChatClient) -> None:
    for asking in (client.engine.requests(), client.engine.stats(), first_events(client, 1)):
        with pytest.raises(NoEngine, match="mlxserve serve"):
            await asking


async def test_malformed_statistics_mean_no_engine(server: FakeServer, client: ChatClient) -> None:
    server.engine["/api/v1/kv/stats"] = {"bytes": 7}
    with pytest.raises(NoEngine):
        await client.engine.stats()

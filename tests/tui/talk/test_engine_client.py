from collections.abc import Callable
from typing import Any

import pytest

from tests.tui import scripts
from tests.tui.fake_server import FakeServer
from tui.talk.client import ChatClient
from tui.talk.engine_state import Progress, RequestStage
from tui.talk.errors import ChatError, NoEngine

InClient = Callable[..., Any]


async def first_events(client: ChatClient, count: int) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    events = client.engine.page_events()
    while len(found) < count:
        found.append(await anext(events))
    await events.aclose()
    return found


def test_requests_are_read_as_progress(server: FakeServer, in_client: InClient) -> None:
    card = scripts.request_card("x", "prefilling", num_computed=5, num_to_compute=20)
    server.engine["/api/v1/requests"] = {"data": [card]}
    progress = in_client(server.url, lambda client: client.engine.requests())
    assert progress == [Progress("x", RequestStage.PREFILLING, None, 5, 20)]


def test_the_statistics_are_read(server: FakeServer, in_client: InClient) -> None:
    server.engine["/api/v1/kv/stats"] = scripts.engine_stats(running=2, waiting=1)
    stats = in_client(server.url, lambda client: client.engine.stats())
    assert (stats.num_running, stats.num_waiting, stats.hit_rate) == (2, 1, 0.84)
    assert (stats.active_size, stats.decode_rate) == (3 << 30, 42.25)


def test_events_of_the_map_have_a_kind(server: FakeServer, in_client: InClient) -> None:
    server.map = [scripts.page_event("snapshot", a=1), scripts.page_event("delta", a=2)]
    found = in_client(server.url, lambda client: first_events(client, 2))
    assert [(kind, data["a"]) for kind, data in found] == [("snapshot", 1), ("delta", 2)]


def test_the_engine_of_the_chosen_model_is_asked(server: FakeServer, in_client: InClient) -> None:
    server.engine["/api/v1/requests"] = {"data": []}
    server.map = [scripts.page_event("snapshot", a=1)]

    async def ask(client: ChatClient) -> None:
        await client.engine.requests()
        client.engine.model = "org/large"
        await client.engine.requests()
        await first_events(client, 1)

    in_client(server.url, ask)
    assert server.queries == [
        ("/api/v1/requests", ""),
        ("/api/v1/requests", "model=org%2Flarge"),
        ("/api/v1/kv/map", "model=org%2Flarge"),
    ]


def test_an_error_in_the_map_is_the_server_s_message(
    server: FakeServer, in_client: InClient
) -> None:
    server.map = [scripts.page_event("error", error={"message": "the engine has ended"})]
    with pytest.raises(ChatError, match="the engine has ended"):
        in_client(server.url, lambda client: first_events(client, 1))


@pytest.mark.parametrize("route", ["requests", "stats", "map"])
def test_another_server_has_no_engine(server: FakeServer, in_client: InClient, route: str) -> None:
    async def ask(client: ChatClient) -> object:
        if route == "map":
            return await first_events(client, 1)
        return await getattr(client.engine, route)()

    with pytest.raises(NoEngine, match="mlxserve serve"):
        in_client(server.url, ask)


def test_malformed_statistics_mean_no_engine(server: FakeServer, in_client: InClient) -> None:
    server.engine["/api/v1/kv/stats"] = {"bytes": 7}
    with pytest.raises(NoEngine):
        in_client(server.url, lambda client: client.engine.stats())

"""Tools in answers that the server writes: any follower decides, and the server calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolCallDelta
from tests.api.chats.following import Follower, text_of
from tests.api.fake_chat import FakeChat
from tests.api.serving import StartServer
from tests.mcp.kept_settings import scripted, write_servers
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

CHATS = "/api/v1/chats"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    write_servers(tmp_path / "config" / "mlxserve" / "mcp.json", {"s": scripted()})


@pytest.fixture
def client(start_server: StartServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=start_server().url, timeout=60) as client:
        yield client


def calling(name: str, arguments: str) -> list[Any]:
    call = ToolCallDelta(0, id="call_1", name=name, arguments=arguments)
    return [
        Delta("Let me see.", (66,)),
        Delta("", (67,), (), FinishReason.STOP, Usage(5, 2, 0), tool_calls=(call,)),
    ]


def asked(client: httpx.Client, chat: FakeChat, name: str, arguments: str = "{}") -> Follower:
    """A follower of an answer that asks for a call."""
    number = client.post(CHATS, json={"title": "One"}).json()["id"]
    follower = Follower(str(client.base_url), number)
    follower.wait_for("state")
    chat.script = calling(name, arguments)
    reply = client.post(f"{CHATS}/{number}/answers", json={"text": "Well?"})
    assert reply.status_code == 200, reply.text
    follower.wait_for("question")
    chat.script = None
    return follower


def decide(client: httpx.Client, follower: Follower, decision: str, call: str = "call_1") -> int:
    answer = follower.of("question")[0]["id"]
    chat = follower.of("state")[0]["chat"]["id"]
    body = {"call_id": call, "decision": decision}
    return client.post(f"{CHATS}/{chat}/answers/{answer}/decision", json=body).status_code


def test_any_follower_allows_a_call_which_the_model_gets(
    client: httpx.Client, chat: FakeChat
) -> None:
    follower = asked(client, chat, "s__add", '{"a": 20, "b": 22}')
    [question] = follower.of("question")
    assert (question["name"], question["description"]) == ("s__add", "Adds two numbers.")
    late = Follower(str(client.base_url), follower.of("state")[0]["chat"]["id"])
    assert late.wait_for("state")["answer"]["question"]["call_id"] == "call_1"
    assert decide(client, follower, "once", "another") == 409
    assert decide(client, follower, "once") == 200
    for each in (follower, late):
        each.wait_for("decided")
        assert each.wait_for("end")["state"] == "done"
        assert text_of(each.blocks) == "Hello"
        each.close()
    assert decide(client, follower, "once") == 404
    last = follower.of("round")[-1]["round"]
    assert (last["text"], last["calls"][0]["state"], last["calls"][0]["result"]) == (
        "Let me see.",
        "done",
        "42",
    )
    roles = [one["role"] for one in chat.rendered[-1].messages]
    assert roles == ["user", "assistant", "tool"]


def test_a_refused_call_is_told_to_the_model(client: httpx.Client, chat: FakeChat) -> None:
    follower = asked(client, chat, "s__huge")
    assert decide(client, follower, "never") == 200
    follower.wait_for("end")
    assert chat.rendered[-1].messages[-1]["content"] == "The user did not allow this call."
    assert "s__huge" not in {tool["function"]["name"] for tool in chat.rendered[-1].tools}
    follower.close()


def test_an_answer_that_waits_for_a_decision_is_stopped(
    client: httpx.Client, chat: FakeChat
) -> None:
    follower = asked(client, chat, "s__never")
    answer = follower.of("question")[0]["id"]
    number = follower.of("state")[0]["chat"]["id"]
    assert client.delete(f"{CHATS}/{number}/answers/{answer}").status_code == 200
    assert follower.wait_for("end")["state"] == "stopped"
    follower.close()
    wait_until(lambda: client.get(f"{CHATS}/{number}").json()["messages"][1]["rounds"], 30)
    [call] = client.get(f"{CHATS}/{number}").json()["messages"][1]["rounds"][0]["calls"]
    assert call["state"] == "stopped"

"""A server that is killed while it writes an answer, and the next one on the same folder."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxserve.api.chats.answer_writer import PUBLISH_INTERVAL
from tests.api.chats.following import PATIENCE, Follower, apply, text_of
from tests.api.server.process import Process, served
from tests.waiting import wait_until

CHATS = "/api/v1/chats"
# Events of a growing text in which more than a second passes, by the clock of the server.
SECOND = math.ceil(1 / PUBLISH_INTERVAL) + 1


def letters(text: str) -> str:
    """The text without spaces and marks, which its blocks do not have."""
    return "".join(filter(str.isalnum, text))


def shown(patches: list[Any]) -> str:
    """What a follower shows after these events of an answer."""
    blocks: list[Any] = []
    for each in patches:
        apply(blocks, each["patches"])
    return letters(text_of(blocks))


@pytest.mark.slow
def test_a_killed_server_loses_a_second_of_an_answer_at_most_which_goes_on(
    write_model: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    model = write_model(tmp_path / "model", "qwen3", max_position_embeddings=20_000)

    def serve() -> contextlib.AbstractContextManager[Process]:
        folders = {"MLXSERVE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
        flags = ("--model", str(model), "--num-pages", "1000")
        return served(tmp_path / "stderr", *flags, env=folders)

    with serve() as killed, httpx.Client(base_url=killed.url, timeout=PATIENCE) as client:
        chat = client.post(CHATS, json={"title": "One"}).json()["id"]
        follower = Follower(killed.url, chat)
        follower.wait_for("state")
        body = {"text": "Why?", "temperature": 1, "seed": 1}
        answer = client.post(f"{CHATS}/{chat}/answers", json=body).json()["answer"]["id"]
        wait_until(lambda: len(follower.of("blocks")) > SECOND + 3, PATIENCE)
        killed.popen.kill()
        assert killed.popen.wait(timeout=PATIENCE) == -signal.SIGKILL
        follower.close()
    assert not follower.of("end")
    seen = shown(follower.of("blocks")[:-SECOND])
    assert seen

    with serve() as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        back = Follower(server.url, chat, after=follower)
        assert back.wait_for("state")["answer"] is None
        _, stopped = client.get(f"{CHATS}/{chat}").json()["messages"]
        assert (stopped["id"], stopped["state"]) == (answer, "stopped")
        assert letters(stopped["text"]).startswith(seen)
        more = {"leaf_id": answer, "continues": answer, "max_tokens": 20, "seed": 1}
        assert client.post(f"{CHATS}/{chat}/answers", json=more).status_code == 200
        # Random weights may say that the answer has ended.
        assert back.wait_for("end")["state"] in ("cut", "done")
        _, whole = client.get(f"{CHATS}/{chat}").json()["messages"]
        assert whole["text"].startswith(stopped["text"])
        assert len(whole["text"]) > len(stopped["text"])
        assert letters(text_of(back.blocks)) == letters(whole["text"])
        back.close()
        assert server.stop() == (0, "")

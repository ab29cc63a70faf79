"""A deleted chat leaves no page on disk, and takes none of another chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.server.process import Process, served
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SYSTEM = "You answer questions about mlxserve, in one or two short sentences. " * 3
ONE = ("What is a page? " * 9, "What is a prefix? " * 9)
OTHER = ("What is a step? " * 9, "What is a chunk? " * 9)


def call(process: Process, method: str, path: str, body: Any = None) -> Any:
    status, text = process.request(method, path, body)
    assert status == 200, text
    return json.loads(text)


def talk(process: Process, questions: tuple[str, ...]) -> int:
    """A chat as the page keeps it; its id."""
    messages = [{"role": "system", "content": SYSTEM}]
    chat = call(process, "POST", "/api/v1/chats", {"title": "One", "system": SYSTEM})["id"]
    parent = None
    for question in questions:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "max_tokens": 60, "temperature": 0}
        reply = call(process, "POST", "/v1/chat/completions", body)
        messages.append(reply["choices"][0]["message"])
        for one in messages[-2:]:
            sent = {"role": one["role"], "text": one["content"], "parent_id": parent}
            parent = call(process, "POST", f"/api/v1/chats/{chat}/messages", sent)["id"]
    return int(chat)


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.rglob("*.page")}


@pytest.mark.long
@pytest.mark.parametrize("is_restarted", [True, False])
def test_its_pages_are_gone_and_those_of_another_chat_stay(
    tmp_path: Path, is_restarted: bool
) -> None:
    pages = tmp_path / "pages"
    flags = ("--num-pages", "256", "--disk-cache-size", "1", "--disk-cache-dir", str(pages))
    env = {"MLXSERVE_HOME": str(tmp_path / "home")}
    with served(tmp_path / "first", *flags, env=env) as process:
        talk(process, ONE)
        assert process.stop() == (0, "")
    of_one = files(pages)
    with served(tmp_path / "second", *flags, env=env) as process:
        other = talk(process, OTHER)
        if not is_restarted:
            call(process, "DELETE", f"/api/v1/chats/{other}")
        assert process.stop() == (0, "")
    if is_restarted:
        of_other = files(pages) - of_one
        assert len(of_other) > 5
        with served(tmp_path / "third", *flags, env=env) as process:
            cache = call(process, "DELETE", f"/api/v1/chats/{other}")["cache"]
            assert cache["pages_on_disk"] == len(of_other)
            wait_until(lambda: files(pages) <= of_one)
            assert process.stop() == (0, "")
    assert files(pages) == of_one

"""The recipes of docs/fleet.md run as written, with a real router and a real store."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from mlxserve.bench.servers import our_server, run_child
from mlxserve.system.machine import free_ports
from tests.fleet.redis_server import RedisServer, need_store
from tests.fleet.room import MODEL, a_room, converse, need_router, requests_of
from tests.test_docs import console_lines

pytestmark = pytest.mark.fleet

TEXT = (Path(__file__).parents[2] / "docs/fleet.md").read_text(encoding="utf-8")


class Names:
    """Free ports of this machine in place of the recipe's hosts."""

    def __init__(self) -> None:
        self._ports: dict[tuple[str, str], int] = {}

    def port(self, host: str, port: str) -> int:
        if (host, port) not in self._ports:
            [self._ports[host, port]] = free_ports(1)
        return self._ports[host, port]

    def here(self, words: list[str]) -> list[str]:
        """The command as it is, but for hosts and ports, which are this machine's."""

        def local(match: re.Match[str]) -> str:
            return f"127.0.0.1:{self.port(match[1], match[2])}"

        return [re.sub(r"([\w-]+\.local|\*):(\d+)", local, word) for word in words]


def recipe(title: str) -> list[list[str]]:
    """The commands of a section."""
    [section] = re.findall(rf"## {title}\n(.*?)\n## ", TEXT, re.DOTALL)
    return [shlex.split(line) for line in console_lines(section)]


def options_of(words: list[str], *left_out: str) -> list[str]:
    """The options after the program, without some that have one value."""
    words = words[2:] if words[:2] == ["mlxserve", "serve"] else words[1:]
    kept: list[str] = []
    rest: Iterator[str] = iter(words)
    for word in rest:
        if word in left_out:
            next(rest)
        else:
            kept.append(word)
    return kept


def say(url: str, messages: list[dict[str, str]]) -> tuple[str, dict[str, int]]:
    """Ask for the next answer, which is added to the messages."""
    body = {"model": "any", "messages": messages, "max_tokens": 24, "temperature": 0}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
    text = reply.json()["choices"][0]["message"]["content"]
    messages.append({"role": "assistant", "content": text})
    return text, reply.json()["usage"]


def question(words: str) -> dict[str, str]:
    return {"role": "user", "content": words * 12}


def test_a_conversation_goes_on_where_its_pages_are() -> None:
    """Each is begun at one server, and continued by the router: at that server, with every full page."""
    with a_room(3, "kv_aware") as room:
        for number, server in enumerate(room.servers[::-1] * 2):
            messages = [question(f"Tell me about assistant {number}. ")]
            say(server.url, messages)
            messages.append(question("And more? "))
            _, usage = say(room.url, messages)
            assert usage["cache"]["num_tokens"] > 100, number  # type: ignore[index]


def test_load_is_spread_and_no_answer_changes_when_a_server_and_the_store_are_killed(
    store: RedisServer,
) -> None:
    """Both are killed under load: what was under way is asked again, and every answer is that of before."""
    with a_room(3, "kv_aware", "--page-store", store.url) as room:
        first = asyncio.run(converse(room))
        requests = [requests_of(server) for server in room.servers]
        assert max(requests) <= sum(requests) / 2, requests
        assert first.share > 0.5

        def kill(num_answers: int) -> None:
            if num_answers == 16:
                store.stop()
            elif num_answers == 32:
                process_id = room.servers[0].process_id
                assert process_id is not None
                os.kill(process_id, signal.SIGKILL)
            elif num_answers == 48:
                store.start()

        again = asyncio.run(converse(room, answered=kill))
        assert again.answers == first.answers
        assert len(again.answers) == 64


def test_two_macs_and_one_address() -> None:
    serve, router = recipe("Two Macs and one address")
    need_router()
    names = Names()
    with ExitStack() as stack:
        router = names.here(router)
        known = shlex.join(router)
        for mac in ("mac-1.local", "mac-2.local"):
            # The events of this Mac's own address are at the ports that the router was told.
            words = [re.sub(r"\*:(\d+)", rf"{mac}:\1", word) for word in serve]
            words = options_of(names.here(words), "-m", "--host", "--port")
            server = stack.enter_context(our_server(mac, MODEL, words))
            known = known.replace(f"127.0.0.1:{names.port(mac, '8000')}", server.url[7:])
            known = known.replace("MODEL", server.model)
        command = [need_router(), *options_of(shlex.split(known), "--host", "--port")]
        command += ["--prometheus-port", str(free_ports(1)[0])]
        url = stack.enter_context(run_child("router", command, "/health", {})).url
        messages = [question("Tell me about pages. ")]
        say(url, messages)
        messages.append(question("And more? "))
        _, usage = say(url, messages)
        assert usage["cache"]["num_tokens"] >= 96  # type: ignore[index]


def test_a_page_store_on_the_mac_with_the_most_memory(tmp_path: Path) -> None:
    start, export, serve = recipe("A page store on the Mac with the most memory")
    need_store()
    options = options_of(start, "--bind", "--port")
    assert start[0] == "valkey-server"
    store = RedisServer(tmp_path, *options, password="SECRET")
    name, _, value = export[1].partition("=")
    environment = {name: value.replace("studio.local:6379", f"127.0.0.1:{store.port}")}
    messages = [question("Tell me about pages. ")]
    words = options_of(serve, "-m", "--port")
    try:
        with our_server("mac 1", MODEL, words, environment) as server:
            say(server.url, messages)
        messages.append(question("And more? "))
        with our_server("mac 2", MODEL, words, environment) as server:
            _, usage = say(server.url, messages)
            found = usage["cache"]
            assert (
                "mlxserve:page_store_hits_total"
                in httpx.get(f"{server.url}/metrics", timeout=120).text
            )
        assert found["tokens_from_store"] == found["num_tokens"] >= 96  # type: ignore[index]
    finally:
        store.stop()

"""How users of each agent compact a conversation by hand."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from tests.clients.coding_agents import SECONDS, AgentRun

_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


def _compact_claude(run: AgentRun) -> None:
    run.resume("/compact")


def _compact_codex(run: AgentRun) -> None:
    """By the protocol that Codex's own screen speaks, where `/compact` sends `thread/compact/start`."""
    with run.process(["app-server"], stdin=subprocess.PIPE) as process:
        server = _AppServer(process)
        server.ask("initialize", {"clientInfo": {"name": "test", "version": "1"}})
        [thread] = server.ask("thread/list", {"sourceKinds": ["exec"]})["data"]
        server.ask("thread/resume", {"threadId": thread["id"]})
        server.ask("thread/compact/start", {"threadId": thread["id"]})
        server.wait_for("turn/completed")


class _AppServer:
    """JSON-RPC with one message on each line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._replies = process.stdin, process.stdout
        self._number = 0

    def ask(self, method: str, parameters: Mapping[str, Any]) -> Any:
        self._number += 1
        body = {"id": self._number, "method": method, "params": parameters}
        self._requests.write(json.dumps(body) + "\n")
        self._requests.flush()
        reply = self._first(lambda each: each.get("id") == self._number)
        assert "result" in reply, reply
        return reply["result"]

    def wait_for(self, method: str) -> None:
        self._first(lambda each: each.get("method") == method)

    def _first(self, is_it: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
        return next(message for message in self._messages() if is_it(message))

    def _messages(self) -> Iterator[Mapping[str, Any]]:
        for line in self._replies:
            yield json.loads(line)
        raise AssertionError("codex app-server has ended")


def _compact_opencode(run: AgentRun) -> None:
    """By the API of opencode's own screen, where `/compact` posts to `summarize`."""
    with run.process(["serve", "--port", "0"]) as process:
        assert process.stdout is not None
        address = next(found[0] for line in process.stdout if (found := _ADDRESS.search(line)))
        query = {"directory": str(run.workplace.project)}
        with httpx.Client(base_url=address, params=query, timeout=SECONDS) as client:
            [session] = client.get("/session").raise_for_status().json()
            model = {"providerID": "mlxserve", "modelID": run.target.model}
            client.post(f"/session/{session['id']}/summarize", json=model).raise_for_status()


COMPACT: Mapping[str, Callable[[AgentRun], None]] = {
    "claude": _compact_claude,
    "codex": _compact_codex,
    "opencode": _compact_opencode,
}

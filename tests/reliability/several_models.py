"""Four models, eight clients, and memory for two: does a request fail, and is the memory kept to?

    python -m tests.reliability models --minutes 30

Answers are greedy, so that each is known from its first time, also after its model was unloaded.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.api.server.process import CHAT, Process, served
from tests.waiting import wait_until

KINDS = ("qwen3", "llama", "gemma3_text", "qwen3_moe")
_NUM_CLIENTS = 8
_NUM_TALKS = 6
_LOOK_SECONDS = 1.0
_ASK_SECONDS = 600.0  # a model may wait for others again and again
_KEEP_ALIVE = 2.0  # seconds
# Some of the models may have smaller pools while they are idle, the others not.
_OPTIONS = (
    "max_num_seqs = 4\nmax_num_batched_tokens = 64\nmax_model_len = 256\ndisable_log_stats = true\n"
)


@dataclass(slots=True)
class SeveralModelsReport:
    """
    memory: bytes that the models had, each second
    loads: how often the models were loaded
    left: what is loaded in the end, though nobody asks for it
    """

    limit: int = 0
    num_answers: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    loads: int = 0
    cached_tokens: int = 0
    longest_seconds: float = 0.0
    left: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        is_within = max(self.memory, default=0) <= self.limit
        return is_within and not self.failures and not self.left and len(self.num_answers) > 3

    def __str__(self) -> str:
        lines = [
            f"answers: {dict(self.num_answers)}, {self.cached_tokens} tokens of prompts from the cache",
            f"models were loaded {self.loads} times; the longest answer took "
            f"{self.longest_seconds:.1f} s",
            f"memory: at most {max(self.memory, default=0) / 1e6:.1f} MB of {self.limit / 1e6:.1f} MB in "
            f"{len(self.memory)} looks",
            f"left loaded: {', '.join(self.left) or 'nothing'}",
            *self.failures[:20],
        ]
        return "\n".join(lines)


def run_several_models(folder: Path, minutes: float) -> SeveralModelsReport:
    """Write the models, start a server with memory for two of them, and ask it from eight clients."""
    from tests.conftest import write_model

    for seed, kind in enumerate(KINDS, 1):
        (folder / kind).mkdir()
        write_model(folder / kind, kind, seed=seed)
    working_set, sizes = _sizes(folder)
    report = SeveralModelsReport()
    share = 1.1 * sum(sorted(sizes)[-2:]) / working_set
    with _serving(folder, share) as server:
        report.limit = _models(server)["memory_limit"]
        answers: dict[str, str] = {}
        end = time.monotonic() + 60 * minutes
        clients = [
            threading.Thread(target=_talk, args=(server, number, end, answers, report))
            for number in range(_NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            report.memory.append(sum(one["memory"] for one in _models(server)["data"]))
            clients[0].join(_LOOK_SECONDS)
            assert time.monotonic() < end + _ASK_SECONDS, "a client waits for an answer"
        try:
            wait_until(lambda: not _loaded(server), 60)
        except AssertionError:
            report.left = _loaded(server)
        code, _ = server.stop()
        text = server.log.read_text()
        report.loads = text.count(" is loaded: ")
        if code:
            report.failures.append(f"the server ended with {code}: {text[-3_000:]}")
        report.failures += [line for line in text.splitlines() if "Traceback" in line]
    return report


def _serving(folder: Path, share: float) -> Any:
    tables = [
        f"[models.{kind}]\nmodel = {str(folder / kind)!r}\nkeep_alive = {str(_KEEP_ALIVE)!r}\n"
        + ("num_pages = 40\n" if number % 2 else "")
        for number, kind in enumerate(KINDS)
    ]
    config = folder / "config.toml"
    config.write_text(_OPTIONS + f"gpu_memory_utilization = {share!r}\n" + "\n".join(tables))
    return served(folder / "stderr", "--config", str(config))


def _sizes(folder: Path) -> tuple[int, list[int]]:
    """(bytes that a share of the memory refers to, bytes of each model)"""
    share = 0.5
    with _serving(folder, share) as server:
        sizes = [
            json.loads(server.request("POST", "/api/v1/models/load", {"model": kind})[1])["memory"]
            for kind in KINDS
        ]
        limit = _models(server)["memory_limit"]
        server.stop()
    return int(limit / share), sizes


def _models(server: Process) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(server.request("GET", "/api/v1/models")[1])
    return found


def _loaded(server: Process) -> list[str]:
    return [one["id"] for one in _models(server)["data"] if one["state"] != "unloaded"]


def _talk(
    server: Process, number: int, end: float, answers: dict[str, str], report: SeveralModelsReport
) -> None:
    draw = random.Random(number)
    with httpx.Client(base_url=server.url, timeout=_ASK_SECONDS) as client:
        while time.monotonic() < end:
            kind, topic = draw.choice(KINDS), draw.randrange(_NUM_TALKS)
            words = [f"topic{topic}", *(f"w{topic * count % 97}" for count in range(4 * topic + 5))]
            began = time.monotonic()
            try:
                text = _ask(client, kind, words, report, stream=draw.random() < 0.5)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                report.failures.append(f"{kind}: {type(error).__name__}: {error}")
                continue
            report.longest_seconds = max(report.longest_seconds, time.monotonic() - began)
            report.num_answers[kind] += 1
            known = answers.setdefault(f"{kind} {topic}", text)
            if text != known:
                report.failures.append(f"{kind}: {text!r} instead of {known!r}")


def _ask(
    client: httpx.Client,
    kind: str,
    words: Sequence[str],
    report: SeveralModelsReport,
    *,
    stream: bool,
) -> str:
    """Raises ValueError for an answer that is not whole."""
    body: dict[str, Any] = {
        "model": kind,
        "messages": [{"role": "user", "content": " ".join(words)}],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    reply = client.post(CHAT, json=body)
    if reply.status_code != 200:
        raise ValueError(f"{reply.status_code} {reply.text[:300]}")
    if not stream:
        usage = reply.json()["usage"]
        report.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        return str(reply.json()["choices"][0]["message"]["content"])
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    if not events or events.pop() != "[DONE]":
        raise ValueError(f"the stream ends with {reply.text[-300:]}")
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)

"""Hostile and good clients side by side: does a good one notice?

    python -m tests.reliability side-by-side --minutes 60

Good clients first run alone, for a fifth of the time, then beside hostile ones, which are processes of
their own. Good answers are greedy, so that each is known from its first time.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import random
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil

from tests.api.server.process import CHAT, ROOT, Process, served
from tests.waiting import wait_until

_ALONE = 0.2  # share of the time in which good clients are alone
_NUM_GOOD = 2
_NUM_HOSTILE = 2
_NUM_TALKS = 12
MAX_WAIT = 2.0  # seconds, or twice what one waits alone
_SCHEMA_EACH = 5  # of a good client's requests is one under a new schema
_PICTURE_EACH, _OTHERS_EACH = (
    4,
    3,
)  # and one about a picture; after which it asks for lists and Markdown
SEEING = "seeing"  # the name of a model that sees
_MODELS = """num_pages = {num_pages}
[models.main]
model = {main}
[models.{seeing}]
model = {folder}
max_model_len = 1024
"""
# What a good client asks for besides answers: a method, a path and a body.
_OTHERS: dict[str, tuple[str, str, Any]] = {
    "list of chats": ("GET", "/api/v1/chats", None),
    "Markdown": ("POST", "/api/v1/render", {"texts": ["# Head\n```python\nprint(1)\n```"]}),
    "health": ("GET", "/health", None),
}
# Pages of the cache: one context. Memory for pages is taken as the cache fills, which a large one does for
# hours, so that its growth would hide a leak.
_NUM_PAGES = 128
# glibc keeps an arena for each thread, each with the free memory of its largest request: in eight minutes of
# attacks what was in use stayed at 160 MB and the resident memory grew from 380 to 690. With two arenas,
# which return what is large, a leak would show. Other systems do not read these variables.
_MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
_LOOK_SECONDS = 1.0  # between two samples of the memory
_END_SECONDS = 120.0  # for a client to end
_STRETCHES = 10  # of the second half, whose means the line of the memory is drawn through


class MemorySample(NamedTuple):
    """Resident bytes of the server and of its helper processes at one moment."""

    seconds: float
    server: int
    helpers: int

    @property
    def total(self) -> int:
        return self.server + self.helpers


@dataclass(slots=True)
class Observations:
    """What good clients saw in one phase, and the memory of the server with its helpers."""

    gaps: list[float] = field(default_factory=list)  # seconds between two events of a stream
    chats: list[float] = field(default_factory=list)  # seconds to the first event
    schemas: list[float] = field(
        default_factory=list
    )  # the same, where the answer has a new schema
    pictures: list[float] = field(default_factory=list)  # the same, about a picture
    others: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _OTHERS})
    failures: list[str] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.by_kind().values()))

    def by_kind(self) -> dict[str, list[float]]:
        """Seconds that each kind of request waited for its first event, or for its reply."""
        answers = {"chats": self.chats, "schemas": self.schemas, "pictures": self.pictures}
        return {**answers, **self.others}

    def gap(self, share: float) -> float:
        return float(np.quantile(self.gaps, share))

    def waits(self) -> str:
        """Seconds to the first events: the median, and the most."""
        return ", ".join(
            f"{name} {np.median(waits):.2f} (at most {max(waits):.2f})"
            for name, waits in self.by_kind().items()
            if waits
        )


@dataclass(frozen=True, slots=True)
class SideBySideReport:
    """Good clients alone and beside hostile ones."""

    alone: Observations
    beside: Observations
    attacks: Counter[str]
    bad_replies: tuple[str, ...]  # to hostile clients
    pages_left: int

    def slow_kinds(self) -> list[str]:
        """Kinds of requests that waited for more than two seconds, and twice what they do alone."""
        alone = self.alone.by_kind()
        return [
            name
            for name, waits in self.beside.by_kind().items()
            if waits and max(waits) > max(MAX_WAIT, 2 * max(alone[name], default=0.0))
        ]

    def slope(
        self, size_of: Callable[[MemorySample], int] = lambda sample: sample.total
    ) -> tuple[float, float]:
        """(MB per hour, its standard error) of the memory in the second half of the attacks.

        Samples close in time are alike, so the error is that of means over ten stretches. NaN of a
        short run, whose samples are too few for a line.
        """
        samples = self.beside.memory[len(self.beside.memory) // 2 :]
        if len(samples) < _STRETCHES:
            return math.nan, math.nan
        at = np.array([sample.seconds for sample in samples])
        size = np.array([size_of(sample) for sample in samples])
        hours = np.array([part.mean() for part in np.array_split(at / 3600, _STRETCHES)])
        mean = np.array([part.mean() for part in np.array_split(size / 1e6, _STRETCHES)])
        slope, offset = np.polyfit(hours, mean, 1)
        rest = mean - (slope * hours + offset)
        error = np.sqrt((rest @ rest) / (len(hours) - 2) / ((hours - hours.mean()) ** 2).sum())
        return float(slope), float(error)

    def __str__(self) -> str:
        lines = [
            f"{self.alone.num_requests} good requests alone, {self.beside.num_requests} beside "
            f"{self.attacks.total()} attacks: {dict(self.attacks.most_common())}",
            f"seconds to the first event: {self.alone.waits()} alone; {self.beside.waits()} beside",
            *(
                f"gap p{100 * share:g}: {1e3 * self.alone.gap(share):.1f} ms alone, "
                f"{1e3 * self.beside.gap(share):.1f} beside "
                f"({self.beside.gap(share) / self.alone.gap(share):.2f})"
                for share in (0.5, 0.99, 1.0)
            ),
            self._memory_line("memory", lambda sample: sample.total),
            self._memory_line("  of the server", lambda sample: sample.server),
            self._memory_line("  of its helpers", lambda sample: sample.helpers),
            f"pages left: {self.pages_left}; waited too long: {self.slow_kinds() or 'none'}",
            *self.alone.failures,
            *self.beside.failures,
            *self.bad_replies,
        ]
        return "\n".join(lines)

    def _memory_line(self, name: str, size_of: Callable[[MemorySample], int]) -> str:
        sizes = [size_of(sample) / 1e6 for sample in self.beside.memory]
        slope, error = self.slope(size_of)
        tenths = " ".join(
            f"{part.mean():.0f}" for part in np.array_split(sizes, min(10, len(sizes)))
        )
        return (
            f"{name}: {sizes[0]:.0f} MB at the beginning, {sizes[-1]:.0f} at the end, at most "
            f"{max(sizes):.0f}, means of tenths {tenths}; slope {slope:+.1f} +- {error:.1f} MB/h"
        )


def run_side_by_side(folder: Path, minutes: float, *, model: str | None = None) -> SideBySideReport:
    """Start a server with the embedded model, or `model`, and one that sees; and clients of both kinds."""
    config = write_models(folder, model)
    # At an address that is not public: nothing is fetched from it, and each request is refused.
    flags = ("--config", str(config), "--allow-remote-images", "127.0.0.1")
    with served(folder / "stderr", *flags, env=_MALLOC) as server:
        answers: dict[str, str] = {}
        seconds = 60 * minutes
        # Warms up: the model that sees is loaded for its first request.
        with httpx.Client(base_url=server.url, timeout=_END_SECONDS) as client:
            _ask(client, "picture", Observations(), None, 0)
        _observe(server, 5.0, answers)
        alone = _observe(server, _ALONE * seconds, answers)
        remaining = (1 - _ALONE) * seconds
        hostile = [_hostile(server.port, seed, remaining) for seed in range(_NUM_HOSTILE)]
        try:
            beside = _observe(server, remaining, answers)
            reports = [json.loads(each.communicate(timeout=_END_SECONDS)[0]) for each in hostile]
        finally:
            for each in hostile:
                each.kill()
                each.communicate()
        counts: Counter[str] = Counter()
        for report in reports:
            counts.update(report["counts"])
        bad = tuple(reply for report in reports for reply in report["bad"])
        pages = _pages_left(server)
        code, _ = server.stop()
        assert code == 0, server.log.read_text()[-3_000:]
    return SideBySideReport(alone, beside, counts, bad, pages)


def write_models(folder: Path, model: str | None = None) -> Path:
    """Write a configuration with the embedded model, or `model`, and a random one that sees. Returns it."""
    from tests.model.small_vision import write_vision_model

    seeing = folder / SEEING
    seeing.mkdir()
    write_vision_model(seeing, "qwen2_5_vl")
    config = folder / "config.toml"
    names = {"main": json.dumps(model or "mlxserve-mini"), "folder": json.dumps(str(seeing))}
    config.write_text(_MODELS.format(num_pages=_NUM_PAGES, seeing=SEEING, **names))
    return config


def _pages_left(server: Process) -> int:
    """Pages in use once every request has ended, also those whose clients have just left."""

    def used() -> int:
        return int(json.loads(server.request("GET", "/api/v1/kv/stats")[1])["pages"]["used"])

    with contextlib.suppress(AssertionError):
        wait_until(lambda: used() == 0, _END_SECONDS)
    return used()


def _hostile(port: int, seed: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.reliability.hostile"]
    command += [str(port), str(seed), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _observe(server: Process, seconds: float, answers: dict[str, str]) -> Observations:
    """Good clients for `seconds`. Their answers are added to `answers`, or compared with these."""
    found = Observations()
    end = time.monotonic() + seconds
    clients = [
        threading.Thread(target=_talk, args=(server, number, end, answers, found))
        for number in range(_NUM_GOOD)
    ]
    for client in clients:
        client.start()
    process = psutil.Process(server.popen.pid)
    while any(client.is_alive() for client in clients):
        found.memory.append(_memory_of(process))
        clients[0].join(_LOOK_SECONDS)
        assert time.monotonic() < end + _END_SECONDS, "a good client waits for an answer"
    return found


def _memory_of(server: psutil.Process) -> MemorySample:
    helpers = 0
    for each in server.children(recursive=True):
        try:
            helpers += each.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # a helper that has just ended
    return MemorySample(time.monotonic(), server.memory_info().rss, helpers)


def _talk(
    server: Process, number: int, end: float, answers: dict[str, str], found: Observations
) -> None:
    draw = random.Random(number)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for count in itertools.count():
            if time.monotonic() >= end:
                return
            topic = draw.randrange(_NUM_TALKS)
            words = [f"topic{topic}", *(f"w{topic * each % 97}" for each in range(8 * topic + 5))]
            schema = new_schema() if count % _SCHEMA_EACH == _SCHEMA_EACH - 1 else None
            is_seen = schema is None and count % _PICTURE_EACH == _PICTURE_EACH - 1
            try:
                if count % _OTHERS_EACH == _OTHERS_EACH - 1:
                    _ask_others(client, found)
                if is_seen:
                    words[0] = f"picture{topic}"
                text = _ask(client, " ".join(words), found, schema, topic if is_seen else None)
            except (httpx.HTTPError, ValueError) as error:
                found.failures.append(f"good client: {type(error).__name__}: {error}")
                continue
            if schema is not None:
                if not text.startswith("{"):
                    found.failures.append(f"good client: {text!r} under a schema")
                continue
            known = answers.setdefault(words[0], text)
            if text != known:
                found.failures.append(f"good client: {text!r} instead of {known!r}")


def new_schema() -> dict[str, Any]:
    """One that no server has compiled."""
    name = f"field{uuid.uuid4().hex}"
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}


def _ask_others(client: httpx.Client, found: Observations) -> None:
    """Raises ValueError for a reply that is no success."""
    for name, (method, path, body) in _OTHERS.items():
        began = time.perf_counter()
        reply = client.request(method, path, json=body)
        found.others[name].append(time.perf_counter() - began)
        if reply.status_code != 200:
            raise ValueError(f"{name}: {reply.status_code} {reply.text[:200]}")


def _content(question: str, picture_seed: int) -> list[dict[str, Any]]:
    """The question after a picture."""
    from tests.images.files import file_of, picture

    data = base64.b64encode(file_of(picture(112, 84, picture_seed))).decode()
    url = {"url": f"data:image/png;base64,{data}"}
    return [{"type": "image_url", "image_url": url}, {"type": "text", "text": question[:200]}]


def _ask(
    client: httpx.Client,
    question: str,
    found: Observations,
    schema: dict[str, Any] | None,
    picture_seed: int | None,
) -> str:
    """The streamed answer. Raises ValueError for one that is not whole.

    picture_seed: of a picture before the question; None for none
    """
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    if schema is not None:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "asked", "schema": schema},
        }
        del body["ignore_eos"]
    if picture_seed is not None:
        content = _content(question, picture_seed)
        body |= {"model": SEEING, "messages": [{"role": "user", "content": content}]}
    waits = found.chats if schema is None else found.schemas
    began = last = time.perf_counter()
    pieces: list[str] = []
    events: list[str] = []
    with client.stream("POST", CHAT, json=body) as reply:
        if reply.status_code != 200:
            raise ValueError(f"{reply.status_code} {reply.read()[:200]!r}")
        for line in reply.iter_lines():
            if not line.startswith("data: "):
                continue
            now = time.perf_counter()
            if events:
                found.gaps.append(now - last)
            else:
                (waits if picture_seed is None else found.pictures).append(now - began)
            last = now
            events.append(line)
            if line != "data: [DONE]":
                choices: Sequence[dict[str, dict[str, str]]] = json.loads(line[6:])["choices"]
                pieces += [choice["delta"].get("content") or "" for choice in choices]
    if not events or events[-1] != "data: [DONE]":
        raise ValueError(f"the stream ends with {events[-1:]}")
    return "".join(pieces)

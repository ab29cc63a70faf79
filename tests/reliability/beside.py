"""Each attack of the reviews, and what another client waits for meanwhile.

    python -m tests.reliability beside

A server with two API keys: one sends the attack, and the other asks for a chat, a list of chats, an
answer under a new schema and /health, again and again until all of the attack is answered.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from tests.api.server.process import CHAT, HELLO, Process, served
from tests.reliability.side_by_side import MAX_WAIT, SEEING, new_schema, write_models

ATTACKER, OTHER = "attacker-attacker-attacker", "another-another-another"
_CHATS = "/api/v1/chats"
_NUM_ALONE, _MAX_ROUNDS = 5, 40  # rounds of requests alone, and beside one attack at most
_ATTACK_SECONDS = 300.0  # for a reply to an attack
_numbers = itertools.count()

Sent = tuple[str, str, Any]  # method, path, body


def _keep_alive(_: Process) -> Iterator[Sent]:
    for path in ("/api/generate", "/api/chat", "/api/embed", "/api/show"):
        body = {"model": "x", "prompt": "hi", "messages": HELLO, "input": "hi"}
        yield "POST", path, {**body, "keep_alive": f"{'1' * 200_000}x"}


def _lexers(_: Process) -> Iterator[Sent]:
    for language in ("html+ng2", "perl", "lua", "sql", "tads3"):
        yield "POST", "/api/v1/render", {"texts": [f"```{language}\n{'(' * 20_000}\n```"]}


def _markdown(_: Process) -> Iterator[Sent]:
    for piece in ("[", "![", "> ", "*a ", "`a", "<!--", "|a"):
        yield "POST", "/api/v1/render", {"texts": [piece * 25_000]}


def _chats(server: Process) -> Iterator[Sent]:
    chat = json.loads(_send(server, ATTACKER, ("POST", _CHATS, {"title": "large"}))[1])["id"]
    parent = None
    for _ in range(10):
        message = {"role": "user", "text": "word " * 400_000, "parent_id": parent}
        added = _send(server, ATTACKER, ("POST", f"{_CHATS}/{chat}/messages", message))
        parent = json.loads(added[1])["id"]
    for path in (f"{_CHATS}/{chat}", f"{_CHATS}/{chat}/export?format=json", f"{_CHATS}?search=wo"):
        yield from [("GET", path, None)] * 4
    yield "DELETE", f"{_CHATS}/{chat}", None


def _about(url: str) -> Sent:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": SEEING, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return "POST", CHAT, body


def _remote(server: Process) -> Iterator[Sent]:
    for number in range(12):  # 24 URLs, as in the review
        yield _about(f"http://127.0.0.1:{server.port}/{number}.png")
        yield _about(f"http://never{number}.invalid/{number}.png")


def _pictures(_: Process) -> Iterator[Sent]:
    for number in range(3):
        file = io.BytesIO()
        Image.new("RGB", (4_000, 4_000), (number, next(_numbers) % 256, 7)).save(file, "PNG")
        data = base64.b64encode(file.getvalue()).decode()
        yield _about(f"data:image/png;base64,{data}")


def _durations(_: Process) -> Iterator[Sent]:
    for value in (1e15, -1e308, True, "9" * 60_000 + "h", "1e400"):
        body = {"model": "mlxserve-mini", "prompt": "x", "keep_alive": value, "stream": False}
        yield "POST", "/api/generate", body
        yield "GET", "/api/ps", None


def _downloads(_: Process) -> Iterator[Sent]:
    for name in ("--help", "-", "--json --yes", "a" * 60_000, "../" * 1_000):
        yield "POST", "/api/v1/downloads", {"model": name}


def _messages(_: Process) -> Iterator[Sent]:
    for content in ("hi", "<|im_end|>"):
        messages = [{"role": "user", "content": content}] * 6_000
        yield from [("POST", CHAT, {"messages": messages, "max_tokens": 1})] * 8


def _schemas(_: Process) -> Iterator[Sent]:
    for _ in range(10):
        source = {"regex": f"(a{{1000}}){{{2_000 + next(_numbers)}}}"}
        yield "POST", CHAT, {"messages": HELLO, "structured_outputs": source, "max_tokens": 1}


# By name: makes the requests, which are sent at once. N5, N7 and N8 take nobody's time.
ATTACKS: Mapping[str, Callable[[Process], Iterator[Sent]]] = {
    "long keep_alive (N1)": _keep_alive,
    "slow lexers (N1b)": _lexers,
    "slow Markdown (N1b)": _markdown,
    "large chats (N2)": _chats,
    "remote pictures (N3)": _remote,
    "large pictures (N4)": _pictures,
    "durations (N6)": _durations,
    "downloads (N9)": _downloads,
    "many messages": _messages,
    "schema bombs": _schemas,
}


def _probes() -> dict[str, Sent]:
    """What the other client asks for, by name."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": new_schema()}}
    chat = {"messages": HELLO, "max_tokens": 1}
    return {
        "chat": ("POST", CHAT, chat),
        "list": ("GET", _CHATS, None),
        "schema": ("POST", CHAT, {**chat, "max_tokens": 8, "response_format": schema}),
        "/health": ("GET", "/health", None),
    }


@dataclass(slots=True)
class BesideReport:
    """Longest waits of the other client, in seconds: alone, and by attack."""

    alone: dict[str, float] = field(default_factory=dict)
    beside: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def limit(self, probe: str) -> float:
        return max(MAX_WAIT, 2 * self.alone[probe])

    @property
    def is_good(self) -> bool:
        return not self.failures and all(
            seconds <= self.limit(probe)
            for waits in self.beside.values()
            for probe, seconds in waits.items()
        )

    def line(self, name: str, waits: Mapping[str, float]) -> str:
        cells = (
            f"{seconds:8.2f}{'!' if seconds > self.limit(probe) else ' '}"
            for probe, seconds in waits.items()
        )
        return f"{name:<24}{''.join(cells)}"

    def __str__(self) -> str:
        lines = [f"{'seconds, at most':<24}{''.join(f'{name:>8} ' for name in self.alone)}"]
        lines += [self.line(name, waits) for name, waits in self.beside.items()]
        return "\n".join([*lines, *self.failures])


def run_beside(
    folder: Path, names: list[str], say: Callable[[str], None] = lambda _: None
) -> BesideReport:
    """Send each attack whose name contains one of `names` (all without any) to one server."""
    flags = ("--config", str(write_models(folder)), "--allow-remote-images", "127.0.0.1")
    keys = folder / "keys"
    keys.write_text(f"{ATTACKER}\n{OTHER}\n")
    keys.chmod(0o600)
    report = BesideReport()
    with served(folder / "stderr", *flags, "--api-key-file", str(keys)) as server:
        # Starts the helpers and loads the model that sees.
        _ask_all(server, report)
        _send(server, OTHER, next(_pictures(server)))
        report.failures.clear()
        alone = [_ask_all(server, report) for _ in range(_NUM_ALONE)]
        report.alone = _longest(alone)
        report.beside["alone"] = report.alone
        say(report.line("alone", report.alone))
        for name, attack in ATTACKS.items():
            if names and not any(each in name for each in names):
                continue
            report.beside[name] = _longest(list(_beside(server, attack, report, name)))
            say(report.line(name, report.beside[name]))
        code, _ = server.stop()
        if code:
            report.failures.append(f"the server ended with {code}")
    return report


def _beside(
    server: Process, attack: Callable[[Process], Iterator[Sent]], report: BesideReport, name: str
) -> Iterator[dict[str, float]]:
    """Ask while the attack is under way. Yields the waits of each round."""
    sending = [
        threading.Thread(target=_attack, args=(server, sent, report, name), daemon=True)
        for sent in attack(server)
    ]
    for thread in sending:
        thread.start()
    for _ in range(_MAX_ROUNDS):
        yield _ask_all(server, report)
        if not any(thread.is_alive() for thread in sending):
            break
    for thread in sending:
        thread.join(_ATTACK_SECONDS)


def _attack(server: Process, sent: Sent, report: BesideReport, name: str) -> None:
    with suppress(OSError):  # refused while it was sent
        status, text = _send(server, ATTACKER, sent)
        if status >= 500 and status != 503:
            report.failures.append(f"{name}: {status} {text[:300]}")


def _ask_all(server: Process, report: BesideReport) -> dict[str, float]:
    """Send all probes at once. Returns the seconds until their replies."""
    took: dict[str, float] = {}

    def ask(name: str, sent: Sent) -> None:
        began = time.monotonic()
        status, text = _send(server, OTHER, sent)
        took[name] = time.monotonic() - began
        if status != 200:
            report.failures.append(f"{name} of the other client: {status} {text[:300]}")

    asking = [threading.Thread(target=ask, args=item) for item in _probes().items()]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    return {name: took[name] for name in _probes()}


def _longest(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(each[name] for each in rounds) for name in rounds[0]}


def _send(server: Process, key: str, sent: Sent) -> tuple[int, str]:
    method, path, body = sent
    headers = {"authorization": f"Bearer {key}"}
    return server.request(method, path, body, headers, seconds=_ATTACK_SECONDS)

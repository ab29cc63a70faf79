"""Bytes on the wire of the events of a chat: a long answer, its latency, and a connection that comes back."""

from __future__ import annotations

import asyncio
import json
import random
import selectors
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from mlxserve.api.chats import answer_writer
from mlxserve.api.chats.answer_writer import AnswerOrder, AnswerWriter
from mlxserve.api.chats.feed import TextForm
from mlxserve.api.chats.following import event_stream
from mlxserve.api.chats.growing_answer import GrowingAnswer
from mlxserve.api.chats.live_chats import LiveChat
from mlxserve.api.page.markdown import Markdown
from mlxserve.api.server.drain import Drain
from mlxserve.history.chat_stores import ChatStores
from mlxserve.history.messages import Role, State, StoredMessage
from tests.api.chats.following import apply, longer, text_of

MAX_WIRE = 120_000  # bytes for an answer of 50 kB
TOKEN = 4  # characters


class NoWaiting(selectors.DefaultSelector):
    """Passes the time that a loop would wait at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


def run_at_once(work: Callable[[], Any]) -> None:
    """Run a coroutine in a loop whose time passes at once."""

    def loop() -> asyncio.AbstractEventLoop:
        selector = NoWaiting()
        made = asyncio.SelectorEventLoop(selector)
        made.time = lambda: selector.now  # type: ignore[method-assign]
        return made

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(work())


def prose(size: int) -> str:
    """Sentences of made-up words, with a heading, a list and code now and then."""
    rng = random.Random(7)
    letters = "etaoinshrdlucmfwypvbgk"
    words = [
        "".join(rng.choices(letters, range(22, 0, -1), k=rng.randint(1, 9))) for _ in range(900)
    ]
    parts: list[str] = []
    while sum(map(len, parts)) < size:
        sentences = [" ".join(rng.choices(words, k=rng.randint(5, 20))) + "." for _ in range(4)]
        mark = rng.choice(("", "", "", "## ", "- "))
        parts.append(mark + (sentences[0] if mark else " ".join(sentences)) + "\n\n")
    return "".join(parts)[:size]


class Model:
    """The server as a writer asks it: its answer has one token in each chunk."""

    def __init__(self, text: str, interval: float) -> None:
        self.tokens = [text[at : at + TOKEN] for at in range(0, len(text), TOKEN)]
        self.times: list[float] = []  # of each token
        self._interval = interval
        self.status, self.headers = 200, dict[str, str]()

    @asynccontextmanager
    async def post(self, *_: Any) -> AsyncIterator[Model]:
        yield self

    async def pieces(self) -> AsyncIterator[bytes]:
        for token in self.tokens:
            await asyncio.sleep(self._interval)
            self.times.append(asyncio.get_running_loop().time())
            choice = {"delta": {"content": token}}
            yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


class Parser:
    """Parses in this thread, where the server has a process for it."""

    def __init__(self) -> None:
        self._markdown = Markdown()

    async def growing(self, text: str, _: Any) -> Any:
        return self._markdown.growing(text, 1.0)

    async def highlight(self, *_: Any) -> None:
        """Nothing is coloured."""


class AtOnce:
    """Runs work now, in the loop."""

    async def run(self, _client: str, work: Any) -> Any:
        return work.run()


class Wire:
    """Counts the bytes that a follower is sent, and reads its events as they arrive."""

    def __init__(self, form: TextForm, after: Wire | None = None) -> None:
        self.num_bytes = 0
        self.arrived: list[tuple[float, int]] = []  # when, and characters of the text by then
        self.text: str = after.text if after else ""
        self.blocks: list[Any] = after.blocks if after else []
        self.last_id: str = after.last_id if after else ""
        self.gone = asyncio.Event()
        self._grown: Any = after._grown if after else None
        self._form = form
        self._read = zlib.decompressobj(16 + zlib.MAX_WBITS)

    async def follow(self, live: LiveChat) -> None:
        headers = [
            (b"accept-encoding", b"gzip, deflate, br"),
            (b"last-event-id", self.last_id.encode()),
        ]
        scope = {"type": "http", "method": "GET", "path": "/", "headers": headers}

        async def begin() -> tuple[bytes, int]:
            return live.feed.state_event(b"{}", live.feed.next), live.feed.begin_state(self._form)

        async def receive() -> dict[str, Any]:
            await self.gone.wait()
            return {"type": "http.disconnect"}

        stream = event_stream(Request(scope), live, Drain(), begin, self._form)
        await stream(scope, receive, self._send)

    async def _send(self, message: Any) -> None:
        content = message.get("body", b"")
        if content:  # as a chunk of HTTP/1.1
            self.num_bytes += len(b"%x\r\n\r\n" % len(content)) + len(content)
        events = self._read.decompress(content)
        assert not events or events.endswith(b"\n\n"), "a part of an event waits for the next one"
        for event in events.decode().split("\n\n")[:-1]:
            self._take(dict(line.split(":", 1) for line in event.split("\n")))

    def _take(self, fields: dict[str, str]) -> None:
        name, data = fields["event"], json.loads(fields["data"])
        self.last_id = fields["id"]
        if name == "more":
            name, data = self._grown[0], longer(self._grown[1], data)
        self._grown = name, data
        if name == "text":
            self.text += data["text"]
            self.arrived.append((asyncio.get_running_loop().time(), len(self.text)))
        if name == "blocks":
            apply(self.blocks, json.loads(json.dumps(data["patches"])))


def writing(home: Path, model: Model) -> tuple[AnswerWriter, LiveChat]:
    stores, live = ChatStores(home), LiveChat()

    def begun(store: Any) -> StoredMessage:
        chat = store.create_chat("One")
        question = store.add(chat.id, None, Role.USER, "Why?")
        answer: StoredMessage = store.add(
            chat.id, question.id, Role.ASSISTANT, "", state=State.WRITING
        )
        return answer

    services: Any = SimpleNamespace(
        requests=model, stores=stores, executor=AtOnce(), renderer=Parser(), toolbox=None
    )
    order = AnswerOrder(
        owner="",
        client="",
        sender=None,  # type: ignore[arg-type]
        messages=[],
        num_characters=0,
        fields={},
        continues=False,
        has_tools=False,
        leaf_before=None,
    )
    answer = GrowingAnswer(stores.run("", begun))
    return AnswerWriter(services, order, answer, live.feed), live


@pytest.fixture(autouse=True)
def saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_writer, "SAVE_INTERVAL", 100.0)


@pytest.mark.slow
def test_a_long_answer_of_a_slow_model_costs_at_most_120_kB(tmp_path: Path) -> None:
    text = prose(50_000)
    model = Model(text, 0.1)

    async def run() -> None:
        writer, live = writing(tmp_path, model)
        wires = [Wire(form) for form in TextForm]
        following = [asyncio.ensure_future(wire.follow(live)) for wire in wires]
        await asyncio.sleep(0)
        await writer.start()
        live.feed.end()
        await asyncio.gather(*following)
        page, terminal = wires
        assert terminal.text == text
        assert len(text_of(page.blocks)) > 0.95 * len(text)  # but for the marks
        assert page.num_bytes < MAX_WIRE
        assert terminal.num_bytes < MAX_WIRE
        assert max_latency(model, terminal) <= answer_writer.MAX_WAIT + answer_writer.TEXT_INTERVAL

    run_at_once(run)


def max_latency(model: Model, wire: Wire) -> float:
    """Seconds from the time of a token to its arrival, at most."""
    latencies, arrived = [], iter(wire.arrived)
    at, size = next(arrived)
    for number, time in enumerate(model.times, 1):
        while size < number * TOKEN and size < len(wire.text):
            at, size = next(arrived)
        latencies.append(at - time)
    return max(latencies)


def test_the_first_pieces_of_an_answer_do_not_wait_for_more(tmp_path: Path) -> None:
    model = Model("word" * 20, 0.3)

    async def run() -> None:
        writer, live = writing(tmp_path, model)
        wire = Wire(TextForm.TEXT)
        following = asyncio.ensure_future(wire.follow(live))
        await asyncio.sleep(0)
        await writer.start()
        live.feed.end()
        await following
        assert len(wire.arrived) == len(model.tokens)
        assert max_latency(model, wire) <= answer_writer.TEXT_INTERVAL + 1e-9

    run_at_once(run)


@pytest.mark.parametrize("form", list(TextForm))
def test_a_follower_that_comes_back_at_any_time_has_each_event_once(
    tmp_path: Path, form: TextForm
) -> None:
    text = prose(3_000)
    model = Model(text, 0.1)

    async def run() -> None:
        writer, live = writing(tmp_path, model)
        stays, leaves = Wire(form), Wire(form)
        following = asyncio.ensure_future(stays.follow(live))
        writing_task = writer.start()
        while not writing_task.done():
            leaving = asyncio.ensure_future(leaves.follow(live))
            await asyncio.sleep(1.7)
            leaves.gone.set()
            await leaving
            leaves = Wire(form, after=leaves)
        live.feed.end()
        await asyncio.gather(following, leaves.follow(live))
        assert (leaves.text, leaves.blocks) == (stays.text, stays.blocks)
        assert stays.text == text or stays.blocks

    run_at_once(run)

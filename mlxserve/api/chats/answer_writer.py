"""AnswerWriter: writes one answer of a chat, whoever looks at it, and keeps it on the disk.

    ask the model ──▶ text ──▶ calls ──▶ a follower's decision ──▶ results ──▶ ask the model ...
                       │ every 0.25 s, if there are followers: their events, parsed
                       │ every 0.07 s, if some want the text itself: that
                       └ every 0.5 s: the store

An event costs some 20 bytes on the wire beside its text, also when it is compressed. So in a long
answer of a slow model an event waits, for half a second at most, until it has a few words: 50 kB at
ten tokens a second cost 75 to 105 kB, and 240 kB with an event for each token.

The model is asked by a request to this server (`InProcess`). The answer ends when the model ends it,
when a follower stops it, or with the server; the client that began it may leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mlxserve.api.chats.feed import ChatFeed, Growth, TextForm
from mlxserve.api.chats.forms import card_of, end_form
from mlxserve.api.chats.growing_answer import AnswerFailed, GrowingAnswer
from mlxserve.api.chats.growing_blocks import GrowingBlocks
from mlxserve.api.chats.in_process import InnerReply, InProcess, Sender
from mlxserve.api.errors import encode_json
from mlxserve.api.page.rendering import Renderer
from mlxserve.api.warnings import WARNING_HEADER
from mlxserve.core.errors import MlxServeError, QueueFull
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.helpers.work import RunsIn, Work
from mlxserve.history.calls import CallRecord, CallState, ToolRound, round_fields, round_messages
from mlxserve.history.chat_file import StoreError
from mlxserve.history.chat_stores import ChatStores
from mlxserve.history.messages import ChatRecord, State
from mlxserve.history.store import Store
from mlxserve.mcp.results import CallResult
from mlxserve.mcp.servers_file import ToolsError
from mlxserve.mcp.toolbox import Permission, Tool, Toolbox

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_ROUNDS = 25  # of tool calls
PUBLISH_INTERVAL = 0.25  # seconds between events of a growing text
TEXT_INTERVAL = 0.07  # the same for those who get it unparsed
MIN_PIECE = 20  # characters that are worth an event
MAX_WAIT = 0.5  # seconds that fewer characters wait for more
_UNPACED = 2_000  # characters of an answer whose pieces do not wait
SAVE_INTERVAL = 0.5  # seconds between writes to the store
_TOUCH_INTERVAL = 5.0  # seconds between writes of an answer that does not change
_MAX_SAVES = 20  # tries to store the end of an answer
_STORE_SECONDS = 0.005  # for a write by itself
_WRITTEN_PER_SECOND = 20 << 20  # characters
_ENCODED_PER_SECOND = 20 << 20  # characters of a conversation as JSON
_TOOL_SECONDS = 1.0
_DATA = b"data: "
_CHAT = "/v1/chat/completions"
_CUT = "were read: the rest does not fit the context"  # in a warning about a document
_DECISIONS = {"always": Permission.ALWAYS, "never": Permission.NEVER}  # that are kept

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Services:
    """Holds the services that all answers of a server use."""

    requests: InProcess
    stores: ChatStores
    executor: FairExecutor
    renderer: Renderer
    toolbox: Toolbox


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOrder:
    """Says what was asked, and by whom.

    owner: the owner of the chat, as in `ChatStores`
    client: the client in whose turn the work is done
    messages: the conversation for the model
    num_characters: of the messages
    fields: further fields of the request, such as temperature
    continues: the last message is the beginning of the answer
    has_tools: the model may call the tools of this server
    leaf_before: the end of the branch that is shown again if there is no answer at all
    """

    owner: str
    client: str
    sender: Sender
    messages: Messages
    num_characters: int
    fields: Mapping[str, Any]
    continues: bool
    has_tools: bool
    leaf_before: int | None


class _Refused(AnswerFailed):
    """The server refused a request for an answer."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class AnswerWriter:
    """Writes one answer. Used in the event loop only."""

    def __init__(
        self, services: Services, order: AnswerOrder, answer: GrowingAnswer, feed: ChatFeed
    ) -> None:
        self.answer = answer
        self._services = services
        self._order = order
        self._feed = feed
        self._published = _Published(services.renderer, answer)
        self._decision: tuple[str, asyncio.Future[str]] | None = None  # of the call with this id
        self._question: dict[str, Any] | None = None
        self._request_id = self._refusal_code = ""
        self._saved_changes, self._saved_at = -1, 0.0
        self._is_unsaved = False
        self._is_ending = self._is_deleted = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Begin to write."""
        # An empty context: the one of the request that asked holds that request.
        self._task = asyncio.get_running_loop().create_task(self._write(), context=Context())
        return self._task

    def stop(self, *, is_deleted: bool = False) -> None:
        """End the answer as it is. Without effect on one that ends already."""
        self._is_deleted |= is_deleted
        if self._task is not None and not self._is_ending:
            self._is_ending = True
            self._task.cancel()

    def decide(self, call_id: str, decision: str) -> bool:
        """Answer the question about a call; False if it is not asked now."""
        if self._decision is None or self._decision[0] != call_id or self._decision[1].done():
            return False
        self._decision[1].set_result(decision)
        return True

    def snapshot(self, form: TextForm) -> Callable[[], dict[str, Any]]:
        """Note what followers have now; the result turns it into a part of an event."""
        return partial(self._published.form(form), self._question, self._request_id)

    # ---- writing

    async def _write(self) -> None:
        beside = [
            asyncio.ensure_future(self._publish_often()),
            asyncio.ensure_future(self._publish_text_often()),
            asyncio.ensure_future(self._save_often()),
        ]
        state, error = State.DONE, ""
        try:
            await self._ask_in_rounds()
            if self.answer.state is not State.WRITING:
                state = self.answer.state
        except asyncio.CancelledError:
            state = State.STOPPED
        except (AnswerFailed, MlxServeError, StoreError, ToolsError) as failure:
            state, error = State.FAILED, str(failure)
            self._refusal_code = failure.code if isinstance(failure, _Refused) else ""
        except Exception:
            logger.exception("An answer failed")
            state, error = State.FAILED, "Internal server error. See the server's log."
        self._is_ending = True
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        self.answer.end(state, error)
        await self._finish()

    async def _ask_in_rounds(self) -> None:
        """Ask the model until it answers without a call. Raises AnswerFailed."""
        order, answer = self._order, self.answer
        messages, continues = list(order.messages), order.continues
        if order.has_tools:
            await self._run(Work(_TOOL_SECONDS, self._services.toolbox.refresh, RunsIn.LOOP))
        for number in range(MAX_ROUNDS + 1):
            tools = [tool.definition for tool in self._offered()]
            calls = await self._hear(messages, tools, continues=continues)
            if not tools or not calls or answer.state is not State.WRITING:
                return
            if number == MAX_ROUNDS:
                break
            if continues:  # its beginning is a part of the round
                del messages[-1]
                continues = False
            answer.add_round(calls)
            for at, call in enumerate(calls):
                await self._call(at, call)
            messages += round_messages(answer.rounds[-1], has_thinking=True)
        raise AnswerFailed(
            f"The model called tools {MAX_ROUNDS} times without answering, so it was stopped."
        )

    def _offered(self) -> list[Tool]:
        return self._services.toolbox.offered() if self._order.has_tools else []

    async def _hear(
        self, messages: Messages, tools: list[dict[str, Any]], *, continues: bool
    ) -> list[CallRecord]:
        """Take one answer of the model, and return the calls that it wants. Raises AnswerFailed."""
        body: dict[str, Any] = {
            **self._order.fields,
            "messages": messages,
            "stream": True,
            "stop_on_repetition": True,
            "stream_options": {"include_usage": True},
        }
        if continues:
            body["continue_final_message"] = True
        try:
            return await self._stream({**body, "tools": tools} if tools else body)
        except _Refused as refused:
            # A model that cannot call tools answers without them.
            if not tools or refused.status != 400 or "tool" not in str(refused).lower():
                raise
            await self._stream(body)
            return []

    async def _stream(self, body: dict[str, Any]) -> list[CallRecord]:
        answer, services = self.answer, self._services
        seconds = self._order.num_characters / _ENCODED_PER_SECOND
        encoding: Work[bytes] = Work(seconds, partial(encode_json, body))
        content = await self._run(encoding)
        answer.begin()
        async with services.requests.post(self._order.sender, _CHAT, content) as reply:
            if reply.status != 200:
                raise _Refused(reply.status, *_refusal_of(await reply.body()))
            warning = reply.headers.get(WARNING_HEADER, "")
            answer.cuts = ". ".join(each for each in warning.split("; ") if _CUT in each)
            self._request_id = reply.headers.get("x-request-id", "")
            self._feed.publish("request", {"id": answer.id, "request_id": self._request_id})
            async for chunk in _chunks(reply):
                answer.take(chunk)
        return answer.end_request()

    # ---- tools

    async def _call(self, at: int, call: CallRecord) -> None:
        """Make a call of the last round, if a follower allows it."""
        answer, toolbox = self.answer, self._services.toolbox
        tool = toolbox.tool(call.name)
        if tool is not None and tool.permission is not Permission.ALWAYS:
            decision = await self._decided(call, tool)
            if decision in _DECISIONS:
                await toolbox.permit(tool.name, _DECISIONS[decision])
            if decision in ("not now", "never"):
                answer.change_call(at, state=CallState.REFUSED)
                return
        answer.change_call(at, state=CallState.RUNNING)
        started = time.monotonic()
        calling: Work[CallResult] = Work(
            _TOOL_SECONDS, partial(toolbox.call, call.name, call.arguments), RunsIn.LOOP
        )
        result = await self._run(calling)
        answer.change_call(
            at,
            state=CallState.FAILED if result.is_error else CallState.DONE,
            result=result.text,
            seconds=time.monotonic() - started,
            images=tuple(result.images),
        )

    async def _decided(self, call: CallRecord, tool: Tool) -> str:
        """Ask the followers about a call, also those that come later."""
        decision: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._decision = (call.id, decision)
        self._question = {
            "call_id": call.id,
            "name": tool.name,
            "server": tool.server,
            "tool": tool.tool,
            "description": tool.description,
            "arguments": call.arguments,
        }
        self._feed.publish("question", {"id": self.answer.id, **self._question})
        try:
            return await decision
        finally:
            self._decision = self._question = None
            self._feed.publish("decided", {"id": self.answer.id, "call_id": call.id})

    # ---- followers

    async def _publish_often(self) -> None:
        taken = 0.0  # seconds of the last time: parsing takes a third of the time at most
        while True:
            await self._until_due(TextForm.BLOCKS, max(PUBLISH_INTERVAL, 2 * taken))
            started = time.monotonic()
            with contextlib.suppress(QueueFull):  # the next time has all of it
                await self._published.publish(self._feed, self._run)
            taken = time.monotonic() - started

    async def _publish_text_often(self) -> None:
        while True:
            await self._until_due(TextForm.TEXT, TEXT_INTERVAL)
            self._published.publish_text(self._feed)

    async def _until_due(self, form: TextForm, pause: float) -> None:
        """Wait `pause` seconds, and then until followers of this form lack enough for an event."""
        waited = 0.0
        while True:
            await asyncio.sleep(pause)
            waited += pause
            if self._feed.has_followers(form) and self._published.is_due(form, waited):
                return
            pause = min(pause, TEXT_INTERVAL)

    async def _finish(self) -> None:
        """Store the end of the answer, and tell the followers."""
        if self._is_deleted:
            return
        await self._with_patience(self._save)
        chat = await self._with_patience(self._ended)
        if self._feed.has_followers(TextForm.BLOCKS):
            await self._with_patience(
                partial(self._published.publish, self._feed, self._run, is_whole=True)
            )
        else:
            self._feed.skip(TextForm.BLOCKS)
        # From here on nobody comes before all have the end.
        if self._feed.has_followers(TextForm.TEXT):
            self._published.publish_text(self._feed)
        else:
            self._feed.skip(TextForm.TEXT)
        end = end_form(self.answer.record(), self.answer.cuts, self._refusal_code)
        self._feed.publish("end", end)
        if chat is not None:
            self._feed.publish("chat", card_of(chat))

    async def _with_patience(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Run work that the executor may have no room for; None if it never has."""
        for _ in range(_MAX_SAVES):
            try:
                return await work()
            except QueueFull:
                await asyncio.sleep(SAVE_INTERVAL)
        logger.warning("The end of an answer was not stored or shown: the server is too busy")
        return None

    async def _ended(self) -> ChatRecord | None:
        """Read the chat; an answer that failed without a word no longer ends the branch."""
        is_refused = self.answer.state is State.FAILED and self.answer.is_empty

        def read(store: Store) -> ChatRecord:
            message = self.answer.record()
            if is_refused and store.chat(message.chat_id).leaf_id == message.id:
                store.show_leaf(message.chat_id, self._order.leaf_before)
            return store.chat(message.chat_id)

        try:
            return await self._on_store(read, 0)
        except StoreError as error:
            logger.warning("%s", error)
            return None

    # ---- the store

    async def _save_often(self) -> None:
        while True:
            await asyncio.sleep(SAVE_INTERVAL)
            is_old = time.monotonic() - self._saved_at > _TOUCH_INTERVAL
            if is_old or self.answer.num_changes != self._saved_changes:
                with contextlib.suppress(QueueFull):
                    await self._save()

    async def _save(self) -> None:
        """Store the answer as it is; followers are told if that fails. Raises QueueFull."""
        record, num_changes = self.answer.record(), self.answer.num_changes
        problem = ""
        try:
            await self._on_store(lambda store: store.save(record), record.num_characters)
            self._saved_changes, self._saved_at = num_changes, time.monotonic()
        except StoreError as error:
            problem = str(error)
        if problem or self._is_unsaved:
            self._feed.publish("unsaved", {"id": record.id, "problem": problem})
        self._is_unsaved = bool(problem)

    async def _on_store(self, work: Callable[[Store], T], num_characters: int) -> T:
        seconds = _STORE_SECONDS + num_characters / _WRITTEN_PER_SECOND
        run = partial(self._services.stores.run, self._order.owner, work)
        return await self._run(Work(seconds, run))

    def _run(self, work: Work[T]) -> Coroutine[Any, Any, T]:
        """Run work in the turn of the client that asked. Raises QueueFull."""
        return self._services.executor.run(self._order.client, work)


class _Published:
    """Tracks what the followers of an answer have of it, in each form."""

    def __init__(self, renderer: Renderer, answer: GrowingAnswer) -> None:
        self._renderer = renderer
        self._answer = answer
        self._rounds: list[ToolRound] = []
        self._blocks = GrowingBlocks(renderer)
        self._text = ""  # of the blocks
        self._thinking = dict.fromkeys(TextForm, "")
        self._plain = ""  # what those have who get the text

    def is_due(self, form: TextForm, waited: float) -> bool:
        """True if the followers of a form lack so much that an event is worth its bytes.

        waited: seconds since the last event
        """
        answer, thinking = self._answer, self._thinking[form]
        if answer.rounds != self._rounds:
            return True
        num_sent = len(self._text if form is TextForm.BLOCKS else self._plain) + len(thinking)
        num_new = len(answer.text) + len(answer.thinking) - num_sent
        if waited >= MAX_WAIT or num_sent < _UNPACED:
            return num_new > 0
        return num_new >= MIN_PIECE

    async def publish(self, feed: ChatFeed, fairly: Any, *, is_whole: bool = False) -> None:
        """Publish what the followers of blocks do not have. Raises QueueFull."""
        answer = self._answer
        self._publish_rounds(feed)
        self._publish_thinking(feed, TextForm.BLOCKS)
        text, blocks = answer.text, self._blocks
        if text == self._text and not (is_whole and text):
            return
        change = await blocks.advance(text, fairly, is_whole=is_whole)
        if blocks is not self._blocks:  # a round has begun, which has the text
            return
        self._text = text
        if not change.patches:
            return
        data = b'{"id":%d,"patches":' % answer.id + change.patches + b"}"
        if change.place is None:
            feed.publish_encoded("blocks", data, TextForm.BLOCKS)
        else:
            place = ("blocks", answer.id, *change.place)
            feed.publish_growth(Growth("blocks", data, place, change.text), TextForm.BLOCKS)

    def publish_text(self, feed: ChatFeed) -> None:
        """Publish what the followers of the text do not have."""
        self._publish_rounds(feed)
        self._publish_thinking(feed, TextForm.TEXT)
        text = self._answer.text
        if text != self._plain:
            self._publish_growth(feed, "text", text[len(self._plain) :], TextForm.TEXT)
            self._plain = text

    def _publish_thinking(self, feed: ChatFeed, form: TextForm) -> None:
        thinking, before = self._answer.thinking, self._thinking[form]
        if thinking != before:
            self._publish_growth(feed, "thinking", thinking[len(before) :], form)
            self._thinking[form] = thinking

    def _publish_growth(self, feed: ChatFeed, name: str, text: str, form: TextForm) -> None:
        data = encode_json({"id": self._answer.id, "text": text})
        feed.publish_growth(Growth(name, data, (name, self._answer.id), text), form)

    def _publish_rounds(self, feed: ChatFeed) -> None:
        rounds = self._answer.rounds
        if len(rounds) != len(self._rounds):  # the text went to a round
            self._blocks, self._text, self._plain = GrowingBlocks(self._renderer), "", ""
            self._thinking = dict.fromkeys(TextForm, "")
        for at, each in enumerate(rounds):
            if at >= len(self._rounds) or self._rounds[at] != each:
                event = {"id": self._answer.id, "index": at, "round": round_fields(each)}
                feed.publish("round", event)
        self._rounds = list(rounds)

    def form(self, form: TextForm) -> Callable[[dict[str, Any] | None, str], dict[str, Any]]:
        """Note the state as it is now; the result makes its form, which may take long."""
        text = self._blocks.shown if form is TextForm.BLOCKS else self._plain
        rounds, thinking = list(self._rounds), self._thinking[form]

        def made(question: dict[str, Any] | None, request_id: str) -> dict[str, Any]:
            return {
                "id": self._answer.id,
                "rounds": list(map(round_fields, rounds)),
                "thinking": thinking,
                form.value: text,
                "question": question,
                "request_id": request_id,
            }

        return made


async def _chunks(reply: InnerReply) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a stream of events. Raises AnswerFailed if it has no end."""
    rest, is_whole = b"", False
    async for piece in reply.pieces():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                is_whole = True
            elif event.startswith(_DATA):
                yield json.loads(event[len(_DATA) :])
    if not is_whole:
        raise AnswerFailed("The server ended the answer before it was complete.")


def _refusal_of(content: bytes) -> tuple[str, str]:
    """Return the sentence and the code of an error reply."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError):
        return "The server refused the question. See its log.", ""

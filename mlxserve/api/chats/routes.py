"""`/api/v1/chats/{id}/answers` and `/events`: answers that the server writes, and those who follow them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.same_user import may_run_programs
from mlxserve.api.access.security import client_name, key_id
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.generation import Seed, TopK
from mlxserve.api.bodies.json_body import body_size
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.api.bodies.thinking import Effort
from mlxserve.api.chats.answer_writer import AnswerOrder
from mlxserve.api.chats.feed import TextForm
from mlxserve.api.chats.following import event_stream
from mlxserve.api.chats.forms import card_of, sent_form
from mlxserve.api.chats.in_process import Sender
from mlxserve.api.chats.live_chats import LiveChat, LiveChats
from mlxserve.api.errors import ApiError, encode_json, invalid_value, json_response
from mlxserve.api.fair_work import run_fairly
from mlxserve.api.native.chats import (
    MAX_IMAGES,
    MAX_TITLE,
    Count,
    ImageFields,
    Text,
    chat_of,
    check_owner,
    message_of,
    number_in,
    run_on_chats,
)
from mlxserve.api.native.tools import check_allowed
from mlxserve.api.server.drain import Drain
from mlxserve.helpers.work import Work
from mlxserve.history.chat_stores import ChatStores
from mlxserve.history.context import sent_messages
from mlxserve.history.identity import identity_of
from mlxserve.history.messages import CAN_CONTINUE, ChatRecord, Role, State, StoredMessage
from mlxserve.history.store import SeenLeaf, Store, draft_name

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "reasoning_effort")
_ENCODED_PER_SECOND = 20 << 20  # characters
_MAX_READS = 5  # of a chat that changes meanwhile


class AnswerRequest(RequestBody):
    """The body of `POST /api/v1/chats/{id}/answers`.

    leaf_id: the end of the branch that the client shows, null in an empty chat; 409 if the chat has
        gone on
    text, images: the question, a child of `parent_id`
    parent_id: without a question, the one to answer again; with one, the message that it follows, or
        null for another beginning of the chat
    continues: the answer that ended too early and goes on; without a question
    """

    leaf_id: Count | None = None
    parent_id: Count | None = None
    continues: Count | None = None
    text: Text | None = None
    images: Annotated[list[ImageFields], Field(max_length=MAX_IMAGES)] = Field(default_factory=list)
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Count | None = None
    seed: Seed | None = None
    reasoning_effort: Effort = None

    @model_validator(mode="after")
    def _is_one_of_three(self) -> AnswerRequest:
        if self.continues is not None and self.has_question:
            raise ValueError("continues: an answer goes on without another question")
        if self.continues is None and self.parent_id is None and not self.has_question:
            raise ValueError("text: give a question, or the `parent_id` of one, or `continues`")
        return self

    @property
    def has_question(self) -> bool:
        return bool(self.text or self.images)

    def sampling_fields(self) -> dict[str, Any]:
        given = ((name, getattr(self, name)) for name in _SAMPLING)
        return {name: value for name, value in given if value is not None}


class DecisionRequest(RequestBody):
    """The body of `POST /api/v1/chats/{id}/answers/{message}/decision`: whether a call is made."""

    call_id: Annotated[str, Field(max_length=MAX_TITLE)]
    decision: Literal["once", "always", "not now", "never"]


@dataclass(frozen=True, slots=True)
class _Begun:
    """An answer that is in the store, and what the model gets for it."""

    chat: ChatRecord
    question: StoredMessage | None
    answer: StoredMessage
    messages: list[dict[str, Any]]
    num_characters: int
    before: int | None


class ChatAnswers:
    """The endpoints over answers and events."""

    def __init__(self, stores: ChatStores, live: LiveChats, drain: Drain) -> None:
        self._stores = stores
        self._live = live
        self._drain = drain

    def routes(self) -> list[Route]:
        answers = "/api/v1/chats/{id}/answers"
        own_route = partial(BodyRoute, of_model=False)
        return [
            own_route(answers, self.begin, body=AnswerRequest, admit=check_owner),
            Route(f"{answers}/{{message}}", self.stop, methods=["DELETE"]),
            own_route(
                f"{answers}/{{message}}/decision",
                self.decide,
                body=DecisionRequest,
                admit=check_allowed,
            ),
            Route("/api/v1/chats/{id}/events", self.events, methods=["GET"]),
        ]

    async def begin(self, request: Request, body: AnswerRequest) -> Response:
        """Begins an answer, which the server goes on with when the client leaves."""
        await check_owner(request)
        owner, chat_id = key_id(request), number_in(request.path_params["id"])
        has_tools = await may_run_programs(request)
        chat = self._live.chat(owner, chat_id)
        chat.reserve()
        try:
            begun = await run_on_chats(
                self._stores,
                request,
                lambda store: _begun(store, chat_of(store, request), body),
                written=body_size(request),
            )
        except BaseException:
            chat.is_reserved = False
            raise
        order = AnswerOrder(
            owner=owner,
            client=client_name(request),
            sender=Sender.of(request),
            messages=begun.messages,
            num_characters=begun.num_characters,
            fields={**({"model": body.model} if body.model else {}), **body.sampling_fields()},
            continues=body.continues is not None and bool(begun.answer.text),
            has_tools=has_tools,
            leaf_before=begun.before,
        )
        if begun.question is not None:
            self._live.added(owner, begun.question)
        self._live.added(owner, begun.answer)
        self._live.changed(owner, begun.chat)
        self._live.begin(chat, order, begun.answer)
        return json_response(
            {
                "object": "chat.answer",
                "question": begun.question and sent_form(replace(begun.question, images=())),
                "answer": sent_form(begun.answer),
            }
        )

    async def stop(self, request: Request) -> Response:
        """Stops an answer, whoever began it; what it has is kept."""
        writer = (await self._answered(request)).writer
        assert writer is not None, "checked"
        writer.stop()
        return json_response({"id": writer.answer.id, "object": "chat.answer", "stopped": True})

    async def decide(self, request: Request, body: DecisionRequest) -> Response:
        """Answers the question about a call, whoever began the answer."""
        writer = (await self._answered(request)).writer
        assert writer is not None, "checked"
        if not writer.decide(body.call_id, body.decision):
            raise ApiError(
                409,
                "This call is not waiting for a decision; another page may have made it.",
                param="call_id",
                code="no_question",
            )
        return json_response({"id": writer.answer.id, "object": "chat.answer"})

    async def _answered(self, request: Request) -> LiveChat:
        """Return the chat whose running answer is in the path. Raises ApiError 403 and 404."""
        await check_owner(request)
        chat = self._live.known(key_id(request), number_in(request.path_params["id"]))
        number = number_in(request.path_params["message"])
        if chat is None or chat.writer is None or chat.writer.answer.id != number:
            raise ApiError(404, "This answer is not being written now.", code="no_answer")
        return chat

    async def events(self, request: Request) -> Response:
        """Sends the state of a chat, then what happens in it, until the client leaves."""
        owner, form = key_id(request), _form_of(request)
        card, _ = await self._card(request)
        self._live.check_followers(owner)
        chat = self._live.chat(owner, card.id)
        begin = partial(self._state, request, chat, form)
        return event_stream(request, chat, self._drain, begin, form)

    async def _card(self, request: Request) -> tuple[ChatRecord, str]:
        """Return the chat, and what names the file that has it."""
        return await run_on_chats(
            self._stores, request, lambda store: (chat_of(store, request), identity_of(store))
        )

    async def _state(self, request: Request, chat: LiveChat, form: TextForm) -> tuple[bytes, int]:
        """Return the first event of a follower, and the number of the event that follows it."""
        for _ in range(_MAX_READS):
            place = chat.feed.next
            card, store = await self._card(request)
            if place == chat.feed.next:
                break
        place = chat.feed.begin_state(form)
        take = None if chat.writer is None else chat.writer.snapshot(form)
        encoding: Work[bytes] = Work(0.001, partial(_encoded_state, card, store, take))
        return chat.feed.state_event(await run_fairly(request, encoding), place), place


def _form_of(request: Request) -> TextForm:
    """Return the form of the text that a follower wants. Raises ApiError 400."""
    try:
        return TextForm(request.query_params.get("form", TextForm.BLOCKS))
    except ValueError:
        raise invalid_value("form", f"must be {' or '.join(TextForm)}") from None


def _encoded_state(
    card: ChatRecord, store: str, take: Callable[[], dict[str, Any]] | None
) -> bytes:
    answer = None if take is None else take()
    return encode_json({"chat": card_of(card), "store": store, "answer": answer})


def _begun(store: Store, chat: ChatRecord, body: AnswerRequest) -> _Begun:
    """Add the question, if there is one, and the answer. Raises ApiError 400 and StoreError."""
    store.recover()  # the answer of a server that was killed can be continued
    seen = SeenLeaf(body.leaf_id)
    if body.continues is not None:
        return _continued(store, chat, body, seen)
    question = None
    parent = (
        None if body.parent_id is None else message_of(store, chat, body.parent_id, "parent_id")
    )
    if body.has_question:
        images = [image.picture() for image in body.images]
        text = body.text or ""
        question = store.add(chat.id, body.parent_id, Role.USER, text, images=images, seen=seen)
        store.set_setting(draft_name(chat.id), "")
        seen, parent = SeenLeaf(question.id), question
    if parent is None or parent.role is not Role.USER:
        raise invalid_value("parent_id", "is no question; give `text` with it")
    answer = store.add(
        chat.id,
        parent.id,
        Role.ASSISTANT,
        "",
        state=State.WRITING,
        model=body.model or "",
        seen=seen,
    )
    before = body.leaf_id if question is None else question.parent_id
    return _with_messages(store, chat, question, answer, before)


def _continued(store: Store, chat: ChatRecord, body: AnswerRequest, seen: SeenLeaf) -> _Begun:
    assert body.continues is not None, "checked"
    answer = message_of(store, chat, body.continues, "continues")
    if answer.role is not Role.ASSISTANT or answer.state not in CAN_CONTINUE:
        raise invalid_value("continues", "is no answer that ended too early")
    store.show_leaf(chat.id, answer.id, seen)
    begun = replace(
        answer,
        state=State.WRITING,
        error="",
        model=body.model or answer.model,
        thinking=answer.thinking if answer.text else "",
    )
    store.save(begun)
    path = store.path(answer.id)
    before = path[-2].parent_id if len(path) > 1 else begun.parent_id
    return _with_messages(store, chat, None, begun, before)


def _with_messages(
    store: Store,
    chat: ChatRecord,
    question: StoredMessage | None,
    answer: StoredMessage,
    before: int | None,
) -> _Begun:
    """`before`: the end of the branch that is shown again if the model says nothing at all."""
    path = store.path(answer.id)
    return _Begun(
        store.chat(chat.id),
        question,
        answer,
        sent_messages(path, chat.system, chat.left_out),
        sum(each.num_characters for each in path) + chat.num_characters,
        before,
    )

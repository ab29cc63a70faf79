"""`/api/v1/chats`: the chats of the page, which are those of the terminal.

The terminal's chats belong to the user who runs the server: with API keys to the owner's key, without keys
to programs of that user on this machine. Every other key has chats of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, field_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.same_user import is_from_same_user
from mlxserve.api.access.security import has_key, key_id
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.json_body import body_size
from mlxserve.api.bodies.request_body import RequestBody, StrictModel
from mlxserve.api.chats.forms import card_of, sent_form
from mlxserve.api.chats.live_chats import LiveChats
from mlxserve.api.entity_tags import is_known, tag_of
from mlxserve.api.errors import ApiError, invalid_value, json_response
from mlxserve.api.fair_work import run_fairly
from mlxserve.api.native.forgetting import DeletedConversations, Forgetting, PromptSettings
from mlxserve.core.errors import MlxServeError
from mlxserve.helpers.work import Work
from mlxserve.history.calls import CallRecord, CallState, ToolRound
from mlxserve.history.chat_file import StoreError
from mlxserve.history.chat_stores import ChatStores
from mlxserve.history.export import as_json, as_markdown
from mlxserve.history.folders import folder_name
from mlxserve.history.messages import ChatRecord, Role, State, StoredMessage
from mlxserve.history.picture import MAX_DOCUMENT, KeptImage
from mlxserve.history.store import SearchHit, SeenLeaf, StaleWrite, Store, draft_name
from mlxserve.history.traces import traces
from mlxserve.mcp import results

T = TypeVar("T")

MAX_TEXT = 4 << 20  # characters
MAX_PAGE = 4 << 20  # characters of a reply, but for its last message
STORE_SECONDS = 0.005  # for a read or a write by itself
_READ_PER_SECOND = 100 << 20  # bytes of a file that is read to its end
WRITTEN_PER_SECOND = 20 << 20  # bytes, into the index as well
MAX_TITLE = 1_000
MAX_IMAGE, MAX_IMAGES = 2 << 20, 16  # characters; of one message
MAX_ROUNDS, MAX_CALLS = 100, 100  # of one answer, and in each of its rounds
_MAX_ID = 2**63 - 1
_CALL = {field.name for field in fields(CallRecord)}

Text = Annotated[str, Field(max_length=MAX_TEXT)]
StateName = Literal["writing", "done", "cut", "repeated", "stopped", "failed"]
Count = Annotated[int, Field(ge=0, le=_MAX_ID)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]


class NewChatRequest(RequestBody):
    """The body of `POST /api/v1/chats`."""

    title: Annotated[str, Field(max_length=MAX_TITLE)]
    system: Text = ""


class ChatChange(RequestBody):
    """The body of `PATCH /api/v1/chats/{id}`.

    leaf_id: the last message of the branch to show
    seen_leaf_id: that of the branch that the client shows now; 409 if the chat has gone on
    draft: what is typed and not sent yet
    folder: the name of the folder to put it into; empty for none
    """

    title: Annotated[str, Field(max_length=MAX_TITLE)] | None = None
    system: Text | None = None
    leaf_id: Count | None = None
    seen_leaf_id: Count | None = None
    draft: Text | None = None
    folder: Annotated[str, Field(max_length=MAX_TITLE), AfterValidator(folder_name)] | None = None
    is_pinned: bool | None = None


class ImageFields(StrictModel):
    """An image or a document of a question: a name, and a data: URL with the file or the text."""

    name: Annotated[str, Field(max_length=MAX_TITLE)]
    url: Annotated[
        str,
        Field(
            max_length=MAX_DOCUMENT,
            pattern=r"^data:(image/(png|jpeg|webp|gif)|text/plain);base64,[A-Za-z0-9+/]+=*$",
        ),
    ]

    @field_validator("url")
    @classmethod
    def _is_no_larger_than_an_image(cls, url: str) -> str:
        if url.startswith("data:image/") and len(url) > MAX_IMAGE:
            raise ValueError(f"an image may have {MAX_IMAGE:,} characters")
        return url

    def picture(self) -> KeptImage:
        return KeptImage(self.name, self.url)


class NewMessageRequest(RequestBody):
    """The body of `POST /api/v1/chats/{id}/messages`. Messages of one parent are versions.

    seen_leaf_id: the end of the branch that the client shows; 409 if the chat has gone on
    """

    role: Literal["user", "assistant"]
    parent_id: Count | None = None
    seen_leaf_id: Count | None = None
    text: Text = ""
    state: StateName = "done"
    model: Annotated[str, Field(max_length=MAX_TITLE)] | None = None
    images: Annotated[list[ImageFields], Field(max_length=MAX_IMAGES)] = Field(default_factory=list)


class StatsFields(StrictModel):
    """The cost of an answer; unknown figures are None."""

    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    page_size: Count | None = None
    completion_tokens: Count | None = None
    accepted_tokens: Count | None = None
    first_token_seconds: Seconds | None = None
    decode_seconds: Seconds | None = None

    def sent(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}


ResultImage = Annotated[
    str,
    Field(
        max_length=results.MAX_IMAGE,
        pattern=r"^data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$",
    ),
]


class CallFields(StrictModel):
    """A call of a tool: `arguments` is JSON as the model wrote it."""

    id: Annotated[str, Field(max_length=MAX_TITLE)]
    name: Annotated[str, Field(max_length=MAX_TITLE)]
    arguments: Text
    state: Literal["asked", "running", "done", "failed", "refused", "stopped"]
    result: Text = ""
    seconds: Seconds | None = None
    images: Annotated[list[ResultImage], Field(max_length=results.MAX_IMAGES)] = Field(
        default_factory=list
    )

    def record(self) -> CallRecord:
        call = self.model_dump(include=_CALL)
        return CallRecord(**{**call, "state": CallState(self.state), "images": tuple(self.images)})


class RoundFields(StrictModel):
    """The model's text before a round of tool calls, and the calls."""

    text: Text
    thinking: Text = ""
    calls: Annotated[list[CallFields], Field(max_length=MAX_CALLS)]

    def record(self) -> ToolRound:
        return ToolRound(self.text, self.thinking, tuple(call.record() for call in self.calls))


class MessageChange(RequestBody):
    """The body of `PATCH /api/v1/chats/{id}/messages/{message}`: an answer as it is being written."""

    text: Text
    thinking: Text = ""
    state: StateName
    error: Annotated[str, Field(max_length=10_000)] = ""
    stats: StatsFields = Field(default_factory=StatsFields)
    rounds: Annotated[list[RoundFields], Field(max_length=MAX_ROUNDS)] | None = None


class Chats:
    """The endpoints over the chats of all keys."""

    def __init__(
        self,
        stores: ChatStores,
        forgetting: Forgetting,
        tools: Callable[[], Sequence[Mapping[str, Any]]],
        live: LiveChats,
    ) -> None:
        """Wire the endpoints.

        tools: returns the definitions of the tools that the page's models see
        live: tells followers what was written
        """
        self._stores = stores
        self._live = live
        self._forgetting = forgetting
        self._tools = tools

    def routes(self) -> list[Route]:
        chat, message = "/api/v1/chats/{id}", "/api/v1/chats/{id}/messages/{message}"
        own_route = partial(BodyRoute, of_model=False, admit=check_owner)
        return [
            Route("/api/v1/chats", self.index, methods=["GET"]),
            own_route("/api/v1/chats", self.create, body=NewChatRequest),
            Route(chat, self.get, methods=["GET"]),
            own_route(chat, self.change, body=ChatChange, method="PATCH"),
            Route(chat, self.delete, methods=["DELETE"]),
            Route(f"{chat}/export", self.export, methods=["GET"]),
            own_route(f"{chat}/messages", self.add, body=NewMessageRequest),
            own_route(message, self.save, body=MessageChange, method="PATCH"),
        ]

    async def index(self, request: Request) -> Response:
        """Lists chats, the most recent first, or those whose messages contain the words of `search`.

        The list of all chats has a tag, and is not sent again to a client that names it.
        """
        words = request.query_params.get("search", "")
        if words.strip():

            def search(store: Store) -> list[dict[str, Any]]:
                return _cards_of(store.search(words[:MAX_TITLE], max_characters=MAX_PAGE))

            cards = await self._call(request, search, reads=1.0)
            return json_response({"object": "list", "data": cards})

        def chats(store: Store) -> tuple[list[ChatRecord], str]:
            found = store.chats(max_characters=MAX_PAGE)
            return found, tag_of(repr(found).encode())

        found, tag = await self._call(request, chats, nbytes=MAX_PAGE)
        if is_known(request.headers, tag):
            return Response(status_code=304, headers={"etag": tag})
        return json_response(
            {"object": "list", "data": list(map(card_of, found))}, 200, {"etag": tag}
        )

    async def create(self, request: Request, body: NewChatRequest) -> Response:
        """Begins a chat. Its title is the start of the given words."""
        chat = await self._call(request, lambda store: store.create_chat(body.title, body.system))
        self._live.listed(key_id(request), chat.id)
        return json_response(card_of(chat))

    async def get(self, request: Request) -> Response:
        """Reads a chat: its messages, with their parents, at most 4 MiB at once; `after` continues after a message.

        `has_more` tells that there may be more than these: ask again with the last one's id as `after`.
        """
        after = request.query_params.get("after", "0")
        if not _is_number(after):
            raise invalid_value("after", "must be the id of a message")

        def read(store: Store) -> dict[str, Any]:
            store.recover()
            chat = chat_of(store, request)
            messages = store.messages(chat.id, int(after), MAX_PAGE)
            has_more = sum(each.num_characters for each in messages) > MAX_PAGE
            draft = store.setting(draft_name(chat.id)) or ""
            found = {"messages": list(map(sent_form, messages)), "has_more": has_more}
            return {**card_of(chat), "draft": draft, **found}

        return json_response(await self._call(request, read, nbytes=MAX_PAGE))

    async def change(self, request: Request, body: ChatChange) -> Response:
        """Renames a chat, moves or pins it, changes its system prompt, or shows another branch."""

        def change(store: Store) -> ChatRecord:
            chat = chat_of(store, request)
            if body.title is not None:
                store.rename(chat.id, body.title)
            if body.system is not None:
                store.set_system(chat.id, body.system)
            if body.folder is not None or body.is_pinned is not None:
                store.place(chat.id, folder=body.folder, is_pinned=body.is_pinned)
            if body.draft is not None:
                store.set_setting(draft_name(chat.id), body.draft)
            if body.leaf_id is not None:
                leaf = message_of(store, chat, body.leaf_id, "leaf_id")
                store.show_leaf(chat.id, leaf.id, seen_by(body.seen_leaf_id))
            return store.chat(chat.id)

        chat = await self._call(request, change, written=body_size(request))
        if body.draft is None or len(body.model_fields_set) > 1:
            self._live.changed(key_id(request), chat)
        return json_response(card_of(chat))

    async def delete(self, request: Request) -> Response:
        """Deletes a chat and its messages, and what loaded models have computed of them."""

        def delete(store: Store) -> tuple[int, list[str], DeletedConversations]:
            chat = chat_of(store, request)
            left = traces(store, chat.id)
            store.delete(chat.id)
            deleted = DeletedConversations.from_chat(left.conversations, left.kept)
            return chat.id, left.models, deleted

        chat_id, models, deleted = await self._call(request, delete, reads=1.0)
        self._live.deleted(key_id(request), chat_id)
        try:
            forgotten = await self._forgetting.forget(
                request, deleted, PromptSettings(self._tools())
            )
        except (ApiError, MlxServeError) as error:
            # The chat is deleted all the same.
            forgotten = {"models": [], "problem": str(error)}
        others = [name for name in models if name not in forgotten["models"]]
        cache = {**forgotten, "models_not_loaded": others}
        return json_response({"id": chat_id, "object": "chat", "deleted": True, "cache": cache})

    async def export(self, request: Request) -> Response:
        """The shown branch as Markdown, or with `format=json` as the messages of a request."""
        is_json = request.query_params.get("format") == "json"

        def text(store: Store) -> bytes:
            chat = chat_of(store, request)
            return (as_json if is_json else as_markdown)(chat, store.path(chat.leaf_id)).encode()

        exported = await self._call(request, text, reads=1.0, nbytes=MAX_PAGE)
        name = "chat.json" if is_json else "chat.md"
        return Response(
            exported,
            media_type="application/json" if is_json else "text/markdown",
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )

    async def add(self, request: Request, body: NewMessageRequest) -> Response:
        """Adds a message, which then ends the shown branch."""

        def add(store: Store) -> StoredMessage:
            chat = chat_of(store, request)
            if body.parent_id is not None:
                message_of(store, chat, body.parent_id, "parent_id")
            return store.add(
                chat.id,
                body.parent_id,
                Role(body.role),
                body.text,
                state=State(body.state),
                model=body.model or "",
                images=[image.picture() for image in body.images],
                seen=seen_by(body.seen_leaf_id),
            )

        message = await self._call(request, add, written=body_size(request))
        self._live.added(key_id(request), message)
        self._live.listed(key_id(request), message.chat_id)
        return json_response(sent_form(message))

    async def save(self, request: Request, body: MessageChange) -> Response:
        """Writes an answer as far as it has come."""

        def save(store: Store) -> StoredMessage:
            chat = chat_of(store, request)
            number = number_in(request.path_params["message"])
            message = message_of(store, chat, number, "message")
            if message.role is not Role.ASSISTANT:
                raise invalid_value("message", "questions do not change; add another version")
            changed = replace(
                message,
                text=body.text,
                thinking=body.thinking,
                state=State(body.state),
                error=body.error,
                stats=replace(message.stats, **body.stats.sent()),
            )
            if body.rounds is not None:
                rounds = tuple(each.record() for each in body.rounds)
                changed = replace(changed, rounds=rounds)
            store.save(changed)
            return changed

        message = await self._call(request, save, written=body_size(request))
        self._live.added(key_id(request), message)
        return json_response(sent_form(message))

    def _call(
        self, request: Request, work: Callable[[Store], T], **costs: Any
    ) -> Coroutine[Any, Any, T]:
        return run_on_chats(self._stores, request, work, **costs)


async def run_on_chats(
    stores: ChatStores,
    request: Request,
    work: Callable[[Store], T],
    *,
    reads: float = 0.0,
    written: int = 0,
    nbytes: int = 0,
) -> T:
    """Run `work` on the store of the request's key, in its turn.

    reads: share of the file that it may have to read
    written: bytes that it writes
    nbytes: bytes of its result, at most

    Raises ApiError 403, 404, 409, 429 and 503.
    """
    await check_owner(request)
    owner = key_id(request)
    size = stores.size(owner)
    seconds = STORE_SECONDS + reads * size / _READ_PER_SECOND + written / WRITTEN_PER_SECOND
    job: Work[T] = Work(seconds, partial(stores.run, owner, work), nbytes=min(nbytes, size))
    try:
        return await run_fairly(request, job)
    except StaleWrite as error:
        raise ApiError(409, str(error), param="leaf_id", code="stale_chat") from error
    except StoreError as error:
        raise ApiError(503, str(error), code="chats_unavailable") from error


async def check_owner(request: Request) -> None:
    """Raises ApiError 403 without an API key, unless the server's own user sent the request."""
    if not has_key(request) and not await is_from_same_user(request):
        raise ApiError(
            403,
            "Without an API key chats are read by programs of the server's own user on its own "
            "machine only. Create a key: mlxserve key create NAME",
            code="chats_not_allowed",
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def number_in(text: str) -> int:
    if _is_number(text):
        return int(text)
    raise _unknown()


def _unknown() -> ApiError:
    return ApiError(404, "There is no such chat; it may have been deleted.", code="unknown_chat")


def chat_of(store: Store, request: Request) -> ChatRecord:
    """Return the chat in the path. Raises ApiError 404."""
    number = number_in(request.path_params["id"])
    try:
        return store.chat(number)
    except StoreError as error:
        raise _unknown() from error


def message_of(store: Store, chat: ChatRecord, number: int, param: str) -> StoredMessage:
    """Return a message of this chat. Raises ApiError 400."""
    try:
        message = store.message(number)
    except StoreError:
        message = None
    if message is None or message.chat_id != chat.id:
        raise invalid_value(param, "is no message of this chat")
    return message


def seen_by(leaf_id: int | None) -> SeenLeaf | None:
    """Return what a client saw; None for one that does not say."""
    return None if leaf_id is None else SeenLeaf(leaf_id)


def _cards_of(hits: list[SearchHit]) -> list[dict[str, Any]]:
    """Return one card per chat, with its newest hit."""
    cards: dict[int, dict[str, Any]] = {}
    for hit in hits:
        card = {**card_of(hit.chat), "excerpt": hit.excerpt, "message_id": hit.message_id}
        cards.setdefault(hit.chat.id, card)
    return list(cards.values())

"""One conversation in one form, from any dialect.

    a dialect's body ──▶ reader ──▶ Conversation ──▶ template_compat ──▶ the template's messages

Readers fill in what their API allows to be absent, and leave a short text in the place of what this
server cannot read. Only `template_compat` turns messages into what a chat template takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any, NamedTuple, Self, TypeAlias

from mlxserve.core.errors import InvalidParameter, InvalidRequest
from mlxserve.images.image import Image
from mlxserve.system.strict_json import finite, refuse_constant
from mlxserve.system.well_formed import well_formed_value
from mlxserve.text.documents.sent import SentDocument, sent_document

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
PARAGRAPH = "\n\n"  # between texts that become one
# Kinds of parts that hold more than text, and what they are called.
_MEDIA = {
    "audio": "audio",
    "container_upload": "file",
    "document": "document",
    "file": "file",
    "image": "image",
    "image_url": "image",
    "input_audio": "audio",
    "input_file": "file",
    "input_image": "image",
    "input_video": "video",
    "video": "video",
    "video_url": "video",
}
# Kinds of text parts in OpenAI's APIs, and the member that holds the text.
_TEXT_PARTS = {
    "text": "text",
    "refusal": "refusal",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
}
_IMAGE_PARTS = ("image_url", "input_image")  # part types of OpenAI's APIs
_FILE_PARTS = ("file", "input_file", "document")
MAX_PARTS = 1_000
_READS_TEXT = "this model reads text only"
# Media that no model is given, whether it sees images or not.
_READS_NONE = {
    "audio": "this server reads no sound; send what is said as text",
    "video": "this server reads no videos; send some of their frames as images",
}
_NEEDS_CONTENT = "a document is sent with its content, in base64; this server stores no files"
# Of a call's arguments: as deep as a schema may be. Templates, msgpack, SDKs and the parser of bodies,
# which a client sends the arguments back to, all have limits of their own above it.
_MAX_DEPTH = 32


class UnseenMedia(InvalidParameter):
    """An image, or another medium, in the newest user message."""

    def __init__(self, kind: str, where: str = "", why: str = _READS_TEXT) -> None:
        super().__init__(where or "messages", f"{kind} parts are not supported: {why}")
        self.kind = kind
        self.where = where

    @property
    def is_image(self) -> bool:
        return _MEDIA.get(self.kind) == "image"


def _why_unread(kind: str) -> str:
    return _READS_NONE.get(_MEDIA[kind], _READS_TEXT)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Content that this server cannot read. `where` is its path in the request."""

    kind: str
    where: str = ""

    @property
    def is_media(self) -> bool:
        return self.kind in _MEDIA

    @property
    def text(self) -> str:
        """Placeholder text."""
        if self.is_media:
            return f"[{_MEDIA[self.kind]} left out: {_why_unread(self.kind)}]"
        return f"[{self.kind} left out]"


@dataclass(frozen=True, slots=True)
class SentImage:
    """An image as it was sent, before it is fetched and decoded.

    source  a URL: data: with the file itself, http: or https:. None for anything else
    kind    of the part, for the refusal of a model that does not see it
    where   its path in the request
    """

    source: str | None
    kind: str = "image"
    where: str = ""

    @property
    def unseen(self) -> Unreadable:
        return Unreadable(self.kind, self.where)


SentPart: TypeAlias = str | SentImage | SentDocument | Unreadable
Part: TypeAlias = SentPart | Image


@dataclass(frozen=True, slots=True)
class Call:
    """A call in an earlier answer, with its arguments as the model wrote them.

    `arguments` is JSON; keeping its text keeps the prompt equal to the generated tokens.
    """

    id: str
    name: str
    arguments: str

    def as_object(self) -> dict[str, Any]:
        """Return the arguments; as one string if they are not a strict JSON object, or cut off."""
        parsed = arguments_object(self.arguments)
        return {"INVALID_JSON": self.arguments} if parsed is None else parsed

    def as_json(self) -> str:
        """Return the arguments as written, or `as_object` if they are no such object."""
        parsed = arguments_object(self.arguments)
        return self.arguments if parsed is not None else json.dumps(self.as_object())


class PlacedImage(NamedTuple):
    """An image before the character `at` of a message's text.

    A text in its place is separated from its neighbours by `separator`.
    """

    at: int
    image: Image | SentImage
    separator: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message of any role.

    call_id, name: of the call whose result a tool's message is; `name` also of a user
    extra: members of the library's messages that only the template knows
    """

    role: str
    text: str = ""
    images: tuple[PlacedImage, ...] = ()
    reasoning: str = ""
    documents: tuple[SentDocument, ...] = ()
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None
    left_out: tuple[Unreadable, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_parts(
        cls,
        role: str,
        parts: Iterable[Part],
        separator: str = "",
        *,
        where: str = "",
        **rest: Any,
    ) -> Self:
        """Build a message from parts.

        separator: between texts with no image between them
        where: the path of the parts, which know their own within it
        """
        parts = tuple(
            part if isinstance(part, (str, Image)) else replace(part, where=where + part.where)
            for part in parts
        )
        text, images = _placed(parts, separator)
        return cls(
            role=role,
            text=text,
            images=images,
            documents=tuple(part for part in parts if isinstance(part, SentDocument)),
            left_out=tuple(part for part in parts if isinstance(part, Unreadable)),
            **rest,
        )

    def content(self) -> str | list[dict[str, Any]]:
        """Return the content for templates: the text, or the parts of a message with images."""
        if not self.images:
            return self.text
        parts: list[dict[str, Any]] = []
        begin = 0
        for at, image, _ in (*self.images, (len(self.text), None, "")):
            if at > begin:
                parts.append({"type": "text", "text": self.text[begin:at]})
            if image is not None:
                parts.append({"type": "image", "image": image})
            begin = at
        return parts

    def after(self, earlier: Message) -> Message:
        """Merge with the message before it."""
        text = PARAGRAPH.join(filter(None, (earlier.text, self.text)))
        shift = len(text) - len(self.text)
        moved = (image._replace(at=image.at + shift) for image in self.images)
        return replace(
            self,
            text=text,
            images=(*earlier.images, *moved),
            documents=(*earlier.documents, *self.documents),
            reasoning=PARAGRAPH.join(filter(None, (earlier.reasoning, self.reasoning))),
            calls=(*earlier.calls, *self.calls),
            left_out=(*earlier.left_out, *self.left_out),
            extra={**earlier.extra, **self.extra},
        )

    @property
    def sent_images(self) -> list[SentImage]:
        """Images that are not decoded yet."""
        return [image for _, image, _ in self.images if isinstance(image, SentImage)]

    def with_images(self, decoded: Mapping[SentImage, Image]) -> Message:
        """Replace sent images by decoded ones."""
        if not self.sent_images:
            return self
        images = (
            placed._replace(image=decoded[placed.image])
            if isinstance(placed.image, SentImage)
            else placed
            for placed in self.images
        )
        return replace(self, images=tuple(images))

    def without_images(self) -> Message:
        """Replace sent images by texts, for a model without vision."""
        if not self.sent_images:
            return self
        text, begin, between = "", 0, ""
        kept, unseen = [], []
        for placed in self.images:
            said, begin = self.text[begin : placed.at], placed.at
            text += between + said if said else ""
            between = ""
            if isinstance(placed.image, SentImage):
                left = placed.image.unseen
                unseen.append(left)
                between = placed.separator
                text += between + left.text if text else left.text
            else:
                kept.append(placed._replace(at=len(text)))
        if said := self.text[begin:]:
            text += between + said
        return replace(self, text=text, images=tuple(kept), left_out=(*self.left_out, *unseen))


def _placed(parts: Sequence[Part], separator: str) -> tuple[str, tuple[PlacedImage, ...]]:
    text, images, follows_text = "", [], False
    for part in parts:
        if isinstance(part, (Image, SentImage)):
            images.append(PlacedImage(len(text), part, separator))
            follows_text = False
            continue
        if isinstance(part, SentDocument):
            continue
        piece = part if isinstance(part, str) else part.text
        text += separator + piece if follows_text else piece
        follows_text = True
    return text, tuple(images)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, each of which has all that templates read."""

    messages: tuple[Message, ...]

    @classmethod
    def from_messages(
        cls, messages: Iterable[Message], *, joins: Sequence[str] = (), sees: bool = False
    ) -> Self:
        """Build a conversation.

        joins: roles whose neighbours the dialect means as one message
        sees: images that were sent stay, to be decoded: the model sees them

        Raises InvalidParameter for an image, or another medium, in the newest user message: an
        answer without it would be about something else. Everywhere else, in earlier turns and in
        the results of tools, a text takes its place, as a refusal would end the session for good.
        """
        messages = tuple(_with_ids(tuple(messages)))
        if not sees:
            messages = tuple(message.without_images() for message in messages)
        _refuse_media(messages)
        names: dict[str, str] = {}
        whole: list[Message] = []
        for message in messages:
            names.update((call.id, call.name) for call in message.calls)
            if message.role == TOOL and message.name is None and message.call_id in names:
                message = replace(message, name=names[message.call_id])
            if whole and message.role in joins and message.role == whole[-1].role:
                whole[-1] = message.after(whole[-1])
            else:
                whole.append(message)
        return cls(tuple(whole))

    @property
    def left_out(self) -> list[str]:
        """Kinds of content that were left out."""
        return sorted({left.kind for message in self.messages for left in message.left_out})

    @property
    def sent_images(self) -> list[SentImage]:
        """Images that are not decoded yet, in order."""
        return [image for message in self.messages for image in message.sent_images]

    @property
    def sent_documents(self) -> list[SentDocument]:
        """Documents that are not read yet, in order."""
        return [document for message in self.messages for document in message.documents]

    @property
    def num_pixels(self) -> int:
        """Pixels of all decoded images."""
        images = [image.image for message in self.messages for image in message.images]
        return sum(image.width * image.height for image in images if isinstance(image, Image))

    def with_images(self, images: Mapping[SentImage, Image]) -> Self:
        """Replace sent images by decoded ones."""
        return replace(self, messages=tuple(m.with_images(images) for m in self.messages))


def images_in(message: Mapping[str, Any]) -> list[Image]:
    """Images of a template's message, in order."""
    content = message.get("content")
    if not isinstance(content, list):
        return []
    images = [part.get("image") for part in content if isinstance(part, Mapping)]
    return [image for image in images if isinstance(image, Image)]


def without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message for a template, which writes a marker in place of each image."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message}
    parts = [{"type": "image"} if "image" in part else part for part in content]
    return {**message, "content": parts}


def _with_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Give calls and results without ids, such as Ollama's, the ids by which templates pair them.

    A result belongs to the first call of the last answer that has none yet, of its name if it has one.
    The same conversation always gets the same ids.
    """
    taken = {call.id for message in messages for call in message.calls}
    ids = (name for number in count() if (name := f"call_{number}") not in taken)
    calls: list[Call] = []  # without a result
    for message in messages:
        if message.calls:
            calls = [call if call.id else replace(call, id=next(ids)) for call in message.calls]
            message = replace(message, calls=tuple(calls))
        elif message.role == TOOL:
            match = next((call for call in calls if _is_result_of(message, call)), None)
            if match is not None:
                calls.remove(match)
                message = replace(message, call_id=match.id)
        yield message


def _is_result_of(result: Message, call: Call) -> bool:
    if result.call_id is not None:
        return result.call_id == call.id
    return result.name in (None, call.name)


def _refuse_media(messages: Sequence[Message]) -> None:
    since = list(takewhile(lambda message: message.role != ASSISTANT, reversed(messages)))
    if any(message.role == TOOL for message in since):
        # What follows a tool's result may be the picture that it took.
        return
    newest = next((message for message in since if message.role == USER), None)
    for left in newest.left_out if newest is not None else ():
        if left.is_media:
            why = _NEEDS_CONTENT if left.kind in _FILE_PARTS else _why_unread(left.kind)
            raise UnseenMedia(left.kind, left.where, why)


def parts_of(content: object) -> tuple[Part, ...]:
    """Read a text or a list of parts, as OpenAI's APIs have it; images may be decoded already.

    Those are {"type": "image", "image": Image}. Raises ValueError for another shape.
    """
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, (list, tuple)):
        raise ValueError("must be a string or a list of parts")
    if len(content) > MAX_PARTS:
        raise ValueError(f"at most {MAX_PARTS} parts are allowed, got {len(content)}")
    return tuple(_part(part, f"[{number}]") for number, part in enumerate(content))


def _part(part: object, where: str) -> Part:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise ValueError('each part must be an object such as {"type": "text", "text": "..."}')
    kind = part["type"]
    if kind == "image" and isinstance(image := part.get("image"), Image):
        return image
    if kind in _IMAGE_PARTS:
        return SentImage(_url_of(part), kind, where)
    if kind in _FILE_PARTS and (document := sent_document(part, where)) is not None:
        return document
    if kind not in _TEXT_PARTS:
        return Unreadable(kind[:64], where)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ValueError(f"a {kind} part needs a string named {_TEXT_PARTS[kind]!r}")
    return text


def _url_of(part: Mapping[str, Any]) -> str | None:
    """Return an image's URL: Chat Completions nests it in an object, Responses does not."""
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    return url if isinstance(url, str) else None


_READ = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")


def read_for(
    read: Callable[[bool], Conversation], *, sees: bool, no_vision_reason: str = ""
) -> Conversation:
    """Return what `read` makes of a conversation, for a model that sees images or not.

    no_vision_reason: why it does not, if it was trained to; the refusal of an image says so
    """
    try:
        return read(sees)
    except UnseenMedia as refused:
        if no_vision_reason and refused.is_image:
            raise UnseenMedia(refused.kind, refused.where, no_vision_reason) from refused
        raise


def read_messages(messages: Iterable[object], *, sees: bool = False) -> Conversation:
    """Read the library's messages, objects as in OpenAI's API plus the template's own fields.

    `sees`: as in `Conversation.from_messages`. Raises InvalidRequest.
    """
    read = (
        _read_message(message, f"messages[{number}]") for number, message in enumerate(messages)
    )
    return Conversation.from_messages(read, sees=sees)


def _read_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"messages: each must be an object, got {message!r:.80}")
    try:
        return Message.from_parts(
            _role(message),
            parts_of(message.get("content") or ""),
            where=f"{where}.content",
            reasoning=str(message.get("reasoning_content") or message.get("reasoning") or ""),
            calls=tuple(_read_call(call) for call in message.get("tool_calls") or ()),
            call_id=message.get("tool_call_id"),
            name=message.get("name"),
            extra={key: value for key, value in message.items() if key not in _READ},
        )
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"{where}: {error}") from error


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError("needs a role")
    return SYSTEM if role == "developer" else role


def _read_call(call: Any) -> Call:
    function = call.get("function") or call
    return Call(
        str(call.get("id") or ""), str(function["name"]), arguments_text(function.get("arguments"))
    )


def arguments_text(arguments: object) -> str:
    """Return arguments sent as text or as an object as JSON text."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments or {}, ensure_ascii=False)


def completed_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in optional members of a tool's definition that templates take for granted."""
    function = dict(tool.get("function", {}))
    if function.get("description") is None:
        function["description"] = ""
    parameters = dict(function.get("parameters") or {})
    parameters.setdefault("type", "object")
    parameters.setdefault("properties", {})
    return {**tool, "function": {**function, "parameters": parameters}}


def arguments_object(text: str) -> dict[str, Any] | None:
    """Parse a call's arguments as an object; None if they are none, or not strict JSON."""
    try:
        value = json.loads(text or "{}", parse_constant=refuse_constant, parse_float=finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not _is_within(value, _MAX_DEPTH):
        return None
    arguments: dict[str, Any] = well_formed_value(value)
    return arguments


def _is_within(value: Any, depth: int) -> bool:
    """True if a value is nested at most this deep."""
    if not isinstance(value, (dict, list)):
        return True
    items = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_within(item, depth - 1) for item in items)

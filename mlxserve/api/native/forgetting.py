"""`POST /api/v1/cache/forget`: forgets what models computed of deleted conversations, also on disk.

A page is found by the hash of all tokens up to its end, so the conversations are rendered into
their prompts again. Some pages are not found this way, and stay until they are evicted: those of
models that are not loaded, and those after a place where the prompt had other tokens, because the
template's variables or the tools have changed since, or because the model wrote its answer in other
tokens than its text encodes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol, Self

from pydantic import Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from mlxserve.api.access.security import cache_namespace
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.fields import MAX_NAME_LENGTH, TemplateKwargs
from mlxserve.api.bodies.messages import ChatMessage, ChatMessages, conversation_of
from mlxserve.api.bodies.prompt_source import PromptSource
from mlxserve.api.bodies.request_body import StrictModel
from mlxserve.api.bodies.thinking import ThinkingFields
from mlxserve.api.bodies.tools import Tools, definitions_of
from mlxserve.api.errors import ApiError, json_response
from mlxserve.api.prompts import Prompts
from mlxserve.chat.text_model import TextModel
from mlxserve.core.errors import InvalidRequest
from mlxserve.request import Forgotten

MAX_CONVERSATIONS = 1_000
_MESSAGES = TypeAdapter(ChatMessages)


class RenderingModel(Protocol):
    """The parts of a loaded model that forgetting uses."""

    @property
    def text_model(self) -> TextModel: ...
    @property
    def prompts(self) -> Prompts: ...


class DeletedConversations(StrictModel):
    """Deleted conversations, and others whose shared pages stay.

    kept: conversations that still exist; a deleted one's pages stay where it begins like one of
        them
    """

    conversations: Annotated[list[ChatMessages], Field(max_length=MAX_CONVERSATIONS)]
    kept: Annotated[list[ChatMessages], Field(max_length=MAX_CONVERSATIONS)] = Field(
        default_factory=list
    )

    @classmethod
    def from_chat(cls, conversations: Iterable[object], kept: Iterable[object]) -> Self:
        """Read stored conversations, skipping those that no request could hold: they have no pages."""
        return cls(conversations=_valid(conversations), kept=_valid(kept))


class ForgetRequest(ThinkingFields, DeletedConversations):
    """The body: conversations, and the other ingredients of their prompts."""

    tools: Tools | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """The ingredients of a prompt besides its conversation."""

    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: TemplateKwargs | None = None
    cache_salt: str | None = None

    def variants(self) -> Iterator[tuple[Sequence[Mapping[str, Any]], TemplateKwargs]]:
        """Yield (tools, template variables): earlier prompts of the conversation may have had none."""
        for tools in (self.tools, ()) if self.tools else ((),):
            yield tools, {}
            if self.template_kwargs:
                yield tools, self.template_kwargs


class Forgetting:
    """Forgets in all loaded models that the request's key may use."""

    def __init__(self, loaded: Callable[[Request], Sequence[RenderingModel]]) -> None:
        self._loaded = loaded

    def routes(self) -> list[BodyRoute]:
        return [BodyRoute("/api/v1/cache/forget", self.reply, body=ForgetRequest, of_model=False)]

    async def reply(self, request: Request, body: ForgetRequest) -> Response:
        """Forgets the cached pages of conversations, of the request's own key, in memory and on disk."""
        settings = PromptSettings(
            definitions_of(body.tools),
            body.template_kwargs,
            body.cache_salt,
        )
        return json_response(await self.forget(request, body, settings))

    async def forget(
        self, request: Request, deleted: DeletedConversations, settings: PromptSettings
    ) -> dict[str, Any]:
        """Forget the pages, and report their numbers and the models' names.

        Raises EngineStopped while an engine has failed.
        """
        forgotten, names = Forgotten(), []
        salt = cache_namespace(request, settings.cache_salt)
        for model in self._loaded(request):
            prompts = await _prompts(request, model, deleted.conversations, settings)
            kept = await _prompts(request, model, deleted.kept, settings)
            forgotten += await model.text_model.forget(prompts, kept, salt)
            names.append(model.text_model.model_name)
        return {
            "object": "cache.forgotten",
            "models": names,
            "pages": forgotten.num_pages,
            "pages_on_disk": forgotten.num_on_disk,
        }


def _valid(conversations: Iterable[object]) -> list[list[ChatMessage]]:
    valid = []
    for conversation in conversations:
        with suppress(ValidationError):
            valid.append(_MESSAGES.validate_python(conversation, strict=True))
    return valid


async def _prompts(
    request: Request,
    model: RenderingModel,
    conversations: Sequence[Sequence[ChatMessage]],
    settings: PromptSettings,
) -> list[list[int]]:
    """Render the conversations that the model's template accepts; it never computed the others."""
    prompts = []
    for messages in conversations:
        is_answered = messages[-1].role == "assistant"
        for tools, variables in settings.variants():
            try:
                prompt = await model.prompts.render(
                    request,
                    PromptSource(
                        read=partial(conversation_of, messages),
                        num_messages=len(messages),
                        template_kwargs=variables,
                        tools=tools,
                        continues=is_answered,
                    ),
                )
            except (InvalidRequest, ApiError):
                continue
            prompts.append(prompt)
    return prompts

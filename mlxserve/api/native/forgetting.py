"""`POST /api/v1/cache/forget`: what models have computed of conversations that are deleted, in memory and on disk.

A page is found by the hash of all tokens up to its end, so the conversations are rendered again as the prompts
that they were. What that does not find stays until it is evicted: pages of models that are not loaded, and those
after a place where a prompt had other tokens, because the template's variables or the tools have changed since, or
because the model wrote its answer in other tokens than its text has.
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
from mlxserve.api.bodies.fields import TemplateKwargs
from mlxserve.api.bodies.generation import TemplateKwargsField
from mlxserve.api.bodies.messages import ChatMessage, ChatMessages, conversation_of
from mlxserve.api.bodies.prompt_source import PromptSource
from mlxserve.api.bodies.request_body import RequestBody, StrictModel
from mlxserve.api.bodies.tools import Effort, Tools, thinking_kwargs
from mlxserve.api.errors import ApiError, json_response
from mlxserve.api.prompts import Prompts
from mlxserve.chat.text_model import TextModel
from mlxserve.core.errors import InvalidRequest
from mlxserve.request import Forgotten

MAX_CONVERSATIONS = 1_000
_MESSAGES = TypeAdapter(ChatMessages)


class RenderingModel(Protocol):
    """What is asked of a loaded model."""

    @property
    def chat(self) -> TextModel: ...
    @property
    def prompts(self) -> Prompts: ...


class DeletedConversations(StrictModel):
    """kept: conversations that stay, whose pages are left where they begin alike"""

    conversations: Annotated[list[ChatMessages], Field(max_length=MAX_CONVERSATIONS)]
    kept: Annotated[list[ChatMessages], Field(max_length=MAX_CONVERSATIONS)] = Field(
        default_factory=list
    )

    @classmethod
    def of_chat(cls, conversations: Iterable[object], kept: Iterable[object]) -> Self:
        """Of a chat that is kept here, but for what no request could have been: that has no pages."""
        return cls(conversations=_valid(conversations), kept=_valid(kept))


class ForgetRequest(RequestBody, DeletedConversations):
    """The body: conversations, and what else their prompts may have been made of."""

    tools: Tools | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateKwargsField = Field(default_factory=dict)
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """What a prompt is made of beside its conversation."""

    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: TemplateKwargs | None = None
    cache_salt: str | None = None

    def variants(self) -> Iterator[tuple[Sequence[Mapping[str, Any]], TemplateKwargs]]:
        """(tools, template variables): an earlier prompt of the conversation may have had none."""
        for tools in (self.tools, ()) if self.tools else ((),):
            yield tools, {}
            if self.template_kwargs:
                yield tools, self.template_kwargs


class Forgetting:
    """Over the models that are loaded, as far as the request's key may use them."""

    def __init__(self, loaded: Callable[[Request], Sequence[RenderingModel]]) -> None:
        self._loaded = loaded

    def routes(self) -> list[BodyRoute]:
        return [BodyRoute("/api/v1/cache/forget", self.reply, body=ForgetRequest, of_model=False)]

    async def reply(self, request: Request, body: ForgetRequest) -> Response:
        """Forgets the cached pages of conversations, of the request's own key, in memory and on disk."""
        settings = PromptSettings(
            [tool.definition() for tool in body.tools or ()],
            thinking_kwargs(body.reasoning_effort, body.chat_template_kwargs),
            body.cache_salt,
        )
        return json_response(await self.forget(request, body, settings))

    async def forget(
        self, request: Request, deleted: DeletedConversations, settings: PromptSettings
    ) -> dict[str, Any]:
        """What was forgotten, and by which models. Raises EngineStopped while an engine has failed."""
        found, names = Forgotten(), []
        salt = cache_namespace(request, settings.cache_salt)
        for model in self._loaded(request):
            prompts = await _prompts(request, model, deleted.conversations, settings)
            kept = await _prompts(request, model, deleted.kept, settings)
            found += await model.chat.forget(prompts, kept, salt)
            names.append(model.chat.model_name)
        return {
            "object": "cache.forgotten",
            "models": names,
            "pages": found.num_pages,
            "pages_on_disk": found.num_on_disk,
        }


def _valid(conversations: Iterable[object]) -> list[list[ChatMessage]]:
    found = []
    for one in conversations:
        with suppress(ValidationError):
            found.append(_MESSAGES.validate_python(one, strict=True))
    return found


async def _prompts(
    request: Request,
    model: RenderingModel,
    conversations: Sequence[Sequence[ChatMessage]],
    settings: PromptSettings,
) -> list[list[int]]:
    """Of those that the model's template takes: others it has never computed."""
    found = []
    for messages in conversations:
        is_answered = messages[-1].role == "assistant"
        for tools, variables in settings.variants():
            try:
                prompt = await model.prompts.of_conversation(
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
            found.append(prompt)
    return found

"""`/v1/models`: the available models in the format of OpenAI's or Anthropic's clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.dispatch import ModelDispatch, OfferedModel
from mlxserve.api.errors import json_response, speaks_anthropic
from mlxserve.api.fair_work import PROBE_SECONDS, run_fairly
from mlxserve.core.errors import EngineStopped, HelperUnavailable
from mlxserve.helpers.work import RunsIn, Work

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel
    from mlxserve.text.template_caps import TemplateCaps


class Models:
    """The endpoints over all models."""

    def __init__(self, dispatch: ModelDispatch) -> None:
        self._dispatch = dispatch
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.index, methods=["GET"]),
            Route("/v1/models/{name:path}", self.get, methods=["GET"]),
        ]

    async def index(self, request: Request) -> Response:
        """Lists the models that the key may ask for."""
        every = self._dispatch.models()
        models = [model for model in every if self._dispatch.may_use(request, model.name)]
        if speaks_anthropic(request.scope):
            cards = [self._anthropic_model(model) for model in models]
            ids = [card["id"] for card in cards] or [None]
            page = {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}
            return json_response({"data": cards, **page})
        cards = [await self._openai_model(request, model) for model in models]
        return json_response({"object": "list", "data": cards})

    async def get(self, request: Request) -> Response:
        """Describes a model, by its name or an alias."""
        is_anthropic = speaks_anthropic(request.scope)
        model = self._dispatch.model(request.path_params["name"], is_anthropic=is_anthropic)
        return json_response(
            self._anthropic_model(model)
            if is_anthropic
            else await self._openai_model(request, model)
        )

    async def _openai_model(self, request: Request, offered: OfferedModel) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": offered.name,
            "object": "model",
            "created": self._created if offered.text_model is None else offered.text_model.created,
            "owned_by": "mlxserve",
            "aliases": list(offered.names.aliases),
        }
        if offered.text_model is None:
            card |= {"context_length": offered.model.context} if offered.model.context else {}
            card["capabilities"] = [offered.model.purpose]
        else:
            card |= {
                "context_length": offered.text_model.max_model_len,
                "max_model_len": offered.text_model.max_model_len,
                "capabilities": list(capabilities(offered.text_model)),
                **await thinking_of(request, offered.text_model),
            }
        if offered.adapter is not None:
            card["parent"] = offered.model.name
        size = {"size": offered.size} if offered.size else {}
        return {**card, "loaded": offered.text_model is not None, **size}

    def _anthropic_model(self, offered: OfferedModel) -> dict[str, Any]:
        created = datetime.fromtimestamp(
            self._created if offered.text_model is None else offered.text_model.created, UTC
        )
        card: dict[str, Any] = {
            "type": "model",
            "id": offered.name,
            "display_name": offered.name,
            "created_at": created.isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
        }
        if offered.text_model is not None:
            card |= {
                "max_input_tokens": offered.text_model.max_model_len,
                "max_tokens": offered.text_model.max_model_len,
            }
        return card


async def thinking_of(request: Request, model: TextModel) -> dict[str, Any]:
    """What clients can choose about the model's thinking, as a member `thinking` of its card."""
    try:
        probing: Work[TemplateCaps | None] = Work(
            PROBE_SECONDS, model.template_caps, RunsIn.PROCESS
        )
        caps = await run_fairly(request, probing)
    except (HelperUnavailable, EngineStopped):  # the model is listed all the same
        return {}
    controls = {} if caps is None else caps.controls.summary()
    return {"thinking": controls} if controls else {}


def capabilities(model: TextModel) -> Iterator[str]:
    """Yield Ollama's names of the model's capabilities, which agents and editors read."""
    if model.writer is not None:
        yield "completion"
    if model.vectors is not None:
        yield "embedding"
    if model.ranker is not None:
        yield "rerank"
    if model.writer is not None and model.codec.middle_ends is not None:
        yield "insert"
    if model.writer is not None and model.can_call:
        yield "tools"
    if model.supports_images:
        yield "vision"
    if model.writer is not None and model.can_think:
        yield "thinking"

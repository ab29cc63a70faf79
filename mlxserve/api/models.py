"""`/v1/models`: the served model, described as OpenAI's or Anthropic's clients expect it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.errors import json_response, speaks_anthropic
from mlxserve.api.service import Service


class Models:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._chat = service.chat
        self._names = service.names

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.index, methods=["GET"]),
            Route("/v1/models/{name:path}", self.get, methods=["GET"]),
        ]

    async def index(self, request: Request) -> Response:
        """Lists the served model."""
        if speaks_anthropic(request.scope):
            name = self._chat.model_name
            page = {"has_more": False, "first_id": name, "last_id": name}
            return json_response({"data": [self._anthropic_model()], **page})
        return json_response({"object": "list", "data": [self._openai_model()]})

    async def get(self, request: Request) -> Response:
        """Describes the served model, by its name or an alias."""
        is_anthropic = speaks_anthropic(request.scope)
        name = request.path_params["name"]
        if self._names.check(name, is_anthropic=is_anthropic) is not None:
            raise self._names.unknown(name)
        return json_response(self._anthropic_model() if is_anthropic else self._openai_model())

    def _openai_model(self) -> dict[str, Any]:
        return {
            "id": self._chat.model_name,
            "object": "model",
            "created": self._chat.created,
            "owned_by": "mlxserve",
            "aliases": list(self._names.aliases),
            "context_length": self._chat.max_model_len,
            "max_model_len": self._chat.max_model_len,
            "capabilities": list(self._capabilities()),
            "loaded": True,
        }

    def _anthropic_model(self) -> dict[str, Any]:
        created = datetime.fromtimestamp(self._chat.created, UTC)
        return {
            "type": "model",
            "id": self._chat.model_name,
            "display_name": self._chat.model_name,
            "created_at": created.isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": self._chat.max_model_len,
            "max_tokens": self._chat.max_model_len,
        }

    def _capabilities(self) -> Iterator[str]:
        """In Ollama's words, which agents and editors read to choose what to send."""
        yield "completion"
        yield "embedding"
        if self._chat.can_call:
            yield "tools"
        if self._chat.can_think:
            yield "thinking"

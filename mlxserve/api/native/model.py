"""`/api/v1/model`: what the served model and its chat template can do."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.errors import json_response
from mlxserve.api.fair_work import PROBE_SECONDS, run_fairly
from mlxserve.api.service import Service
from mlxserve.helpers.work import RunsIn, Work


class ModelCard:
    """The endpoint over one service."""

    def __init__(self, service: Service) -> None:
        self._model = service.model

    def routes(self) -> list[Route]:
        return [Route("/api/v1/model", self.get, methods=["GET"])]

    async def get(self, request: Request) -> Response:
        """Describes the served model and the abilities of its chat template."""
        card: Work[dict[str, Any]] = Work(PROBE_SECONDS, self._model.template_card, RunsIn.PROCESS)
        template = await run_fairly(request, card)
        return json_response(
            {
                "id": self._model.model_name,
                "context_length": self._model.max_model_len,
                "tools": self._model.can_call,
                "thinking": self._model.can_think,
                "vision": self._model.supports_images,
                "chat_template": template,
            }
        )

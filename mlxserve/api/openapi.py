"""`/openapi.json`, generated from the routes and from the models that validate their bodies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.errors import json_response, speaks_ollama
from mlxserve.core.version import __version__

PATH = "/openapi.json"
_ANTHROPIC = "/v1/messages"
_PARAMETER = re.compile(r"\{([a-z_]+)(?::[a-z]+)?\}")
_REF = "#/components/schemas/{model}"
_TEXT = {"type": "string"}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
    },
}
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": _TEXT}}


class OpenAPI:
    """The endpoint of the document, which is built on the first request."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = [route for route in (*routes, *self.routes()) if route.include_in_schema]
        self._document: dict[str, Any] | None = None

    def routes(self) -> list[Route]:
        return [Route(PATH, self.get, methods=["GET"])]

    async def get(self, _request: Request) -> Response:
        """Returns this document."""
        if self._document is None:
            self._document = document(self._routes)
        return json_response(self._document)


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of these routes."""
    routes = list(routes)
    bodies = dict.fromkeys(route.body for route in routes if isinstance(route, BodyRoute))
    models = [(body, "validation") for body in bodies]
    _, schemas = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method.lower())
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxserve", "version": __version__},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": {
                **schemas["$defs"],
                "OpenAIError": _OPENAI_ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
                "OllamaError": _OLLAMA_ERROR,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, path: str, method: str) -> dict[str, Any]:
    handler = route.handler if isinstance(route, BodyRoute) else route.endpoint
    lines = inspect.cleandoc(inspect.getdoc(handler) or "").splitlines()
    operation: dict[str, Any] = {
        "operationId": f"{method}_{path.strip('/')}",
        "responses": _responses(path),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PARAMETER.findall(path)
        ],
    }
    if lines:
        operation["summary"] = lines[0]
    if isinstance(route, BodyRoute):
        content = _json(_ref(route.body.__name__))
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(path: str) -> dict[str, Any]:
    if path.startswith(_ANTHROPIC):
        error = "AnthropicError"
    else:
        error = "OllamaError" if speaks_ollama(path) else "OpenAIError"
    refused = {"description": "Refused", "content": _json(_ref(error))}
    return {"200": {"description": "Done"}, "4XX": refused, "5XX": refused}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=name)}

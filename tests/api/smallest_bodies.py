"""The smallest valid body of a route, made from `/openapi.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

USER = {"role": "user", "content": "x"}
# What a body needs beside the required fields of its schema. Ollama's need a model's name.
ADDED: Mapping[str, Mapping[str, Any]] = {
    "AnswerRequest": {"text": "x"},
    "ChatImportRequest": {"chats": [{"messages": [USER]}]},
    "ForgetRequest": {"conversations": [[USER]]},
    "ImageFields": {"url": "data:image/png;base64,AAAA"},
    "PrefixRequest": {"prompt": "x"},
    "ResponsesRequest": {"input": "x"},
    "TokenizeRequest": {"prompt": "x"},
    "OllamaChatRequest": {"messages": [USER]},
    "OllamaGenerateRequest": {"prompt": "x"},
    "OllamaEmbedRequest": {"input": "x"},
    "OllamaEmbeddingsRequest": {"prompt": "x"},
}
# These reply with events until the client leaves.
ENDLESS = ("/api/v1/kv/map", "/api/v1/chats/events")
_VALUES: Mapping[str, Any] = {"string": "x", "boolean": False, "integer": 1, "number": 1}


class SmallestBodies:
    """Of the routes that a document describes."""

    def __init__(self, document: Mapping[str, Any], model: str) -> None:
        """model: the name that a required field `model` gets"""
        self._document = document
        self._schemas = document["components"]["schemas"]
        self._model = model

    def names(self) -> dict[tuple[str, str], str]:
        """The name of the body's schema, by the method and the path of each route that has a body."""
        return {
            (method.upper(), path): operation["requestBody"]["content"]["application/json"][
                "schema"
            ]["$ref"].rpartition("/")[2]
            for path, operations in self._document["paths"].items()
            for method, operation in operations.items()
            if "requestBody" in operation
        }

    def body(self, name: str) -> dict[str, Any]:
        schema = self._schemas[name]
        required = {
            field: self.value(schema["properties"][field], field)
            for field in schema.get("required", ())
        }
        ollama = {"model": self._model} if name.startswith("Ollama") else {}
        return {**required, **ollama, **ADDED.get(name, {})}

    def with_text(self, name: str, field: str, text: str) -> dict[str, Any]:
        """The smallest body with another text in the field that holds the prompt."""
        body = self.body(name)
        is_messages = "messages" in self._schemas[name]["properties"] and field == "messages"
        value: Any = [{**USER, "content": text}] if is_messages else text
        return {**body, field: [value] if field == "documents" else value}

    def has_field(self, name: str, field: str) -> bool:
        return field in self._schemas[name]["properties"]

    def value(self, schema: Mapping[str, Any], field: str = "") -> Any:
        if field == "model":
            return self._model
        if field == "messages":
            return [USER]
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            target = self._schemas[name]
            return self.body(name) if "properties" in target else self.value(target)
        for kind in ("enum", "const", "anyOf"):
            if kind in schema:
                first = schema[kind] if kind == "const" else schema[kind][0]
                return self.value(first) if kind == "anyOf" else first
        if schema.get("type") == "array":
            return [self.value(schema["items"])] if schema.get("items") else ["x"]
        return schema.get("minimum", _VALUES.get(schema.get("type", "string"), "x"))


def filled(path: str) -> str:
    """A path with values for its parameters."""
    return re.sub(r"{\w+(:\w+)?}", "1", path)

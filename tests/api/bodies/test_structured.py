"""Fields that constrain an answer's format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlxserve.api.errors import ApiError
from mlxserve.api.openai.schema import ChatRequest, CompletionRequest
from mlxserve.core.errors import GrammarFailed
from mlxserve.core.sampling_params import SamplingParams, StructureKind
from mlxserve.text.deltas import Delta
from tests.api.fake_chat import FakeChat

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def structure(**fields: Any) -> Any:
    request = ChatRequest.read({"messages": HELLO, **fields})
    return request.sampling(SamplingParams()).structure


@pytest.mark.parametrize(
    ("fields", "kind", "source", "field"),
    [
        (
            {"response_format": {"type": "json_object"}},
            StructureKind.JSON_OBJECT,
            "",
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            StructureKind.JSON_SCHEMA,
            json.dumps(SCHEMA),
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            StructureKind.JSON_SCHEMA,
            json.dumps(SCHEMA),
            "response_format.schema",
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            StructureKind.JSON_SCHEMA,
            json.dumps(SCHEMA),
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"regex": "[a-z]+"}},
            StructureKind.REGEX,
            "[a-z]+",
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"choice": ["yes", "no"]}},
            StructureKind.CHOICE,
            '["yes", "no"]',
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            StructureKind.GRAMMAR,
            'start: "a"',
            "structured_outputs.grammar",
        ),
    ],
)
def test_each_field_becomes_a_structure(
    fields: dict[str, Any], kind: StructureKind, source: str, field: str
) -> None:
    found = structure(**fields)
    assert (found.kind, found.source, found.field) == (kind, source, field)


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}]
)
def test_the_text_format_is_not_a_structure(fields: dict[str, Any]) -> None:
    assert structure(**fields) is None


def test_an_invalid_format_is_refused_by_name() -> None:
    for fields, param in [
        ({"response_format": "xml"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ]:
        with pytest.raises(ApiError) as caught:
            structure(**fields)
        assert (caught.value.status, caught.value.param) == (400, param), fields


def test_completions_accept_structured_outputs() -> None:
    body = {"prompt": "a", "structured_outputs": {"regex": "b"}}
    found = CompletionRequest.read(body).sampling(SamplingParams()).structure
    assert found is not None
    assert found.kind is StructureKind.REGEX


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_midway_is_an_error_of_the_request(
    client: TestClient, chat: FakeChat, stream: bool
) -> None:
    chat.script = [Delta("He", (1,)), GrammarFailed("The grammar became too much work.")]
    body = {"messages": HELLO, "stream": stream}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == (200 if stream else 400)
    assert '"code":"grammar_failed"' in reply.text
    assert "[DONE]" not in reply.text

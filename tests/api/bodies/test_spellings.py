"""One request, however a client writes it: null, empty, `8.0`, and the spellings of neighbouring APIs.

The cases are made from the models of all bodies, so a new field is covered by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args

import pytest
from starlette.testclient import TestClient

from mlxserve.api.anthropic.schema import MessagesRequest
from mlxserve.api.app import create_app
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.request_body import KindedModel, RequestBody, StrictModel
from mlxserve.api.errors import ApiError
from mlxserve.api.ollama.schema import OllamaChatRequest
from mlxserve.api.openai.schema import ChatRequest, CompletionRequest
from mlxserve.api.responses.schema import ResponsesRequest
from mlxserve.core.sampling_params import SamplingParams, StructureKind
from mlxserve.text.parsing.turn import ToolChoice
from tests.api.fake_chat import FakeChat
from tests.api.smallest_bodies import SmallestBodies

Json = dict[str, Any]
USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# The smallest valid values of models that are part of a body, or whose fields need others beside them.
EXAMPLES: Mapping[str, Sequence[Json]] = {
    "AnthropicMessage": [USER],
    "AnthropicTool": [{"name": "f", "input_schema": SCHEMA}, {"type": "bash_20250124"}],
    "CallFields": [{"id": "c", "name": "f", "arguments": "{}", "state": "done"}],
    "ChatFunctionCall": [{"name": "f", "arguments": "{}"}],
    "ChatMessage": [
        USER,
        {"role": "system", "content": "x"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
    "ChatToolCall": [CALL],
    "ContentBlock": [
        {"type": "text", "text": "x"},
        {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}},
        {"type": "document", "source": {"type": "text", "data": "x"}},
        {"type": "thinking", "thinking": "x"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "search_result"},
    ],
    "FunctionDefinition": [FUNCTION],
    "FunctionTool": [{"type": "function", "function": FUNCTION}, {"type": "web_search"}],
    "AnswerRequest": [{"parent_id": 1}],
    "ImageFields": [{"name": "x", "url": "data:image/png;base64,AA"}],
    "InputItem": [
        USER,
        {"type": "message", "role": "assistant", "content": "x"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
        {"type": "reasoning"},
        {"type": "web_search_call"},
    ],
    "OllamaMessage": [USER, {"role": "tool", "tool_name": "f", "content": "x"}],
    "ResponsesRequest": [{"input": "x"}, {"instructions": "x"}],
    "ResponsesTool": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
    "RoundFields": [{"text": "x", "calls": []}],
    "TextBlock": [{"type": "text", "text": "x"}],
}
# Something has to be there; a sentence says what.
NEEDED = {
    "AnswerRequest": "give a question",
    "AnthropicTool": "needs a `name`",
    "FunctionTool": "needs `function`",
    "PrefixRequest": "give either",
    "ResponsesRequest": "is empty; send a text",
    "ResponsesTool": "needs a `name`",
    "TokenizeRequest": "give either",
}
EMPTY: Mapping[str, Any] = {"null": None, "text": "", "list": [], "object": {}}


@cache
def bodies() -> tuple[SmallestBodies, tuple[type[RequestBody], ...]]:
    app = create_app(FakeChat())  # type: ignore[arg-type]
    client = TestClient(app, base_url="http://127.0.0.1:8000")
    routes = [route for route in app.routes if isinstance(route, BodyRoute)]
    document = client.get("/openapi.json").json()
    return SmallestBodies(document, "fake"), tuple(route.body for route in routes)


def models_in(annotation: Any) -> Iterator[type[StrictModel]]:
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


@cache
def models() -> Mapping[str, type[StrictModel]]:
    """The models of all bodies, and of their fields."""
    to_visit: list[type[StrictModel]] = [*bodies()[1]]
    seen: dict[str, type[StrictModel]] = {}
    while to_visit:
        model = to_visit.pop()
        if model.__name__ not in seen:
            seen[model.__name__] = model
            for field in model.model_fields.values():
                to_visit += models_in(field.annotation)
    return seen


def examples(name: str) -> Sequence[Json]:
    if name in EXAMPLES:
        return EXAMPLES[name]
    return [bodies()[0].body(name) if issubclass(models()[name], RequestBody) else {}]


def read(model: type[StrictModel], value: Json) -> str | None:
    """Read a value as far as a route does. Returns the sentence of a refusal."""
    try:
        if not issubclass(model, RequestBody):
            model.model_validate(value)
            return None
        body: Any = model.read(value)
        if callable(getattr(body, "sampling", None)):
            body.sampling(SamplingParams())
        if hasattr(body, "turn"):
            body.turn()
        if hasattr(body, "prompt_source") and getattr(body, "messages", True):
            body.prompt_source().read(False)
    except (ApiError, ValueError) as error:
        return str(error)
    return None


def refusals(name: str, spelled: Callable[[Any], Mapping[str, Any]]) -> list[str]:
    """Return (model, field, spelling) of each value that is refused, of the values that `spelled` makes."""
    model = models()[name]
    refused = []
    for example in examples(name):
        assert read(model, example) is None, example
        for field, info in model.model_fields.items():
            if field in discriminators(model, example):
                continue
            for spelling, value in spelled(info).items():
                message = read(model, {**example, field: value})
                if message is not None and NEEDED.get(name, "-") not in message:
                    refused.append(f"{field} as {spelling}: {message}")
    return refused


def discriminators(model: type[StrictModel], example: Json) -> set[str]:
    """The fields that say what kind of thing an object is, without which it is nothing."""
    if not issubclass(model, KindedModel):
        return set()
    return {"type", *model.NEEDS.get(example.get("type", "message"), ())}


@pytest.mark.parametrize("name", sorted(models()))
def test_null_and_empty_are_absent_where_a_field_may_be(name: str) -> None:
    assert refusals(name, lambda field: {} if field.is_required() else EMPTY) == []


@pytest.mark.parametrize("name", sorted(models()))
def test_a_whole_number_may_have_a_point(name: str) -> None:
    def spelled(field: Any) -> Json:
        words = set(re.findall(r"\w+", str(field.annotation)))
        is_whole = field.annotation is int or "int" in words
        return {"1.0": 1.0} if is_whole and not {"list", "dict", "tuple"} & words else {}

    skipped = {"top_logprobs"}  # needs `logprobs` beside it
    assert [line for line in refusals(name, spelled) if line.split()[0] not in skipped] == []


@pytest.mark.parametrize("model", bodies()[1])
def test_an_empty_value_of_a_field_that_is_not_supported_requests_nothing(
    model: type[RequestBody],
) -> None:
    example = examples(model.__name__)[0]
    for field in (*model.NOT_YET, *model.IGNORED):
        for value in EMPTY.values():
            body = model.read({**example, field: value})
            assert body.unknown_fields == [], field


def test_an_unknown_field_that_is_null_is_not_reported() -> None:
    assert ChatRequest.read({"messages": [USER], "frobnicate": None}).unknown_fields == []


def test_numbers_with_a_point_are_whole_in_lists_and_only_if_nothing_is_behind_it() -> None:
    assert CompletionRequest.read({"prompt": [1.0, 2]}).prompt == ((1, 2),)
    with pytest.raises(ApiError, match="max_tokens"):
        CompletionRequest.read({"prompt": "x", "max_tokens": 1.5})


# ---- neighbours' spellings

NESTED = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION}
NAMED = {"name": "f", "description": "d", "input_schema": SCHEMA}
ASKING: Mapping[str, tuple[type[Any], Json]] = {
    "chat": (ChatRequest, {"messages": [USER]}),
    "Responses": (ResponsesRequest, {"input": "x"}),
    "Messages": (MessagesRequest, {"messages": [USER], "max_tokens": 4}),
    "Ollama": (OllamaChatRequest, {"model": "fake", "messages": [USER]}),
}


def body_of(dialect: str, **fields: Any) -> Any:
    model, body = ASKING[dialect]
    return model.read({**body, **fields})


@pytest.mark.parametrize("dialect", ASKING)
@pytest.mark.parametrize(
    "tool",
    [NESTED, FLAT, NAMED, {**NAMED, "type": "custom"}, {"function": FUNCTION}, FUNCTION],
    ids=json.dumps,
)
def test_a_tool_is_read_in_every_spelling(dialect: str, tool: Json) -> None:
    body = body_of(dialect, tools=[tool])
    assert body.definitions == [{"type": "function", "function": FUNCTION}]
    assert body.unknown_fields == []


@pytest.mark.parametrize("dialect", ASKING)
@pytest.mark.parametrize("kind", ["web_search", "mcp", "mcp_toolset", "computer_use_preview"])
def test_a_tool_that_others_run_is_left_out_and_named(dialect: str, kind: str) -> None:
    body = body_of(dialect, tools=[{"type": kind, "server_label": "s"}, NESTED])
    assert len(body.definitions) == 1
    assert any(kind in name for name in body.unknown_fields)


@pytest.mark.parametrize("dialect", ["chat", "Responses", "Messages"])
@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        ("any", ToolChoice.REQUIRED, None),
        ("required", ToolChoice.REQUIRED, None),
        ("auto", ToolChoice.AUTO, None),
        ("", ToolChoice.AUTO, None),
        ({}, ToolChoice.AUTO, None),
        ({"type": "any"}, ToolChoice.REQUIRED, None),
        ({"type": "auto", "name": None}, ToolChoice.AUTO, None),
        ({"type": "none"}, ToolChoice.NONE, None),
        ({"type": "tool", "name": "f"}, ToolChoice.REQUIRED, "f"),
        ({"type": "function", "name": "f"}, ToolChoice.REQUIRED, "f"),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice.REQUIRED, "f"),
        ({"function": {"name": "f"}}, ToolChoice.REQUIRED, "f"),
        ({"name": "f"}, ToolChoice.REQUIRED, "f"),
    ],
)
def test_a_choice_of_tools_is_read_in_every_spelling(
    dialect: str, choice: Any, mode: ToolChoice, name: str | None
) -> None:
    turn = body_of(dialect, tools=[NESTED], tool_choice=choice).turn()
    assert (turn.tool_choice, turn.tool_name) == (mode, name)


@pytest.mark.parametrize("dialect", ["chat", "Responses", "Messages"])
def test_parallel_calls_are_switched_off_within_the_choice(dialect: str) -> None:
    for is_single in (True, False):
        choice = {"type": "any", "disable_parallel_tool_use": is_single}
        turn = body_of(dialect, tools=[NESTED], tool_choice=choice).turn()
        assert turn.parallel_tool_calls is not is_single


@pytest.mark.parametrize("dialect", ["chat", "Responses", "Messages"])
@pytest.mark.parametrize("choice", ["sometimes", 5, {"type": "tool"}, {"type": "function"}])
def test_a_choice_of_nothing_is_refused(dialect: str, choice: Any) -> None:
    with pytest.raises(ApiError, match=r"^tool_choice: "):
        body_of(dialect, tools=[NESTED], tool_choice=choice)


def structure_of(dialect: str, value: Any) -> Any:
    fields: Mapping[str, Json] = {
        "chat": {"response_format": value},
        "Responses": {"text": {"format": value}},
        "Messages": {"output_config": {"format": value}},
        "Ollama": {"format": value},
    }
    return body_of(dialect, **fields[dialect]).sampling(SamplingParams()).structure


@pytest.mark.parametrize("dialect", ASKING)
@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        {"type": "json_object", "schema": SCHEMA},
        SCHEMA,
    ],
    ids=json.dumps,
)
def test_a_schema_is_read_in_every_spelling(dialect: str, value: Any) -> None:
    if dialect == "Responses" and value is SCHEMA:
        pytest.skip("its field is an object with a type")
    structure = structure_of(dialect, value)
    assert (structure.kind, json.loads(structure.source)) == (StructureKind.JSON_SCHEMA, SCHEMA)


@pytest.mark.parametrize("dialect", ["chat", "Messages", "Ollama"])
def test_a_format_without_a_schema_is_read_in_every_spelling(dialect: str) -> None:
    for value in ("json", {"type": "json_object"}):
        assert structure_of(dialect, value).kind is StructureKind.JSON_OBJECT
    for value in ({}, "", None, {"type": "text"}):
        assert structure_of(dialect, value) is None


HISTORIES: Mapping[str, list[Json]] = {
    "as today": [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": '{"a": 1}'},
    ],
    "a call without its type": [
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "c", "content": {"a": 1}},
    ],
    "a call without a function": [
        {"role": "assistant", "tool_calls": [{"id": "c", "name": "f", "arguments": {}}]},
        {"role": "tool", "tool_call_id": "c", "content": '{"a": 1}'},
    ],
    "a function's call": [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": '{"a": 1}'},
    ],
}


@pytest.mark.parametrize("dialect", ["chat", "Responses", "Ollama"])
@pytest.mark.parametrize("kind", HISTORIES)
def test_calls_and_results_are_read_in_every_spelling(dialect: str, kind: str) -> None:
    field = "input" if dialect == "Responses" else "messages"
    body = body_of(dialect, **{field: [USER, *HISTORIES[kind]]})
    _, answer, result = body.prompt_source().read(False).messages
    [call] = answer.calls
    assert (call.name, call.as_object()) == ("f", {})
    assert (result.role, result.text, result.call_id) == ("tool", '{"a": 1}', call.id)
    assert body.unknown_fields == []


@pytest.mark.parametrize("dialect", ["chat", "Responses", "Ollama"])
def test_a_custom_tools_call_in_a_history_has_its_text(dialect: str) -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "ls"}}
    field = "input" if dialect == "Responses" else "messages"
    body = body_of(dialect, **{field: [USER, {"role": "assistant", "tool_calls": [call]}]})
    [call_] = body.prompt_source().read(False).messages[1].calls
    assert (call_.name, call_.as_object()) == ("f", {"input": "ls"})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"a": "é"}, '{"a": "é"}'),
        ({"type": "text", "text": "x"}, "x"),
        ([{"a": 1}, "y"], '{"a": 1}y'),
        (5, "5"),
        (True, "true"),
        (None, ""),
        ([], ""),
        ({}, "{}"),
    ],
)
def test_a_result_may_be_any_json(content: Any, text: str) -> None:
    message = {"role": "tool", "tool_call_id": "c", "content": content}
    chat = body_of("chat", messages=[USER, {"role": "assistant", "tool_calls": [CALL]}, message])
    assert chat.prompt_source().read(False).messages[2].text == text
    item = {"type": "function_call_output", "call_id": "c", "output": content}
    responses = body_of("Responses", input=[USER, item])
    assert responses.prompt_source().read(False).messages[1].text == text


def test_a_top_p_of_zero_samples_the_most_probable_token_alone() -> None:
    for dialect in ("chat", "Messages"):
        assert 0 < body_of(dialect, top_p=0).sampling(SamplingParams()).top_p < 1e-6


def test_no_alternatives_need_no_log_probabilities_beside_them() -> None:
    assert body_of("chat", top_logprobs=0).sampling(SamplingParams()).logprobs is None


def test_a_limit_of_chat_completions_limits_a_response() -> None:
    assert body_of("Responses", max_tokens=7).sampling(SamplingParams()).max_tokens == 7


def test_thinking_before_which_a_response_was_stopped_is_an_answer() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    for items in ([USER, thought], [USER, thought, USER]):
        messages = body_of("Responses", input=items).prompt_source().read(False).messages
        assert [message.role for message in messages][:2] == ["user", "assistant"]
        assert messages[1].reasoning == "Hm."
        assert len(messages) == len(items)


def test_an_answer_of_thinking_only_ends_a_conversation_without_being_continued() -> None:
    for block in ({"type": "thinking", "thinking": "Hm."}, {"type": "tool_use", "name": "f"}):
        messages = [USER, {"role": "assistant", "content": [block]}]
        source = body_of("Messages", messages=messages).prompt_source()
        assert not source.continues
        assert source.read(False).messages[1].role == "assistant"

from __future__ import annotations

from typing import Any

import pytest

from mlxserve.api.bodies.fields import MAX_LOGIT_BIASES, MAX_PROMPTS
from mlxserve.api.bodies.messages import MAX_MESSAGES, conversation_of
from mlxserve.api.errors import ApiError
from mlxserve.api.openai.schema import COMPLETION_MAX_TOKENS, ChatRequest, CompletionRequest
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.text.conversation import Call
from tests.api.fake_chat import FakeChat

DEFAULTS = SamplingParams(temperature=0.7, top_k=20)
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.read({"messages": HELLO, **fields})


def refused(kind: type[ChatRequest] | type[CompletionRequest], body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        kind.read(body).sampling(DEFAULTS)
    assert caught.value.status == 400
    return caught.value


def test_every_sampling_field_is_a_request_field() -> None:
    asked = {
        "max_tokens": 5,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "stop_on_repetition": True,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"12": 5, "13": -100},
    }
    params = chat(**asked, logprobs=True, top_logprobs=4).sampling(DEFAULTS)
    expected = {**asked, "stop": ("a", "b"), "logit_bias": {12: 5, 13: -100}, "logprobs": 4}
    # A structure has several spellings, and `n` is the number of forks of one request.
    fields = set(SamplingParams.__dataclass_fields__) - {"structure", "n"}
    assert set(expected) == fields
    assert params == SamplingParams(**expected)


def test_the_models_defaults_apply_to_missing_fields() -> None:
    assert chat(top_k=1, temperature=None).sampling(DEFAULTS) == SamplingParams(
        temperature=0.7, top_k=1
    )


def test_the_models_suppressed_tokens_stay_unless_a_request_has_biases_of_its_own() -> None:
    defaults = SamplingParams(logit_bias={7: -1e4}, max_tokens=256)
    assert chat().sampling(defaults) == defaults
    assert chat(logit_bias={"3": 5}).sampling(defaults).logit_bias == {3: 5}
    assert chat(logit_bias={}).sampling(defaults).logit_bias == {}


def test_zero_is_a_value() -> None:
    assert chat(temperature=0, seed=0).sampling(DEFAULTS) == SamplingParams(
        temperature=0, top_k=20, seed=0
    )


def test_max_completion_tokens_takes_precedence() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).sampling(DEFAULTS).max_tokens == 9


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_no_limit(field: str) -> None:
    params = chat(**{field: -1}, top_k=-1).sampling(SamplingParams(top_k=20, max_tokens=256))
    assert (params.max_tokens, params.top_k) == (2**31 - 1, 0)
    completion = CompletionRequest.read({"prompt": "x", "max_tokens": -1})
    assert completion.sampling(DEFAULTS).max_tokens == 2**31 - 1


def test_the_effort_is_read_where_other_servers_have_it() -> None:
    for fields, effort in [
        ({"reasoning": {"effort": "high"}}, "high"),
        ({"reasoning": {"effort": "none"}}, "none"),
        ({"reasoning": {"enabled": False}}, "none"),
        ({"reasoning": {"enabled": True}}, "medium"),
        ({"reasoning": {"enabled": True, "effort": "low"}}, "low"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "high"),
        ({"reasoning": "low"}, "low"),
        ({"reasoning": False}, "none"),
        ({"reasoning": {}}, None),
        ({"reasoning": None}, None),
    ]:
        request = chat(**fields)
        assert request.effort == effort, fields
        assert request.template_kwargs.get("enable_thinking") == (effort and effort != "none"), (
            fields
        )
        assert request.unknown_fields == [], fields


def test_completions_have_openais_default_of_16_tokens() -> None:
    request = CompletionRequest.read({"prompt": "x"})
    assert request.sampling(DEFAULTS).max_tokens == COMPLETION_MAX_TOKENS


def test_a_prompt_comes_in_four_forms() -> None:
    for prompt, prompts in [
        ("text", ("text",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ]:
        assert CompletionRequest.read({"prompt": prompt}).prompt == prompts, prompt


def test_other_prompts_are_refused() -> None:
    for prompt in [
        None,
        [],
        {},
        5,
        [[]],
        ["a", 1],
        [1, "a"],
        [True],
        [-1],
        [2**31],
        [1.5],
        [["a"]],
        ["a"] * (MAX_PROMPTS + 1),
    ]:
        assert refused(CompletionRequest, {"prompt": prompt}).param == "prompt", prompt


BAD = [
    ({"messages": []}, "messages"),
    ({"messages": HELLO * (MAX_MESSAGES + 1)}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": ["Hello"]}, "messages[0]"),
    ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"temperature": [0]}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": 1e12}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"seed": 2**80}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": [1]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 1_000}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"4294967296": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1e9}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias[1]"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(MAX_LOGIT_BIASES + 1)}}, "logit_bias"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"presence_penalty": 1e9}, "presence_penalty"),
    ({"frequency_penalty": "x"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": [1]}, "stream_options"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"priority": 2**40}, "priority"),
    ({"priority": 0.5}, "priority"),
    ({"model": 5}, "model"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"n": 9}, "n"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": -1}, "n"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"thinking_budget": -1}, "thinking_budget"),
    ({"thinking_token_budget": "many"}, "thinking_token_budget"),
    ({"thinking": {"budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
]


def test_a_bad_value_is_refused_with_its_fields_name() -> None:
    for fields, param in BAD:
        error = refused(ChatRequest, {"messages": HELLO, **fields})
        assert error.param == param, (fields, param)
        assert error.message.startswith(f"{param}: "), (fields, param)
        assert len(error.message) < 400, (fields, param)


def test_a_bad_value_of_a_completion_is_refused_with_its_fields_name() -> None:
    for fields, param in [
        ({"suffix": "x", "echo": True}, "echo"),
        ({"suffix": 5}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 1.5}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ]:
        assert refused(CompletionRequest, {"prompt": "x", **fields}).param == param, fields


def test_a_missing_field_is_named() -> None:
    assert refused(CompletionRequest, {}).code == "missing_required_parameter"
    assert refused(ChatRequest, {}).param == "messages"


def test_defaults_that_ask_for_nothing_are_accepted() -> None:
    request = chat(
        n=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        store=False,
        service_tier="auto",
        user="me",
        metadata={"a": "b"},
        prompt_cache_key="k",
        parallel_tool_calls=True,
        stop=None,
        logit_bias=None,
    )
    assert request.unknown_fields == []
    assert request.sampling(DEFAULTS) == DEFAULTS


def test_unknown_fields_are_collected_at_every_level() -> None:
    request = ChatRequest.read(
        {
            "messages": [
                {"role": "user", "content": "x", "cache_control": 1},
                {"role": "user", "content": "y", "cache_control": 2, "mood": "sad"},
            ],
            "stream": True,
            "stream_options": {"speed": 9},
            "top_kk": 5,
        }
    )
    assert request.unknown_fields == [
        "messages[].cache_control",
        "messages[].mood",
        "stream_options.speed",
        "top_kk",
    ]


def test_a_message_reaches_the_template_as_role_and_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = ChatRequest.read(
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "extra": 1,
                },
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "3", "tool_call_id": "c"},
                {"role": "assistant", "refusal": "No."},
            ]
        }
    )
    fitted = FakeChat().fit(conversation_of(request.messages))
    assert fitted.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c", "name": "f"},
        {"role": "assistant", "content": "No."},
    ]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_read_under_both_names(name: str) -> None:
    said = {"role": "assistant", "content": "4", name: "2 and 2"}
    request = ChatRequest.read({"messages": [*HELLO, said]})
    assert conversation_of(request.messages).messages[1].reasoning == "2 and 2"
    assert request.unknown_fields == []


def test_calls_may_have_objects_as_arguments_and_no_type() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}
    request = ChatRequest.read(
        {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    )
    [found] = conversation_of(request.messages).messages[1].calls
    assert (found.id, found.name, found.arguments) == ("c", "f", '{"a": 1}')


def test_calls_may_have_nulls_where_nothing_is_said() -> None:
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": None}}
    request = ChatRequest.read({"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]})
    assert conversation_of(request.messages).messages[1].calls == (Call("call_0", "f", ""),)


@pytest.mark.parametrize(
    "fields", [{"service_tier": "flex"}, {"store": True}, {"verbosity": "low"}], ids=str
)
def test_a_manner_of_serving_is_ignored_with_a_warning(fields: dict[str, Any]) -> None:
    assert chat(**fields).unknown_fields == list(fields)

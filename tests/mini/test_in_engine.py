"""The packaged model in the engine, with its own defaults: what newcomers type first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxserve import LLM
from mlxserve.request import FinishReason
from mlxserve.sampling_params import SamplingParams
from mlxserve.text.parsing.turn import AssistantTurn

LIMIT = 256  # of its generation_config.json
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_pages=256, disable_log_stats=True) as made:
        yield made


@pytest.mark.parametrize(
    "text",
    [
        "Write a Python function that adds two numbers.",
        "for f in *.txt; do cat $f; done",
        "¿Qué tiempo hace hoy en Madrid?",
    ],
)
def test_without_tools_it_writes_no_call_and_never_runs_away(llm: LLM, text: str) -> None:
    [output] = llm.chat([user(text)], use_tqdm=False)
    assert "<tool_call>" not in output.text
    assert not output.tool_calls
    assert output.usage.completion_tokens <= LIMIT


def test_with_tools_it_calls_them(llm: LLM) -> None:
    turn = AssistantTurn(tools=[WEATHER])
    [output] = llm.chat([user("What is the weather in Paris?")], turn=turn, use_tqdm=False)
    assert output.finish_reason is FinishReason.TOOL_CALLS
    [call] = output.tool_calls
    assert call.name == "get_weather"
    assert "Paris" in call.arguments


def test_a_request_may_set_its_own_limit(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    [output] = llm.chat([user("Hello")], params, use_tqdm=False)
    assert (output.usage.completion_tokens, output.finish_reason) == (3, FinishReason.LENGTH)

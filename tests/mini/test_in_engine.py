"""The packaged model in the engine, with its own defaults: what newcomers type first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxserve import LLM
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.hub.embedded import model_path
from mlxserve.request import FinishReason
from mlxserve.text.parsing.turn import AssistantTurn
from tests.training.abilities import newcomers
from tests.training.abilities.refusals import refuses

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "Write a Python function that adds two numbers.",
        "Can you explain black holes to me?",
        "¿Qué tiempo hace hoy en Madrid?",
        "what is 12 * 12",
        "Sort banana, apple, cherry",
    ],
)
def test_it_refuses_what_it_cannot_do_in_one_sentence(llm: LLM, text: str) -> None:
    [output] = llm.chat([user(text)], use_tqdm=False)
    assert refuses(output.text), output.text
    assert output.finish_reason is FinishReason.STOP


def test_it_refuses_after_other_turns_and_still_recalls(llm: LLM) -> None:
    turns = ["Hello", "My name is Lucy.", "Write me a poem about the sea.", "What is my name?"]
    conversation: list[dict[str, str]] = []
    for text in turns:
        conversation += user(text)
        [output] = llm.chat([conversation], use_tqdm=False)
        conversation.append({"role": "assistant", "content": output.text})
    answers = [message["content"] for message in conversation[1::2]]
    assert "mlxserve-mini" in answers[0]
    assert refuses(answers[2])
    assert answers[3] == "Your name is Lucy."


@pytest.mark.slow
def test_it_tries_no_call_without_tools_even_where_it_may(tmp_path: Path) -> None:
    """Without `suppress_tokens`, which hides what the weights would do."""
    folder = tmp_path / "model"
    shutil.copytree(model_path(), folder)
    settings = folder / "generation_config.json"
    content = json.loads(settings.read_text())
    [marker] = content.pop("suppress_tokens")
    settings.write_text(json.dumps(content))
    prompts = [case.prompt for case in newcomers.REFUSED[::6]]
    with LLM(str(folder), num_pages=256, disable_log_stats=True) as free:
        outputs = free.chat(prompts, SamplingParams(max_tokens=60, temperature=0), use_tqdm=False)
    assert len(outputs) == 50
    assert not any(marker in output.token_ids for output in outputs)


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

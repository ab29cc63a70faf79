"""Thinking before a constrained answer, with a real engine and random weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxserve.build import build_text_model
from mlxserve.chat.request_options import RequestOptions
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import GrammarFailed
from mlxserve.core.sampling_params import SamplingParams, Structure, StructureKind
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta
from mlxserve.text.parsing.turn import AssistantTurn, ToolChoice, join_calls

HELLO = [{"role": "user", "content": "Hello"}]
# Like the templates of thinking models: the prompt opens the thinking, or closes it at once.
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{{ tools }}<tool_call>tool_call.name"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)
NAME = Structure(StructureKind.REGEX, "[A-C][a-f]{2,5}")
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
    },
}


@pytest.fixture(scope="module")
def chat(write_model: Callable[..., Path], tmp_path_factory: Any) -> Iterator[TextModel]:
    folder = write_model(tmp_path_factory.mktemp("thinks"), "llama")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    built = build_text_model(
        EngineConfig().with_options(
            model=str(folder), num_pages=64, page_size=16, disable_log_stats=True
        )
    )
    yield built
    built.close()


async def ask(
    chat: TextModel, turn: AssistantTurn, *, thinks: bool = True, **params: Any
) -> list[Delta]:
    prompt = chat.writer.render(HELLO, enable_thinking=thinks, tools=turn.tools)
    sampling = SamplingParams(**{"max_tokens": 90, **params})
    answer = await chat.writer.submit(prompt, sampling, RequestOptions(turn=turn))
    return [delta async for delta in answer]


def joined(deltas: list[Delta]) -> tuple[str, str]:
    return "".join(d.reasoning for d in deltas), "".join(d.text for d in deltas)


@pytest.mark.parametrize("seed", range(3))
def test_a_grammar_applies_after_the_thinking(chat: TextModel, seed: int) -> None:
    turn = AssistantTurn(thinking_budget=6)
    deltas = asyncio.run(ask(chat, turn, structure=NAME, seed=seed))
    reasoning, text = joined(deltas)
    assert 3 <= len(text) <= 6
    assert set(text) <= set("ABCabcdef")
    usage = deltas[-1].usage
    assert usage is not None
    assert usage.reasoning_tokens <= 7  # including the end marker
    assert "<" not in text
    assert reasoning
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_without_thinking_the_grammar_applies_at_once(chat: TextModel) -> None:
    deltas = asyncio.run(ask(chat, AssistantTurn(thinking_budget=0), thinks=False, structure=NAME))
    reasoning, text = joined(deltas)
    assert reasoning == ""
    assert 3 <= len(text) <= 6


def test_a_zero_budget_ends_thinking_opened_by_the_prompt(chat: TextModel) -> None:
    deltas = asyncio.run(ask(chat, AssistantTurn(thinking_budget=0), temperature=0))
    reasoning, text = joined(deltas)
    assert reasoning == ""
    assert text
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.reasoning_tokens == 1  # the end marker


def test_a_required_call_follows_the_thinking(chat: TextModel) -> None:
    turn = AssistantTurn(
        tools=[TOOL],
        tool_choice=ToolChoice.REQUIRED,
        parallel_tool_calls=False,
        thinking_budget=4,
    )
    deltas = asyncio.run(ask(chat, turn, seed=1))
    [call] = join_calls([piece for delta in deltas for piece in delta.tool_calls])
    assert json.loads(call.arguments)["n"] in (1, 2)
    assert joined(deltas)[1] == ""
    assert deltas[-1].finish_reason is FinishReason.TOOL_CALLS


def test_guided_answers_do_not_change_unguided_ones_in_the_batch(chat: TextModel) -> None:
    async def plain() -> str:
        return joined(await ask(chat, AssistantTurn(), seed=11, max_tokens=40))[0]

    async def together() -> str:
        guided = [
            ask(chat, AssistantTurn(thinking_budget=3), structure=NAME, seed=n) for n in range(3)
        ]
        text, answers = await asyncio.gather(plain(), asyncio.gather(*guided))
        assert all(set(joined(deltas)[1]) <= set("ABCabcdef") for deltas in answers)
        return text

    assert asyncio.run(together()) == asyncio.run(plain())


@pytest.mark.slow
def test_an_answer_that_leaves_its_grammar_fails_alone(
    chat: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("mlxserve.text.guidance.guide.AnswerGuide.mask", lambda *_: None)
        with pytest.raises(GrammarFailed, match="grammar became too much work"):
            asyncio.run(
                ask(chat, AssistantTurn(thinking_budget=0), thinks=False, structure=NAME, seed=2)
            )
    deltas = asyncio.run(
        ask(chat, AssistantTurn(thinking_budget=0), thinks=False, structure=NAME, seed=2)
    )
    assert deltas[-1].finish_reason is FinishReason.STOP

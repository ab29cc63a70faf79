"""What the cache does for the sessions of agents, on a running engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from mlxserve.api.anthropic.schema import MessagesRequest
from mlxserve.api.app import create_app
from mlxserve.core.config import EngineConfig
from tests.api.agent_requests import CLAUDE, LATE, MESSAGES, result, use

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

# A quarter of the sizes that were recorded, with half of the default page.
PAGE = 16
INSTRUCTIONS, FILE, PAGE_OF_TEXT, LINE = 5_400, 120, 60, 8  # words


@pytest.fixture(scope="module")
def chat(
    write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TextModel]:
    from mlxserve.build import build_text_model

    folder = write_model(
        tmp_path_factory.mktemp("agent"),
        "qwen3",
        num_hidden_layers=1,
        max_position_embeddings=8_192,
    )
    chat = build_text_model(
        EngineConfig().with_options(
            model=str(folder), page_size=PAGE, num_pages=768, disable_log_stats=True
        )
    )
    yield chat
    chat.close()


def words(number: int, seed: int) -> str:
    """This many words, of one or two tokens each."""
    chosen = random.Random(seed)
    return " ".join(
        chosen.choice(("the", "file", "read", "at", "line", "is")) for _ in range(number)
    )


def session() -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """The messages of twelve requests of Claude Code, and whether they only append to the last ones."""
    calls = iter(range(100))
    said: list[dict[str, Any]] = [{"role": "user", "content": words(40, 1)}, LATE]

    def called(size: int, *more: dict[str, Any]) -> list[dict[str, Any]]:
        number = next(calls)
        told = result(f"toolu_{number}", words(size, 100 + number))
        return [
            {"role": "assistant", "content": [use(f"toolu_{number}")]},
            {"role": "user", "content": [told, *more]},
        ]

    def answered(question: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": "Done."}, {"role": "user", "content": question}]

    reminder = {"role": "system", "content": words(LINE, 2)}
    steer = {"type": "text", "text": words(LINE, 3)}
    yield said, False
    for appended in (
        called(FILE),
        called(LINE),
        called(PAGE_OF_TEXT),
        called(LINE),
        [*answered(words(LINE, 4)), reminder],
        called(PAGE_OF_TEXT),
        called(FILE, steer),
        [*called(LINE), reminder],
    ):
        said = [*said, *appended]
        yield said, True
    cleared = result("toolu_0", "[Old tool result content cleared]")
    said = [*said[:3], {"role": "user", "content": [cleared]}, *said[4:], *called(LINE)]
    yield said, False
    yield [*said, *answered("Summarise this conversation.")], True
    yield [{"role": "user", "content": f"{words(40, 1)} {words(LINE, 5)}"}, LATE], False


@pytest.mark.slow
def test_a_session_of_twelve_turns_computes_only_what_is_new(chat: TextModel) -> None:
    client = TestClient(create_app(chat), base_url="http://127.0.0.1:8000")
    system = [*CLAUDE["system"], {"type": "text", "text": words(INSTRUCTIONS, 0)}]
    common = {**CLAUDE, "system": system, "max_tokens": 1, "stream": False}
    prompts: list[list[int]] = []
    num_prompt = num_cached = 0
    with client:
        for messages, is_appended in session():
            body = {**common, "messages": messages}
            prompt = prompt_of(chat, body)
            usage = client.post(MESSAGES, json=body).json()["usage"]
            cached = usage["cache_read_input_tokens"]
            assert usage["input_tokens"] + cached == len(prompt)
            assert cached > max((shared(prompt, earlier) for earlier in prompts), default=0) - PAGE
            if is_appended:
                assert cached >= 0.96 * len(prompt), usage
            prompts.append(prompt)
            num_prompt += len(prompt)
            num_cached += cached
    assert len(prompts) == 12
    assert num_cached >= 0.899 * num_prompt


def prompt_of(chat: TextModel, body: dict[str, Any]) -> list[int]:
    request = MessagesRequest.read(body)
    fitted = chat.writer.fit(request.conversation())
    return chat.writer.render(fitted.messages, tools=request.definitions, **request.template_kwargs)


def shared(prompt: list[int], earlier: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(prompt, earlier, strict=False)
    return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])

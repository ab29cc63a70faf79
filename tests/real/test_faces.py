"""SmolLM2 by every API, by their official clients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.clients import anthropic, openai
from tests.api.server.process import Process
from tests.real.prompts import NUM_TOKENS, QUESTIONS, REAL, chat_of
from tests.real.record import figures_of

pytestmark = pytest.mark.slow

QUESTION = QUESTIONS[1]  # the capital of France
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(server: Process) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def test_chat_completions(client: Any) -> None:
    stream = client.chat.completions.create(
        model=REAL, messages=MESSAGES, max_tokens=40, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "Paris" in text


def test_completions_count_as_the_references(client: Any) -> None:
    reply = client.completions.create(
        model=REAL, prompt=chat_of(QUESTION), max_tokens=NUM_TOKENS, temperature=0
    )
    [answer] = [
        a
        for n, a in enumerate(figures_of("mlx-lm", "smollm2-135m-instruct.q4_1")["answers"])
        if n == 1
    ]
    assert "Paris" in reply.choices[0].text
    assert reply.usage.prompt_tokens == answer["num_prompt_tokens"]


def test_responses(client: Any) -> None:
    reply = client.responses.create(model=REAL, input=QUESTION, max_output_tokens=40, temperature=0)
    assert "Paris" in reply.output_text


def test_messages(server: Process) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    reply = client.messages.create(
        model=REAL, messages=MESSAGES, max_tokens=40, extra_body={"temperature": 0}
    )
    assert "Paris" in reply.content[0].text


def test_similar_texts_lie_closer(client: Any) -> None:
    texts = [
        "A cat sleeps on the sofa.",
        "A kitten naps on the couch.",
        "Interest rates rose in March.",
    ]
    cat, kitten, rates = (
        item.embedding for item in client.embeddings.create(model=REAL, input=texts).data
    )

    def similarity(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    assert similarity(cat, kitten) > similarity(cat, rates)

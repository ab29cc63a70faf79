"""One server with three models, two of them real, asked by the official clients of three makers.

What they ask is what their own first pages show.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.api.clients import anthropic, ollama, openai
from tests.api.server.process import Process
from tests.real.prompts import EMBEDDER, NUM_TOKENS, QUESTIONS, REAL, SMOLLM2, TINY, chat_of
from tests.real.record import figures_of

pytestmark = pytest.mark.slow

QUESTION = QUESTIONS[1]  # the capital of France


@pytest.fixture
def of_openai(server: Process) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def of_ollama(server: Process) -> Iterator[Any]:
    with ollama.Client(host=server.url) as client:
        yield client


def said(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": answer}]


def test_openais_client_finds_all_and_asks_each(of_openai: Any) -> None:
    assert {model.id for model in of_openai.models.list()} == {REAL, EMBEDDER, TINY}
    options: Any = {"temperature": 0, "max_tokens": 24}
    reply = of_openai.chat.completions.create(model=REAL, messages=said(QUESTION), **options)
    assert "Paris" in reply.choices[0].message.content
    stream = of_openai.chat.completions.create(
        model=REAL, messages=said(QUESTION), stream=True, **options
    )
    text = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
    assert text == reply.choices[0].message.content
    response = of_openai.responses.create(
        model=REAL, input=QUESTION, temperature=0, max_output_tokens=24
    )
    assert "Paris" in response.output_text
    other = of_openai.chat.completions.create(model=TINY, messages=said(QUESTION), **options)
    assert (other.model, other.usage.completion_tokens) == (TINY, 24)
    vectors = of_openai.embeddings.create(model=EMBEDDER, input=["a cat", "a kitten", "a train"])
    cat, kitten, train = (np.array(one.embedding) for one in vectors.data)
    assert cat @ kitten > cat @ train
    with pytest.raises(openai.BadRequestError, match=EMBEDDER):
        of_openai.chat.completions.create(model=EMBEDDER, messages=said(QUESTION), **options)


def test_completions_count_as_the_references(of_openai: Any) -> None:
    reply = of_openai.completions.create(
        model=REAL, prompt=chat_of(QUESTION), max_tokens=NUM_TOKENS, temperature=0
    )
    assert "Paris" in reply.choices[0].text
    answer = figures_of("mlx-lm", SMOLLM2)["answers"][1]
    assert reply.usage.prompt_tokens == answer["num_prompt_tokens"]


def test_a_model_that_writes_embeds_similar_texts_closer(of_openai: Any) -> None:
    texts = [
        "A cat sleeps on the sofa.",
        "A kitten naps on the couch.",
        "Interest rates rose in March.",
    ]
    vectors = of_openai.embeddings.create(model=REAL, input=texts)
    cat, kitten, rates = (np.array(one.embedding) for one in vectors.data)
    assert cat @ kitten > cat @ rates


def test_anthropics_client_asks_and_streams(server: Process) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked: Any = {"model": REAL, "max_tokens": 24, "messages": said(QUESTION)}
        asked["extra_body"] = {"temperature": 0}
        reply = client.messages.create(**asked)
        assert "Paris" in reply.content[0].text
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == reply.content[0].text
        assert client.messages.count_tokens(model=REAL, messages=said(QUESTION)).input_tokens > 10


@pytest.mark.long
def test_a_long_document_is_read_where_its_meaning_answers_the_question(server: Process) -> None:
    """No word of the question is on the page."""
    topics = ["The garden has roses", "Ships carry grain", "Mountains are cold", "Bread needs salt"]
    pages = [f"{topics[number % 4]}. " * 60 for number in range(60)]
    pages[44] = "Customers may return purchases within thirty days for a full refund. " * 30
    data = base64.b64encode("\f".join(pages).encode()).decode()
    file = {"filename": "a.pdf", "file_data": f"data:text/plain;base64,{data}"}
    question = {"type": "text", "text": "How do I get my money back?"}
    content = [{"type": "file", "file": file}, question]
    body = {
        "model": REAL,
        "max_tokens": 32,
        "temperature": 0,
        "messages": [{"role": "user", "content": content}],
    }
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)
    assert "of 60 pages of a.pdf were read" in reply.headers["x-mlxserve-warning"]
    answer = reply.json()["choices"][0]["message"]["content"].lower()
    assert "return" in answer or "refund" in answer, answer


@pytest.mark.long
def test_ollamas_client_lists_chats_generates_and_embeds(of_ollama: Any) -> None:
    assert {model.model.partition(":")[0] for model in of_ollama.list().models} == {
        REAL, EMBEDDER, TINY,
    }  # fmt: skip
    options = {"temperature": 0, "num_predict": 24}
    reply = of_ollama.chat(model=REAL, messages=said(QUESTION), options=options)
    assert "Paris" in reply.message.content
    parts = list(of_ollama.chat(model=REAL, messages=said(QUESTION), options=options, stream=True))
    assert "".join(part.message.content for part in parts) == reply.message.content
    assert parts[-1].done
    generated = of_ollama.generate(model=TINY, prompt="Why is the sky blue?", options=options)
    assert generated.eval_count == 24
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string"}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    whole = of_ollama.chat(
        model=REAL, messages=said(QUESTION), format=schema, options={"temperature": 0}
    )
    assert json.loads(whole.message.content)["capital"] == "Paris"
    assert len(of_ollama.embed(model=EMBEDDER, input=["a", "b"]).embeddings[0]) == 384
    assert of_ollama.show(REAL).modelinfo["general.architecture"] == "llama"
    assert "embedding" in of_ollama.show(EMBEDDER).capabilities
    assert {model.model.partition(":")[0] for model in of_ollama.ps().models} <= {
        REAL, EMBEDDER, TINY,
    }  # fmt: skip
    with pytest.raises(ollama.ResponseError, match="nonesuch"):
        of_ollama.chat(model="nonesuch", messages=said(QUESTION))

"""OpenAI's own client against a real engine in this process: vectors and stored responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.chat.text_model import TextModel
from tests.api.clients import openai

ALICE, BOB = "a" * 32, "b" * 32


@pytest.fixture(scope="module")
def url(serve_real: Callable[..., Any]) -> Iterator[str]:
    with serve_real(access=AccessPolicy(api_keys=[ALICE, BOB])) as server:
        yield f"{server.url}/v1"


@pytest.fixture(scope="module")
def alice(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=ALICE, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def bob(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=BOB, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(real_chat: Any) -> str:
    return real_chat.model_name


# Vectors.


def test_a_vector_is_the_same_as_floats_and_in_base64(alice: openai.OpenAI, model: str) -> None:
    text = "The sea is wide."
    packed = alice.embeddings.create(model=model, input=text)  # which asks for base64
    floats = alice.embeddings.create(model=model, input=text, encoding_format="float")
    vector = packed.data[0].embedding
    assert vector == pytest.approx(floats.data[0].embedding, abs=1e-6)
    assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0


def test_a_text_and_its_tokens_have_the_same_vector_in_any_batch(
    alice: openai.OpenAI, real_chat: TextModel, model: str
) -> None:
    texts = ["The sea is wide.", "A stone " * 200]
    tokens = [real_chat.codec.encode(text) for text in texts]
    together = alice.embeddings.create(model=model, input=texts)
    by_tokens = alice.embeddings.create(model=model, input=tokens)
    alone = [alice.embeddings.create(model=model, input=text).data[0] for text in texts]
    for one, other, third in zip(together.data, by_tokens.data, alone, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
        assert one.embedding == pytest.approx(third.embedding, abs=1e-5)
    assert together.usage.prompt_tokens == sum(map(len, tokens))


def test_fewer_dimensions_are_of_length_one_and_more_are_refused(
    alice: openai.OpenAI, model: str
) -> None:
    short = alice.embeddings.create(model=model, input="x y z", dimensions=16).data[0].embedding
    assert len(short) == 16
    assert math.hypot(*short) == pytest.approx(1, abs=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        alice.embeddings.create(model=model, input="x", dimensions=10_000)


def test_an_unknown_token_is_refused(alice: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="token ids"):
        alice.embeddings.create(model=model, input=[[10**9]])


# Responses.


def test_a_stored_response_can_be_continued(alice: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "max_output_tokens": 8, "temperature": 0}
    first = alice.responses.create(**asked, input="My name is Ada.")
    second = alice.responses.create(
        **asked, input="What is my name?", previous_response_id=first.id
    )
    messages = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "What is my name?"},
    ]
    whole = alice.responses.create(**asked, input=messages, store=False)
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert second.previous_response_id == first.id


def test_a_stored_response_can_be_read_and_deleted(alice: openai.OpenAI, model: str) -> None:
    events = alice.responses.create(model=model, input="Hi", max_output_tokens=4, stream=True)
    made = list(events)[-1].response
    again = alice.responses.retrieve(made.id)
    assert (again.id, again.output_text, again.usage) == (made.id, made.output_text, made.usage)
    [item] = alice.responses.input_items.list(made.id)
    assert (item.type, item.role, item.content[0].text) == ("message", "user", "Hi")
    with pytest.raises(openai.BadRequestError, match="background responses"):
        alice.responses.cancel(made.id)
    alice.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(made.id)


def test_a_stored_response_does_not_exist_for_another_key(
    alice: openai.OpenAI, bob: openai.OpenAI, model: str
) -> None:
    made = alice.responses.create(model=model, input="A secret", max_output_tokens=2)
    for attempt in (
        lambda: bob.responses.retrieve(made.id),
        lambda: bob.responses.delete(made.id),
        lambda: list(bob.responses.input_items.list(made.id)),
        lambda: bob.responses.cancel(made.id),
        lambda: bob.responses.create(model=model, input="Go on", previous_response_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()
    assert alice.responses.retrieve(made.id).id == made.id


def test_a_response_is_not_stored_if_store_is_false(alice: openai.OpenAI, model: str) -> None:
    made = alice.responses.create(model=model, input="Hi", max_output_tokens=2, store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(made.id)

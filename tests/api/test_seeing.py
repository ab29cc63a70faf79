"""A model that sees, over each API with its official client."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from mlxserve.build import build_text_model
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from tests.api.clients import anthropic, ollama, openai
from tests.api.serving import serving
from tests.images.files import file_of, picture
from tests.model.small_vision import write_vision_model

pytestmark = pytest.mark.slow

TEXT = "What is it?"
FILES = [file_of(picture(112, 84, seed)) for seed in (1, 2)]
BASE64 = [base64.b64encode(file).decode() for file in FILES]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextModel]:
    folder = write_vision_model(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl")
    options = {"num_pages": 256, "page_size": 16, "max_model_len": 1024}
    chat = build_text_model(
        EngineConfig().with_options(model=str(folder), disable_log_stats=True, **options)
    )
    assert chat.supports_images
    yield chat
    chat.close()


@pytest.fixture(scope="module")
def url(chat: TextModel) -> Iterator[str]:
    with serving(chat, stop_engine=lambda: None) as server:
        yield server.url


@pytest.fixture
def of_openai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(client: openai.OpenAI, content: str) -> Any:
    """A chat's completion about an image in base64."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
    messages: Any = [{"role": "user", "content": [image, {"type": "text", "text": TEXT}]}]
    return client.chat.completions.create(
        model="small", messages=messages, temperature=0, max_tokens=12, logprobs=True
    )


def test_answers_depend_on_the_image_and_an_image_is_cached(
    chat: TextModel, of_openai: openai.OpenAI
) -> None:
    first, again, other = (asked(of_openai, BASE64[number]) for number in (0, 0, 1))
    logprobs = [one.choices[0].logprobs.content[0].logprob for one in (first, again, other)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert logprobs[0] != pytest.approx(logprobs[2], abs=1e-3)
    image_tokens = first.usage.prompt_tokens_details.model_dump()["image_tokens"]
    assert image_tokens == 12  # 112 x 84 pixels, in squares of 28
    assert again.usage.prompt_tokens_details.cached_tokens > image_tokens
    assert other.usage.prompt_tokens_details.cached_tokens < image_tokens
    asyncio.run(chat.engine.check())


def test_every_api_gives_the_same_answer_about_an_image(url: str, of_openai: openai.OpenAI) -> None:
    expected = asked(of_openai, BASE64[0]).choices[0].message.content
    response = of_openai.responses.create(
        model="small",
        input=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_image",
                        "image_url": f"data:;base64,{BASE64[0]}",
                        "detail": "auto",
                    },
                    {"type": "input_text", "text": TEXT},
                ],
            }
        ],
        temperature=0,
        max_output_tokens=12,
    )
    assert response.output_text == expected
    assert response.usage is not None
    assert response.usage.input_tokens_details.model_dump()["image_tokens"] == 12

    source = {"type": "base64", "media_type": "image/png", "data": BASE64[0]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    messages: Any = [{"role": "user", "content": content}]
    with anthropic.Anthropic(base_url=url, api_key="none") as client:
        message = client.messages.create(
            model="claude-local", max_tokens=12, messages=messages, extra_body={"temperature": 0}
        )
        counted = client.messages.count_tokens(model="claude-local", messages=messages)
    assert "".join(block.text for block in message.content if block.type == "text") == expected
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)

    options: Any = {"temperature": 0, "num_predict": 12}
    with ollama.Client(host=url) as of_ollama:
        [listed] = of_ollama.list().models
        name = str(listed.model)
        said = [{"role": "user", "content": TEXT, "images": [FILES[0]]}]
        assert of_ollama.chat(name, messages=said, options=options).message.content == expected
        generated = of_ollama.generate(name, TEXT, images=[FILES[0]], options=options)
        assert generated.response == expected
        assert "vision" in (of_ollama.show(name).capabilities or [])
        assert min(generated.context or ()) >= 0
        more = of_ollama.generate(
            name, TEXT, images=[FILES[0]], context=generated.context, options=options
        )
        assert more.done


def test_a_stream_about_an_image_is_the_same_answer(of_openai: openai.OpenAI) -> None:
    expected = asked(of_openai, BASE64[1])
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64[1]}"}}
    messages: Any = [{"role": "user", "content": [image, {"type": "text", "text": TEXT}]}]
    chunks = of_openai.chat.completions.create(
        model="small",
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        max_tokens=12,
    )
    found = list(chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices)
    assert text == expected.choices[0].message.content
    assert found[-1].usage is not None


@pytest.mark.parametrize("size", [(20_000, 1), (1, 1), (1, 20_000), (300, 3)])
def test_an_image_of_any_shape_is_an_answer_or_a_sentence(
    of_openai: openai.OpenAI, chat: TextModel, size: tuple[int, int]
) -> None:
    content = base64.b64encode(file_of(Image.new("RGB", size, "red"))).decode()
    try:
        reply = asked(of_openai, content)
        said = "an answer" if reply.usage.completion_tokens else "nothing"
    except openai.BadRequestError as error:
        said = error.message
    assert said == "an answer" or "image" in said
    asyncio.run(chat.engine.check())


def test_an_image_in_an_earlier_turn_is_found_in_the_cache(of_openai: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64[1]}"}}
    messages: Any = [{"role": "user", "content": [image, {"type": "text", "text": TEXT}]}]
    first = of_openai.chat.completions.create(model="small", messages=messages, max_tokens=12)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content or "-"},
        {"role": "user", "content": "And its colour?"},
    ]
    second = of_openai.chat.completions.create(model="small", messages=messages, max_tokens=12)
    details = second.usage.prompt_tokens_details if second.usage else None
    assert details is not None
    assert (details.cached_tokens or 0) > 12

"""Answers of the embedded model under random schemas, validated by the package jsonschema."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema
import pytest

from mlxserve.build import build_text_model
from mlxserve.chat.request_options import RequestOptions
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from mlxserve.core.sampling_params import SamplingParams, Structure, StructureKind
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta
from mlxserve.text.parsing.turn import AssistantTurn

WORDS = ("city", "name", "n", "tags", "kind", "größe", "a b", "is_open")
ASKED = ("Tell me of Paris.", "Who are you?", "Make a list.", "Answer in JSON, please.")


@pytest.fixture(scope="module")
def chat() -> Iterator[TextModel]:
    built = build_text_model(
        EngineConfig().with_options(num_pages=256, page_size=16, disable_log_stats=True)
    )
    yield built
    built.close()


def random_schema(rng: Random, depth: int = 0) -> dict[str, Any]:
    """A schema with answers of bounded length, so that every answer ends."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kinds += ["object", "array", "anyOf"] if depth < 2 else []
    match rng.choice(kinds):
        case "string":
            low = rng.randrange(3)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 8)}
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(100)}
        case "number":
            return {"enum": [0.5, -1, 3e3, 7.25]}
        case "boolean":
            return {"type": "boolean"}
        case "null":
            return {"type": ["null", "boolean"]}
        case "enum":
            return {"enum": rng.sample(["x", "ü", 3, None, True, '"q"', "a\nb"], 3)}
        case "const":
            return {"const": rng.choice(["one", 2, {"a": [1]}])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^(on|off)$"])}
        case "array":
            low = rng.randrange(2)
            items = random_schema(rng, depth + 1)
            return {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + rng.randrange(1, 3),
            }
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    return random_object(rng, depth)


def random_object(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 2))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


async def answer(chat: TextModel, number: int) -> tuple[dict[str, Any], list[Delta]]:
    rng = Random(number)
    schema = random_object(rng, 0)
    structure = Structure(StructureKind.JSON_SCHEMA, json.dumps(schema))
    params = SamplingParams(
        max_tokens=900,
        temperature=rng.choice([0, 0.7, 1.0, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        seed=number,
        structure=structure,
    )
    prompt = chat.writer.render([{"role": "user", "content": rng.choice(ASKED)}])
    submitted = await chat.writer.submit(prompt, params, RequestOptions(turn=AssistantTurn()))
    return schema, [delta async for delta in submitted]


async def answers(chat: TextModel, numbers: range, num_running: int) -> None:
    """Keep `num_running` answers running: as one ends, the next one starts."""
    room = asyncio.Semaphore(num_running)

    async def judged(number: int) -> None:
        async with room:
            schema, deltas = await answer(chat, number)
        text = "".join(delta.text for delta in deltas)
        assert deltas[-1].finish_reason is FinishReason.STOP, (number, text)
        jsonschema.validate(json.loads(text), schema)

    async with asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(judged(number))


def test_answers_under_schemas_parse_and_validate(chat: TextModel) -> None:
    asyncio.run(answers(chat, range(12), 8))


@pytest.mark.long
def test_answers_under_many_schemas_parse_and_validate(chat: TextModel) -> None:
    asyncio.run(answers(chat, range(12, 212), 24))


def test_an_answer_is_the_same_in_a_batch_and_alone(chat: TextModel) -> None:
    async def texts(numbers: list[int]) -> list[str]:
        found = await asyncio.gather(*(answer(chat, number) for number in numbers))
        return ["".join(delta.text for delta in deltas) for _, deltas in found]

    alone = [asyncio.run(texts([number]))[0] for number in (3, 4)]
    assert asyncio.run(texts([3, 4])) == alone


def test_an_answer_under_a_schema_is_the_same_after_losing_its_pages(chat: TextModel) -> None:
    async def text(*, is_disturbed: bool) -> str:
        task = asyncio.ensure_future(answer(chat, 3))
        while is_disturbed and not task.done():
            await chat.engine.reset_prefix_cache(force=True)  # forces it to recompute everything
        return "".join(delta.text for delta in (await task)[1])

    lost = chat.engine.stats().scheduler.recomputed_tokens
    assert asyncio.run(text(is_disturbed=True)) == asyncio.run(text(is_disturbed=False))
    assert chat.engine.stats().scheduler.recomputed_tokens > lost


def test_an_answer_cut_off_under_a_schema_finishes_with_length(chat: TextModel) -> None:
    structure = Structure(StructureKind.JSON_SCHEMA, json.dumps({"type": "string"}))
    params = SamplingParams(max_tokens=5, structure=structure, seed=1)

    async def reason() -> FinishReason | None:
        submitted = await chat.writer.submit(chat.codec.encode("Tell me a long story."), params)
        return [delta async for delta in submitted][-1].finish_reason

    assert asyncio.run(reason()) is FinishReason.LENGTH

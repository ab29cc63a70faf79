"""JSON of a small schema, filled with values from the question."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.training import words
from tests.training.conversation import Check, Dialogue, Exchange, Phrasings, single
from tests.training.words import DataSplit

_TEXT_FIELDS: dict[str, Callable[[Random, DataSplit], str]] = {
    "name": words.first_name,
    "city": words.place,
    "code": words.code_word,
    "title": words.code_word,
    "label": words.code_word,
    "owner": words.full_name,
}
_NUMBER_FIELDS = ("age", "number", "price", "count", "size")
_ASK = Phrasings(
    train=(
        "Write this as JSON: {facts}",
        "As JSON, please: {facts}",
        "{facts}\nGive me JSON with the keys {keys}.",
        "{facts}\n\nAnswer in JSON with the keys {keys}.",
        "{facts}\nFollow this JSON schema: {schema}",
        "Make JSON that follows the schema {schema} from this: {facts}",
        "Return JSON. {facts}",
    ),
    held_out=(
        "Put this into JSON: {facts}",
        "{facts}\nReply in JSON with the keys {keys}.",
        "{facts}\nUse this JSON schema: {schema}",
    ),
)


def structured(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A conversation of one record."""
    del num_words
    return single(exchange(rng, split))


def exchange(rng: Random, split: DataSplit) -> Exchange:
    """One record of two to four fields; the answer is only the JSON object."""
    keys = rng.sample([*_TEXT_FIELDS, *_NUMBER_FIELDS], rng.randint(2, 4))
    record = {key: _value(rng, split, key) for key in keys}
    question = _ASK.pick(rng, split).format(
        facts=_facts(rng, record), keys=", ".join(keys), schema=json.dumps(_schema(record))
    )
    answer = json.dumps(record, ensure_ascii=False)
    return Exchange(question, answer, is_json(record))


def is_json(record: dict[str, Any]) -> Check:
    """Accept a JSON document equal to `record`."""

    def accepts(answer: str) -> bool:
        try:
            return bool(json.loads(answer) == record)
        except json.JSONDecodeError:
            return False

    return accepts


def _value(rng: Random, split: DataSplit, key: str) -> str | int:
    if key in _NUMBER_FIELDS:
        return int(words.number(rng, split))
    return _TEXT_FIELDS[key](rng, split)


def _facts(rng: Random, record: dict[str, Any]) -> str:
    if rng.random() < 0.5:
        return ", ".join(f"{key} {value}" for key, value in record.items())
    *most, last = (f"the {key} is {value}" for key, value in record.items())
    text = f"{', '.join(most)} and {last}."
    return text[0].upper() + text[1:]


def _schema(record: dict[str, Any]) -> dict[str, Any]:
    types = {str: "string", int: "integer"}
    properties = {key: {"type": types[type(value)]} for key, value in record.items()}
    return {"type": "object", "properties": properties}

"""What is compiled, what is refused, and what the cache shares."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest

from mlxserve.errors import EngineStopped, InvalidParameter
from mlxserve.sampling_params import Structure, StructureKind
from mlxserve.text.guidance.grammars import MAX_DEPTH, MAX_PROPERTIES, MAX_SOURCE, Grammars
from mlxserve.text.tokenizer import Tokenizer


def compiled(grammars: Grammars, kind: StructureKind, source: str) -> Any:
    return asyncio.run(grammars.compile(Structure(kind, source, "response_format")))


def digit(grammars: Grammars) -> Any:
    return compiled(grammars, StructureKind.REGEX, "[0-9]")


BAD: Sequence[tuple[StructureKind, str, str]] = [
    (StructureKind.JSON_SCHEMA, '{"type": "objec"}', "Invalid type"),
    (StructureKind.JSON_SCHEMA, '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    (StructureKind.JSON_SCHEMA, '{"$ref": "http://x/y"}', "does not fetch"),
    (StructureKind.JSON_SCHEMA, '{"not": {}}', "Unimplemented"),
    (StructureKind.JSON_SCHEMA, "[]", "a JSON schema must be an object"),
    (
        StructureKind.JSON_SCHEMA,
        json.dumps({"properties": {str(n): {} for n in range(MAX_PROPERTIES + 1)}}),
        "more than 500 properties",
    ),
    (
        StructureKind.JSON_SCHEMA,
        '{"items":' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 1),
        "deeper than 32",
    ),
    (StructureKind.JSON_SCHEMA, '{"enum": [' + '"x", ' * MAX_SOURCE + '"x"]}', "longer than 65536"),
    (StructureKind.REGEX, "(", "unclosed group"),
    (StructureKind.GRAMMAR, 'start: "a" foo', "unknown name"),
]


@pytest.mark.parametrize(("kind", "source", "message"), BAD)
def test_an_unsupported_structure_is_refused_by_its_field(
    kind: StructureKind, source: str, message: str, grammars: Grammars
) -> None:
    with pytest.raises(InvalidParameter, match=message) as caught:
        compiled(grammars, kind, source)
    assert caught.value.name == "response_format"


@pytest.mark.parametrize(
    "source",
    [
        '{"type": "string", "pattern": "(a+)+b"}',
        '{"type": "string", "pattern": ".{0,100000}"}',
        '{"type": "array", "minItems": 1000000, "items": {}}',
    ],
)
def test_schemas_that_hang_other_servers_compile_quickly(source: str, grammars: Grammars) -> None:
    assert compiled(grammars, StructureKind.JSON_SCHEMA, source).compute_bitmask()


def test_a_slow_compilation_times_out(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    grammars = Grammars(tokenizer, 2100)
    monkeypatch.setattr("mlxserve.text.guidance.grammars.COMPILE_SECONDS", 0.01)
    llguidance = MagicMock()
    llguidance.grammar_from_regex.side_effect = lambda _source: is_over.wait(20)
    monkeypatch.setattr("llguidance.LLMatcher", llguidance)
    with pytest.raises(InvalidParameter, match="response_format: takes more than"):
        digit(grammars)
    is_over.set()
    grammars.close()
    with pytest.raises(EngineStopped):
        digit(grammars)


def test_cached_grammars_share_no_state(tokenizer: Tokenizer, grammars: Grammars) -> None:
    one, other = digit(grammars), digit(grammars)
    assert one.consume_token(tokenizer.encode("3")[0])
    assert one.is_stopped()
    assert not other.is_stopped()

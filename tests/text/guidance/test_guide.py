"""A guide knows from the tokens alone what may come next."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence

import pytest

from mlxserve.errors import EngineStopped, InvalidParameter
from mlxserve.hub.embedded import model_path
from mlxserve.sampling_params import Structure, StructureKind
from mlxserve.text.guidance.grammars import MAX_DEPTH, MAX_PROPERTIES, MAX_SOURCE, Grammars
from mlxserve.text.guidance.guide import AnswerGuide, Plan
from mlxserve.text.tokenizer import Tokenizer

END = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(model_path())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    found = Grammars(tokenizer, 2100)
    yield found
    found.close()


def compiled(grammars: Grammars, kind: StructureKind, source: str):  # type: ignore[no-untyped-def]
    return asyncio.run(grammars.compile(Structure(kind, source, "response_format")))


def digit(grammars: Grammars):  # type: ignore[no-untyped-def]
    return compiled(grammars, StructureKind.REGEX, "[0-9]")


def allowed(guide: AnswerGuide) -> set[int] | None:
    mask = guide.mask()
    if mask is None:
        return None
    return {t for t in range(len(mask) * 8) if mask[t >> 3] >> (t & 7) & 1}


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)


def test_an_answer_follows_its_grammar_and_ends_where_it_does(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    guide = AnswerGuide(Plan(vocab_size=2100, end_ids=frozenset({END}), answer=digit(grammars)))
    assert allowed(guide) == {ids(tokenizer, str(n))[0] for n in range(10)}
    assert guide.must_wait
    guide.read(ids(tokenizer, "7"))
    assert allowed(guide) == {END}
    guide.read([END])
    assert guide.error is None


@pytest.mark.parametrize("vocab_size", [2048, 2049, 2080, 2100])
def test_masks_have_one_size_whatever_made_them(vocab_size: int, tokenizer: Tokenizer) -> None:
    """A step stacks those of answers that think, that follow a grammar and that have ended."""
    grammars = Grammars(tokenizer, vocab_size)
    plan = Plan(
        vocab_size=vocab_size,
        end_ids=frozenset({END}),
        think_start=(2046,),
        think_end=(2047,),
        thinking_budget=1,
        answer=digit(grammars),
    )
    guide = AnswerGuide(plan)
    masks = [guide.mask()]
    for token in (2046, *ids(tokenizer, "h"), 2047, *ids(tokenizer, "7")):
        guide.read([token])
        masks.append(guide.mask())
    grammars.close()
    assert {len(mask) for mask in masks if mask is not None} == {-(-vocab_size // 32) * 4}


@pytest.mark.parametrize("start", [(2046,), (2046, 2044)])
def test_an_answer_may_think_first(
    start: tuple[int, ...], tokenizer: Tokenizer, grammars: Grammars
) -> None:
    plan = Plan(
        vocab_size=2100,
        end_ids=frozenset({END}),
        think_start=start,
        think_end=(2047,),
        answer=digit(grammars),
    )
    guide = AnswerGuide(plan)
    digits = {ids(tokenizer, str(n))[0] for n in range(10)}
    assert allowed(guide) == digits | {start[0]}
    guide.read(start[:1])
    if len(start) > 1:
        assert allowed(guide) == {start[1]}
        guide.read(start[1:])
    thinking = allowed(guide)
    assert thinking is not None
    assert END not in thinking  # or the answer would end without what was asked for
    assert len(thinking) > 2000
    assert guide.must_wait
    guide.read([*ids(tokenizer, "hm"), 2047])
    assert allowed(guide) == digits


def test_thinking_and_answer_may_begin_alike(tokenizer: Tokenizer, grammars: Grammars) -> None:
    answer = compiled(grammars, StructureKind.GRAMMAR, "start: <[2040]> /[0-9]/")
    plan = Plan(
        vocab_size=2100,
        end_ids=frozenset({END}),
        think_start=(2040, 2046),
        think_end=(2047,),
        answer=answer,
    )
    digits = {ids(tokenizer, str(n))[0] for n in range(10)}
    guide = AnswerGuide(plan)
    assert allowed(guide) == {2040}
    guide.read([2040])
    assert allowed(guide) == digits | {2046}
    guide.read(ids(tokenizer, "4"))
    assert allowed(guide) == {END}
    guide = AnswerGuide(plan)
    guide.read([2040, 2046, 5, 2047])
    assert allowed(guide) == {2040}


@pytest.mark.parametrize("marker", [(2047,), (2047, 2045, 2047, 2043)])
def test_a_budget_of_thinking_ends_it_by_its_marker(marker: tuple[int, ...]) -> None:
    plan = Plan(
        vocab_size=2100,
        end_ids=frozenset({END}),
        think_start=(2046,),
        think_end=marker,
        is_thinking=True,
        thinking_budget=3,
    )
    guide = AnswerGuide(plan)
    assert not guide.must_wait
    guide.read([10, 11])
    assert allowed(guide) is None
    assert guide.must_wait  # the next token may be the third
    guide.read([12])
    for token in marker:
        assert allowed(guide) == {token}
        guide.read([token])
    assert allowed(guide) is None
    assert not guide.must_wait
    # Thinking that the model opens again has no budget left.
    guide.read([2046])
    assert allowed(guide) == {marker[0]}


def test_a_call_follows_its_grammar_once_it_has_begun(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    call = compiled(grammars, StructureKind.GRAMMAR, "start: /[0-9]/ <[2041]>")
    plan = Plan(vocab_size=2100, end_ids=frozenset({END}), call_start=(2040,), call=call)
    guide = AnswerGuide(plan)
    guide.read(ids(tokenizer, "text"))
    assert allowed(guide) is None
    assert not guide.must_wait
    for _ in range(2):
        guide.read([2040])
        assert guide.must_wait
        assert allowed(guide) == {ids(tokenizer, str(n))[0] for n in range(10)}
        guide.read(ids(tokenizer, "1"))
        assert allowed(guide) == {2041}
        guide.read([2041])
        assert allowed(guide) is None
    # The token behind the marker was chosen before the marker was known.
    guide.read([2040, *ids(tokenizer, "text")])
    assert allowed(guide) is None
    assert guide.error is None


def test_a_call_can_have_to_begin(grammars: Grammars) -> None:
    plan = Plan(vocab_size=2100, end_ids=frozenset({END}), opening=(2040, 5))
    guide = AnswerGuide(plan)
    assert guide.must_wait
    for token in plan.opening:
        assert allowed(guide) == {token}
        guide.read([token])
    assert allowed(guide) is None
    assert not guide.must_wait


def test_a_guide_that_reads_all_tokens_again_is_where_it_was(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    source = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    plan = Plan(
        vocab_size=2100,
        end_ids=frozenset({END}),
        think_start=(2046,),
        think_end=(2047,),
        answer=compiled(grammars, StructureKind.JSON_SCHEMA, source),
    )
    tokens = [2046, *ids(tokenizer, "hm"), 2047, *ids(tokenizer, '{"a": 12')]
    one = AnswerGuide(plan)
    for at, token in enumerate(tokens):
        again = AnswerGuide(plan)
        again.read(tokens[:at])
        assert (one.mask(), one.must_wait) == (again.mask(), again.must_wait)
        one.read([token])


def test_a_token_against_the_grammar_is_an_error_and_ends_the_answer(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    guide = AnswerGuide(Plan(vocab_size=2100, end_ids=frozenset({END}), answer=digit(grammars)))
    guide.read(ids(tokenizer, "x"))
    assert guide.error
    assert allowed(guide) == {END}


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
def test_what_cannot_be_followed_is_refused_by_its_field(
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
def test_what_is_known_to_stop_other_servers_is_quick(source: str, grammars: Grammars) -> None:
    assert compiled(grammars, StructureKind.JSON_SCHEMA, source).compute_bitmask()


def test_a_compiler_that_takes_too_long_is_not_waited_for(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    grammars = Grammars(tokenizer, 2100)
    monkeypatch.setattr("mlxserve.text.guidance.grammars.COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(grammars, "_compile", lambda structure: is_over.wait(20))
    with pytest.raises(InvalidParameter, match="response_format: takes more than"):
        digit(grammars)
    is_over.set()
    grammars.close()
    with pytest.raises(EngineStopped):
        digit(grammars)


def test_a_grammar_that_is_kept_is_shared_by_nobody(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    one, other = digit(grammars), digit(grammars)
    assert one.consume_token(ids(tokenizer, "3")[0])
    assert one.is_stopped()
    assert not other.is_stopped()

"""A guide derives from the tokens alone which may come next."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from mlxserve.core.sampling_params import Structure, StructureKind
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.text.guidance.grammars import Grammars
from mlxserve.text.guidance.guide import AnswerGuide, Plan
from mlxserve.text.tokenizer import Tokenizer
from tests.text.guidance.call_formats import allowed_tokens

END = 2


def compiled(grammars: Grammars, kind: StructureKind, source: str) -> Any:
    return asyncio.run(grammars.compile(Structure(kind, source, "response_format")))


def digit(grammars: Grammars) -> Any:
    return compiled(grammars, StructureKind.REGEX, "[0-9]")


def allowed(guide: AnswerGuide) -> set[int] | None:
    mask = guide.mask()
    return None if mask is None else set(allowed_tokens(mask))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)


def test_an_answer_follows_its_grammar_and_ends_with_it(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    guide = AnswerGuide(Plan(vocab_size=2100, end_ids=frozenset({END}), answer=digit(grammars)))
    assert allowed(guide) == {ids(tokenizer, str(n))[0] for n in range(10)}
    assert guide.must_wait
    guide.read(ids(tokenizer, "7"))
    assert allowed(guide) == {END}
    guide.read([END])
    assert guide.error is None


def test_likely_tokens_have_masks_where_no_grammar_is_followed_yet(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """While it thinks, within its budget, and in text up to the marker of a call; nothing of it is read."""
    plan = Plan(
        vocab_size=2100,
        end_ids=frozenset({END}),
        think_start=(2046,),
        think_end=(2047,),
        is_thinking=True,
        thinking_budget=6,
        call_start=(2040,),
        call=digit(grammars),
    )
    words = ids(tokenizer, "a b c")
    guide = AnswerGuide(plan)
    for likely, num_foreseen in (
        ([*words, 2047, *words, 2040, *ids(tokenizer, "7")], 2 * len(words) + 1),
        (3 * words, 3 * len(words)),
    ):
        step_by_step = AnswerGuide(plan)
        guide.expect(likely)
        assert list(guide.foreseen) == likely[:num_foreseen]
        for number, token in enumerate(guide.foreseen):
            step_by_step.read([token])
            assert step_by_step.mask() == guide.mask(1 + number)
        assert guide.mask(1 + num_foreseen) is None
    assert allowed(step_by_step) == {2047}, "the budget is spent"
    assert guide.num_read == 0
    guide.read(words)
    assert list(guide.foreseen) == []
    guide.read([2047])
    assert (guide.is_free, guide.must_wait) == (True, False)
    guide.read([2040])
    assert not guide.is_free
    guide.expect(words)
    assert allowed(guide) == {ids(tokenizer, str(n))[0] for n in range(10)}


@pytest.mark.parametrize("vocab_size", [2048, 2049, 2080, 2100])
def test_masks_have_one_size_whatever_made_them(vocab_size: int, tokenizer: Tokenizer) -> None:
    """A step stacks those of answers that think, that follow a grammar and that have ended."""
    grammars = Grammars(tokenizer, vocab_size, FairExecutor())
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
def test_a_constrained_answer_may_think_first(
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
    assert END not in thinking  # or the answer could end without its constrained part
    assert len(thinking) > 2000
    assert guide.must_wait
    guide.read([*ids(tokenizer, "hm"), 2047])
    assert allowed(guide) == digits


def test_the_end_of_thinking_may_be_merged_with_what_follows_it(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """As in `</think>` and a line break, where the marker is plain text."""
    plan = Plan(
        vocab_size=2100,
        end_ids=frozenset({END}),
        think_start=(2046,),
        think_end=(2045, 2047),
        think_ends=frozenset({2047, 2041}),
        is_thinking=True,
        answer=digit(grammars),
    )
    digits = {ids(tokenizer, str(n))[0] for n in range(10)}
    for last in (2047, 2041):
        guide = AnswerGuide(plan)
        guide.read([*ids(tokenizer, "hm"), last, 2045])
        assert allowed(guide) != digits
        guide.read([last])
        assert allowed(guide) == digits


def test_thinking_and_answer_may_start_with_the_same_token(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
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
def test_an_exhausted_thinking_budget_forces_the_end_marker(marker: tuple[int, ...]) -> None:
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
    # If the model starts thinking again, no budget is left.
    guide.read([2046])
    assert allowed(guide) == {marker[0]}


def test_thinking_opens_again_after_white_space_or_a_call_and_not_in_a_text(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    blank = ids(tokenizer, "\n")
    plan = Plan(
        vocab_size=2100,
        end_ids=frozenset({END}),
        think_start=(2046,),
        think_end=(2047,),
        thinking_budget=0,
        blanks=frozenset(blank),
        call_start=(2040,),
        call=compiled(grammars, StructureKind.GRAMMAR, "start: /[0-9]/ <[2041]>"),
    )
    one, said = ids(tokenizer, "1"), ids(tokenizer, "The tag is")
    for before, opens in [
        (blank, True),
        (said, False),
        ([*said, *blank], False),
        ([2046, 2047, *blank], True),
        ([2046, 2047, *said], False),
        ([*said, 2040, *one, 2041, *blank], True),
        ([2040, *one, 2041, *said], False),
    ]:
        guide = AnswerGuide(plan)
        guide.read(before)
        guide.read([2046])
        assert (allowed(guide) == {2047}) is opens, before
    anywhere = AnswerGuide(replace(plan, thinks_anywhere=True))
    anywhere.read([*said, 2046])
    assert allowed(anywhere) == {2047}


def test_a_call_follows_its_grammar_once_it_has_started(
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
    # The token after the marker was sampled before the marker was known.
    guide.read([2040, *ids(tokenizer, "text")])
    assert allowed(guide) is None
    assert guide.error is None


@pytest.mark.parametrize("joins", [False, True])
def test_a_marker_after_a_quote_is_text_and_forces_no_call(
    joins: bool, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    [quote], [one] = ids(tokenizer, "`"), ids(tokenizer, "1")
    start = "start: <[2040]> /[0-9]/" if joins else "start: /[0-9]/"
    call = compiled(grammars, StructureKind.GRAMMAR, f"{start} <[2041]>")
    plan = Plan(
        vocab_size=2100,
        end_ids=frozenset({END}),
        call_start=(2039,) if joins else (2039, 2040),
        call=call,
        call_joins=joins,
        quotes=frozenset({quote}),
    )
    for before, opens in [([], True), ([quote], False), ([quote, one], True)]:
        guide = AnswerGuide(plan)
        guide.read([*before, 2039, 2040])
        digits = {ids(tokenizer, str(n))[0] for n in range(10)}
        assert allowed(guide) == (digits if opens else None), before


def test_a_call_can_be_forced_to_start(grammars: Grammars) -> None:
    plan = Plan(vocab_size=2100, end_ids=frozenset({END}), opening=(2040, 5))
    guide = AnswerGuide(plan)
    assert guide.must_wait
    for token in plan.opening:
        assert allowed(guide) == {token}
        guide.read([token])
    assert allowed(guide) is None
    assert not guide.must_wait


def test_a_guide_that_rereads_its_tokens_reaches_the_same_state(
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


def test_a_token_outside_the_grammar_is_an_error_and_ends_the_answer(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    guide = AnswerGuide(Plan(vocab_size=2100, end_ids=frozenset({END}), answer=digit(grammars)))
    guide.read(ids(tokenizer, "x"))
    assert allowed(guide) == {END}
    assert guide.error

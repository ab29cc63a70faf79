"""Planner: builds the guide that an answer's options require.

Most answers need none: only a structure, required calls, a thinking budget, or tools whose call
format has a grammar constrain what the model may generate.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mlxserve.core.errors import InvalidParameter
from mlxserve.core.sampling_params import SamplingParams, Structure, StructureKind
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.helpers.work import Work
from mlxserve.text.costs import encode_seconds, text_size
from mlxserve.text.guidance.calls import call_grammar
from mlxserve.text.guidance.grammars import Grammars
from mlxserve.text.guidance.guide import AnswerGuide, Plan
from mlxserve.text.guidance.structures import MAX_GRAMMAR, inline
from mlxserve.text.parsing.markup import Markup, Part
from mlxserve.text.parsing.turn import AssistantTurn, ToolChoice
from mlxserve.text.tokenizer import Tokenizer

log = logging.getLogger("mlxserve.guidance")


class Planner:
    """Builds guides for one model. Its methods may be called from any event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, executor: FairExecutor) -> None:
        self._tokenizer = tokenizer
        self._executor = executor
        self._grammars = Grammars(tokenizer, vocab_size, executor)

    def close(self) -> None:
        self._grammars.close()

    async def guide(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        turn: AssistantTurn | None,
        client: str = "",
    ) -> AnswerGuide | None:
        """Return the guide of an answer; None if it needs none.

        Raises InvalidParameter for unsupported constraints, and what `Grammars.compile` raises.
        """
        if turn is None and params.structure is None:
            return None
        turn, markup = (
            (AssistantTurn(), Markup()) if turn is None else (turn, self._tokenizer.markup)
        )
        plan = Plan(
            vocab_size=self._grammars.vocab_size,
            end_ids=self._tokenizer.eos_token_ids,
            think_start=markup.think_start,
            think_end=markup.think_end,
            think_ends=markup.think_ends,
            may_think=markup.is_taught and turn.thinking_budget != 0,
            is_thinking=markup.opens_thinking(prompt, self._tokenizer.decode),
            blanks=markup.blanks,
            quotes=markup.quotes,
            thinks_anywhere=markup.first is Part.HEADER,
            thinking_budget=turn.thinking_budget if markup.can_think else None,
        )
        plan = await self._with_grammars(client, plan, params.structure, turn, markup)
        is_idle = plan.answer is None and not plan.opening and plan.call is None
        return None if is_idle and plan.thinking_budget is None else AnswerGuide(plan)

    async def _with_grammars(
        self,
        client: str,
        plan: Plan,
        structure: Structure | None,
        turn: AssistantTurn,
        markup: Markup,
    ) -> Plan:
        may_call = turn.may_call
        is_required = may_call and turn.tool_choice is ToolChoice.REQUIRED
        is_known = markup.first is not Part.HEADER or markup.text_start
        if not is_known and (is_required or structure is not None):
            field = structure.field if structure is not None else "tool_choice"
            raise InvalidParameter(field, "is not supported with this model's answer format")
        if is_required:
            return await self._required(client, plan, structure, turn, markup)
        if structure is not None and may_call:
            return await self._structured_or_calls(client, plan, structure, turn, markup)
        if structure is not None:
            structure = self._after(markup.text_start, structure)
            return replace(plan, answer=await self._grammars.compile(structure, client))
        return await self._followed(client, plan, turn, markup) if may_call else plan

    async def _required(
        self,
        client: str,
        plan: Plan,
        structure: Structure | None,
        turn: AssistantTurn,
        markup: Markup,
    ) -> Plan:
        if structure is not None:
            raise InvalidParameter(structure.field, "cannot be combined with a required tool call")
        grammar = await self._call_grammar(client, markup, turn, "tools", is_whole=True)
        if grammar is not None:
            return replace(
                plan, answer=await self._grammars.compile(grammar, client, limit=MAX_GRAMMAR)
            )
        if turn.tool_name is not None:
            raise InvalidParameter(
                "tool_choice", "this model does not support naming a tool; use 'required' instead"
            )
        return replace(plan, opening=markup.call_start)

    async def _structured_or_calls(
        self,
        client: str,
        plan: Plan,
        structure: Structure,
        turn: AssistantTurn,
        markup: Markup,
    ) -> Plan:
        # Errors in it name its own field.
        await self._grammars.compile(structure, client)
        inner = inline(structure)
        if inner is None:
            raise InvalidParameter(structure.field, "cannot be combined with tools")
        otherwise = f"{markup.text_start} ({inner})".strip()
        grammar = await self._call_grammar(
            client, markup, turn, structure.field, is_whole=True, otherwise=otherwise
        )
        if grammar is None:
            raise InvalidParameter(structure.field, "cannot be combined with tools on this model")
        return replace(
            plan, answer=await self._grammars.compile(grammar, client, limit=MAX_GRAMMAR)
        )

    @staticmethod
    def _after(start: str, structure: Structure) -> Structure:
        """The same structure after the markup that opens the text."""
        if not start:
            return structure
        inner = inline(structure)
        if inner is None:
            raise InvalidParameter(structure.field, "is not supported with this model")
        return Structure(StructureKind.GRAMMAR, f"start: {start} ({inner})", structure.field)

    async def _followed(self, client: str, plan: Plan, turn: AssistantTurn, markup: Markup) -> Plan:
        """Constrain calls to their schemas once they start, if a grammar can express them."""
        try:
            grammar = await self._call_grammar(client, markup, turn, "tools", is_whole=False)
            if grammar is None:
                # Nothing shows where a call ends.
                return replace(plan, thinks_anywhere=True)
            call = await self._grammars.compile(grammar, client, limit=MAX_GRAMMAR)
        except InvalidParameter as error:
            log.info("Tool calls are not constrained to their schemas: %s", error)
            return replace(plan, thinks_anywhere=True)
        joins = bool(markup.call_tail)
        marker = markup.call_start[:-1] if joins else markup.call_start
        return replace(plan, call=call, call_start=marker, call_joins=joins)

    async def _call_grammar(
        self, client: str, markup: Markup, turn: AssistantTurn, field: str, **options: Any
    ) -> Structure | None:
        """Build `_grammar` in the client's turn."""
        build = partial(_grammar, markup, turn, field, **options)
        work: Work[Structure | None] = Work(encode_seconds(text_size(turn.tools)), build)
        return await self._executor.run(client, work)


def _grammar(
    markup: Markup, turn: AssistantTurn, field: str, *, is_whole: bool, otherwise: str = ""
) -> Structure | None:
    """The grammar of a turn's calls. Raises InvalidParameter for an invalid tool schema."""
    try:
        source = call_grammar(
            markup,
            turn.tools,
            is_whole=is_whole,
            repeats=turn.parallel_tool_calls,
            otherwise=otherwise,
        )
    except ValueError as error:
        raise InvalidParameter("tools", str(error)) from error
    return None if source is None else Structure(StructureKind.GRAMMAR, source, field)

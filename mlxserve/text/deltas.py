"""DeltaDecoder: the engine's tokens to deltas of text, reasoning and tool calls.

    tokens ─ detokenizer ─ parser ─ stop strings ─ Delta
             half a        half a   the beginning
             character     marker   of one

Below each stage is what it holds back until the next tokens decide what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import (
    CacheReport,
    FinishReason,
    Output,
    SpeculationReport,
    TokenLogprob,
)
from mlxserve.text.parsing.markers import overlap
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import Event, ReasoningDelta, TextDelta, ToolCallDelta
from mlxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    prompt_tokens      of the whole prompt, cached or not
    completion_tokens  generated so far, including reasoning
    cached_tokens      of the prompt, found in the cache
    reasoning_tokens   of the completion
    image_tokens       of the prompt
    cache              why no more was cached; None if the request never started
    speculation        counts of drafted tokens; None without drafts
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache: CacheReport | None = None
    reasoning_tokens: int = 0
    speculation: SpeculationReport | None = None
    image_tokens: int = 0


class Delta(NamedTuple):
    """A piece of a streamed answer.

    for delta in llm.stream("Once upon"):
        print(delta.text, end="")

    An answer comes as reasoning, then text, then tool calls, each possibly empty; some models mix
    them. Within a delta that order holds.

    text, reasoning   continue those of the deltas before
    token_ids         new tokens; text may come later than its tokens
    logprobs          one per token, if requested
    finish_reason     of the last delta; None before
    usage             of the first and the last delta
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    stop: str | None = None  # the stop string that ended the answer
    answer_index: int = 0  # index among the answers to one request


class DeltaDecoder:
    """Turns the outputs of one request into deltas.

    Detokenises, tells reasoning and tool calls from text, and ends at stop strings, which are
    searched for in the text only. Without a parser everything is text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stop_ids: frozenset[int],
        parser: TurnParser | None = None,
        *,
        answer_index: int = 0,
        image_tokens: int = 0,
    ) -> None:
        """image_tokens: number in the prompt, for its usage."""
        self._decoder = tokenizer.stream(None if parser is None else parser.tokens)
        self._parser = parser
        self._stops = StopStrings(params.stop)
        self._min_tokens = params.min_tokens
        self._hidden = frozenset() if params.ignore_eos else stop_ids
        self._is_plain = parser is None and not params.stop
        self._answer_index = answer_index
        self._num_outputs = 0
        self._num_reasoning = 0
        self._is_first = True
        self._image_tokens = image_tokens

    def push(self, output: Output) -> Delta:
        token_ids = output.token_ids
        if self._is_plain and not self._is_first and output.finish_reason is None:
            # Most outputs, in half the time of what follows. None of their tokens is hidden: a
            # token that ends the answer comes with a finish reason.
            self._num_outputs += len(token_ids)
            text = self._decoder.push(token_ids)
            return Delta(text, token_ids, output.logprobs, answer_index=self._answer_index)
        early: list[Event] = []  # not searched for stop strings
        events: list[Event] = []
        for token in token_ids:
            self._num_outputs += 1
            target = early if self._num_outputs <= self._min_tokens else events
            if token not in self._hidden:
                self._num_reasoning += self._parser is not None and self._parser.is_thinking
                target += self._events(self._decoder.push([token]))
        is_last = output.finish_reason is not None
        if is_last:
            events += self._events(self._decoder.finish())
            events += self._parser.finish() if self._parser is not None else ()
        return self._delta(output, [*early, *self._stops.filter(events, is_last=is_last)])

    def _events(self, text: str) -> Iterable[Event]:
        if self._parser is not None:
            return self._parser.push(text)
        return (TextDelta(text),) if text else ()

    def _delta(self, output: Output, events: Sequence[Event]) -> Delta:
        reason = self._reason(output.finish_reason)
        has_usage = reason is not None or self._is_first
        self._is_first = False
        text = reasoning = ""
        calls: list[ToolCallDelta] = []
        for event in events:
            if isinstance(event, TextDelta):
                text += event.text
            elif isinstance(event, ReasoningDelta):
                reasoning += event.text
            else:
                calls.append(event)
        return Delta(
            text,
            output.token_ids,
            output.logprobs,
            reason,
            self._usage(output) if has_usage else None,
            reasoning,
            tuple(calls),
            self._stops.found,
            self._answer_index,
        )

    def _reason(self, reason: FinishReason | None) -> FinishReason | None:
        """Return the engine's reason, unless a stop string or tool calls ended the text."""
        if self._stops.found is not None:
            return FinishReason.STOP
        if self._parser is None:
            return reason
        if self._parser.is_over or (reason is FinishReason.STOP and self._parser.num_calls):
            return FinishReason.TOOL_CALLS
        return reason

    def _usage(self, output: Output) -> Usage:
        return Usage(
            output.num_prompt,
            self._num_outputs,
            output.num_cached,
            output.cache,
            self._num_reasoning,
            output.speculation,
            self._image_tokens,
        )


class StopStrings:
    """Ends the text of an answer before the first stop string in it, which is `found`."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = tuple(stops)
        # May be the beginning of a stop string.
        self._held = ""

    def filter(self, events: Sequence[Event], *, is_last: bool) -> list[Event]:
        """The events up to a stop string, which does not span events other than text."""
        if not self._stops:
            return list(events)
        kept: list[Event] = []
        for event in events:
            if isinstance(event, TextDelta):
                self._held += event.text
                kept += self._release(is_certain=False)
            else:
                kept += self._release(is_certain=True)
                kept += () if self.found is not None else (event,)
            if self.found is not None:
                return kept
        return kept + self._release(is_certain=True) if is_last else kept

    def _release(self, *, is_certain: bool) -> list[Event]:
        matches = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            cut, self.found = min(matches)
        else:
            cut = len(self._held) - (0 if is_certain else overlap(self._held, self._stops))
        text, self._held = self._held[:cut], self._held[cut:]
        return [TextDelta(text)] if text else []

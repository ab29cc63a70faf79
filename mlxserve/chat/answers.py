"""AnswerStream: the stream of deltas behind every answer, and whole answers built from it.

A streaming reply renders each delta, a plain one renders the result of `AnswerStream.whole`.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from mlxserve.core.errors import GrammarFailed
from mlxserve.request import FinishReason, Request, TokenLogprob
from mlxserve.text.deltas import Delta, DeltaDecoder, Usage
from mlxserve.text.parsing.turn import ToolCall, join_calls

if TYPE_CHECKING:  # it imports mlx, which waits for machine.prepare()
    from mlxserve.engine.output_stream import OutputStream

Observe: TypeAlias = Callable[[Delta], None]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished answer.

    logprobs: one entry per token if they were requested, else None
    alternatives: the other answers if `SamplingParams.n` is above 1
    reasoning, tool_calls: only of an answer to a conversation; the text of any other answer is
        everything that the model generated
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    alternatives: tuple[RequestOutput, ...] = ()


async def fold(
    deltas: AsyncIterable[Delta], num_answers: int, *, wants_logprobs: bool
) -> list[RequestOutput]:
    """Join deltas into whole answers, by `Delta.answer_index`."""
    pieces: list[list[Delta]] = [[] for _ in range(num_answers)]
    async for delta in deltas:
        pieces[delta.answer_index].append(delta)
    return [_joined(answer, wants_logprobs=wants_logprobs) for answer in pieces]


def _joined(deltas: Sequence[Delta], *, wants_logprobs: bool) -> RequestOutput:
    last = deltas[-1]
    assert last.finish_reason is not None, "an answer ended without a reason"
    assert last.usage is not None, "an answer ended without its usage"
    return RequestOutput(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        usage=last.usage,
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs)
        if wants_logprobs
        else None,
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=join_calls([call for delta in deltas for call in delta.tool_calls]),
    )


class AnswerStream:
    """The deltas of answers that were submitted together. Closing it early aborts them."""

    def __init__(
        self,
        outputs: OutputStream,
        answers: Sequence[tuple[Request, DeltaDecoder]],
        *,
        keep: Callable[[Request], None],
        observe: Observe | None = None,
    ) -> None:
        """Stream the answers of submitted requests.

        keep: called with a request that ended in tool calls, as its conversation will continue
        observe: called with each delta before the reader gets it; its errors end the stream
        """
        self._outputs = outputs
        self._answers = {answer[0].id: answer for answer in answers}
        self._keep = keep
        self._observe = observe

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """Return the next delta.

        Raises EngineStopped if the engine ends before the answers do, and GrammarFailed.
        """
        output = await self._outputs.__anext__()
        request, decoder = self._answers[output.request_id]
        delta = decoder.push(output)
        if delta.finish_reason is not None:
            self._finish(request, delta.finish_reason)
        if self._observe is not None:
            self._observe(delta)
        return delta

    async def whole(self) -> list[RequestOutput]:
        """Return all answers, in order. Raises the errors of iterating."""
        requests = [request for request, _ in self._answers.values()]
        wants_logprobs = requests[0].params.logprobs is not None
        return await fold(self, len(requests), wants_logprobs=wants_logprobs)

    async def aclose(self) -> None:
        """Abort the answers that have not ended."""
        self._outputs.close()

    def _finish(self, request: Request, reason: FinishReason) -> None:
        # The decoder finds a stop string before the engine knows of it.
        self._outputs.finish(request.id, reason)
        if reason is FinishReason.TOOL_CALLS:
            self._keep(request)
        if request.guide is not None and request.guide.error is not None:
            raise GrammarFailed(f"The answer's grammar became too much work: {request.guide.error}")

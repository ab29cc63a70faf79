"""Ollama's replies, whole or as lines of JSON.

Each line is a piece of the answer; the last one says `done` and has the durations. Arguments of
calls are objects, so a call is sent when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from mlxserve.api.answers import Answers
from mlxserve.api.errors import ApiError, json_response
from mlxserve.api.server.sse import JSON_LINES, json_line
from mlxserve.api.usage import Tokens, reports
from mlxserve.request import FinishReason, TokenLogprob
from mlxserve.text.conversation import Call
from mlxserve.text.parsing.turn import ToolCall, ToolCallDelta

if TYPE_CHECKING:
    from mlxserve.api.ollama.schema import OllamaRequest
    from mlxserve.text.deltas import Delta

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class OllamaReply:
    """The reply to one request.

    member: the member that holds the answer: "message" or "response"
    started: arrival of the request, in seconds of `perf_counter`
    load_seconds: time that the request waited for its model
    token_text: the text of one token alone, for log-probabilities; None if none are wanted
    answers: set once they are submitted
    context: the prompt's tokens, which the last object returns with the answer's for the next
        request; None to return none
    """

    member: str
    model: str
    started: float
    load_seconds: float
    token_text: Callable[[int], str] | None = None
    answers: Answers | None = None
    context: Sequence[int] | None = None
    _reason: FinishReason | None = None
    _token_ids: list[int] = field(default_factory=list)
    _call: list[ToolCallDelta] = field(default_factory=list)  # pieces of the open call
    _num_calls: int = 0

    async def whole(self, answers: Answers) -> dict[str, Any]:
        [output] = await answers.whole()
        self._reason = output.finish_reason
        self._token_ids += output.token_ids
        answer = self.piece(output.text, output.reasoning, output.tool_calls, output.logprobs or ())
        return {**answer, **self._end(answers.tokens)}

    def opening(self) -> bytes:
        return b""

    def push(self, delta: Delta) -> bytes:
        self._reason = delta.finish_reason
        self._token_ids += delta.token_ids
        return b"".join(map(json_line, self._pieces(delta)))

    def ending(self, tokens: Tokens) -> bytes:
        return json_line({**self.piece(), **self._end(tokens)})

    def failure(self, error: ApiError) -> bytes:
        return json_line(error.ollama_body())

    def keepalive(self) -> bytes:
        """An empty piece: clients parse every line."""
        return json_line(self.piece())

    def _pieces(self, delta: Delta) -> Iterator[dict[str, Any]]:
        logprobs = delta.logprobs if self.token_text else ()
        if delta.text or delta.reasoning or logprobs:
            yield self.piece(delta.text, delta.reasoning, logprobs=logprobs)
        for call in self._completed(delta):
            yield self.piece(calls=[call])

    def _completed(self, delta: Delta) -> Iterator[ToolCall]:
        """Yield completed calls: a call ends where the next one begins, or with the answer."""
        for piece in delta.tool_calls:
            if piece.id is not None:
                yield from self._close_call()
            self._call.append(piece)
        if delta.finish_reason is not None:
            yield from self._close_call()

    def _close_call(self) -> Iterator[ToolCall]:
        if self._call:
            first, arguments = self._call[0], "".join(piece.arguments for piece in self._call)
            self._call.clear()
            yield ToolCall(first.id or "", first.name or "", arguments)

    def piece(
        self,
        text: str = "",
        thinking: str = "",
        calls: Sequence[ToolCall] = (),
        logprobs: Sequence[TokenLogprob] = (),
    ) -> dict[str, Any]:
        """Render a piece of the answer, or all of it."""
        others = {"thinking": thinking, "tool_calls": [self._rendered(call) for call in calls]}
        others = {name: value for name, value in others.items() if value}
        message = {"role": "assistant", "content": text, **others}
        content = {"message": message} if self.member == "message" else {"response": text, **others}
        piece = {"model": self.model, "created_at": timestamp(), **content, "done": False}
        return {**piece, "logprobs": list(map(self._logprob, logprobs))} if logprobs else piece

    def _rendered(self, call: ToolCall) -> dict[str, Any]:
        arguments = Call(call.id, call.name, call.arguments).as_object()
        function = {"index": self._num_calls, "name": call.name, "arguments": arguments}
        self._num_calls += 1
        return {"id": call.id, "function": function}

    def _logprob(self, token: TokenLogprob) -> dict[str, Any]:
        top = [self._candidate(*candidate) for candidate in token.top]
        return {**self._candidate(token.token_id, token.logprob), "top_logprobs": top}

    def _candidate(self, token_id: int, logprob: float) -> dict[str, Any]:
        assert self.token_text is not None
        return {"token": self.token_text(token_id), "logprob": max(logprob, LOWEST_LOGPROB)}

    def _end(self, tokens: Tokens) -> dict[str, Any]:
        """The members that only the last object has. Durations are in nanoseconds."""
        assert self.answers is not None, "nothing was submitted"
        timing = self.answers.timing
        ended = {
            "done": True,
            "done_reason": "length" if self._reason is FinishReason.LENGTH else "stop",
            "total_duration": nanoseconds(perf_counter() - self.started),
            "load_duration": nanoseconds(self.load_seconds),
            "prompt_eval_count": tokens.prompt,
            "prompt_eval_duration": nanoseconds(timing.to_first_token),
            "eval_count": tokens.completion,
            "eval_duration": nanoseconds(timing.since_first_token),
            **reports(tokens),
        }
        if self.context is not None:
            ended["context"] = [*self.context, *self._token_ids]
        return ended


def lines_or_object(body: OllamaRequest, pieces: Sequence[dict[str, Any]]) -> Response:
    """Reply with these lines if the request streams, which is the default, or with the last one.

    Clients that read lines never see one that does not end.
    """
    if not body.stream:
        return json_response(pieces[-1])
    return Response(b"".join(map(json_line, pieces)), media_type=JSON_LINES.media_type)


def timestamp(moment: datetime | None = None) -> str:
    """Format a time, by default now, as Go does."""
    moment = moment or datetime.now(UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

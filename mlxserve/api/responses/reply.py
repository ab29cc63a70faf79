"""ResponseReply: a response while it is generated, whole or as events.

    created, in_progress                 at once
      the events of `items.py`           from the first piece of each item on
    completed | incomplete | failed

Event numbers rise by one; clients index items and parts, so each is added before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxserve.api.answers import Answers
from mlxserve.api.errors import ApiError, encode_json
from mlxserve.api.responses.items import ResponseOutput
from mlxserve.api.responses.schema import ResponsesRequest
from mlxserve.api.server.sse import named_event, named_event_of
from mlxserve.api.usage import Tokens, reports
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import FinishReason

if TYPE_CHECKING:
    from mlxserve.text.deltas import Delta


@dataclass(slots=True, kw_only=True)
class ResponseReply:
    """A response: its output so far, and the number of its next event."""

    id: str
    created: int
    model: str
    request: ResponsesRequest
    params: SamplingParams
    on_end: Callable[[dict[str, Any]], None]
    _number: int = 0
    _begun: bytes = b""  # the response without output
    _output: ResponseOutput = field(init=False)
    _finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self._output = ResponseOutput(
            self.id, self.request.addresses, signs=self.request.signs_reasoning
        )

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """The output built from the same events, in their order."""
        async for delta in answers:
            self._finish_reason = delta.finish_reason
            for _event in self._output.push(delta):
                pass
        for _event in self._output.finish(self._status):
            pass
        return self._ended(answers.tokens)

    # Events.

    def opening(self) -> bytes:
        self._begun = encode_json(self._response("in_progress"))
        return self._progress("created") + self._progress("in_progress")

    def push(self, delta: Delta) -> bytes:
        self._finish_reason = delta.finish_reason
        return b"".join(self._event(kind, **data) for kind, data in self._output.push(delta))

    def ending(self, tokens: Tokens) -> bytes:
        status = self._status
        events = [self._event(kind, **data) for kind, data in self._output.finish(status)]
        return b"".join([*events, self._event(status, response=self._ended(tokens))])

    def failure(self, error: ApiError) -> bytes:
        """End the stream with the event `response.failed`."""
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("failed", response=response)

    def keepalive(self) -> bytes:
        """A real event: some clients time out on a stream that only sends comments."""
        return self._progress("in_progress")

    def _progress(self, kind: str) -> bytes:
        """An event with the response as it began, which is encoded once: it repeats the request."""
        number = self._number
        self._number += 1
        kind = f"response.{kind}"
        head = encode_json({"type": kind, "sequence_number": number})
        return named_event_of(kind, head[:-1] + b',"response":' + self._begun + b"}")

    # Objects.

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason is FinishReason.LENGTH else "completed"

    def _ended(self, tokens: Tokens) -> dict[str, Any]:
        status = self._status
        response = self._response(status)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["output"] = self._output.whole(status)
        response["usage"] = {
            "input_tokens": tokens.prompt,
            "input_tokens_details": tokens.prompt_details,
            "output_tokens": tokens.completion,
            "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
            "total_tokens": tokens.prompt + tokens.completion,
            **reports(tokens),
        }
        self.on_end(response)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self.request.instructions,
            "metadata": self.request.metadata or {},
            "model": self.model,
            "output": [],
            "previous_response_id": self.request.previous_response_id,
            "reasoning": {"effort": self.request.effort, "summary": None},
            "store": self.request.store is not False,
            "temperature": self.params.temperature,
            **self.request.echo(),
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _event(self, kind: str, **data: Any) -> bytes:
        number = self._number
        self._number += 1
        kind = f"response.{kind}"
        return named_event(kind, {"type": kind, "sequence_number": number, **data})

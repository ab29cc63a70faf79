"""OpenAI's response objects, whole and in chunks, as plain dictionaries.

A reply object belongs to one reply: it knows its id, its model and the fields that the client
wants, and renders `Delta` as events and `RequestOutput` as JSON. It reads no socket and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxserve.api.answers import Answers
from mlxserve.api.errors import ApiError
from mlxserve.api.server.sse import DONE, KEEPALIVE, TextEvents, event
from mlxserve.api.usage import Tokens, reports
from mlxserve.core.version import __version__
from mlxserve.request import FinishReason, TokenLogprob
from mlxserve.text.parsing.turn import ToolCallDelta

if TYPE_CHECKING:
    from mlxserve.chat.answers import RequestOutput
    from mlxserve.text.deltas import Delta

FINGERPRINT = f"mlxserve-{__version__}"
LOWEST_LOGPROB = -9999.0  # JSON has no infinity; the value other servers send for it
_REPLACEMENT = "\ufffd"
_NOT_YET: Mapping[str, Any] = {"finish_reason": None}


@dataclass(slots=True, kw_only=True)
class _Reply:
    """The base of both replies.

    token_text: the text of one token alone, for log-probabilities
    """

    id: str
    created: int
    model: str
    token_text: Callable[[int], str]
    wants_logprobs: bool
    wants_usage: bool = False
    _texts: dict[tuple[int, str], TextEvents] = field(default_factory=dict)

    def events(self, delta: Delta) -> Iterator[bytes]:
        raise NotImplementedError

    def usage_chunk(self, tokens: Tokens) -> dict[str, Any]:
        raise NotImplementedError

    def rendered(self, outputs: Sequence[RequestOutput], tokens: Tokens) -> dict[str, Any]:
        raise NotImplementedError

    async def whole(self, answers: Answers) -> dict[str, Any]:
        return self.rendered(await answers.whole(), answers.tokens)

    def opening(self) -> bytes:
        return b""

    def push(self, delta: Delta) -> bytes:
        return b"".join(self.events(delta))

    def ending(self, tokens: Tokens) -> bytes:
        return (event(self.usage_chunk(tokens)) if self.wants_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        """End the stream with an error as OpenAI's servers do: without [DONE]."""
        return event(error.body())

    def keepalive(self) -> bytes:
        return KEEPALIVE

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def _text_event(
        self, index: int, kind: str, text: str, chunk: Callable[[str], dict[str, Any]]
    ) -> bytes:
        """Encode a chunk in which only this text is new."""
        events = self._texts.get((index, kind))
        if events is None:
            events = self._texts[index, kind] = TextEvents(lambda place: event(chunk(place)))
        return events.encode(text)

    def _chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._object(kind, choices)
        if self.wants_usage:
            chunk["usage"] = None
        return chunk

    def _usage_chunk(self, kind: str, tokens: Tokens) -> dict[str, Any]:
        return {**self._object(kind, []), "usage": usage(tokens)}


@dataclass(slots=True, kw_only=True)
class ChatReply(_Reply):
    """The objects `chat.completion` and `chat.completion.chunk`."""

    _opened: set[int] = field(default_factory=set)  # choices whose role was sent

    def events(self, delta: Delta) -> Iterator[bytes]:
        """Yield the role once per choice, then text, then an empty delta with the finish reason."""
        index = delta.answer_index
        if index not in self._opened:
            self._opened.add(index)
            yield event(self._delta(index, {"role": "assistant", "content": ""}))
        if delta.reasoning:
            yield self._piece(index, "reasoning_content", delta.reasoning)
        if self.wants_logprobs and delta.logprobs:
            yield event(self._delta(index, {"content": delta.text}, logprobs=delta.logprobs))
        elif delta.text:
            yield self._piece(index, "content", delta.text)
        for call in delta.tool_calls:
            yield event(self._delta(index, {"tool_calls": [_call_piece(call)]}))
        if delta.finish_reason is not None:
            yield event(self._delta(index, {}, ending=_ending(delta.finish_reason)))

    def usage_chunk(self, tokens: Tokens) -> dict[str, Any]:
        return self._usage_chunk("chat.completion.chunk", tokens)

    def rendered(self, outputs: Sequence[RequestOutput], tokens: Tokens) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(output),
                "logprobs": self._logprobs(output.logprobs or ()),
                **_ending(output.finish_reason),
            }
            for index, output in enumerate(outputs)
        ]
        return {**self._object("chat.completion", choices), "usage": usage(tokens)}

    def _piece(self, index: int, name: str, text: str) -> bytes:
        return self._text_event(index, name, text, lambda place: self._delta(index, {name: place}))

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: Sequence[TokenLogprob] = (),
        ending: Mapping[str, Any] = _NOT_YET,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            **ending,
        }
        return self._chunk("chat.completion.chunk", [choice])

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        return {"content": [self._token(token) for token in logprobs], "refusal": None}

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        top = [self._candidate(token_id, logprob) for token_id, logprob in token.top]
        return {**self._candidate(token.token_id, token.logprob), "top_logprobs": top}

    def _candidate(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token_id)
        # A token may hold a part of a character; its bytes are then not those of its text.
        text_bytes = None if _REPLACEMENT in text else list(text.encode())
        return {"token": text, "bytes": text_bytes, "logprob": _finite(logprob)}


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt in front of its answer.

    logprobs: those of all tokens but the first; empty unless they are wanted
    """

    text: str
    first_token: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(slots=True, kw_only=True)
class CompletionReply(_Reply):
    """The object `text_completion`, whose chunks hold less text.

    echoed: the prompt that each answer begins with; empty for none
    """

    echoed: Sequence[EchoedPrompt] = ()
    _opened: set[int] = field(default_factory=set)  # choices whose prompt was sent
    _offsets: dict[int, int] = field(default_factory=dict)  # by index: characters so far

    def events(self, delta: Delta) -> Iterator[bytes]:
        index = delta.answer_index
        if self.echoed and index not in self._opened:
            self._opened.add(index)
            yield event(self._chunk("text_completion", [self._prompt(index)]))
        if self.wants_logprobs and (delta.text or delta.logprobs):
            yield event(self._text(index, delta.text, delta.logprobs))
        elif delta.text:
            yield self._text_event(
                index, "text", delta.text, lambda place: self._text(index, place, None)
            )
        if delta.finish_reason is not None:
            yield event(self._text(index, "", None, _ending(delta.finish_reason)))

    def usage_chunk(self, tokens: Tokens) -> dict[str, Any]:
        return self._usage_chunk("text_completion", tokens)

    def rendered(self, outputs: Sequence[RequestOutput], tokens: Tokens) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            prompt = self._prompt(index) if self.echoed else None
            ending = _ending(output.finish_reason)
            answer = self._choice(index, output.text, output.logprobs, ending)
            choices.append(answer if prompt is None else _joined(prompt, answer))
        return {**self._object("text_completion", choices), "usage": usage(tokens)}

    def _text(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob] | None,
        ending: Mapping[str, Any] = _NOT_YET,
    ) -> dict[str, Any]:
        return self._chunk("text_completion", [self._choice(index, text, logprobs, ending)])

    def _prompt(self, index: int) -> dict[str, Any]:
        """The echoed prompt as a choice.

        Nothing precedes its first token, which has no log-probability.
        """
        prompt, logprobs = self.echoed[index], None
        if self.wants_logprobs:
            first = TokenLogprob(prompt.first_token, 0.0)
            logprobs = self._logprobs(index, (first, *prompt.logprobs))
            logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        return {"index": index, "text": prompt.text, "logprobs": logprobs, **_NOT_YET}

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob] | None,
        ending: Mapping[str, Any],
    ) -> dict[str, Any]:
        shows_logprobs = self.wants_logprobs and logprobs is not None
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, logprobs or ()) if shows_logprobs else None,
            **ending,
        }

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self.token_text(token.token_id) for token in logprobs]
        offset = self._offsets.get(index, 0)
        offsets = []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(token.logprob) for token in logprobs],
            "top_logprobs": [
                {self.token_text(token_id): _finite(logprob) for token_id, logprob in token.top}
                for token in logprobs
            ],
            "text_offset": offsets,
        }


def _joined(prompt: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Prepend the echoed prompt's choice to an answer's."""
    logprobs = answer["logprobs"]
    if logprobs is not None:
        logprobs = {name: prompt["logprobs"][name] + values for name, values in logprobs.items()}
    return {**answer, "text": prompt["text"] + answer["text"], "logprobs": logprobs}


def _ending(reason: FinishReason) -> dict[str, Any]:
    """The finish reason; one that OpenAI's API lacks goes into `stop_reason`, as in vLLM."""
    if reason is FinishReason.REPETITION:
        return {"finish_reason": str(FinishReason.STOP), "stop_reason": str(reason)}
    return {"finish_reason": str(reason)}


def _message(answer: RequestOutput) -> dict[str, Any]:
    """The answer as a message. Its content is null only if it consists of tool calls."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.text if answer.text or not answer.tool_calls else None,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.tool_calls
        ]
    return message


def _call_piece(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def usage(tokens: Tokens) -> dict[str, Any]:
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.completion,
        "total_tokens": tokens.prompt + tokens.completion,
        "prompt_tokens_details": tokens.prompt_details,
        "completion_tokens_details": {"reasoning_tokens": tokens.reasoning},
        **reports(tokens),
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)

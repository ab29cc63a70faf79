"""Chat: prompts to token ids, and the one stream that every answer comes from.

    answer = await chat.submit(chat.render(messages), params)
    async for delta in answer: ...

A server-sent event frames these deltas, the library folds them, the terminal paints them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlxserve.errors import (
    EngineStopped,
    GrammarFailed,
    InvalidParameter,
    InvalidRequest,
    PromptTooLong,
    UnknownPrefix,
)
from mlxserve.request import FinishReason, Pooling, Request, Resized, check_num_pages
from mlxserve.request_options import RequestOptions
from mlxserve.sampling_params import SamplingParams
from mlxserve.stats import Stats
from mlxserve.text.deltas import Delta, DeltaDecoder, Usage
from mlxserve.text.guidance.planner import Planner
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import AssistantTurn
from mlxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # they import mlx, which waits for machine.prepare()
    from mlxserve.engine.async_engine import AsyncEngine, OutputStream
    from mlxserve.engine.snapshot import Snapshot

__all__ = ["Answer", "Chat", "Delta", "DeltaDecoder", "NamedPrefix", "RequestOptions", "Usage"]

_DEFAULTS = RequestOptions()
_MARGIN = 4  # how much longer a text may look than it can be, before it is refused unread


@dataclass(frozen=True, slots=True)
class NamedPrefix:
    """What `prefix_name` stands for. Its pages are pinned under the id of what computed them."""

    token_ids: tuple[int, ...]
    cache_salt: str | None
    request_id: str


class Answer:
    """The deltas of one request. Closing it early aborts the request."""

    def __init__(self, outputs: OutputStream, text: DeltaDecoder, tool_keep_seconds: float) -> None:
        """An answer that ends in calls of tools is about to go on: for so long its pages are
        evicted after those of others."""
        self.request_id = outputs.request.id
        self.num_prompt = outputs.request.num_prompt
        self._outputs = outputs
        self._text = text
        self._tool_keep_seconds = tool_keep_seconds
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """Raises EngineStopped when the engine ends before the answer does, and GrammarFailed."""
        if self._is_over:
            raise StopAsyncIteration
        delta = self._text.push(await self._outputs.__anext__())
        if delta.finish_reason is not None:
            self._is_over = True
            self._outputs.close(delta.finish_reason)  # a stop string ends it here first
            if delta.finish_reason is FinishReason.TOOL_CALLS and self._tool_keep_seconds:
                self._outputs.keep(self._tool_keep_seconds)
            guide = self._outputs.request.guide
            if guide is not None and guide.error is not None:
                raise GrammarFailed(f"The answer's grammar became too much work: {guide.error}")
        return delta

    async def aclose(self) -> None:
        """Abort the request, if it has not ended."""
        self._is_over = True
        self._outputs.close()


class Chat:
    """A loaded model as everybody uses it. Methods may be called from any event loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        vocab_size: int,
        default_params: SamplingParams,
        fingerprint: str = "",
        tool_keep_seconds: float = 60.0,
    ) -> None:
        """`fingerprint` names the model's weights: no page is shared with another model's.

        `tool_keep_seconds` as in EngineConfig.
        """
        self.model_name = model_name
        self.default_params = default_params
        self.created = int(time.time())
        self._engine = engine
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self._tool_keep_seconds = tool_keep_seconds
        self._planner = Planner(tokenizer, vocab_size)
        self._numbers = itertools.count()
        self._prefixes: dict[str, NamedPrefix] = {}
        self._prefix_lock = threading.Lock()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer."""
        return self._engine.max_model_len

    @property
    def can_call(self) -> bool:
        """Whether the model can be shown tools, and its calls of them be read."""
        return self._tokenizer.markup.can_call and self._tokenizer.supports_tools

    @property
    def can_think(self) -> bool:
        """Whether the model was taught to think before it answers."""
        return self._tokenizer.markup.is_taught

    # ---- text and tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """A conversation as token ids, ready to be answered. Raises InvalidRequest, PromptTooLong."""
        contents = (message.get("content") for message in messages if isinstance(message, Mapping))
        self._refuse_huge(sum(len(content) for content in contents if isinstance(content, str)))
        return self._tokenizer.render(messages, tools=tools, **template_kwargs)

    def _refuse_huge(self, num_characters: int) -> None:
        """Before a text is tokenised, which takes seconds for one that can never fit.

        The margin is for tokenizers that drop or join characters first.
        """
        num_tokens = num_characters // (_MARGIN * self._tokenizer.max_token_size)
        if num_tokens >= self.max_model_len:
            raise PromptTooLong.for_answer(
                num_tokens, self.max_model_len, num_characters=num_characters
            )

    def encode(self, text: str) -> list[int]:
        """Raises PromptTooLong for a text that is far too long, InvalidRequest."""
        self._refuse_huge(len(text))
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Raises InvalidParameter for what is no token: some tokenizers fail, some say nothing."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            raise InvalidParameter("tokens", f"must be from 0 to {self._vocab_size - 1}")
        return self._tokenizer.decode(token_ids)

    # ---- answers

    async def submit(
        self, prompt: Sequence[int], params: SamplingParams, options: RequestOptions = _DEFAULTS
    ) -> Answer:
        """Queue a prompt. Whatever is wrong with it is raised here, before anything is computed.

        Raises InvalidRequest, InvalidParameter, PromptTooLong, UnknownPrefix, QueueFull,
        EngineStopped.
        """
        if params.n != 1:
            raise InvalidParameter(
                "n", "must be 1 where one answer is streamed; ask for all at once"
            )
        [answer] = await self.submit_all(prompt, params, options)
        return answer

    async def submit_all(
        self, prompt: Sequence[int], params: SamplingParams, options: RequestOptions = _DEFAULTS
    ) -> list[Answer]:
        """As `submit`, with as many answers as `params.n` says: the prompt is computed once."""
        if options.prefix_name is not None:
            prefix = self._named(options.prefix_name)
            prompt = (*prefix.token_ids, *prompt)
            salt = prefix.cache_salt if options.cache_salt is None else options.cache_salt
            options = replace(options, cache_salt=salt)
        names = options.request_ids or [None] * params.n
        return await self._submit(
            [
                await self._answer_to(prompt, choice, options, request_id=name)
                for choice, name in zip(params.choices(), names, strict=True)
            ]
        )

    async def _submit(self, asked: Sequence[tuple[Request, DeltaDecoder]]) -> list[Answer]:
        """All but the first are forks of it."""
        first, *others = (request for request, _ in asked)
        forks = [replace(request, fork_of=first.id) for request in others]
        streams = await self._engine.submit_all([first, *forks])
        return [
            Answer(stream, text, self._tool_keep_seconds)
            for stream, (_, text) in zip(streams, asked, strict=True)
        ]

    async def _answer_to(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        pins: bool = False,
        request_id: str | None = None,
    ) -> tuple[Request, DeltaDecoder]:
        """A request that is not yet queued, and what makes text of its tokens."""
        turn = options.turn
        self._check(prompt, params)
        params = self._without_calls(params, turn)
        stop_ids = self._tokenizer.eos_token_ids
        parser = self._parser(prompt, turn) if turn is not None else None
        request = Request(
            id=request_id or f"request-{next(self._numbers)}",
            token_ids=list(prompt),
            params=params,
            stop_ids=stop_ids,
            # The fingerprint has no zero byte: no salt can pass for another model's.
            cache_salt=f"{self._fingerprint}\0{options.cache_salt or ''}".encode(),
            client=options.client,
            priority=options.priority,
            pins=pins,
            guide=await self._planner.guide(prompt, params, turn),
        )
        return request, DeltaDecoder(self._tokenizer, params, stop_ids, parser)

    def _without_calls(self, params: SamplingParams, turn: AssistantTurn | None) -> SamplingParams:
        """Where tools are shown but none may be called, the marker of a call is never chosen."""
        marker = self._tokenizer.markup.call_start
        if turn is None or turn.may_call or not turn.tools or len(marker) != 1:
            return params
        return replace(params, logit_bias={**params.logit_bias, marker[0]: -1e4})

    def _parser(self, prompt: Sequence[int], turn: AssistantTurn) -> TurnParser:
        markup = self._tokenizer.markup
        if turn.may_call and not markup.can_call:
            raise InvalidParameter(
                "tools", "how this model writes calls of tools is not known; leave them out"
            )
        is_thinking = markup.opens_thinking(prompt, self._tokenizer.decode)
        return TurnParser(markup, turn, is_thinking=is_thinking)

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise InvalidRequest("prompt: it is empty; at least one token is needed")
        if len(prompt) >= self.max_model_len:
            raise PromptTooLong.for_answer(len(prompt), self.max_model_len)
        self._check_ids(prompt, "prompt")
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if ids and max(ids) >= self._vocab_size:
                raise InvalidParameter(
                    name, f"token ids go up to {self._vocab_size - 1}, got {max(ids)}"
                )

    def _check_ids(self, token_ids: Sequence[int], field: str) -> None:
        if not all(isinstance(token, int) for token in token_ids) or not (
            min(token_ids) >= 0 and max(token_ids) < self._vocab_size
        ):
            raise InvalidParameter(
                field, f"token ids must be whole numbers from 0 to {self._vocab_size - 1}"
            )

    # ---- vectors

    async def embed(
        self,
        token_ids: Sequence[int],
        *,
        pooling: Pooling = Pooling.MEAN,
        dimensions: int | None = None,
    ) -> list[float]:
        """A text as a vector of length one, from the model's last hidden states.

        Computed beside the answers under way, in pieces between their steps. `dimensions` keeps
        the first ones. Raises InvalidRequest, InvalidParameter, PromptTooLong, EngineStopped.
        """
        if not token_ids:
            raise InvalidRequest("input: it is empty; at least one token is needed")
        if len(token_ids) > self.max_model_len:
            raise PromptTooLong.for_embedding(len(token_ids), self.max_model_len)
        self._check_ids(token_ids, "input")
        return await self._engine.embed(token_ids, pooling, dimensions)

    # ---- named prefixes

    async def add_prefix(
        self, name: str, token_ids: Sequence[int], *, cache_salt: str | None = None
    ) -> None:
        """Compute a prefix and keep its pages, for requests that begin with it.

        It is found only by requests with the same `cache_salt`. A prefix that had the name is
        replaced once this one is computed; until then both count against `max_pinned_fraction`.
        Raises InvalidRequest for an empty name or prefix, PrefixQuotaExceeded, and what `submit`
        raises.
        """
        if not name:
            raise InvalidParameter("prefix_name", "must not be empty")
        params = SamplingParams(max_tokens=1, temperature=0)
        options = RequestOptions(cache_salt=cache_salt)
        [answer] = await self._submit(
            [await self._answer_to(token_ids, params, options, pins=True)]
        )
        try:
            reason = [delta.finish_reason async for delta in answer][-1]
            if reason is FinishReason.ABORT:
                raise EngineStopped("The engine ended before the prefix was computed.")
        except BaseException:
            await answer.aclose()
            self._engine.unpin(answer.request_id)  # it may have ended just now
            raise
        new = NamedPrefix(tuple(token_ids), cache_salt, answer.request_id)
        with self._prefix_lock:
            old, self._prefixes[name] = self._prefixes.get(name), new
        if old is not None:
            self._engine.unpin(old.request_id)

    def remove_prefix(self, name: str) -> None:
        """Forget a named prefix; its pages may be evicted now. Raises UnknownPrefix."""
        with self._prefix_lock:
            old = self._named(name)
            del self._prefixes[name]
        self._engine.unpin(old.request_id)

    def prefix(self, name: str) -> tuple[int, ...]:
        """The token ids of a named prefix. Raises UnknownPrefix."""
        return self._named(name).token_ids

    def prefixes(self) -> dict[str, int]:
        """Each named prefix and its number of tokens."""
        with self._prefix_lock:
            return {name: len(prefix.token_ids) for name, prefix in self._prefixes.items()}

    def _named(self, name: str) -> NamedPrefix:
        prefix = self._prefixes.get(name)
        if prefix is None:
            raise UnknownPrefix.named(name, self._prefixes)
        return prefix

    # ---- the engine

    def stats(self) -> Stats:
        return self._engine.stats()

    async def snapshot(self) -> Snapshot:
        """Every request and page between two steps. Raises EngineStopped."""
        return await self._engine.snapshot()

    def is_alive(self) -> bool:
        """Whether the engine has not ended."""
        return self._engine.is_alive()

    def seconds_since_beat(self) -> float:
        """Since the engine last ended a step, or showed in idleness that it is there."""
        return self._engine.seconds_since_beat()

    async def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Forget every cached page but those of named prefixes.

        False, and nothing happened, while requests hold pages. `force` takes theirs away first:
        they compute them again, and their answers stay the same.
        """
        return await self._engine.reset_prefix_cache(force=force)

    async def resize_cache(self, num_pages: int) -> Resized:
        """Give the cache so many pages: memory back to the machine, or more of it.

        Answers under way stay the same; where pages are too few for all of them some are computed
        again later. Raises InvalidParameter, OutOfMemory, PrefixQuotaExceeded where named prefixes
        have too many pages for so few, QueueFull where a request has grown too long for them, and
        EngineStopped; nothing happened then.
        """
        check_num_pages(num_pages)
        return await self._engine.resize_cache(num_pages)

    async def check(self) -> None:
        """Audit requests and pages. Raises AssertionError."""
        await self._engine.check()

    def close(self) -> None:
        """End every answer and the engine. Idempotent."""
        self._planner.close()
        self._engine.close()

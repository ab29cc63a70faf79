"""Writer: prompts to token ids, and the one stream that every answer comes from.

answer = await writer.submit(writer.render(messages), params)
async for delta in answer: ...

AsyncEngine ── OutputStream ── AnswerStream ──> library, terminal, HTTP replies
               token ids       deltas of text
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxserve.chat.answers import AnswerStream, Observe
from mlxserve.chat.codec import TextCodec
from mlxserve.chat.image_prompts import ImagePrompts, after_prefix, text_of
from mlxserve.chat.named_prefixes import NamedPrefixes
from mlxserve.chat.prefix_store import NamedPrefix, PrefixStore
from mlxserve.chat.request_options import RequestOptions
from mlxserve.chat.view import View
from mlxserve.core.errors import (
    EngineStopped,
    InvalidParameter,
    InvalidRequest,
    PromptTooLong,
)
from mlxserve.core.sampling_params import MAX_BIAS, SamplingParams
from mlxserve.images.picture import pictures_of
from mlxserve.request import FinishReason, Forgotten, Request, TokenLogprob
from mlxserve.text.conversation import Conversation
from mlxserve.text.costs import text_size
from mlxserve.text.deltas import DeltaDecoder
from mlxserve.text.guidance.planner import Planner
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import AssistantTurn
from mlxserve.text.template_compat import AdaptedConversation
from mlxserve.text.templates import RenderedTooLong

if TYPE_CHECKING:  # they import mlx, which waits for machine.prepare()
    from mlxserve.engine.async_engine import AsyncEngine

_DEFAULTS = RequestOptions()


class Writer:
    """The answers and named prefixes of one view. Usable from any event loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        codec: TextCodec,
        planner: Planner,
        view: View,
        *,
        default_params: SamplingParams,
        request_numbers: Iterator[int] | None = None,
        prefix_file: Path | None = None,
        images: ImagePrompts | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_keep_seconds: float = 60.0,
        max_num_waiting: int | None = None,
    ) -> None:
        """Write answers with an engine.

        planner: compiles the grammars of answers; `close` closes it
        request_numbers: for requests without an id, unique in the engine; None counts its own
        prefix_file: stores named prefixes; None for this process only
        images: puts the images of messages into prompts; None for a model that reads text only
        template_kwargs: default variables of the chat template
        tool_keep_seconds: as in EngineConfig
        max_num_waiting: as in SchedulerConfig; None for no limit
        """
        self._engine = engine
        self._codec = codec
        self._tokenizer = codec.tokenizer
        self._planner = planner
        self._view = view
        self._default_params = default_params
        self._numbers = itertools.count() if request_numbers is None else request_numbers
        self._images = images or ImagePrompts(None)
        self._template_kwargs = dict(template_kwargs or {})
        self._tool_keep_seconds = tool_keep_seconds
        self._max_num_waiting = max_num_waiting
        self.prefixes = NamedPrefixes(
            engine, PrefixStore(prefix_file), self._compute, salt_of=view.page_salt
        )

    @property
    def supports_images(self) -> bool:
        """True if messages may hold images."""
        return self._images.reader is not None

    @property
    def no_vision_reason(self) -> str:
        """The reason if a model that was trained to see reads text only; empty otherwise."""
        return self._images.no_vision_reason

    # ---- prompts

    def fit(self, conversation: Conversation) -> AdaptedConversation:
        """Adapt a conversation to the model's template. Raises InvalidRequest."""
        return self._tokenizer.template.fit(conversation)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        on_change: Callable[[str], None] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Render messages into the token ids of a prompt.

        A message's content is a text or a list of parts: {"type": "text", "text": str} and {"type":
        "image", "image": Image}. `on_change` is that of `Tokenizer.render`. Raises InvalidRequest,
        PromptTooLong.
        """
        messages, images = self._images.split(messages)
        self._codec.refuse_huge(text_size(messages, tools))
        try:
            token_ids = self._tokenizer.render(
                messages,
                tools=tools,
                max_characters=self._codec.max_characters,
                on_change=on_change,
                **{**self._template_kwargs, **template_kwargs},
            )
        except RenderedTooLong as error:
            raise self._codec.too_long(error.num_characters) from error
        return self._images.join(token_ids, images)

    # ---- answers

    async def submit(
        self, prompt: Sequence[int], params: SamplingParams, options: RequestOptions = _DEFAULTS
    ) -> AnswerStream:
        """Queue a prompt that has one answer. Errors are raised before anything is computed.

        Raises InvalidRequest, InvalidParameter, PromptTooLong, UnknownPrefix, QueueFull,
        EngineStopped.
        """
        if params.n != 1:
            raise InvalidParameter("n", "must be 1 where one answer is streamed")
        return await self.submit_all([prompt], params, options)

    async def submit_all(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        options: RequestOptions = _DEFAULTS,
        *,
        observe: Observe | None = None,
    ) -> AnswerStream:
        """Queue prompts together, all or none, for `params.n` answers to each.

        A prompt is computed once for its answers, which have consecutive indices. `observe` is that
        of AnswerStream. Raises the errors of `submit`.
        """
        self._refuse_crowd(len(prompts), params.n)
        salt = self._view.page_salt(options.cache_salt)
        if options.prefix_name is not None:
            prefix = self.prefixes.of_request(options.prefix_name, options.cache_salt)
            prompts = [after_prefix(prefix.token_ids, prompt) for prompt in prompts]
            salt = prefix.salt
        ids = self._request_ids(options.request_id, len(prompts) * params.n)
        answers: list[tuple[Request, DeltaDecoder]] = []
        for prompt in prompts:
            leader: str | None = None
            for choice in params.choices():
                answer = await self._answer(
                    prompt,
                    choice,
                    options,
                    next(ids),
                    salt=salt,
                    answer_index=len(answers),
                    fork_of=leader,
                )
                answers.append(answer)
                leader = leader or answer[0].id
        return await self._submit(answers, observe)

    def _refuse_crowd(self, num_prompts: int, num_answers: int) -> None:
        """Raises InvalidRequest for more requests at once than may ever wait."""
        num_requests, max_waiting = num_prompts * num_answers, self._max_num_waiting
        if max_waiting is not None and num_requests > max_waiting:
            raise InvalidRequest(
                f"n: {num_prompts} prompts with {num_answers} answers each are {num_requests} requests, "
                f"and at most {max_waiting} may wait (max_num_waiting); send fewer at once"
            )

    async def _submit(
        self, answers: Sequence[tuple[Request, DeltaDecoder]], observe: Observe | None = None
    ) -> AnswerStream:
        for request, _ in answers:
            if request.pictures and request.fork_of is None:
                await self._engine.see(request)
        outputs = await self._engine.submit([request for request, _ in answers])
        return AnswerStream(outputs, answers, keep=self._keep, observe=observe)

    def _keep(self, request: Request) -> None:
        if self._tool_keep_seconds:
            self._engine.keep_pages(request, self._tool_keep_seconds)

    def _request_ids(self, name: str | None, count: int) -> Iterator[str]:
        if name is None:
            return (f"request-{next(self._numbers)}" for _ in range(count))
        return iter([name] if count == 1 else [f"{name}-{number}" for number in range(count)])

    async def _answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        request_id: str,
        *,
        salt: bytes,
        answer_index: int = 0,
        fork_of: str | None = None,
        pins: bool = False,
        pin_share: float = 1.0,
    ) -> tuple[Request, DeltaDecoder]:
        """Build a request, which is not queued yet, and the decoder of its outputs."""
        text = text_of(prompt)
        self._check(prompt, text, params)
        if options.turn is not None:
            self._check_tools(options.turn)
            params = self._with_call_bias(params, options.turn)
        request = Request(
            id=request_id,
            token_ids=list(prompt),
            params=params,
            stop_ids=self._tokenizer.eos_token_ids,
            cache_salt=salt,
            client=options.client,
            priority=options.priority,
            skips_cache=options.skip_prefix_cache,
            pins=pins,
            pin_share=pin_share,
            fork_of=fork_of,
            guide=await self._planner.guide(text, params, options.turn, options.client),
            pictures=pictures_of(prompt),
            adapter=self._view.number,
        )
        return request, self._decoder(text, request, options.turn, answer_index)

    def _decoder(
        self, text: Sequence[int], request: Request, turn: AssistantTurn | None, answer_index: int
    ) -> DeltaDecoder:
        parser = None
        if turn is not None:
            markup = self._tokenizer.markup
            is_thinking = markup.opens_thinking(text, self._tokenizer.decode)
            parser = TurnParser(markup, turn, is_thinking=is_thinking)
        return DeltaDecoder(
            self._tokenizer,
            request.params,
            request.stop_ids,
            parser,
            answer_index=answer_index,
            image_tokens=sum(placed.picture.num_rows for placed in request.pictures),
        )

    def _with_call_bias(self, params: SamplingParams, turn: AssistantTurn) -> SamplingParams:
        """Forbid or allow the marker of a call, by the turn.

        Forbids it if tools are shown but none may be called. Allows it if they may be, and only the
        model's defaults forbid it.
        """
        marker = self._tokenizer.markup.call_start
        if not turn.tools or len(marker) != 1:
            return params
        biases = dict(params.logit_bias)
        if not turn.may_call:
            biases[marker[0]] = -MAX_BIAS
        elif params.logit_bias == self._default_params.logit_bias:
            biases.pop(marker[0], None)
        return replace(params, logit_bias=biases)

    def _check_tools(self, turn: AssistantTurn) -> None:
        if turn.may_call and not self._tokenizer.markup.can_call:
            raise InvalidParameter(
                "tools", "how this model writes tool calls is not known; leave them out"
            )

    def _check(self, prompt: Sequence[int], text: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise InvalidRequest("prompt: it is empty; at least one token is needed")
        if len(prompt) >= (max_len := self._codec.max_model_len):
            raise PromptTooLong.for_answer(len(prompt), max_len)
        self._codec.check_ids(text, "prompt")
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if ids and max(ids) >= self._codec.vocab_size:
                raise InvalidParameter(
                    name, f"token ids go up to {self._codec.vocab_size - 1}, got {max(ids)}"
                )

    async def forget(
        self,
        prompts: Sequence[Sequence[int]],
        kept: Sequence[Sequence[int]],
        cache_salt: str | None,
    ) -> Forgotten:
        """Forget the pages of prompts under this view, as `TextModel.forget` does."""
        salt = self._view.page_salt(cache_salt)
        shared = [*kept, *self.prefixes.of_salt(salt)]
        return await self._engine.forget_prompts(prompts, shared, salt)

    async def score(
        self, token_ids: Sequence[int], *, num_top: int = 0, client: str = ""
    ) -> list[TokenLogprob]:
        """Return the log-probability of each token but the first, with `num_top` alternatives.

        Computed in pieces as vectors are, without the cache, which would skip the computation.
        Raises InvalidRequest, InvalidParameter, PromptTooLong, EngineStopped.
        """
        self._check(token_ids, token_ids, SamplingParams(logprobs=num_top))
        return await self._engine.score(token_ids, num_top, client, self._view.number)

    # ---- named prefixes

    async def _compute(self, prefix: NamedPrefix, priority: int) -> str:
        """Compute a prefix and return the id of the request under which its pages are pinned."""
        params = SamplingParams(max_tokens=1, temperature=0)
        options = RequestOptions(client=prefix.client, priority=priority)
        [request_id] = self._request_ids(None, 1)
        pinned = await self._answer(
            prefix.token_ids,
            params,
            options,
            request_id,
            salt=prefix.salt,
            pins=True,
            pin_share=prefix.max_share,
        )
        answer = None
        try:
            answer = await self._submit([pinned])
            [output] = await answer.whole()
            if output.finish_reason is FinishReason.ABORT:
                raise EngineStopped("The engine ended before the prefix was computed.")
        except BaseException:
            if answer is not None:
                await answer.aclose()
            # The request may have ended just now, or while it was submitted.
            self._engine.unpin(request_id)
            raise
        return request_id

    def close(self) -> None:
        """Close the planner, after the engine: its thread uses the planner's matchers."""
        self._planner.close()

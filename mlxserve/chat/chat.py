"""Chat: prompts to token ids, and the one stream that every answer comes from.

answer = await chat.submit(chat.render(messages), params)
async for delta in answer: ...

AsyncEngine ── OutputStream ── AnswerStream ──> library, terminal, HTTP replies
               token ids       deltas of text
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxserve.chat.answers import AnswerStream, Observe
from mlxserve.chat.image_prompts import ImagePrompts, after_prefix, text_of
from mlxserve.chat.named_prefixes import NamedPrefixes
from mlxserve.chat.prefix_store import NamedPrefix, PrefixStore
from mlxserve.chat.request_options import RequestOptions
from mlxserve.core.errors import (
    EngineStopped,
    InvalidParameter,
    InvalidRequest,
    PromptTooLong,
)
from mlxserve.core.sampling_params import MAX_BIAS, SamplingParams
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.hub.facts import ModelFacts
from mlxserve.images.picture import pictures_of
from mlxserve.request import FinishReason, Forgotten, Pooling, Request, TokenLogprob
from mlxserve.text.conversation import Conversation
from mlxserve.text.costs import text_size
from mlxserve.text.deltas import DeltaDecoder
from mlxserve.text.guidance.planner import Planner
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import AssistantTurn
from mlxserve.text.template_caps import TemplateCaps
from mlxserve.text.template_compat import AdaptedConversation
from mlxserve.text.templates import RenderedTooLong
from mlxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # they import mlx, which waits for machine.prepare()
    from mlxserve.engine.async_engine import AsyncEngine

_DEFAULTS = RequestOptions()
_MARGIN = 4  # a text is refused unread if it has this many times more characters than can fit


class Chat:
    """A loaded model, its engine and its named prefixes. Methods may be called from any event loop.

    can_write  whether it answers; `mlxserve.chat.embedding` has models that do not
    can_embed  whether it makes vectors
    can_rank   whether it ranks documents for a query
    """

    can_write, can_embed, can_rank = True, True, False

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        vocab_size: int,
        default_params: SamplingParams,
        fingerprint: str = "",
        facts: ModelFacts | None = None,
        tool_keep_seconds: float = 60.0,
        prefix_file: Path | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        executor: FairExecutor | None = None,
        owns_door: bool = True,
        max_num_waiting: int | None = None,
        images: ImagePrompts | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """executor: of all work on its prompts; None for one of its own
        owns_door: closes it
        max_num_waiting: as in SchedulerConfig; None for no limit
        images: puts those of messages into prompts; None for a model that reads text only
        fingerprint: names the model's weights, as models never share pages
        facts: what is known of the model, for clients that show it
        prefix_file: where named prefixes outlive the process; None for nowhere
        adapters: the engine's, by name in the order of their numbers, and the digest of each
        tool_keep_seconds: as in EngineConfig
        template_kwargs: variables of the chat template that a request does not set
        """
        self.model_name = model_name
        self.default_params = default_params
        self.created = int(time.time())
        self.facts = facts or ModelFacts()
        self.engine = engine
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.fingerprint = fingerprint
        self._tool_keep_seconds = tool_keep_seconds
        self._template_kwargs = dict(template_kwargs or {})
        self._max_num_waiting = max_num_waiting
        self._images = images or ImagePrompts(None)
        self.executor = executor or FairExecutor()
        self._owns_door = owns_door or executor is None
        self._planner = Planner(tokenizer, vocab_size, self.executor)
        self._numbers = itertools.count()
        self._adapter: int | None = None
        self.prefixes = self._named_prefixes(prefix_file)
        self._adapted = {
            name: self._with_adapter(number, name, digest, prefix_file)
            for number, (name, digest) in enumerate((adapters or {}).items())
        }

    def _named_prefixes(self, file: Path | None) -> NamedPrefixes:
        return NamedPrefixes(self.engine, PrefixStore(file), self._compute, salt_of=self._salt)

    def _with_adapter(self, number: int, name: str, digest: str, prefix_file: Path | None) -> Chat:
        """The same engine, tokenizer and executor; pages and named prefixes are those of the adapter."""
        chat = copy.copy(self)
        chat.model_name = f"{self.model_name}:{name}"
        chat.fingerprint = f"{self.fingerprint}/{digest}"
        chat._adapter = number
        chat._adapted = {}
        chat.prefixes = chat._named_prefixes(
            prefix_file and prefix_file.with_stem(f"{prefix_file.stem}-{digest}")
        )
        return chat

    def adapted(self, name: str | None) -> Chat:
        """The same with an adapter; itself for None. Raises InvalidParameter for an unknown name.

        It is closed with this one.
        """
        if name is None:
            return self
        if name not in self._adapted:
            known = ", ".join(self._adapted) or "none"
            raise InvalidParameter("adapter", f"{name!r:.80} is not loaded. Loaded: {known}")
        return self._adapted[name]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._adapted)

    def _require_writer(self) -> None:
        if not self.can_write:
            does = "embeds and ranks texts" if self.can_embed else "ranks documents"
            raise InvalidRequest(
                f"{self.model_name} {does} and writes no answers. Name a language model for this request."
            )

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer."""
        return self.engine.max_model_len

    @property
    def can_call(self) -> bool:
        """Whether the model's template shows tools, and its tool calls can be parsed."""
        return self._tokenizer.markup.can_call and self._tokenizer.supports_tools

    @property
    def can_think(self) -> bool:
        """Whether the model was trained to reason before it answers."""
        return self._tokenizer.markup.is_taught

    @property
    def supports_images(self) -> bool:
        """Whether messages may hold images."""
        return self._images.reader is not None

    @property
    def no_vision_reason(self) -> str:
        """Why it may not, though the model was trained to see; empty otherwise."""
        return self._images.no_vision_reason

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template; empty for none, or one written in Python."""
        return self._tokenizer.chat_template

    # ---- text and tokens

    def template_abilities(self) -> TemplateCaps | None:
        """What the model's chat template takes; None without one. Waits until that is known."""
        return self._tokenizer.abilities if self._tokenizer.has_chat_template else None

    def fit(self, conversation: Conversation) -> AdaptedConversation:
        """A conversation as the model's template takes it. Raises InvalidRequest."""
        self._require_writer()
        return self._tokenizer.fit(conversation)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        on_change: Callable[[str], None] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """A conversation as the token ids of a prompt. Raises InvalidRequest, PromptTooLong.

        A message's content is a text or a list of parts: {"type": "text", "text": str} and
        {"type": "image", "image": Image}. `on_change` as in `Tokenizer.render`.
        """
        self._require_writer()
        messages, images = self._images.split(messages)
        self._refuse_huge(text_size(messages, tools))
        most = self.most_characters
        try:
            token_ids = self._tokenizer.render(
                messages,
                tools=tools,
                most_characters=most,
                on_change=on_change,
                **{**self._template_kwargs, **template_kwargs},
            )
        except RenderedTooLong as error:
            raise self._too_long(error.num_characters) from error
        return self._images.join(token_ids, images)

    @property
    def most_characters(self) -> int:
        """Of a text that is tokenised: one with more can never fit, and tokenising takes seconds.

        The margin allows for tokenizers that drop or join characters first.
        """
        return self.max_model_len * _MARGIN * self._tokenizer.max_token_size - 1

    def _refuse_huge(self, num_characters: int) -> None:
        if num_characters > self.most_characters:
            raise self._too_long(num_characters)

    def _too_long(self, num_characters: int) -> PromptTooLong:
        num_tokens = num_characters // (_MARGIN * self._tokenizer.max_token_size)
        return PromptTooLong.for_answer(
            num_tokens, self.max_model_len, num_characters=num_characters
        )

    def encode(self, text: str) -> list[int]:
        """A text as token ids. Raises InvalidRequest, and PromptTooLong if it is far too long."""
        self._refuse_huge(len(text))
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Raises InvalidParameter for ids outside the vocabulary.

        Tokenizers treat those inconsistently: some fail, some ignore them.
        """
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            raise InvalidParameter("tokens", f"must be from 0 to {self._vocab_size - 1}")
        return self._tokenizer.decode(token_ids)

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

        A prompt is computed once for its answers, which have consecutive indices. `observe` as in
        AnswerStream. Raises what `submit` raises.
        """
        self._refuse_crowd(len(prompts), params.n)
        salt = self._salt(options.cache_salt)
        if options.prefix_name is not None:
            prefix = self.prefixes.of_request(options.prefix_name, options.cache_salt)
            prompts = [after_prefix(prefix.token_ids, prompt) for prompt in prompts]
            salt = prefix.salt
        ids = self._request_ids(options.request_id, len(prompts) * params.n)
        answers: list[tuple[Request, DeltaDecoder]] = []
        for prompt in prompts:
            leader: str | None = None
            for choice in params.choices():
                request = await self._request(
                    prompt, choice, options, next(ids), salt=salt, fork_of=leader
                )
                decoder = self._decoder(prompt, request, options.turn, answer_index=len(answers))
                answers.append((request, decoder))
                leader = leader or request.id
        return await self._submit(answers, observe)

    def _refuse_crowd(self, num_prompts: int, num_answers: int) -> None:
        """Raises InvalidRequest for more requests at once than may wait: no later time suits them."""
        num_requests, most = num_prompts * num_answers, self._max_num_waiting
        if most is not None and num_requests > most:
            raise InvalidRequest(
                f"n: {num_prompts} prompts with {num_answers} answers each are {num_requests} requests, "
                f"and at most {most} may wait (max_num_waiting); send fewer at once"
            )

    async def _submit(
        self, answers: Sequence[tuple[Request, DeltaDecoder]], observe: Observe | None = None
    ) -> AnswerStream:
        for request, _ in answers:
            if request.pictures and request.fork_of is None:
                await self.engine.see(request)
        outputs = await self.engine.submit([request for request, _ in answers])
        return AnswerStream(outputs, answers, keep=self._keep, observe=observe)

    def _keep(self, request: Request) -> None:
        if self._tool_keep_seconds:
            self.engine.keep_pages(request, self._tool_keep_seconds)

    def _request_ids(self, name: str | None, count: int) -> Iterator[str]:
        if name is None:
            return (f"request-{next(self._numbers)}" for _ in range(count))
        return iter([name] if count == 1 else [f"{name}-{number}" for number in range(count)])

    async def _request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        request_id: str,
        *,
        salt: bytes,
        fork_of: str | None = None,
        pins: bool = False,
        pin_share: float = 1.0,
    ) -> Request:
        """Not yet queued."""
        self._require_writer()
        self._check(prompt, params)
        text = text_of(prompt)
        if options.turn is not None:
            self._check_tools(options.turn)
            params = self._with_calls_as_asked(params, options.turn)
        return Request(
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
            adapter=self._adapter,
        )

    def _decoder(
        self,
        prompt: Sequence[int],
        request: Request,
        turn: AssistantTurn | None,
        *,
        answer_index: int = 0,
    ) -> DeltaDecoder:
        parser = None
        if turn is not None:
            markup = self._tokenizer.markup
            is_thinking = markup.opens_thinking(text_of(prompt), self._tokenizer.decode)
            parser = TurnParser(markup, turn, is_thinking=is_thinking)
        return DeltaDecoder(
            self._tokenizer,
            request.params,
            request.stop_ids,
            parser,
            answer_index=answer_index,
            image_tokens=sum(one.picture.num_rows for one in request.pictures),
        )

    def _with_calls_as_asked(self, params: SamplingParams, turn: AssistantTurn) -> SamplingParams:
        """Forbid the marker of a call where tools are shown but none may be called; allow it where
        they may be, if the model's defaults forbid it."""
        marker = self._tokenizer.markup.call_start
        if not turn.tools or len(marker) != 1:
            return params
        biases = dict(params.logit_bias)
        if not turn.may_call:
            biases[marker[0]] = -MAX_BIAS
        elif params.logit_bias == self.default_params.logit_bias:
            biases.pop(marker[0], None)
        return replace(params, logit_bias=biases)

    def _check_tools(self, turn: AssistantTurn) -> None:
        if turn.may_call and not self._tokenizer.markup.can_call:
            raise InvalidParameter(
                "tools", "how this model writes tool calls is not known; leave them out"
            )

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise InvalidRequest("prompt: it is empty; at least one token is needed")
        if len(prompt) >= self.max_model_len:
            raise PromptTooLong.for_answer(len(prompt), self.max_model_len)
        self._check_ids(text_of(prompt), "prompt")
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

    async def forget(
        self,
        prompts: Sequence[Sequence[int]],
        kept: Sequence[Sequence[int]] = (),
        cache_salt: str | None = None,
    ) -> Forgotten:
        """Forget the cached pages of conversations that were deleted, in memory and on disk, also those
        that adapters computed.

        Those that a prompt of `kept` or a named prefix has as well stay, and those that a running
        request holds. Raises EngineStopped.
        """
        found = Forgotten()
        for chat in (self, *self._adapted.values()):
            salt = chat._salt(cache_salt)
            shared = [*kept, *chat.prefixes.of_salt(salt)]
            found += await self.engine.forget_prompts(prompts, shared, salt)
        return found

    # ---- vectors

    async def embed(
        self,
        token_ids: Sequence[int],
        *,
        pooling: Pooling = Pooling.MEAN,
        dimensions: int | None = None,
        client: str = "",
    ) -> list[float]:
        """A text as a vector of length 1, from the model's last hidden states.

        Computed in pieces between the steps of running answers, in the client's turn. `dimensions`
        keeps only the first components. Raises InvalidRequest, InvalidParameter, PromptTooLong, EngineStopped.
        """
        if not token_ids:
            raise InvalidRequest("input: it is empty; at least one token is needed")
        if len(token_ids) > self.max_model_len:
            raise PromptTooLong.for_embedding(len(token_ids), self.max_model_len)
        self._check_ids(token_ids, "input")
        return await self.engine.embed(token_ids, pooling, dimensions, client, self._adapter)

    async def embed_all(
        self,
        texts: Sequence[Sequence[int]],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        client: str = "",
    ) -> list[list[float]]:
        """A vector of each text. Raises what `embed` raises."""
        pooling = Pooling.MEAN if pooling is None else pooling
        return [
            await self.embed(text, pooling=pooling, dimensions=dimensions, client=client)
            for text in texts
        ]

    def prompt_of(self, input_type: str | None) -> str:
        """What to put before a text of a type. Raises InvalidParameter: language models have no such prompts."""
        if input_type is not None:
            raise InvalidParameter("input_type", "this model has no prompts; leave it out")
        return ""

    def cut(self, token_ids: Sequence[int]) -> list[int]:
        """The first tokens of a text to embed, as many as the context has."""
        return list(token_ids[: self.max_model_len])

    async def score(
        self, token_ids: Sequence[int], *, num_top: int = 0, client: str = ""
    ) -> list[TokenLogprob]:
        """The log-probability of each token of a text but the first, and of `num_top` alternatives.

        Computed in pieces as `embed` does, and not from the cache, which skips the computation.
        Raises InvalidRequest, InvalidParameter, PromptTooLong, EngineStopped.
        """
        self._require_writer()
        self._check(token_ids, SamplingParams(logprobs=num_top))
        return await self.engine.score(token_ids, num_top, client, self._adapter)

    # ---- named prefixes

    async def _compute(self, prefix: NamedPrefix, priority: int) -> str:
        """The id of the request under which the pages of a prefix are pinned."""
        params = SamplingParams(max_tokens=1, temperature=0)
        options = RequestOptions(client=prefix.client, priority=priority)
        [request_id] = self._request_ids(None, 1)
        request = await self._request(
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
            answer = await self._submit([(request, self._decoder(prefix.token_ids, request, None))])
            [output] = await answer.whole()
            if output.finish_reason is FinishReason.ABORT:
                raise EngineStopped("The engine ended before the prefix was computed.")
        except BaseException:
            if answer is not None:
                await answer.aclose()
            self.engine.unpin(request_id)  # it may have ended just now, or while it was submitted
            raise
        return request_id

    def _salt(self, cache_salt: str | None) -> bytes:
        """Of pages of this model. Another digest than of any other model with any salt."""
        # The fingerprint has no zero byte: no salt can pass for another model's.
        text = f"{self.fingerprint}\0{cache_salt or ''}"
        return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()

    def close(self) -> None:
        """Abort every answer and end the engine. Idempotent."""
        self.engine.close()  # first: its thread uses the planner's matchers
        if self._owns_door:
            self.executor.close()
        self._planner.close()
        self._tokenizer.close()

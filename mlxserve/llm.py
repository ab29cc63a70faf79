"""The library: LLM for scripts and notebooks, AsyncLLM for programs with an event loop.

    llm = LLM()                                        # the included model
    llm.chat([{"role": "user", "content": "Hello"}])[0].text
    llm.generate(["Once upon", "There was"], SamplingParams(max_tokens=32, temperature=0))
    for delta in llm.stream("Once upon"): print(delta.text, end="")

Both read the `Writer`'s stream, as the HTTP API does. LLM runs AsyncLLM in an event loop on a thread of
its own, so it also works where an event loop is already running, as in a notebook.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar

from tqdm import tqdm

from mlxserve.chat.answers import RequestOutput
from mlxserve.chat.document_prompts import DocumentPrompts
from mlxserve.chat.given_messages import read_given
from mlxserve.chat.request_options import RequestOptions
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import EngineStopped, InvalidParameter, InvalidRequest
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.stats import Stats
from mlxserve.engine.threads import result_of
from mlxserve.helpers.work import RunsIn, Work
from mlxserve.ranks.environment import own_rank
from mlxserve.request import Resized
from mlxserve.system import machine
from mlxserve.text.costs import encode_seconds, render_seconds
from mlxserve.text.deltas import Delta
from mlxserve.text.parsing.turn import AssistantTurn

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

Message: TypeAlias = Mapping[str, Any]  # {"role": ..., "content": ...}
Messages: TypeAlias = Sequence[Message]
Tools: TypeAlias = Sequence[Mapping[str, Any]]
Prompt: TypeAlias = str | Sequence[int] | Messages  # text, token ids, or a conversation
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
T = TypeVar("T")
P = ParamSpec("P")


class _LoadedModel:
    """The members that LLM and AsyncLLM share: none of them waits for the engine."""

    _model: TextModel

    def _share_model_of(self, other: _LoadedModel) -> None:
        self._model = other._model

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self._model.model_name

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt and its answer."""
        return self._model.max_model_len

    @property
    def default_params(self) -> SamplingParams:
        """The sampling parameters that the model's authors recommend."""
        return self._model.default_params

    def remove_prefix(self, name: str, *, adapter: str | None = None) -> None:
        """Forget a named prefix; its pages become ordinary cached pages. Raises UnknownPrefix."""
        self._model.with_adapter(adapter).require_writer().prefixes.remove(name)

    def list_prefixes(self, *, adapter: str | None = None) -> dict[str, int]:
        """Return each named prefix and its number of tokens.

        With a disk cache these include prefixes of earlier processes.
        """
        writer = self._model.with_adapter(adapter).writer
        return {} if writer is None else writer.prefixes.sizes()

    def stats(self) -> Stats:
        """Return a copy of the engine's counters."""
        return self._model.engine.stats()


class AsyncLLM(_LoadedModel):
    """A model and its engine, for use in an event loop. Only loading the model blocks.

    llm = AsyncLLM("qwen3.5:4b", max_num_seqs=16)
    output = await llm.chat([{"role": "user", "content": "Hello"}])
    async for delta in llm.stream("Once upon", SamplingParams(max_tokens=32)):
        print(delta.text, end="")
    llm.close()
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        """Load a model: a folder, a Hugging Face repository id, or None for the included model.

        config: the engine's options; None for the defaults
        adapters: LoRA adapters by name, as folders that `mlx_lm.lora` has written
        options: those of `mlxserve serve`, such as max_num_seqs=16; they override `config`

        Raises InvalidConfig, ModelNotFound, UnsupportedModel, OutOfMemory, and EngineStopped if the
        other ranks of a model do not join. On a rank above 0 this follows rank 0, and then ends the
        process.
        """
        if model is not None:
            options["model"] = model
        if adapters is not None:
            options["adapter"] = tuple(f"{name}={folder}" for name, folder in adapters.items())
        self.config = (config or EngineConfig()).with_options(**options)
        machine.import_mlx_lm()
        # Imports mlx and mlx-lm.
        from mlxserve.ranks.run import (
            build_text_model_of_ranks,
            run_worker,
        )

        if self.config.num_ranks > 1 and own_rank():
            # Does not return.
            run_worker(self.config)
        self._model = build_text_model_of_ranks(self.config)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        turn: AssistantTurn | None = None,
        adapter: str | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Answer one prompt: text or token ids as they are, messages in the chat template.

        output = await llm.generate("Once upon", SamplingParams(max_tokens=32, temperature=0))

        params: None for the model's defaults
        turn: what an answer to messages may hold, such as tool calls
        adapter: name of the adapter that answers; None for the model alone
        options: the fields of RequestOptions, such as `prefix_name`, `cache_salt` and `priority`

        Raises InvalidRequest and its subclasses, QueueFull, EngineFailed, EngineStopped.
        """
        params = params or self.default_params
        writer = self._model.with_adapter(adapter).require_writer()
        token_ids, request_options = await self._prepared(prompt, turn, options)
        answers = await writer.submit_all([token_ids], params, request_options)
        try:
            first, *others = await answers.whole()
        finally:
            await answers.aclose()
        return replace(first, alternatives=tuple(others))

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Tools = (),
        turn: AssistantTurn | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Answer one conversation. Raises what `generate` raises.

        messages: {"role": ..., "content": ...} as in OpenAI's API
        tools: definitions in OpenAI's format; pass `turn` instead to say more about their use
        """
        turn = turn or AssistantTurn(tools=tools)
        messages = _conversation(messages)
        return await self.generate(messages, params, turn=turn, **options)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        turn: AssistantTurn | None = None,
        adapter: str | None = None,
        **options: Any,
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of one answer. Leaving the loop early aborts the request.

        Arguments and errors are those of `generate`.
        """
        params = params or self.default_params
        writer = self._model.with_adapter(adapter).require_writer()
        token_ids, request_options = await self._prepared(prompt, turn, options)
        answer = await writer.submit(token_ids, params, request_options)
        try:
            async for delta in answer:
                yield delta
        finally:
            await answer.aclose()

    async def add_prefix(
        self,
        name: str,
        prefix: Prompt,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Compute a text or the beginning of a conversation, and keep its pages under a name.

        A request with this `prefix_name` has the prefix prepended and finds its pages in the cache;
        so does one that begins with the same tokens and has the same `cache_salt`. Only requests with
        this `adapter` use it. The pages stay until the prefix is removed.

        Raises PrefixQuotaExceeded, PagesPromised if it would cut a running answer, and what `generate`
        raises.
        """
        token_ids = await self._token_ids(prefix, add_generation_prompt=False)
        await (
            self._model.with_adapter(adapter)
            .require_writer()
            .prefixes.add(name, token_ids, cache_salt=cache_salt)
        )

    async def add_prefixes(
        self, prefixes: Mapping[str, Prompt], *, cache_salt: str | None = None
    ) -> None:
        """Add several prefixes by name, all or none. Raises what `add_prefix` raises.

        An error removes those that were new. A prefix that replaced another of its name stays.
        """
        known, added = set(self.list_prefixes()), list[str]()
        try:
            for name, prefix in prefixes.items():
                await self.add_prefix(name, prefix, cache_salt=cache_salt)
                added.append(name)
        except BaseException:
            for name in added:
                if name not in known:
                    self.remove_prefix(name)
            raise

    async def restore_prefixes(self) -> None:
        """Compute the named prefixes of earlier processes, or read them from the disk cache.

        Their names are known without this, and their pages are found like any others.
        """
        for name in (None, *self._model.adapters):
            if (writer := self._model.with_adapter(name).writer) is not None:
                await writer.prefixes.restore()

    async def reset_prefix_cache(self, *, force: bool = False, disk: bool = False) -> bool:
        """Forget every cached page except those of named prefixes.

        disk: also forget this model's pages on disk

        Returns False and changes nothing while requests hold pages, unless `force`: running requests
        then release theirs and recompute them; their answers stay the same.
        """
        return await self._model.engine.reset_prefix_cache(force=force, disk=disk)

    async def resize_cache(self, num_pages: int) -> Resized:
        """Resize the cache to `num_pages`; memory is returned to the machine, or taken from it.

        Running answers stay the same. A smaller cache begins empty: their pages and those of named
        prefixes are computed again.

        Raises, and then changes nothing: InvalidParameter, OutOfMemory, PrefixQuotaExceeded if named
        prefixes, or those of one client, have too many pages, PagesPromised if it would cut a running
        answer, EngineStopped.
        """
        return await self._model.engine.resize_cache(num_pages)

    async def check(self) -> None:
        """Audit requests and pages between two steps. Raises AssertionError."""
        await self._model.engine.check()

    def close(self) -> None:
        """Abort every answer and end the engine. Idempotent."""
        self._model.close()

    async def _prepared(
        self, prompt: Prompt, turn: AssistantTurn | None, options: Mapping[str, Any]
    ) -> tuple[list[int], RequestOptions]:
        """Return the token ids and options for `Writer`. Only answers to conversations have a turn."""
        is_conversation = not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping)
        turn = (turn or AssistantTurn()) if is_conversation else None
        request_options = RequestOptions(turn=turn, **options)
        token_ids = await self._token_ids(
            prompt, add_generation_prompt=True, tools=turn.tools if turn else ()
        )
        return token_ids, request_options

    async def _token_ids(
        self, prompt: Prompt, *, add_generation_prompt: bool, tools: Tools = ()
    ) -> list[int]:
        if isinstance(prompt, str):
            encode = partial(self._model.codec.encode, prompt)
            work: Work[list[int]] = Work(encode_seconds(len(prompt)), encode)
            return await self._model.executor.run("", work)
        if prompt and isinstance(prompt[0], Mapping):
            writer = self._model.require_writer()
            conversation = await read_given(
                _conversation(prompt),
                partial(self._model.executor.run, ""),
                documents=DocumentPrompts(self._model.codec),
                sees=writer.supports_images,
                no_vision_reason=writer.no_vision_reason,
            )

            def render() -> list[int]:
                fitted = writer.fit(conversation)
                return writer.render(
                    fitted.messages, tools=tools, add_generation_prompt=add_generation_prompt
                )

            work = Work(render_seconds(prompt, tools), render, RunsIn.PROCESS)
            return await self._model.executor.run("", work)
        if not all(isinstance(token, int) for token in prompt):
            raise InvalidParameter("prompt", "must be text, token ids or messages")
        return [token for token in prompt if isinstance(token, int)]


def _waits(
    method: Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[LLM, P], T]:
    """Return a method of LLM that waits for a method of AsyncLLM."""

    @wraps(method)
    def call(self: LLM, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._llm, *args, **kwargs))

    return call


class LLM(_LoadedModel):
    """A model and its engine, for scripts: every call waits for its result.

    with LLM("qwen3.5:4b") as llm:  # closes the engine at the end of the block
        outputs = llm.generate(["Once upon", "There was"], SamplingParams(max_tokens=32))
        print([output.text for output in outputs])

    Methods raise EngineStopped after `close`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        """Load a model: a folder, a Hugging Face repository id, or None for the included model.

        `adapters`, `options` and errors are those of AsyncLLM.
        """
        self._llm = AsyncLLM(model, config=config, adapters=adapters, **options)
        self._share_model_of(self._llm)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="mlxserve-llm", daemon=True
        )
        self._thread.start()
        # Runs at the latest when the object is collected, or the process ends.
        self._close = weakref.finalize(self, _shut_down, self._llm, self._loop, self._thread)
        self._run(self._llm.restore_prefixes())

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: Params = None,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt as it is, without a chat template; return the outputs in order.

        All prompts run at once. The first error ends the others and is raised, as `AsyncLLM.generate`
        raises it.

        prompts: one text, or a list of texts or of token id lists
        params: for all prompts, a list with one for each, or None for the model's defaults
        use_tqdm: show a progress bar
        options: those of `AsyncLLM.generate`
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        for prompt in prompts:
            if not isinstance(prompt, str) and not isinstance(prompt, Sequence):
                raise InvalidParameter("prompts", "must be texts or lists of token ids")
        return self._all(list(prompts), params, use_tqdm, None, options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        tools: Tools = (),
        turn: AssistantTurn | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once, in the model's chat template.

        llm.chat([{"role": "user", "content": "Hello"}])[0].text

        messages: one conversation, or a list of them
        params: for all conversations, a list with one for each, or None for the model's defaults
        tools: definitions in OpenAI's format; pass `turn` instead to say more about their use
        options: those of `AsyncLLM.generate`, whose errors it raises
        """
        turn = turn or AssistantTurn(tools=tools)
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one or not messages else messages
        prompts = [_conversation(c) for c in conversations]
        return self._all(prompts, params, use_tqdm, turn, options)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        turn: AssistantTurn | None = None,
        **options: Any,
    ) -> Iterator[Delta]:
        """Yield the deltas of one answer. Leaving the loop early aborts the request.

        Arguments and errors are those of `AsyncLLM.generate`.
        """
        deltas = self._llm.stream(prompt, params, turn=turn, **options)
        try:
            while (delta := self._run(anext(deltas, None))) is not None:
                yield delta
        finally:
            self._run(deltas.aclose())  # type: ignore[attr-defined]

    add_prefix = _waits(AsyncLLM.add_prefix)
    add_prefixes = _waits(AsyncLLM.add_prefixes)
    reset_prefix_cache = _waits(AsyncLLM.reset_prefix_cache)
    resize_cache = _waits(AsyncLLM.resize_cache)
    check = _waits(AsyncLLM.check)

    def close(self) -> None:
        """Abort every answer and end the engine. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _all(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        use_tqdm: bool,
        turn: AssistantTurn | None,
        options: Mapping[str, Any],
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidParameter("params", f"{len(params)} for {len(prompts)} prompts")
        return self._run(self._gather(prompts, params, use_tqdm, turn, options))

    async def _gather(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        turn: AssistantTurn | None,
        options: Mapping[str, Any],
    ) -> list[RequestOutput]:
        num_at_once = max((p.n for p in params), default=1)
        room = asyncio.Semaphore(max(1, self._llm.config.scheduler.max_num_waiting // num_at_once))
        with tqdm(total=len(prompts), unit="answer", disable=not use_tqdm) as bar:

            async def one(prompt: Prompt, params: SamplingParams) -> RequestOutput:
                async with room:
                    output = await self._llm.generate(prompt, params, turn=turn, **options)
                bar.update()
                return output

            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(one(prompt, p))
                    for prompt, p in zip(prompts, params, strict=True)
                ]
        return [task.result() for task in tasks]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._close.alive:
            work.close()
            raise EngineStopped("This LLM was closed.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return result_of(future)
        except BaseExceptionGroup as group:
            # The first failure of a batch ends the others.
            raise group.exceptions[0] from None
        except KeyboardInterrupt:
            # Aborts the requests, so that the next call finds the engine idle.
            future.cancel()
            raise


def _shut_down(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    llm.close()
    loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join()
        loop.close()


def _conversation(messages: Any) -> Messages:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidParameter("messages", "must be a list of messages")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidRequest(
                'messages: each must look like {"role": "user", "content": "..."}, '
                f"got {str(message)[:80]!r}"
            )
    return messages

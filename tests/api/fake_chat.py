"""A `TextModel` that answers from a script, for behaviour that no model shows on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, product, zip_longest
from types import SimpleNamespace
from typing import Any

from mlxserve.chat.answers import RequestOutput, fold
from mlxserve.chat.request_options import RequestOptions
from mlxserve.chat.vectors import LanguageVectors
from mlxserve.chat.view import View
from mlxserve.core.errors import (
    EngineStopped,
    InvalidParameter,
    MlxServeError,
    PromptTooLong,
    UnknownPrefix,
)
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.stats import (
    DiskStats,
    MemoryUse,
    PlannedMemory,
    PoolStats,
    SchedulerStats,
    Stats,
)
from mlxserve.engine.snapshot import RequestView, Snapshot
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.hub.facts import ModelFacts
from mlxserve.request import (
    FinishReason,
    Forgotten,
    Pooling,
    Resized,
    TokenLogprob,
    check_num_pages,
)
from mlxserve.text.conversation import Conversation
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.fill_in_middle import OtherFile
from mlxserve.text.template_caps import Arguments, TemplateCaps
from mlxserve.text.template_compat import AdaptedConversation, Fitting

HOLD = object()  # in a script: wait until `FakeChat.release` is called


@dataclass
class FakeAnswer:
    """One answer that was asked for."""

    is_closed: bool = False
    executor: FairExecutor = field(default_factory=FairExecutor)


class FakeAnswers:
    """In the place of an AnswerStream: the answers take turns with the steps of their scripts."""

    def __init__(
        self,
        chat: FakeChat,
        scripts: Sequence[list[Any]],
        *,
        wants_logprobs: bool,
        observe: Callable[[Delta], None] | None,
    ) -> None:
        self._chat = chat
        self._scripts = scripts
        self._wants_logprobs = wants_logprobs
        self._observe = observe
        self._answers = [FakeAnswer() for _ in scripts]
        chat.answers += self._answers

    async def __aiter__(self) -> AsyncIterator[Delta]:
        rounds = chain.from_iterable(zip_longest(*map(self._numbered, self._scripts, count())))
        for number, step in filter(None, rounds):
            if step is HOLD:
                await self._chat.wait_for_release()
            elif isinstance(step, BaseException):
                raise step
            else:
                delta = step._replace(answer_index=number)
                if self._observe is not None:
                    self._observe(delta)
                yield delta

    async def whole(self) -> list[RequestOutput]:
        return await fold(self, len(self._scripts), wants_logprobs=self._wants_logprobs)

    async def aclose(self) -> None:
        with self._chat.changed:
            for answer in self._answers:
                answer.is_closed = True
            self._chat.changed.notify_all()

    @staticmethod
    def _numbered(script: list[Any], number: int) -> list[tuple[int, Any]]:
        return [(number, step) for step in script]


@dataclass
class FakeChat:
    """Answers every request with `script`, or with `reply(prompt)`."""

    model_name: str = "fake"
    max_model_len: int = 1_000
    created: int = 1_700_000_000
    can_call: bool = True
    can_think: bool = False
    can_fill_in: bool = True
    supports_images: bool = False
    no_vision_reason: str = ""
    adapters: tuple[str, ...] = ()
    chat_template: str = "{{ messages }}"
    view: View = field(default_factory=lambda: View("fake", "print"))
    facts: ModelFacts = field(
        default_factory=lambda: ModelFacts(
            architecture="llama",
            format="safetensors",
            quantisation="int4",
            num_parameters=1_720_000_000,
            weight_size=970_000_000,
            hidden_size=2_048,
        )
    )
    script: list[Any] | None = None
    submit_error: MlxServeError | None = None
    default_params: SamplingParams = field(default_factory=SamplingParams)
    answers: list[FakeAnswer] = field(default_factory=list)
    submitted: list[SimpleNamespace] = field(default_factory=list)
    rendered: list[SimpleNamespace] = field(default_factory=list)
    embedded: list[SimpleNamespace] = field(default_factory=list)
    forgotten: list[SimpleNamespace] = field(default_factory=list)
    named: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)  # of named prefixes
    holds_prefixes: bool = False  # until `release` is called
    alive: bool = True
    silence: float = 0.0  # seconds since the engine's last step
    pages: bytes = bytes([4, 1, 2, 3, 0, 0, 0, 0])
    views: list[RequestView] = field(default_factory=list)
    num_snapshots: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    on_hold: threading.Event = field(default_factory=threading.Event)
    is_closed: bool = False
    executor: FairExecutor = field(default_factory=FairExecutor)

    def __post_init__(self) -> None:
        self._is_released = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._adapted = {
            name: replace(
                self,
                model_name=f"{self.model_name}:{name}",
                view=self.view.with_adapter(0, name, name),
                adapters=(),
                answers=[],
                submitted=[],
                embedded=[],
                named={},
            )
            for name in self.adapters
        }

    def with_adapter(self, name: str) -> FakeChat:
        return self._adapted[name]

    def template_caps(self) -> TemplateCaps:
        return TemplateCaps(arguments=Arguments.TEXT)

    def template_card(self) -> dict[str, Any]:
        return self.template_caps().card()

    def fit(self, conversation: Conversation) -> AdaptedConversation:
        return Fitting(self.template_caps()).fit(conversation)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        on_change: Any = None,
        **kwargs: Any,
    ) -> list[int]:
        self.rendered.append(
            SimpleNamespace(messages=list(messages), tools=list(tools or ()), kwargs=kwargs)
        )
        parts = [
            part if isinstance(part, str) else part.get("text", "#")
            for message in messages
            for part in message["content"]
        ]
        return self.encode("".join(parts))

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    @property
    def middle_ends(self) -> tuple[int, ...] | None:
        return (0,) if self.can_fill_in else None

    def encode_middle(self, prefix: str, suffix: str, files: Sequence[OtherFile] = ()) -> list[int]:
        others = "".join(f"[{file.name}]{file.text}" for file in files)
        return self.encode(f"{others}<{prefix}|{suffix}>")

    def decode(self, token_ids: Sequence[int]) -> str:
        if max(token_ids, default=0) > 255:
            raise InvalidParameter("tokens", "must be from 0 to 255")
        return bytes(token_ids).decode(errors="replace")

    async def submit(
        self, prompt: Sequence[int], params: SamplingParams, options: RequestOptions | None = None
    ) -> FakeAnswers:
        return await self.submit_all([prompt], params, options or RequestOptions())

    async def submit_all(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        options: RequestOptions,
        *,
        observe: Callable[[Delta], None] | None = None,
    ) -> FakeAnswers:
        if options.prefix_name is not None:
            if options.prefix_name not in self.named:
                raise UnknownPrefix.named(options.prefix_name, self.named)
            prompts = [(*self.named[options.prefix_name], *prompt) for prompt in prompts]
        self._refuse(prompts)
        for prompt, choice in product(prompts, params.choices()):
            self.submitted.append(
                SimpleNamespace(
                    prompt=list(prompt),
                    params=choice,
                    cache_salt=options.cache_salt,
                    skip_prefix_cache=options.skip_prefix_cache,
                    priority=options.priority,
                    client=options.client,
                    request_id=options.request_id,
                    turn=options.turn,
                )
            )
        return FakeAnswers(
            self,
            [self.script or self.reply(prompt) for prompt in prompts for _ in range(params.n)],
            wants_logprobs=params.logprobs is not None,
            observe=observe,
        )

    def _refuse(self, prompts: Sequence[Sequence[int]]) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        for prompt in prompts:
            if len(prompt) >= self.max_model_len:
                raise PromptTooLong.for_answer(len(prompt), self.max_model_len)

    async def embed(
        self,
        texts: Sequence[Sequence[int]],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        client: str = "",
    ) -> list[list[float]]:
        """The k-th text has a vector that begins with k."""
        pooling = Pooling.MEAN if pooling is None else pooling
        return [await self._vector(text, pooling, dimensions, client) for text in texts]

    def cut(self, token_ids: Sequence[int]) -> list[int]:
        return list(token_ids[: self.max_model_len])

    async def _vector(
        self, token_ids: Sequence[int], pooling: Pooling, dimensions: int | None, client: str
    ) -> list[float]:
        if self.submit_error is not None:
            raise self.submit_error
        self.embedded.append(
            SimpleNamespace(token_ids=list(token_ids), pooling=pooling, client=client)
        )
        number = len(self.embedded)
        if self.script is not None:
            await self.wait_for_release()
        return [float(number), 0.5, -0.5][:dimensions]

    prompt_for = LanguageVectors.prompt_for
    max_characters = 1_000_000

    def prepare(
        self, query: str, documents: Sequence[str], instruction: str | None = None
    ) -> tuple[list[list[int]], int]:
        return [self.encode((instruction or "") + query + document) for document in documents], 0

    async def rank(self, texts: Sequence[Sequence[int]], *, client: str = "") -> list[float]:
        """The shortest document is the most relevant."""
        return [1 / len(text) for text in texts]

    async def score(
        self, token_ids: Sequence[int], *, num_top: int = 0, client: str = ""
    ) -> list[TokenLogprob]:
        """The k-th token has the log-probability -k, and is its only alternative."""
        top = 1 if num_top else 0
        return [
            TokenLogprob(token_id, -float(k), ((token_id, -float(k)),) * top)
            for k, token_id in enumerate(token_ids[1:], 1)
        ]

    def reply(self, prompt: Sequence[int]) -> list[Any]:
        usage = Usage(len(prompt), 2, len(prompt) // 2)
        return [
            Delta("Hel", (72,), (TokenLogprob(72, -0.5, ((72, -0.5), (74, -1.5))),)),
            Delta("lo", (108,), (TokenLogprob(108, -0.25),), FinishReason.STOP, usage),
        ]

    @property
    def engine(self) -> FakeChat:
        """The fake is its own engine, and each of a TextModel's parts."""
        return self

    codec = writer = vectors = engine

    def require_writer(self) -> FakeChat:
        return self

    require_vectors = require_ranker = require_writer
    ranker = None

    @property
    def prefixes(self) -> FakePrefixes:
        return FakePrefixes(self)

    are_files_deleted = False

    async def reset_prefix_cache(self, *, force: bool = False, disk: bool = False) -> bool:
        self.are_files_deleted |= disk
        return force or self.stats().scheduler.num_running == 0

    async def forget(
        self,
        prompts: Sequence[Sequence[int]],
        kept: Sequence[Sequence[int]] = (),
        cache_salt: str | None = None,
    ) -> Forgotten:
        if self.submit_error is not None:
            raise self.submit_error
        self.forgotten.append(
            SimpleNamespace(prompts=list(prompts), kept=list(kept), cache_salt=cache_salt)
        )
        return Forgotten(2, 1)

    async def resize_cache(self, num_pages: int) -> Resized:
        if self.submit_error is not None:
            raise self.submit_error
        check_num_pages(num_pages)
        return Resized(num_pages, 16 * num_pages, 1, 2)

    async def snapshot(self) -> Snapshot:
        if self.is_closed:
            raise EngineStopped("The engine has stopped.")
        self.num_snapshots += 1
        return Snapshot(
            stats=self.stats(),
            memory=MemoryUse(
                kv_cache=8_000, active=9_000, reserved=10, peak=9_500, kv_cache_dtype="float32"
            ),
            page_size=16,
            pages=self.pages,
            requests=tuple(self.views),
            prefill_rate=12.5,
            generation_rate=3.0,
        )

    def seconds_since_beat(self) -> float:
        return self.silence

    def stats(self) -> Stats:
        running = sum(not answer.is_closed for answer in self.answers)
        return Stats(
            scheduler=SchedulerStats(
                num_running=running, num_preemptions=1, prefix_queries=100, prefix_hits=40
            ),
            pool=PoolStats(num_pages=8, num_free=6, num_used=2),
            planned=PlannedMemory(weights=900, step=60, pool=40, page=5),
            disk=DiskStats(
                num_pages=2,
                num_bytes=4096,
                limit=8192,
                num_read=3,
                num_lost=1,
                num_written=5,
                bytes_read=6144,
                bytes_written=10_240,
                written_today=6000,
                read_rate=1000.4,
                state=1,
            ),
        )

    def is_alive(self) -> bool:
        return self.alive

    def has_failed(self) -> bool:
        return not self.alive

    def release(self) -> None:
        """Continue the answers on HOLD; from any thread."""
        self._is_released = True
        for loop, event in self._waiters:
            loop.call_soon_threadsafe(event.set)
        self._waiters.clear()

    def hold_again(self) -> None:
        """Let answers stop at HOLD until the next `release`."""
        self._is_released = False

    def wait_until_closed(self) -> None:
        """Wait until every answer so far is closed; from the test's thread."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: self.answers and all(answer.is_closed for answer in self.answers),
                timeout=20,
            ), [each.is_closed for each in self.answers]

    def close(self) -> None:
        """Like the end of the engine: running answers raise EngineStopped."""
        self.is_closed = True
        self.release()

    async def wait_for_release(self) -> None:
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        self._waiters.append(waiter)
        self.on_hold.set()
        if not self._is_released:
            await waiter[1].wait()
        if self.is_closed:
            raise EngineStopped("The engine has stopped.")


class FakePrefixes:
    """In the place of NamedPrefixes."""

    def __init__(self, chat: FakeChat) -> None:
        self._chat = chat

    async def add(
        self,
        name: str,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        client: str = "",
        max_share: float = 1.0,
    ) -> None:
        options = RequestOptions(cache_salt=cache_salt, client=client)
        self._chat.shares[name] = max_share
        await self._chat.submit(token_ids, SamplingParams(max_tokens=1), options)
        self._chat.answers.pop()
        if self._chat.holds_prefixes:
            await self._chat.wait_for_release()
        self._chat.named[name] = tuple(token_ids)

    def remove(self, name: str) -> None:
        if name not in self._chat.named:
            raise UnknownPrefix.named(name, self._chat.named)
        del self._chat.named[name]

    def sizes(self) -> dict[str, int]:
        return {name: len(token_ids) for name, token_ids in self._chat.named.items()}

    async def restore(self, is_client: Callable[[str], bool] = lambda _: True) -> None:
        """Nothing was named before."""

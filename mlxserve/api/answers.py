"""The answers to one HTTP request: submitted together, read together, closed together.

A streaming reply iterates over them, a plain reply folds them; there is no third way to read.
Knows `mlxserve.chat`; does not know JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive

from mlxserve.api.metrics import Metrics, Timed
from mlxserve.api.server.sse import until_disconnect
from mlxserve.errors import EngineStopped
from mlxserve.request import CacheReport, FinishReason, TokenLogprob
from mlxserve.request_options import RequestOptions
from mlxserve.sampling_params import SamplingParams
from mlxserve.text.parsing.turn import ToolCall, ToolCallDelta, join_calls

if TYPE_CHECKING:
    from mlxserve.chat import Chat, Delta, Usage

T = TypeVar("T")


@dataclass(slots=True)
class Folded:
    """One whole answer."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop: str | None = None  # the stop string that ended it


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a request cost, over all its answers."""

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0  # of the completion's
    cache: CacheReport | None = None  # of the prompt, where there is one


class Answers:
    """The answers of one request, by index. Closing them aborts what still runs.

    Each prompt has `num_choices` answers in a row; the prompt is computed once for all of them.
    """

    def __init__(self, answers: Sequence[Timed], num_choices: int = 1) -> None:
        self._answers = answers
        self._num_choices = num_choices
        self._usages: dict[int, Usage] = {}

    @classmethod
    async def submit(
        cls,
        chat: Chat,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        options: RequestOptions,
        metrics: Metrics,
        *,
        num_choices: int = 1,
        request_id: str | None = None,
    ) -> Answers:
        """All are admitted, or none is. Raises what `Chat.submit` raises.

        `request_id` names them in snapshots: with `-N` for the N-th, where there are several.
        """

        # Together, because the engine takes requests between two steps: one by one, a hundred
        # prompts would wait for a hundred steps.
        names = _names(request_id, len(prompts) * num_choices)
        params = replace(params, n=num_choices)
        tasks = [
            asyncio.ensure_future(
                _submit(chat, prompt, params, _called(options, names, num_choices), metrics)
            )
            for prompt in prompts
        ]
        try:
            return cls(list(chain.from_iterable(await asyncio.gather(*tasks))), num_choices)
        except BaseException:
            await _withdraw(tasks)
            raise

    @property
    def tokens(self) -> Tokens:
        """Counts of the answers that have begun; a prompt counts once, however many its choices."""
        first = [usage for n, usage in self._usages.items() if n % self._num_choices == 0]
        return Tokens(
            sum(usage.prompt_tokens for usage in first),
            sum(usage.completion_tokens for usage in self._usages.values()),
            sum(usage.cached_tokens for usage in first),
            sum(usage.reasoning_tokens for usage in self._usages.values()),
            first[0].cache if len(first) == 1 else None,
        )

    def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Pieces of all answers with their index, as they come. Raises EngineStopped."""
        return self._only() if len(self._answers) == 1 else self._merged()

    async def _only(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Of the one answer there is, without the task per piece that waiting for several needs."""
        [answer] = self._answers
        async for delta in answer:
            yield 0, self._counted(0, delta)
            if delta.finish_reason is not None:
                return
        self._counted(0, None)

    async def _merged(self) -> AsyncGenerator[tuple[int, Delta], None]:
        waiting = {
            asyncio.ensure_future(_next(answer)): index
            for index, answer in enumerate(self._answers)
        }
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    index = waiting.pop(task)
                    delta = self._counted(index, task.result())
                    yield index, delta
                    if delta.finish_reason is None:
                        waiting[asyncio.ensure_future(_next(self._answers[index]))] = index
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def fold(self) -> list[Folded]:
        """Every answer, whole. Raises EngineStopped."""
        folded = [Folded() for _ in self._answers]
        calls: list[list[ToolCallDelta]] = [[] for _ in self._answers]
        async with aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                folded[index].text += delta.text
                folded[index].reasoning += delta.reasoning
                folded[index].logprobs += delta.logprobs
                folded[index].finish_reason = delta.finish_reason
                folded[index].stop = delta.stop
                calls[index] += delta.tool_calls
        for answer, deltas_of_calls in zip(folded, calls, strict=True):
            answer.tool_calls = join_calls(deltas_of_calls)
        return folded

    async def aclose(self) -> None:
        for answer in self._answers:
            await answer.aclose()

    def _counted(self, index: int, delta: Delta | None) -> Delta:
        if delta is None or delta.finish_reason is FinishReason.ABORT:
            raise EngineStopped("The answer was stopped before its end. Ask again.")
        if delta.usage is not None:
            self._usages[index] = delta.usage
        return delta


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result; None, and the work cancelled, when the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _submit(
    chat: Chat,
    prompt: Sequence[int],
    params: SamplingParams,
    options: RequestOptions,
    metrics: Metrics,
) -> list[Timed]:
    """The choices of one prompt."""
    timed = [metrics.timed() for _ in range(params.n)]
    answers = await chat.submit_all(prompt, params, options)
    for choice, answer in zip(timed, answers, strict=True):
        choice.start(answer)
    return timed


async def _withdraw(tasks: Sequence[asyncio.Future[list[Timed]]]) -> None:
    """One of these prompts was not admitted, so none shall be."""
    for task in tasks:
        task.cancel()
    for admitted in await asyncio.gather(*tasks, return_exceptions=True):
        for answer in admitted if isinstance(admitted, list) else ():
            await answer.aclose()


async def _next(answer: Timed) -> Delta | None:
    return await anext(answer, None)


def _called(options: RequestOptions, names: Iterator[str | None], count: int) -> RequestOptions:
    """The same options under the next names."""
    return replace(options, request_ids=list(islice(names, count)))


def _names(request_id: str | None, count: int) -> Iterator[str | None]:
    """Of each answer to one request."""
    if request_id is None or count == 1:
        return iter([request_id] * count)
    return (f"{request_id}-{number}" for number in range(count))

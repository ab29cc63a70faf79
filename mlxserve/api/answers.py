"""The answers to one HTTP request, counted and timed as they come.

A streaming reply iterates over their deltas, a plain reply renders what `whole` makes of them.
Knows `mlxserve.chat`; does not know JSON.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from mlxserve.api.metrics import AnswerTimer, Metrics
from mlxserve.api.usage import Tokens
from mlxserve.chat.request_options import RequestOptions
from mlxserve.core.errors import EngineStopped
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import FinishReason

if TYPE_CHECKING:
    from mlxserve.chat.answers import AnswerStream, RequestOutput
    from mlxserve.chat.text_model import TextModel
    from mlxserve.text.deltas import Delta, Usage


class _Meter:
    """Counts and times answers. Apart from them, since their stream holds what observes it."""

    def __init__(self, metrics: Metrics, num_prompts: int, num_choices: int) -> None:
        self.timers = [metrics.timer() for _ in range(num_prompts * num_choices)]
        self.num_choices = num_choices
        self.usages: dict[int, Usage] = {}

    def observe(self, delta: Delta) -> None:
        self.timers[delta.answer_index].observe(delta)
        if delta.finish_reason is FinishReason.ABORT:
            raise EngineStopped("The answer was stopped before its end. Ask again.")
        if delta.usage is not None:
            self.usages[delta.answer_index] = delta.usage


class Answers:
    """The answers to one request, by index: `num_choices` in a row for each prompt."""

    def __init__(self, stream: AnswerStream, meter: _Meter) -> None:
        self._stream = stream
        self._meter = meter

    @classmethod
    async def submit(
        cls,
        model: TextModel,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        options: RequestOptions,
        metrics: Metrics,
    ) -> Answers:
        """Queue the prompts, and time their answers. Raises the errors of `Writer.submit_all`."""
        meter = _Meter(metrics, len(prompts), params.n)
        stream = await model.require_writer().submit_all(
            prompts, params, options, observe=meter.observe
        )
        return cls(stream, meter)

    @property
    def tokens(self) -> Tokens:
        """Token counts of the answers that have begun; a prompt counts once for all its choices."""
        return Tokens.from_usages(self._meter.usages, self._meter.num_choices)

    @property
    def timing(self) -> AnswerTimer:
        """The timer of the first answer."""
        return self._meter.timers[0]

    def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas of all answers as they come. Raises EngineStopped and GrammarFailed."""
        return aiter(self._stream)

    async def whole(self) -> list[RequestOutput]:
        """Return every answer, in order. Raises the errors of iterating."""
        return await self._stream.whole()

    async def aclose(self) -> None:
        """Abort the answers that have not ended."""
        await self._stream.aclose()

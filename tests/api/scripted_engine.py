"""An engine under a real `TextModel` that generates a given text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxserve.core.stats import Stats
from mlxserve.request import FinishReason


class ScriptedEngine:
    """Replaces an AsyncEngine: answers every request with the tokens of `says`.

    The text passes through the real decoder and parser, as a model's would.
    """

    max_model_len = 4_096

    def __init__(self, tokenizer: Any) -> None:
        self.says = ""
        self.step_size = 1  # tokens of one output
        self.requests: list[Any] = []
        self.ends: list[FinishReason] = []  # of those that were ended early
        self.kept: list[float] = []  # for how long, of those whose pages are kept
        self._tokenizer = tokenizer

    async def submit(self, requests: Sequence[Any]) -> Any:
        from mlxserve.engine.output_stream import OutputStream
        from mlxserve.request import Output

        self.requests += requests
        stream = OutputStream(self, requests)
        for request in requests:
            tokens = self._tokenizer.encode(self.says)
            limit = request.params.max_tokens or len(tokens) + 1
            said = tokens[:limit]
            for at in range(0, len(said), self.step_size):
                step = tuple(said[at : at + self.step_size])
                stream.deliver(Output(request.id, step, num_prompt=request.num_prompt))
            is_cut = limit <= len(tokens)
            end = ((), FinishReason.LENGTH) if is_cut else (self._end, FinishReason.STOP)
            stream.deliver(Output(request.id, *end, num_prompt=request.num_prompt))
        return stream

    @property
    def _end(self) -> tuple[int, ...]:
        return (min(self._tokenizer.eos_token_ids),)

    def abort(self, _request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self.ends.append(reason)

    def keep_pages(self, _request: Any, seconds: float) -> None:
        self.kept.append(seconds)

    def stats(self) -> Stats:
        return Stats()

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        pass

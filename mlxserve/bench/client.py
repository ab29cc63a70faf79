"""A measuring client: concurrent streams to any server with OpenAI's `/v1/completions`.

It knows the protocol and the clock, not the contenders or the workloads.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

import httpx

# A cold prompt on a slow machine may take minutes.
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(slots=True)
class TimedRequest:
    """One request and its answer. Times in seconds on the client's clock."""

    label: str
    started: float
    times: list[float] = field(default_factory=list)  # time of each piece of text
    ended: float = 0.0
    text: str = ""
    num_prompt: int = 0
    num_cached: int = 0
    num_completion: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first text; NaN if none arrived."""
        return self.times[0] - self.started if self.times else float("nan")

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece of text and the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]


class LoadClient:
    """Sends prompts to one server and keeps the measurements of each."""

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self.model = model
        self.requests: list[TimedRequest] = []

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def ask(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        label: str = "",
        on_text: Callable[[TimedRequest], None] = lambda _: None,
        fields: Mapping[str, Any] = {},
    ) -> TimedRequest:
        """Send a prompt, text or token ids, and read the whole answer.

        It is decoded greedily unless `fields` override that. Errors are recorded, not raised. An
        exception from `on_text` closes the connection.
        """
        request = TimedRequest(label, time.perf_counter())
        self.requests.append(request)
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                await _read_answer(response, request, on_text)
        except (httpx.HTTPError, ValueError) as error:
            # ValueError: an event that is not JSON.
            request.error = f"{type(error).__name__}: {error}"
        request.ended = time.perf_counter()
        return request

    async def metric(self, name: str) -> float:
        """Sum of a counter or gauge over its labels; NaN if unavailable."""
        try:
            response = await self._http.get("/metrics")
        except httpx.HTTPError:
            return float("nan")
        if response.status_code != httpx.codes.OK:
            return float("nan")
        samples = (f"{name} ", f"{name}{{")
        lines = [line for line in response.text.splitlines() if line.startswith(samples)]
        values = [float(line.rsplit(" ", 1)[1]) for line in lines]
        return sum(values) if values else float("nan")


async def _read_answer(
    response: httpx.Response, request: TimedRequest, on_text: Callable[[TimedRequest], None]
) -> None:
    if response.status_code != httpx.codes.OK:
        text = (await response.aread()).decode(errors="replace")
        request.error = f"{response.status_code}: {text:.200}"
        return
    async for data in _events(response):
        if _record(request, data):
            on_text(request)


async def find_model(url: str) -> str:
    """The first model a server lists. Raises httpx.HTTPError, or LookupError if it lists none."""
    async with httpx.AsyncClient(trust_env=False) as http:
        response = await http.get(f"{url.rstrip('/').removesuffix('/v1')}/v1/models")
        response.raise_for_status()
        models = response.json()["data"]
    if not models:
        raise LookupError(f"{url} lists no model")
    return str(models[0]["id"])


async def _events(response: httpx.Response) -> AsyncGenerator[str, None]:
    async for line in response.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield data


def _record(request: TimedRequest, data: str) -> bool:
    """Add an event to the request; True if it contained text."""
    num_pieces = len(request.times)
    content = json.loads(data)
    if error := content.get("error"):
        request.error = f"{error}"[:200]
    for choice in content.get("choices") or ():
        if text := choice.get("text"):
            request.times.append(time.perf_counter())
            request.text += text
    if usage := content.get("usage"):
        request.num_prompt = usage.get("prompt_tokens", 0)
        request.num_completion = usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        request.num_cached = details.get("cached_tokens") or 0
    return len(request.times) > num_pieces

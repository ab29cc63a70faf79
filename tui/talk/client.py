"""The HTTP client of an OpenAI-compatible server; every failure becomes a sentence for the user.

Fields that only mlxserve sends (cached tokens, health) may be missing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from mlxserve.system.loopback import is_here
from mlxserve.system.terminal_text import one_line
from mlxserve.system.well_formed import well_formed
from tui.talk.chats_client import ChatsClient
from tui.talk.engine_client import EngineClient
from tui.talk.errors import ChatError
from tui.talk.http_client import ClosingClient
from tui.talk.model_control import ModelControl
from tui.talk.pieces import Began, Finish, Piece, TextPiece, ThinkingPiece, ToolPiece, UsagePiece
from tui.talk.prompt_client import PromptClient
from tui.talk.served_model import ServedModel
from tui.talk.wire import check, error_code, events, explained, json_object, said, start_of

# Prefill of a long prompt may take minutes without a byte, so a stream has no read timeout:
# the status line counts the seconds, and Esc stops it.
_STREAM_TIMEOUT = httpx.Timeout(10.0, read=None)
_NO_FIELDS: Mapping[str, float | int | str] = {}
# The code of our server's error when its engine has died.
_STOPPED = "engine_stopped"
_CUT = "were read: the rest does not fit the context"
_REPETITION = "repetition"  # value of our server's `stop_reason`
_QUESTION_TIMEOUT = httpx.Timeout(10.0)


@dataclass(frozen=True, slots=True)
class Health:
    """The server's readiness."""

    is_ready: bool
    progress: float | None = None  # progress of loading the model, 0 to 1


class ChatClient:
    """Talks to one server. Use as an async context manager, or call `close`."""

    def __init__(
        self,
        url: str,
        *,
        read_key: Callable[[], str | None] = lambda: None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`read_key` is asked before each request: the user may make or revoke keys meanwhile."""

        def authorize(request: httpx.Request) -> httpx.Request:
            if key := read_key():
                request.headers["Authorization"] = f"Bearer {key}"
            return request

        self.url = base_url(url)
        here = is_here(self.url)
        self._http = ClosingClient(
            base_url=self.url,
            auth=authorize,
            timeout=_QUESTION_TIMEOUT,
            transport=transport,
            # Requests to this machine must not go through a proxy from the environment.
            trust_env=not here,
            # Reading the system's certificates takes 40 ms.
            verify=not (here and self.url.startswith("http:")),
        )
        self.engine = EngineClient(self._http, self.url)
        self.control = ModelControl(self._http, self.url)
        self.prompts = PromptClient(self._http, self.url)
        self.chats = ChatsClient(self._http, self.url)

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def health(self) -> Health:
        """Return the server's health; one without /health counts as ready. Raises ChatError."""
        with explained(self.url):
            reply = await self._http.get("/health")
        content = json_object(reply.content)
        if error_code(content) == _STOPPED:  # waiting does not help
            raise ChatError(f"The server at {self.url} reports a failure: {said(content)}.")
        progress = content.get("progress")
        # Others answer an unknown path by an error of any status, and llama-server by 503 "Loading model".
        return Health(
            is_ready=reply.status_code != httpx.codes.SERVICE_UNAVAILABLE
            and content.get("status") not in ("loading", "starting"),
            progress=float(progress) if isinstance(progress, int | float) else None,
        )

    async def models(self) -> list[ServedModel]:
        """List the server's models. Raises ChatError."""
        with explained(self.url):
            reply = await self._http.get("/v1/models")
            check(reply.status_code, reply.content, self.url)
        data = json_object(reply.content).get("data")
        entries = data if isinstance(data, list) else []
        models = [entry for entry in entries if isinstance(entry, dict) and "id" in entry]
        writers = [entry for entry in models if _writes(entry)]
        return [_served(entry) for entry in writers or models]

    async def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        model: str,
        continues: bool = False,
        stops_loops: bool = False,
        fields: Mapping[str, float | int | str] = _NO_FIELDS,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> AsyncGenerator[Piece, None]:
        """Stream the answer to the conversation. Raises ChatError.

        Closing the iterator closes the connection, which stops the request on the server.

        continues: the answer continues the last message, which is the assistant's
        stops_loops: end an answer that repeats itself; for servers that know the field
        fields: further fields of the request, such as temperature
        tools: what the model may call, as the API describes functions
        """
        body: dict[str, object] = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        if tools:
            body["tools"] = list(tools)
        if continues:
            body["continue_final_message"] = True
        if stops_loops:
            body["stop_on_repetition"] = True
        is_finished = False
        with explained(self.url):
            async with self._http.stream(
                "POST", "/v1/chat/completions", json=body, timeout=_STREAM_TIMEOUT
            ) as reply:
                if reply.status_code != httpx.codes.OK:
                    check(reply.status_code, await start_of(reply), self.url)
                request_id = one_line(reply.headers.get("x-request-id", ""), 100) or None
                yield Began(request_id, _cuts(reply.headers.get("x-mlxserve-warning", "")))
                async with aclosing(_streamed(reply)) as pieces:
                    async for piece in pieces:
                        is_finished |= isinstance(piece, Finish)
                        yield piece
        if not is_finished:
            raise ChatError(
                "The connection closed before the answer was complete. "
                "The text so far is kept; press Ctrl+R to retry."
            )


def _cuts(warning: str) -> str:
    """Return what the server's warnings say about documents that it read in part."""
    cuts = [one_line(each, 300) for each in warning.split("; ") if _CUT in each]
    return ". ".join(cuts)


def base_url(url: str) -> str:
    """Return the root URL of a server, to which /v1 and /health are appended. Raises ChatError.

    `localhost:8000`, `http://localhost:8000/` and `http://localhost:8000/v1` are all accepted.
    """
    full = url.strip() if "://" in url else f"http://{url.strip()}"
    address = urlsplit(full)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ChatError(
            f"{one_line(url)!r} is not a server address. "
            "Give --url an address such as http://127.0.0.1:8000."
        )
    path = address.path.rstrip("/").removesuffix("/v1")
    return f"{address.scheme}://{address.netloc}{path}"


async def _chunks(reply: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON objects of the stream, until "[DONE]"."""
    async with aclosing(events(reply)) as stream:
        async for event in stream:
            if event.data.strip() == "[DONE]":
                return
            content = json_object(event.data)
            if "error" in content:
                raise ChatError(f"The server stopped with an error: {said(content)}")
            yield content


async def _streamed(reply: httpx.Response) -> AsyncGenerator[Piece, None]:
    async with aclosing(_chunks(reply)) as chunks:
        async for chunk in chunks:
            for piece in _pieces(chunk):
                yield piece


def _pieces(chunk: Mapping[str, Any]) -> list[Piece]:
    pieces: list[Piece] = []
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            delta = choice.get("delta")
            pieces.extend(_delta_pieces(delta if isinstance(delta, dict) else {}))
            if isinstance(reason := choice.get("finish_reason"), str):
                pieces.append(
                    Finish(_REPETITION if choice.get("stop_reason") == _REPETITION else reason)
                )
    if isinstance(usage := chunk.get("usage"), dict):
        pieces.append(_usage(usage))
    return pieces


def _delta_pieces(delta: Mapping[str, Any]) -> list[Piece]:
    pieces: list[Piece] = []
    thinking = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(thinking, str) and thinking:
        pieces.append(ThinkingPiece(well_formed(thinking)))
    text = delta.get("content")
    if isinstance(text, str) and text:
        pieces.append(TextPiece(well_formed(text)))
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            name, arguments = function.get("name") or "", function.get("arguments") or ""
            index, call_id = call.get("index", 0), well_formed(str(call.get("id") or ""))
            name, arguments = well_formed(str(name)), well_formed(str(arguments))
            pieces.append(ToolPiece(index, name, arguments, call_id))
    return pieces


def _usage(usage: Mapping[str, Any]) -> UsagePiece:
    details, cache = usage.get("prompt_tokens_details"), usage.get("cache")
    cache = cache if isinstance(cache, dict) else {}
    drafts = usage.get("speculation")
    return UsagePiece(
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        differs_at=_count(cache.get("differs_at")),
        miss=one_line(well_formed(str(cache.get("reason", ""))), 40),
        accepted_tokens=_count(drafts.get("accepted_tokens")) if isinstance(drafts, dict) else None,
        page_size=_count(cache.get("page_size")),
    )


def _writes(entry: Mapping[str, Any]) -> bool:
    """True if the model can chat, as far as the server says."""
    abilities = entry.get("capabilities")
    return not isinstance(abilities, list) or not abilities or "completion" in abilities


def _served(entry: Mapping[str, Any]) -> ServedModel:
    context = _count(entry.get("max_model_len")) or _count(entry.get("context_length"))
    abilities = entry.get("capabilities")
    sees = "vision" in abilities if isinstance(abilities, list) else None
    return ServedModel(str(entry["id"]), context, entry.get("owned_by") == "mlxserve", sees)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

"""The HTTP client: asks an OpenAI-compatible server and turns every failure into one sentence.

Knows the wire format and nothing else: no widgets, no store. Our own server and any other one
are spoken to in the same way; what only ours sends (cached tokens, health) may be missing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx

from tui.events import (
    ChatError,
    Finish,
    NotReady,
    Piece,
    TextPiece,
    ThinkingPiece,
    ToolPiece,
    Unreachable,
    Usage,
)
from tui.sanitise import one_line, well_formed
from tui.sse import EventReader, EventTooLarge

# Prefill of a long prompt may take minutes without a byte, so a stream has no read timeout:
# the reader sees the seconds go by and has Esc.
_STREAM_TIMEOUT = httpx.Timeout(10.0, read=None)
_QUESTION_TIMEOUT = httpx.Timeout(10.0)
_MAX_ERROR_SIZE = 64 * 1024


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the server can answer, and what it says about it."""

    is_ready: bool
    status: str = ""
    progress: float | None = None  # of loading, 0 to 1


class ChatClient:
    """One server. Use as an async context manager, or call `close`."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = base_url(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=_QUESTION_TIMEOUT,
            # A proxy from the environment must never see what goes to this machine itself.
            trust_env=not _is_loopback(self.url),
        )

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def health(self) -> Health:
        """Raises Unreachable. A server without /health counts as ready."""
        with _explained(self.url):
            reply = await self._http.get("/health")
        content = _object(reply.content)
        if said := _said(content):
            # Ours says so when its engine has died, which waiting does not mend.
            raise ChatError(f"The server at {self.url} is not well: {said}.")
        status = one_line(str(content.get("status", "")), 80)
        progress = content.get("progress")
        return Health(
            is_ready=reply.status_code != httpx.codes.SERVICE_UNAVAILABLE
            and status not in ("loading", "starting"),
            status=status,
            progress=float(progress) if isinstance(progress, int | float) else None,
        )

    async def models(self) -> list[str]:
        """The names of the models that can be asked. Raises ChatError."""
        with _explained(self.url):
            reply = await self._http.get("/v1/models")
            self._check(reply.status_code, reply.content)
        data = _object(reply.content).get("data")
        entries = data if isinstance(data, list) else []
        return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]

    async def stream(
        self, messages: Sequence[Mapping[str, str]], *, model: str
    ) -> AsyncGenerator[Piece, None]:
        """The answer to the conversation, as it is written. Raises ChatError.

        Closing the iterator closes the connection, which is how the server learns of a stop.
        """
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        is_finished = False
        with _explained(self.url):
            async with self._http.stream(
                "POST", "/v1/chat/completions", json=body, timeout=_STREAM_TIMEOUT
            ) as reply:
                if reply.status_code != httpx.codes.OK:
                    self._check(reply.status_code, await _start_of(reply))
                async with aclosing(_events(reply)) as events:
                    async for data in events:
                        for piece in _pieces(data):
                            is_finished |= isinstance(piece, Finish)
                            yield piece
        if not is_finished:
            raise ChatError(
                "The connection ended in the middle of the answer. "
                "What arrived is kept; press Ctrl+R to ask again."
            )

    def _check(self, status: int, content: bytes) -> None:
        if status >= httpx.codes.BAD_REQUEST:
            raise _refusal(status, _said(_object(content)), self.url)


def base_url(url: str) -> str:
    """An address as people write it, as the root that /v1 and /health hang from.

    `localhost:8000`, `http://localhost:8000/` and `http://localhost:8000/v1` mean the same.
    Raises ChatError.
    """
    full = url.strip() if "://" in url else f"http://{url.strip()}"
    parts = urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ChatError(
            f"{one_line(url)!r} is not an address of a server: "
            "write it like http://127.0.0.1:8000 after --url."
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class _explained:
    """Turns what httpx raises into a ChatError that says what to do."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        match error:
            case httpx.ConnectError() | httpx.ConnectTimeout():
                raise Unreachable(
                    f"No server answers at {self._url}. Start one with `mlxserve serve`, "
                    "or check the address after --url."
                ) from error
            case httpx.TimeoutException():
                raise ChatError(
                    f"The server at {self._url} took too long to answer. Try again in a moment."
                ) from error
            case httpx.TransportError():
                raise ChatError(
                    f"The connection to {self._url} broke. "
                    "What arrived is kept; press Ctrl+R to ask again."
                ) from error
            case EventTooLarge():
                raise ChatError(
                    f"The server at {self._url} sent {error}, which is not an answer. "
                    "Check that the address is that of an OpenAI-compatible server."
                ) from error


async def _start_of(reply: httpx.Response) -> bytes:
    content = b""
    async for part in reply.aiter_bytes():
        content += part
        if len(content) > _MAX_ERROR_SIZE:
            break
    return content


async def _events(reply: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of the stream, up to "[DONE]"."""
    reader = EventReader()
    async for part in reply.aiter_bytes():
        for event in reader.feed(part):
            if event.data.strip() == "[DONE]":
                return
            content = _object(event.data)
            if "error" in content:
                raise ChatError(f"The server stopped with an error: {_said(content)}")
            yield content


def _pieces(chunk: Mapping[str, Any]) -> list[Piece]:
    pieces: list[Piece] = []
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            delta = choice.get("delta")
            pieces.extend(_delta_pieces(delta if isinstance(delta, dict) else {}))
            if isinstance(reason := choice.get("finish_reason"), str):
                pieces.append(Finish(reason))
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
            index = call.get("index", 0)
            pieces.append(ToolPiece(index, well_formed(str(name)), well_formed(str(arguments))))
    return pieces


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details")
    return Usage(
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _object(content: bytes | str) -> dict[str, Any]:
    """The JSON object in the content; an empty one where there is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _said(content: Mapping[str, Any]) -> str:
    """The server's own words about an error, on one line."""
    error = content.get("error", "")
    if isinstance(error, dict):
        error = error.get("message", "")
    return one_line(well_formed(str(error)), 300).rstrip(".") if error else ""


def _refusal(status: int, said: str, url: str) -> ChatError:
    words = f": {said}." if said else "."
    match status:
        case 401 | 403:
            return ChatError(
                f"The server at {url} wants another key{words} "
                "Set MLXSERVE_API_KEY to its key and start again."
            )
        case 404:
            return ChatError(
                f"The server at {url} does not know this model or address{words} "
                "Choose a model with /model, or check the address after --url."
            )
        case 413:
            return ChatError(f"The message is too large{words} Shorten it, or start a new chat.")
        case 429:
            return ChatError(f"The server is busy{words} Press Ctrl+R to ask again in a moment.")
        case 503:
            return NotReady(
                f"The server cannot answer yet{words} Press Ctrl+R to ask again in a moment."
            )
        case _ if status < 500:
            return ChatError(f"The server refused the request{words} Change it with /edit.")
        case _:
            return ChatError(f"The server failed (HTTP {status}){words} Press Ctrl+R to ask again.")

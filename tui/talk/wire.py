"""Common parts of all requests: JSON, events, and failures turned into a ChatError."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from mlxserve.system.terminal_text import one_line
from mlxserve.system.well_formed import well_formed
from tui.talk.errors import ChatError, ContextFull, NoEngine, NoReply, ToolsRefused
from tui.talk.sse import EventReader, EventTooLarge, ServerEvent

_MAX_ERROR_SIZE = 64 * 1024
# Statuses with which servers refuse fields that they or the model cannot do.
_INVALID = (400, 422, 500, 501)
_ABSENT = (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED)


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn httpx's exceptions into a ChatError that says what to do."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise NoReply(
            f"No server answers at {url}. Start one with `mlxserve serve`, "
            "or check the address given to --url."
        ) from error
    except httpx.TimeoutException as error:
        raise ChatError(
            f"The server at {url} took too long to respond. Try again in a moment."
        ) from error
    except httpx.TransportError as error:
        raise NoReply(
            f"The connection to {url} was lost. The text so far is kept; press Ctrl+R to retry."
        ) from error
    except EventTooLarge as error:
        raise ChatError(
            f"The server at {url} sent {error}. Check that it is an OpenAI-compatible server."
        ) from error


def check(status: int, content: bytes, url: str) -> None:
    """Raises ChatError for an error status."""
    if status >= httpx.codes.BAD_REQUEST:
        body = json_object(content)
        raise _refusal(status, error_code(body), said(body), url)


def own_content(reply: httpx.Response, url: str, *, lacks: NoEngine, known: str) -> dict[str, Any]:
    """Return the object of a reply to one of mlxserve's own routes.

    lacks: raised if the server does not have the route
    known: the code of a 404 of a server that has it

    Raises ChatError, in the server's words where it has some.
    """
    content = json_object(reply.content)
    if reply.status_code in _ABSENT and error_code(content) != known:
        raise lacks
    if reply.is_error and (words := said(content)):
        raise ChatError(f"{words}.")
    check(reply.status_code, reply.content, url)
    return content


async def start_of(reply: httpx.Response) -> bytes:
    """Return the body of an error reply, cut off after `_MAX_ERROR_SIZE`."""
    content = b""
    async for part in reply.aiter_bytes():
        content += part
        if len(content) > _MAX_ERROR_SIZE:
            break
    return content


async def events(reply: httpx.Response) -> AsyncGenerator[ServerEvent, None]:
    """Yield the events of a stream, to its end."""
    reader = EventReader()
    async for part in reply.aiter_bytes():
        for event in reader.feed(part):
            yield event


def json_object(content: bytes | str) -> dict[str, Any]:
    """Parse a JSON object; empty for anything else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def error_code(content: Mapping[str, Any]) -> str:
    """Return the code of the server's error; empty if there is none."""
    error = content.get("error")
    return str(error.get("code", "")) if isinstance(error, dict) else ""


def said(content: Mapping[str, Any]) -> str:
    """Return the server's error message, on one line; empty if there is none."""
    error = content.get("error", "")
    if isinstance(error, dict):
        error = error.get("message", "")
    return one_line(well_formed(str(error)), 300).rstrip(".") if error else ""


def _refusal(status: int, code: str, said: str, url: str) -> ChatError:
    words = f": {said}." if said else "."
    if code == "context_length_exceeded":
        return ContextFull(f"This chat does not fit into the model's context{words}")
    match status:
        case 401 | 403:
            return ChatError(
                f"The server at {url} requires another API key{words} "
                "Set MLXSERVE_API_KEY to it and start again; `mlxserve key create NAME` makes one."
            )
        case 404:
            return ChatError(
                f"The server at {url} does not know this model or address{words} "
                "Choose a model with /model, or check the address given to --url."
            )
        case 413:
            return ChatError(f"The message is too large{words} Shorten it, or start a new chat.")
        case 429:
            return ChatError(f"The server is busy{words} Press Ctrl+R to retry in a moment.")
        case 503:
            return ChatError(
                f"The server is not ready yet{words} Press Ctrl+R to retry in a moment."
            )
        case _ if status in _INVALID and "tool" in said.lower():
            return ToolsRefused(f"The server refused the request{words} Change it with /edit.")
        case _ if status < 500:
            return ChatError(f"The server refused the request{words} Change it with /edit.")
        case _:
            return ChatError(f"The server failed (HTTP {status}){words} Press Ctrl+R to retry.")

"""Errors as clients see them: a status with a body in OpenAI's, Anthropic's or Ollama's dialect.

Messages say what the reader can do; details of the process stay in the log. Of the routes, this
file only knows which ones are Anthropic's and Ollama's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlxserve.core.errors import (
    EngineStopped,
    GrammarFailed,
    HelperUnavailable,
    InvalidParameter,
    InvalidRequest,
    MlxServeError,
    OutOfMemory,
    PagesPromised,
    PrefixQuotaExceeded,
    PromptTooLong,
    QueueFull,
    UnknownPrefix,
)
from mlxserve.system.well_formed import well_formed

_TYPES = {403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_OVERLOADED = 529  # Anthropic's status for what is 503 elsewhere
RETRY_SOON = {"retry-after": "1"}  # when there is no estimate
# What is larger is not encoded in the event loop: 64 KiB take 0.3 ms.
MAX_ENCODED_IN_LOOP = 64 << 10
# In the scope of a request: `async (scope, receive, value) -> bytes`, which encodes in its turn.
ENCODE_FAIRLY = "mlxserve.encode_fairly"
_VALUE_SIZE = 32  # counted for each value of any kind, so that looking at a large one ends soon
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
DO_NOT_RETRY = {"x-should-retry": "false"}  # obeyed by the official clients


class ApiError(Exception):
    """An error reply.

    status: the HTTP status
    param: the invalid request field, as a path such as `messages[0].content`
    code: the error's name for programs
    anthropic_message, ollama_message: other wording, if these APIs' clients match on it
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic_message: str | None = None,
        ollama_message: str | None = None,
    ) -> None:
        super().__init__(message)
        self.anthropic_message = anthropic_message or message
        self.ollama_message = ollama_message or message
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic_body(self, request_id: str | None) -> dict[str, Any]:
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        return {
            "type": "error",
            "error": {
                "type": _ANTHROPIC_TYPES.get(self.status, kind),
                "message": self.anthropic_message,
            },
            "request_id": request_id,
        }

    def ollama_body(self) -> dict[str, Any]:
        return {"error": self.ollama_message}


def invalid_value(param: str, reason: str) -> ApiError:
    """Build a 400 for the value of a field. `reason` continues a sentence that begins with the field."""
    return ApiError(400, f"{param}: {reason}.", param=param, code="invalid_value")


def from_engine(error: MlxServeError, *, prompt_param: str = "prompt") -> ApiError:
    """Build the reply to an error of the engine. `prompt_param` is the name of the prompt's field."""
    return (
        _refusal(error, prompt_param)
        or _unavailable(error)
        or ApiError(500, str(error), code="engine_error")
    )


def _refusal(error: MlxServeError, prompt_param: str) -> ApiError | None:
    """Return the reply to an invalid request; None for other errors."""
    message = str(error)
    match error:
        case PromptTooLong():
            return _too_long(error, prompt_param)
        case InvalidParameter():
            return ApiError(400, message, param=error.name, code="invalid_value")
        case UnknownPrefix():
            return ApiError(404, message, param="prefix_name", code="unknown_prefix")
        case PrefixQuotaExceeded():
            return ApiError(409, message, code="prefix_quota_exceeded")
        case InvalidRequest():
            return ApiError(400, message, param=prompt_param)
        case GrammarFailed():
            return ApiError(400, message, code="grammar_failed")
    return None


def _unavailable(error: MlxServeError) -> ApiError | None:
    """Return the reply to a request that cannot be served now; None for other errors."""
    message = str(error)
    match error:
        case PagesPromised():
            return ApiError(409, message, code="busy")
        case QueueFull():
            return ApiError(503, message, code="queue_full", headers=RETRY_SOON)
        case HelperUnavailable():
            return ApiError(503, message, code="helper_unavailable", headers=RETRY_SOON)
        case EngineStopped():
            headers = RETRY_SOON if error.starts_again else DO_NOT_RETRY
            return ApiError(503, message, code="engine_stopped", headers=headers)
        case OutOfMemory():
            return ApiError(503, message, code="out_of_memory", headers=DO_NOT_RETRY)
    return None


def _too_long(error: PromptTooLong, param: str) -> ApiError:
    """Build a 400 in the wording by which clients recognise that they must shorten the conversation."""
    length, num_tokens = error.max_model_len, error.num_tokens
    return ApiError(
        400,
        f"This model's maximum context length is {length} tokens. However, your prompt has "
        f"{num_tokens} tokens. {error.advice}",
        param=param,
        code="context_length_exceeded",
        anthropic_message=f"prompt is too long: {num_tokens} tokens > {length} maximum. "
        f"{error.advice}",
    )


def internal_error() -> ApiError:
    """The reply to a bug, which hides the cause. The log has it."""
    return ApiError(500, "Internal server error. See the server's log.", code="internal_error")


def encode_json(value: object) -> bytes:
    """Encode compact JSON in UTF-8, escaping U+2028, U+2029 and U+0085.

    They are legal inside a JSON string, but several clients split a stream of events with
    `str.splitlines`, which breaks lines at them. Their escapes mean the same. A lone surrogate,
    which UTF-8 cannot encode, becomes U+FFFD: no text of a model or client makes a reply fail.
    """
    text = _encoder.encode(value)
    if text.isascii():
        return text.encode()
    for char, escape in (("\u2028", "\\u2028"), ("\u2029", "\\u2029"), ("\x85", "\\u0085")):
        text = text.replace(char, escape)
    return well_formed(text).encode()


def is_large(value: object) -> bool:
    """True if the JSON of a value may be too large to be encoded in the event loop."""
    left, values = MAX_ENCODED_IN_LOOP, [value]
    while values and left >= 0:
        item = values.pop()
        left -= _VALUE_SIZE
        if isinstance(item, str):
            left -= len(item)
        elif isinstance(item, (dict, list, tuple)):
            if _VALUE_SIZE * len(item) > left:
                return True
            if isinstance(item, dict):
                left -= sum(map(len, item))
            values += item.values() if isinstance(item, dict) else item
    return left < 0


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return _JsonReply(value, status, headers)


class _JsonReply(Response):
    """A value that is encoded when it is sent, and if it is large, in its client's turn."""

    media_type = "application/json"

    def __init__(self, value: object, status: int, headers: Mapping[str, str] | None) -> None:
        self.status_code = status
        self.background = None
        self._value = value
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encode = scope.get(ENCODE_FAIRLY)
        if encode is not None and is_large(self._value):
            self.body = await encode(scope, receive, self._value)
        else:
            self.body = encode_json(self._value)
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


# No browser takes a reply for a page or a script, whatever a model wrote into it.
NO_SNIFF = {"x-content-type-options": "nosniff"}


def error_response(error: ApiError) -> Response:
    return _ErrorResponse(error)


class _ErrorResponse(Response):
    """An error in the dialect of the requested route, which is known when it is sent."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error
        if speaks_anthropic(scope):
            reply = _for_anthropic(error, scope.get("mlxserve.request_id"))
        elif speaks_ollama(scope["path"]):
            reply = json_response(error.ollama_body(), error.status, error.headers)
        else:
            reply = json_response(error.body(), error.status, error.headers)
        await reply(scope, receive, send)


def _for_anthropic(error: ApiError, request_id: str | None) -> Response:
    status = _OVERLOADED if error.status == 503 else error.status
    headers = {**error.headers, "request-id": request_id or ""}
    return json_response(error.anthropic_body(request_id), status, headers)


def speaks_anthropic(scope: Scope) -> bool:
    """True for Anthropic's dialect: by the route, or by the header that its clients send."""
    path = scope["path"]
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return True
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def speaks_ollama(path: str) -> bool:
    """True for Ollama's routes. Ours are below `/api/v1/`."""
    return path.startswith("/api/") and not path.startswith("/api/v1/")

"""A request's JSON body: read within limits and parsed strictly.

Python's parser accepts more than JSON (NaN, duplicate names) and turns 1e400 into infinity. These
are refused here. Invalid Unicode (invalid UTF-8, half of a surrogate pair) is replaced by U+FFFD
with a warning, so that no later code has to handle it: refusing it would end an agent's session for
good, as its client sends the same history again.
"""

from __future__ import annotations

import json
import re
import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from mlxserve.api.errors import ApiError, speaks_ollama
from mlxserve.api.fair_work import body_hold, refusal, run_fairly
from mlxserve.api.warnings import warn
from mlxserve.core.errors import QueueFull
from mlxserve.helpers.fair_executor import BodyHold
from mlxserve.helpers.work import MaybeWork, Work
from mlxserve.system.strict_json import finite, refuse_constant
from mlxserve.system.well_formed import well_formed_value
from mlxserve.text.costs import parse_seconds

T = TypeVar("T")

MAX_BODY_SIZE = 32 * 2**20  # bytes
MAX_JSON_DEPTH = 64
MAX_MEMBERS = 4_096  # of one object
MAX_VALUES = 400_000  # of the whole body: more than the tokens of any request
MAX_ALL_MEMBERS = 100_000  # of all its objects: more than 10,000 messages have
# What a validated message takes beside its text; no route reads more of them.
_OBJECT_SIZE, _MAX_OBJECTS = 1_000, 10_000
# A string, or all before the next one. The quantifiers are possessive and the closing quote is
# optional, so that an unterminated string is read once.
_PIECE = re.compile(rb'"(?s:[^"\\]++|\\.)*+"?|[^"]++')
_QUOTE = ord('"')
# To one kind of brackets and nothing else.
_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
# The examples of Ollama's documentation send no content type, which `curl` then calls a form.
_OF_CURL = ("", "application/x-www-form-urlencoded")
_SIZE = "mlxserve.body_size"  # in the scope of a request whose body was read: its bytes
_OBJECT = "mlxserve.object"  # in the scope of a request whose body was parsed, and not yet used
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_INVALID_UTF_8 = "invalid UTF-8 in the body was replaced by U+FFFD"
_LONE_SURROGATE = "half of a surrogate pair in the body was replaced by U+FFFD"


async def read_json(request: Request, make: Callable[[dict[str, Any]], MaybeWork[T]]) -> T:
    """Parse the body and apply `make` to it, off the event loop.

    Raises ApiError 415, 413, 400, 429 or 503.
    """
    if _OBJECT in request.scope:
        seconds, value = request.scope.pop(_OBJECT)
        return await run_fairly(request, Work(seconds, lambda: make(value)))
    raw = await _raw(request)
    parse = partial(parse_json, raw, partial(warn, request))
    return await run_fairly(request, Work(parse_seconds(raw), lambda: make(parse())))


async def read_object(request: Request) -> dict[str, Any]:
    """Parse the body before its route reads it. Raises the errors of `read_json`."""
    raw = await _raw(request)
    seconds = parse_seconds(raw)
    parse = partial(parse_json, raw, partial(warn, request))
    value: dict[str, Any] = await run_fairly(request, Work(seconds, parse))
    request.scope[_OBJECT] = seconds, value
    return value


async def _raw(request: Request) -> bytes:
    """Read the body, charging it to the memory budget of bodies."""
    _require_json(request)
    try:
        hold = body_hold(request)
        raw = await _read(request, hold)
        request.scope[_SIZE] = len(raw)
        hold.grow_to(len(raw) + _OBJECT_SIZE * min(raw.count(b"{"), _MAX_OBJECTS))
    except QueueFull as error:
        raise refusal(error) from error
    return raw


def body_size(request: Request) -> int:
    """Bytes of the body; 0 before it was read."""
    size: int = request.scope.get(_SIZE, 0)
    return size


def parse_json(raw: bytes, warn: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Parse strict JSON, one object. Raises ApiError 400.

    warn: called with a sentence about replaced characters
    """
    _check_shape(raw)
    try:
        content = json.loads(
            _decoded(raw, warn),
            parse_constant=refuse_constant,
            parse_float=finite,
            object_pairs_hook=_unique,
        )
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise _bad_json(_reason(error)) from error
    if not isinstance(content, dict):
        raise _bad_json("it must be an object, in braces")
    if _SURROGATE_ESCAPE.search(raw) and _has_lone_surrogate(content):
        warn(_LONE_SURROGATE)
        return dict(well_formed_value(content))
    return content


def _decoded(raw: bytes, warn: Callable[[str], None]) -> str:
    raw = raw.removeprefix(BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        warn(_INVALID_UTF_8)
        return raw.decode(errors="replace")


def _require_json(request: Request) -> None:
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    is_json = media_type.strip().lower() == "application/json"
    if not (is_json or (speaks_ollama(request.url.path) and media_type.strip() in _OF_CURL)):
        raise ApiError(
            415, "The body must be JSON: send the header `Content-Type: application/json`."
        )
    charset = parameters.strip().lower()
    if charset.startswith("charset=") and charset[8:].strip('"') not in ("utf-8", "utf8"):
        raise ApiError(415, "The body must be encoded in UTF-8.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed request bodies are not accepted.")


async def _read(request: Request, hold: BodyHold) -> bytes:
    """Read the body. A declared length is charged before the first byte is read."""
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else 0
    _grow(hold, size)
    # Not one array: several that grow in turn leave as much memory again in holes.
    pieces: list[bytes] = []
    num_read = 0
    async for piece in request.stream():
        if not piece:
            # The end of the body.
            continue
        pieces.append(piece)
        num_read += len(piece)
        _grow(hold, max(size, num_read))
    return b"".join(pieces)


def _grow(hold: BodyHold, size: int) -> None:
    if size > MAX_BODY_SIZE:
        raise _too_large()
    hold.grow_to(size)


def _check_shape(raw: bytes) -> None:
    """Refuse too many values, naming the top-level field that has them, and too many levels.

    This precedes parsing, because `json.loads` holds the interpreter's lock and calls no hook for
    the elements of an array: it would stop the event loop for 2.3 s on 32 MiB of `[],`, for 1.9 s
    on a million members, and for 0.05 s within these limits. A loop in Python over all values would
    slow every running answer as long: only strings are looked at one by one, and most bodies not at
    all.
    """
    if raw.count(b",") < MAX_ALL_MEMBERS and raw.count(b"[") + raw.count(b"{") <= MAX_JSON_DEPTH:
        return
    num_commas = num_members = depth = 0
    brackets: list[bytes] = []
    text = field = b""
    for match in _PIECE.finditer(raw):
        piece = match[0]
        if piece[0] == _QUOTE:
            text = piece[1:-1] if depth == 1 else b""
            continue
        if depth == 1 and text and piece.lstrip()[:1] == b":":
            field = text
        num_commas += piece.count(b",")
        num_members += piece.count(b":")
        if num_commas >= MAX_VALUES:
            raise _too_many(field, f"the request holds more than {MAX_VALUES:,} values")
        if num_members > MAX_ALL_MEMBERS:
            raise _too_many(field, f"objects have more than {MAX_ALL_MEMBERS:,} members together")
        own_brackets = piece.translate(_AS_BRACKETS, _NO_BRACKETS)
        if own_brackets:
            depth += 2 * own_brackets.count(b"[") - len(own_brackets)
            brackets.append(own_brackets)
    _check_depth(b"".join(brackets))


def _check_depth(brackets: bytes) -> None:
    """Refuse deep nesting. Each round removes the innermost level; the parser checks pairing."""
    for _ in range(MAX_JSON_DEPTH):
        outer = brackets.replace(b"[]", b"")
        if len(outer) == len(brackets):
            return
        brackets = outer
    if brackets:
        raise _too_deep()


def _reason(error: ValueError) -> str:
    """Return what is wrong with the text, without the advice that Python's message has for programmers."""
    # With a `parse_int` of its own, a list of 100,000 tokens would take three times as long.
    if "set_int_max_str_digits" in str(error):
        return f"a number has more than {sys.get_int_max_str_digits()} digits"
    return str(error)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_MEMBERS:
        raise ValueError(f"an object has more than {MAX_MEMBERS} members")
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {twice[:100]!r} appears twice in one object")
    return members


def _has_lone_surrogate(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _bad_json(reason: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")


def _too_many(field: bytes, reason: str) -> ApiError:
    name = ascii(field.decode("utf-8", "replace"))[1:-1][:100]
    return ApiError(400, f"{name or 'body'}: {reason}.", param=name or None, code="invalid_json")


def _too_deep() -> ApiError:
    return ApiError(
        400,
        f"The body's JSON is nested deeper than {MAX_JSON_DEPTH} levels.",
        code="invalid_json",
    )


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {MAX_BODY_SIZE // 2**20} MiB.",
        code="request_too_large",
    )

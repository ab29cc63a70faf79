"""Grammars: compiles structures with llguidance, off the event loop, and caches the results.

llguidance's compiler releases the GIL, and copying a compiled grammar takes microseconds. Sources
are bounded before they are compiled: a schema with 10,000 properties would take half a minute.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from mlxserve.errors import EngineStopped, InvalidParameter
from mlxserve.sampling_params import Structure, StructureKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from mlxserve.text.tokenizer import Tokenizer

MAX_SOURCE = 64 << 10  # characters of a source that a client sent
MAX_GRAMMAR = 512 << 10  # characters of a grammar generated for all tools of a request
MAX_PROPERTIES = 500  # 300 compile in 25 ms, 1,000 in 0.2 s, 3,000 in 1.7 s
MAX_DEPTH = 32
COMPILE_SECONDS = 2.0
MAX_KEPT = 64  # compiled grammars in the cache
# The white space of usual JSON. Unbounded, small models never stop generating white space.
WHITE_SPACE = r"[ ]|\n[ ]{0,32}"


class Grammars:
    """Compiles grammars for one tokenizer. Its methods may be called from any event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._source = tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._kept: OrderedDict[tuple[StructureKind, str], LLMatcher] = OrderedDict()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="mlxserve-grammar")

    def __len__(self) -> int:
        """The number of compiled grammars in the cache."""
        return len(self._kept)

    async def compile(self, structure: Structure, *, limit: int = MAX_SOURCE) -> LLMatcher:
        """A new matcher for the structure. `limit`: maximum length of its source in characters.

        Raises InvalidParameter, which names the structure's field, and EngineStopped.
        """
        if len(structure.source) > limit:
            raise _refused(structure, f"is longer than {limit} characters")
        if self._is_closed:
            raise EngineStopped("The engine was closed.")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._load_tokenizer)
        work = loop.run_in_executor(self._threads, self._compiled, structure)
        try:
            compiled = await asyncio.wait_for(work, COMPILE_SECONDS)
        except TimeoutError:
            raise _refused(
                structure, f"takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
            ) from None
        return compiled.deep_copy()

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _load_tokenizer(self) -> None:
        """Takes about a second for a large vocabulary."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is not None:
                return
            text = self._source.serialized()
            if text is None:
                raise InvalidParameter(
                    "response_format", "needs a tokenizer.json, which this model does not have"
                )
            self._tokenizer = LLTokenizer(
                text, n_vocab=self.vocab_size, eos_token=sorted(self._source.eos_token_ids)
            )

    def _compiled(self, structure: Structure) -> LLMatcher:
        key = (structure.kind, structure.source)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        matcher = self._compile(structure)
        with self._lock:
            self._kept[key] = matcher
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _compile(self, structure: Structure) -> LLMatcher:
        from llguidance import LLMatcher

        assert self._tokenizer is not None
        try:
            grammar = _grammar(structure)
        except (ValueError, RecursionError) as error:
            raise _refused(structure, f"cannot be read: {error}") from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(structure, f"cannot be followed: {matcher.get_error().strip()[:500]}")
        return matcher


def _grammar(structure: Structure) -> str:
    from llguidance import LLMatcher

    match structure.kind:
        case StructureKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema(_spaced({"type": "object"}))
        case StructureKind.JSON_SCHEMA:
            schema = json.loads(structure.source)
            check_schema(schema)
            return LLMatcher.grammar_from_json_schema(_spaced(schema))
        case StructureKind.REGEX:
            return LLMatcher.grammar_from_regex(structure.source)
        case StructureKind.CHOICE:
            words = json.loads(structure.source)
            quoted = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
            return LLMatcher.grammar_from_lark(f"start: {quoted}")
        case StructureKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(structure.source)


def inline(structure: Structure) -> str | None:
    """A structure as an expression inside a Lark grammar; None for one that is a whole grammar.

    Raises InvalidParameter for an invalid or too large schema.
    """
    from llguidance import regex_to_lark

    match structure.kind:
        case StructureKind.GRAMMAR:
            return None
        case StructureKind.REGEX:
            return f"/{regex_to_lark(structure.source)}/"
        case StructureKind.CHOICE:
            words = json.loads(structure.source)
            return " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
        case StructureKind.JSON_OBJECT:
            return json_text({"type": "object"})
    try:
        schema = json.loads(structure.source)
        check_schema(schema)
    except (ValueError, RecursionError) as error:
        raise _refused(structure, f"cannot be read: {error}") from error
    return json_text(schema)


def json_text(schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
    """A Lark expression for JSON that follows a schema."""
    guidance = {"whitespace_pattern": WHITE_SPACE, "lenient": is_lenient}
    return f"%json {json.dumps({**schema, 'x-guidance': guidance}, ensure_ascii=False)}"


def _spaced(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}


def check_schema(schema: object) -> None:
    """Raises ValueError for a value that is not a schema, or one too large to compile."""
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema must be an object")
    num_properties = 0
    for value, depth in _walk(schema):
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        properties = value.get("properties")
        num_properties += len(properties) if isinstance(properties, dict) else 0
        if num_properties > MAX_PROPERTIES:
            raise ValueError(f"it has more than {MAX_PROPERTIES} properties")


def _walk(value: object) -> Iterator[tuple[dict[str, Any], int]]:
    """Every object in the value, with its depth."""
    waiting = [(value, 1)]
    while waiting:
        found, depth = waiting.pop()
        if isinstance(found, dict):
            yield found, depth
            waiting += [(inner, depth + 1) for inner in found.values()]
        elif isinstance(found, list):
            waiting += [(inner, depth) for inner in found]


def _refused(structure: Structure, message: str) -> InvalidParameter:
    return InvalidParameter(structure.field, message)

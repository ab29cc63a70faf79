"""Every error mlxserve raises on purpose, in one tree.

    MlxServeError
    ├── InvalidRequest          the request cannot be served; the message says what to change
    │   ├── InvalidParameter    a value is out of range
    │   ├── PromptTooLong       the prompt exceeds the context, or can never fit in the cache
    │   ├── UnknownPrefix       no named prefix has this name
    │   └── PrefixQuotaExceeded a named prefix would occupy too much of the cache
    ├── InvalidConfig           the engine cannot be built from these options
    ├── ModelNotFound           neither a local folder nor a repository that can be downloaded
    ├── UnsupportedModel        the architecture, or a file in the model's folder, is refused
    ├── OutOfMemory             the model or its cache does not fit in memory
    ├── GrammarFailed           the grammar became too expensive in the middle of an answer
    ├── QueueFull               too many requests are waiting
    │   ├── ClientQueueFull     too many of this client
    │   └── PagesPromised       live requests were promised the pages that a prefix or resize would take
    ├── HelperUnavailable       a process that works on texts was paused, or cannot be started
    ├── EngineFailed            a failure inside the engine ended this request; the engine goes on
    └── EngineStopped           the engine was closed or has failed and accepts no requests

A message says what happened, then what to do about it. Where several modules check the same rule,
a classmethod of the error builds its sentence.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Self


class MlxServeError(Exception):
    """Base class of every error that mlxserve raises on purpose."""


class InvalidRequest(MlxServeError, ValueError):
    """The request cannot be served. Nothing was computed for it."""


class InvalidParameter(InvalidRequest):
    """A parameter's value is invalid or out of range. `name` is the parameter."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


class PromptTooLong(InvalidRequest):
    """The prompt exceeds the context, or can never fit in the cache.

    advice: what to do about it, for replies that say the rest in the words of their API
    """

    def __init__(
        self, message: str, *, num_tokens: int, max_model_len: int, advice: str = ""
    ) -> None:
        super().__init__(message)
        self.advice = advice or message
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len

    @classmethod
    def for_answer(
        cls,
        num_tokens: int,
        max_model_len: int,
        *,
        num_characters: int | None = None,
        limit: str = "the context has",
        advice: str = "raise max_model_len if the model and the memory allow it",
    ) -> Self:
        """A prompt whose answer would have no room.

        num_characters: of a text that was not tokenised, as it has more than `num_tokens` in any case
        limit, advice: what holds only `max_model_len` tokens, and how to change that
        """
        size = f"{num_tokens} tokens"
        if num_characters is not None:
            size = f"{num_characters} characters, which is more than {size}"
        advice = f"Shorten the prompt, or {advice}."
        return cls(
            f"the prompt has {size}, but {limit} {max_model_len}, and the answer needs at least "
            f"one. {advice}",
            num_tokens=num_tokens,
            max_model_len=max_model_len,
            advice=advice,
        )

    @classmethod
    def for_embedding(cls, num_tokens: int, max_model_len: int) -> Self:
        """A text to embed that is longer than the context."""
        return cls(
            f"input: a text has {num_tokens} tokens, but the context has {max_model_len}. Embed it "
            "in parts.",
            num_tokens=num_tokens,
            max_model_len=max_model_len,
            advice="Embed the text in parts.",
        )


class UnknownPrefix(InvalidRequest):
    """No named prefix has this name. Add it first."""

    @classmethod
    def named(cls, name: str, known: Iterable[str]) -> Self:
        """`known`: the names that the caller may see."""
        names = ", ".join(sorted(known)) or "none"
        return cls(f"There is no prefix named {name[:100]!r}; known: {names}.")


class PrefixQuotaExceeded(InvalidRequest):
    """A named prefix needs more pages than named prefixes may pin."""


class InvalidConfig(MlxServeError, ValueError):
    """The engine cannot be built from these options. `option` is the one to change, if known."""

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class ModelNotFound(MlxServeError):
    """Neither a local folder nor a repository that can be downloaded."""


class UnsupportedModel(MlxServeError):
    """The model's architecture, or a file in its folder, is refused."""


class OutOfMemory(MlxServeError):
    """The model, or the smallest useful cache next to it, does not fit in memory."""


class GrammarFailed(MlxServeError):
    """The grammar exceeded its work limit in the middle of an answer, which stays incomplete."""


class QueueFull(MlxServeError):
    """Too many requests are waiting. Try again later, in `seconds` if they are known."""

    def __init__(self, message: str, *, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class ClientQueueFull(QueueFull):
    """Too much work of this one client is waiting."""


class PagesPromised(QueueFull):
    """A named prefix or a smaller cache would cut the answers of live requests. Try again when they
    have ended.
    """


class HelperUnavailable(MlxServeError):
    """A process that works on texts was paused or ended by others, or the system refuses to start it.
    Try again.
    """


class EngineFailed(MlxServeError):
    """A failure inside the engine ended this request or call. The engine goes on."""

    @classmethod
    def because_of(cls, error: BaseException) -> Self:
        """Details of the process stay in its log; `__cause__` holds the error for the library."""
        failed = cls(
            f"The engine failed ({type(error).__name__}) and this request was lost. It has "
            "recovered: send the request again. The log says what happened."
        )
        failed.__cause__ = error
        return failed


class EngineStopped(MlxServeError):
    """The engine was closed or has failed and accepts no more requests."""


def in_one_line(error: BaseException) -> str:
    """Another library's error as part of our message: one line of at most 300 characters."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__

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
    ├── EngineFailed            a failure inside the engine ended this request; the engine runs on
    └── EngineStopped           the engine was closed or has failed and accepts no requests

A message says what happened, then what to do about it. Where several modules check the same rule,
a classmethod of the error builds its sentence.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Self


class MlxServeError(Exception):
    """Base class of every error that mlxserve raises on purpose.

    try:
        llm.generate(prompt)
    except MlxServeError as error:
        print(error)  # what happened, then what to do about it
    """


class InvalidRequest(MlxServeError, ValueError):
    """The request cannot be served. Nothing was computed for it.

    Also a ValueError, so that callers may treat it as any other bad argument.
    """


class InvalidParameter(InvalidRequest):
    """A parameter's value is invalid or out of range.

    name: the parameter, as the library spells it
    """

    name: str

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


class PromptTooLong(InvalidRequest):
    """The prompt exceeds the context, or can never fit in the cache.

    num_tokens: length of the prompt; a lower bound if the text was too long to tokenise
    max_model_len: tokens of a prompt and its answer that the engine accepts
    advice: what to do about it, for replies that say the rest in the words of their API
    """

    num_tokens: int
    max_model_len: int
    advice: str

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
        """Return the error for a prompt that leaves no room for an answer.

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
        """Return the error for a text to embed that is longer than the context."""
        return cls(
            f"input: a text has {num_tokens} tokens, but the context has {max_model_len}. Embed it "
            "in parts.",
            num_tokens=num_tokens,
            max_model_len=max_model_len,
            advice="Embed the text in parts.",
        )


class UnknownPrefix(InvalidRequest):
    """No named prefix has the requested name; `add_prefix` adds one."""

    @classmethod
    def named(cls, name: str, known: Iterable[str]) -> Self:
        """Return the error; `known`: the names that the caller may see."""
        names = ", ".join(sorted(known)) or "none"
        return cls(f"There is no prefix named {name[:100]!r}; known: {names}.")


class PrefixQuotaExceeded(InvalidRequest):
    """A named prefix needs more pages than named prefixes may pin."""


class InvalidConfig(MlxServeError, ValueError):
    """The engine cannot be built from these options.

    option: the one to change; None if several are involved
    """

    option: str | None

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class ModelNotFound(MlxServeError):
    """The model is neither a local folder nor a repository that can be downloaded."""


class UnsupportedModel(MlxServeError):
    """The model's architecture, or a file in its folder, is refused."""


class OutOfMemory(MlxServeError):
    """The model, or the smallest useful cache next to it, does not fit in memory."""


class GrammarFailed(MlxServeError):
    """The grammar exceeded its work limit in the middle of an answer, which stays incomplete."""


class QueueFull(MlxServeError):
    """Too many requests are waiting.

    seconds: when to try again; None if unknown
    """

    seconds: float | None

    def __init__(self, message: str, *, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class ClientQueueFull(QueueFull):
    """Too much work of one client is waiting; others are still served."""


class PagesPromised(QueueFull):
    """A named prefix or a smaller cache would cut the answers of live requests.

    Try again when they have ended.
    """


class HelperUnavailable(MlxServeError):
    """A process that works on texts was paused or ended, or cannot be started. Try again."""


class EngineFailed(MlxServeError):
    """A failure inside the engine ended this request or call. The engine keeps running."""

    @classmethod
    def because_of(cls, error: BaseException) -> Self:
        """Wrap another error: details stay in the log, and `__cause__` holds it for the library."""
        failed = cls(
            f"The engine failed ({type(error).__name__}) and this request was lost. It has "
            "recovered: send the request again. The log says what happened."
        )
        failed.__cause__ = error
        return failed


class EngineStopped(MlxServeError):
    """The engine was closed or has failed and accepts no more requests."""

    def __init__(self, message: str, *, starts_again: bool = False) -> None:
        """`starts_again`: another one soon answers at the same address."""
        super().__init__(message)
        self.starts_again = starts_again


def in_one_line(error: BaseException) -> str:
    """Return another library's error as one line of at most 300 characters."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__

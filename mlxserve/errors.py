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
    └── EngineStopped           the engine was closed or has failed and accepts no requests

A message says what happened, then what to do about it.
"""


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
    """The prompt exceeds the context, or can never fit in the cache."""

    def __init__(self, message: str, *, num_tokens: int, max_model_len: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len


class UnknownPrefix(InvalidRequest):
    """No named prefix has this name. Add it first."""


class PrefixQuotaExceeded(InvalidRequest):
    """A named prefix needs more pages than named prefixes may pin."""


class InvalidConfig(MlxServeError, ValueError):
    """The engine cannot be built from these options."""


class ModelNotFound(MlxServeError):
    """Neither a local folder nor a repository that can be downloaded."""


class UnsupportedModel(MlxServeError):
    """The model's architecture, or a file in its folder, is refused."""


class OutOfMemory(MlxServeError):
    """The model, or the smallest useful cache next to it, does not fit in memory."""


class GrammarFailed(MlxServeError):
    """The grammar exceeded its work limit in the middle of an answer, which stays incomplete."""


class QueueFull(MlxServeError):
    """Too many requests are waiting. Try again later."""


class EngineStopped(MlxServeError):
    """The engine was closed or has failed and accepts no more requests."""

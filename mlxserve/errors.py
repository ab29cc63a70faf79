"""Every error mlxserve raises on purpose, in one tree.

    MlxServeError
    ├── InvalidRequest          what was asked cannot be done; the message says what to change
    │   ├── InvalidParameter    a value out of its range
    │   ├── PromptTooLong       the prompt leaves no room in the context, or can never fit in memory
    │   ├── UnknownPrefix       a prefix_name nobody added
    │   └── PrefixQuotaExceeded a named prefix would take too much of the cache
    ├── InvalidConfig           the engine cannot be built from these options
    ├── ModelNotFound           neither a folder nor a repository that can be read
    ├── UnsupportedModel        the architecture, or a file of it, is refused
    ├── OutOfMemory             the model, or its cache, does not fit
    ├── GrammarFailed           an answer's grammar took more work than is allowed, in the middle of it
    ├── QueueFull               too many requests are waiting
    └── EngineStopped           the engine has ended, or failed, and takes no more work

Messages are written for the person who has to act on them: what happened, then what to do.
"""


class MlxServeError(Exception):
    """Base of every error raised on purpose."""


class InvalidRequest(MlxServeError, ValueError):
    """What was asked cannot be done; nothing was computed."""


class InvalidParameter(InvalidRequest):
    """One named value is out of its range."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for an answer, or can never fit in the cache."""

    def __init__(self, message: str, *, num_tokens: int, max_model_len: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len


class UnknownPrefix(InvalidRequest):
    """No prefix of this name was added."""


class PrefixQuotaExceeded(InvalidRequest):
    """The pages of a named prefix are more than may be kept."""


class InvalidConfig(MlxServeError, ValueError):
    """The engine cannot be built from these options."""


class ModelNotFound(MlxServeError):
    """Neither a folder nor a repository that can be read."""


class UnsupportedModel(MlxServeError):
    """The architecture, or something in the model's folder, is refused."""


class OutOfMemory(MlxServeError):
    """The model, or the smallest useful cache beside it, does not fit in memory."""


class GrammarFailed(MlxServeError):
    """The grammar of an answer took more work than is allowed; the answer ends without its end."""


class QueueFull(MlxServeError):
    """Too many requests are waiting."""


class EngineStopped(MlxServeError):
    """The engine has ended and takes no more work."""

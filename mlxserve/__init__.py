"""mlxserve: a local inference server for Apple Silicon.

    from mlxserve import LLM, SamplingParams
    print(LLM().chat([{"role": "user", "content": "Hello"}])[0].text)

Importing this package costs nothing: a name's module, and with it mlx, is imported when the
name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlxserve.version import __version__

if TYPE_CHECKING:
    from mlxserve.config import EngineConfig
    from mlxserve.errors import (
        EngineStopped,
        GrammarFailed,
        InvalidConfig,
        InvalidParameter,
        InvalidRequest,
        MlxServeError,
        ModelNotFound,
        OutOfMemory,
        PrefixQuotaExceeded,
        PromptTooLong,
        QueueFull,
        UnknownPrefix,
        UnsupportedModel,
    )
    from mlxserve.llm import LLM, AsyncLLM, RequestOutput, Usage
    from mlxserve.request import FinishReason, Resized, TokenLogprob
    from mlxserve.sampling_params import SamplingParams, Structure, StructureKind
    from mlxserve.stats import Stats
    from mlxserve.text.deltas import Delta
    from mlxserve.text.parsing.turn import AssistantTurn, ToolCall, ToolChoice

__all__ = [
    "LLM",
    "AssistantTurn",
    "AsyncLLM",
    "Delta",
    "EngineConfig",
    "EngineStopped",
    "FinishReason",
    "GrammarFailed",
    "InvalidConfig",
    "InvalidParameter",
    "InvalidRequest",
    "MlxServeError",
    "ModelNotFound",
    "OutOfMemory",
    "PrefixQuotaExceeded",
    "PromptTooLong",
    "QueueFull",
    "RequestOutput",
    "Resized",
    "SamplingParams",
    "Stats",
    "Structure",
    "StructureKind",
    "TokenLogprob",
    "ToolCall",
    "ToolChoice",
    "UnknownPrefix",
    "UnsupportedModel",
    "Usage",
    "__version__",
]

_MODULE_OF = {
    "EngineConfig": "mlxserve.config",
    "EngineStopped": "mlxserve.errors",
    "GrammarFailed": "mlxserve.errors",
    "InvalidConfig": "mlxserve.errors",
    "InvalidParameter": "mlxserve.errors",
    "InvalidRequest": "mlxserve.errors",
    "MlxServeError": "mlxserve.errors",
    "ModelNotFound": "mlxserve.errors",
    "OutOfMemory": "mlxserve.errors",
    "PrefixQuotaExceeded": "mlxserve.errors",
    "PromptTooLong": "mlxserve.errors",
    "QueueFull": "mlxserve.errors",
    "UnknownPrefix": "mlxserve.errors",
    "UnsupportedModel": "mlxserve.errors",
    "LLM": "mlxserve.llm",
    "AsyncLLM": "mlxserve.llm",
    "RequestOutput": "mlxserve.llm",
    "Usage": "mlxserve.llm",
    "ToolCall": "mlxserve.text.parsing.turn",
    "ToolChoice": "mlxserve.text.parsing.turn",
    "AssistantTurn": "mlxserve.text.parsing.turn",
    "Delta": "mlxserve.text.deltas",
    "Stats": "mlxserve.stats",
    "Resized": "mlxserve.request",
    "FinishReason": "mlxserve.request",
    "SamplingParams": "mlxserve.sampling_params",
    "Structure": "mlxserve.sampling_params",
    "StructureKind": "mlxserve.sampling_params",
    "TokenLogprob": "mlxserve.request",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

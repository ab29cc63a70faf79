"""mlxserve: a local inference server for Apple Silicon.

    from mlxserve import LLM, SamplingParams
    print(LLM().chat([{"role": "user", "content": "Hello"}])[0].text)

Importing this package costs nothing: a public name's module is imported when the name is first used.
"""

import ast
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlxserve.core.version import __version__ as __version__

# The list of public names: type checkers follow it, _modules() reads it.
if TYPE_CHECKING:
    from mlxserve.chat.answers import RequestOutput as RequestOutput
    from mlxserve.core.config import EngineConfig as EngineConfig
    from mlxserve.core.config import SchedulerConfig as SchedulerConfig
    from mlxserve.core.errors import EngineFailed as EngineFailed
    from mlxserve.core.errors import EngineStopped as EngineStopped
    from mlxserve.core.errors import GrammarFailed as GrammarFailed
    from mlxserve.core.errors import HelperUnavailable as HelperUnavailable
    from mlxserve.core.errors import InvalidConfig as InvalidConfig
    from mlxserve.core.errors import InvalidParameter as InvalidParameter
    from mlxserve.core.errors import InvalidRequest as InvalidRequest
    from mlxserve.core.errors import MlxServeError as MlxServeError
    from mlxserve.core.errors import ModelNotFound as ModelNotFound
    from mlxserve.core.errors import OutOfMemory as OutOfMemory
    from mlxserve.core.errors import PagesPromised as PagesPromised
    from mlxserve.core.errors import PrefixQuotaExceeded as PrefixQuotaExceeded
    from mlxserve.core.errors import PromptTooLong as PromptTooLong
    from mlxserve.core.errors import QueueFull as QueueFull
    from mlxserve.core.errors import UnknownPrefix as UnknownPrefix
    from mlxserve.core.errors import UnsupportedModel as UnsupportedModel
    from mlxserve.core.sampling_params import SamplingParams as SamplingParams
    from mlxserve.core.sampling_params import Structure as Structure
    from mlxserve.core.sampling_params import StructureKind as StructureKind
    from mlxserve.core.stats import Stats as Stats
    from mlxserve.llm import LLM as LLM
    from mlxserve.llm import AsyncLLM as AsyncLLM
    from mlxserve.request import FinishReason as FinishReason
    from mlxserve.request import Resized as Resized
    from mlxserve.request import TokenLogprob as TokenLogprob
    from mlxserve.text.deltas import Delta as Delta
    from mlxserve.text.deltas import Usage as Usage
    from mlxserve.text.parsing.turn import AssistantTurn as AssistantTurn
    from mlxserve.text.parsing.turn import ToolCall as ToolCall
    from mlxserve.text.parsing.turn import ToolChoice as ToolChoice


@cache
def _modules() -> dict[str, str]:
    """Map public names to modules, from the imports in this file (as lazy_loader does, SPEC 1)."""
    with open(__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlxserve.")
    ]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_modules())
    if name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_modules()[name]), name)


def __dir__() -> list[str]:
    return sorted(_modules())

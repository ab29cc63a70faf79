"""The way from options to a model that answers, for the commands that load one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxserve.config import EngineConfig

if TYPE_CHECKING:
    from mlxserve.chat import Chat


def build(config: EngineConfig) -> Chat:
    """Loads mlx and the model. Raises MlxServeError; for a model that is not there, at once."""
    from mlxserve import machine
    from mlxserve.hub.files import find_model

    files = find_model(config.model, config.revision)
    machine.prepare()
    from mlxserve.build import build_chat  # imports mlx: after prepare()

    return build_chat(config, files)

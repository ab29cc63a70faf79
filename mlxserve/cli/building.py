"""Builds the engine and its chat from options, for the commands that load a model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mlxserve.cli.streams import print_error
from mlxserve.config import EngineConfig
from mlxserve.errors import EngineStopped

if TYPE_CHECKING:
    from mlxserve.chat.chat import Chat


def build(config: EngineConfig) -> Chat:
    """Import mlx and load the model. Raises MlxServeError; a missing model fails before mlx loads."""
    from mlxserve import machine
    from mlxserve.hub.files import find_model

    files = find_model(config.model, config.revision)
    machine.import_mlx_lm()
    from mlxserve.ranks.run import build_chat_of_ranks  # imports mlx and mlx-lm

    try:
        return build_chat_of_ranks(config, files)
    except EngineStopped as error:
        if config.num_ranks > 1:  # the engine's thread may wait for another rank for ever
            print_error(error)
            os._exit(1)
        raise

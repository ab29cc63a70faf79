"""`mlxserve serve`: serves a model over HTTP."""

# Annotations are read by typer at run time, so this file does not postpone them.

import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer

from mlxserve.api.config import ServerConfig
from mlxserve.cli.building import build
from mlxserve.cli.settings import Settings
from mlxserve.config import EngineConfig


def serve(
    settings: Settings,
    exit_with_parent: Annotated[
        bool, typer.Option("--exit-with-parent", help="Stop when stdin is closed.")
    ] = False,
) -> None:
    """Serve a model over HTTP (OpenAI and Anthropic APIs).

    Every option can also be set in the configuration file (max_num_seqs = 32) or the environment
    (MLXSERVE_MAX_NUM_SEQS=32). Flags override the environment, which overrides the file.
    """
    signal.signal(signal.SIGTERM, _leave)  # until the server installs its own handlers
    server = settings.build(ServerConfig)
    config = settings.build(EngineConfig)
    from mlxserve.api.access.policy import read_access
    from mlxserve.api.app import create_app
    from mlxserve.api.server import logs
    from mlxserve.api.server.connection import Limits
    from mlxserve.api.server.drain import Drain
    from mlxserve.api.server.server import HttpServer, bind, stop_at_end_of_input, url_of
    from mlxserve.api.server.server import serve as run_server

    logs.configure(server.log_level)
    access = read_access(server, os.environ.get("MLXSERVE_API_KEY"))
    with bind(server.host, server.port) as listener:
        if exit_with_parent:
            stop_at_end_of_input()
        chat = build(config)
        drain = Drain()
        running = HttpServer(
            create_app(chat, aliases=server.alias, access=access, drain=drain),
            on_ready=lambda: print(f"mlxserve is ready at {url_of(listener)}", flush=True),
            stop_engine=chat.close,
            limits=Limits.of(server),
            drain=drain,
            drain_seconds=server.drain_seconds,
        )
        try:
            run_server(running, listener)
        finally:
            chat.close()


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(0)

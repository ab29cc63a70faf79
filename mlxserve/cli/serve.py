"""`mlxserve serve`: serves a model over HTTP."""

# Annotations are read by typer at run time, so this file does not postpone them.

import gc
import os
import signal
import sys
from contextlib import nullcontext
from types import FrameType
from typing import Annotated, NoReturn

import typer

from mlxserve.api.config import ServerConfig
from mlxserve.cli.building import build
from mlxserve.cli.ranks import STOP, run_by_launcher
from mlxserve.cli.servers import serve_in_background
from mlxserve.cli.settings import Settings
from mlxserve.cli.streams import forget_unwritten, open_closed_streams, say
from mlxserve.config import EngineConfig
from mlxserve.disk.folder import default_bytes, disk_folder
from mlxserve.running import registered

RANKS_ENDED = 70  # the exit code, so that a service manager starts them again


def serve(
    settings: Settings,
    exit_with_parent: Annotated[
        bool, typer.Option("--exit-with-parent", help="Stop when stdin is closed.")
    ] = False,
    background: Annotated[
        bool, typer.Option("--background", help="Return once the server is ready; `stop` ends it.")
    ] = False,
) -> None:
    """Serve a model over HTTP (OpenAI and Anthropic APIs).

    Every option can also be set in the configuration file (max_num_seqs = 32) or the environment
    (MLXSERVE_MAX_NUM_SEQS=32). Flags override the environment, which overrides the file.
    """
    if background:
        serve_in_background([part for part in sys.argv[2:] if part != "--background"])
        return
    gc.disable()  # until all is loaded: little of that is garbage, and looking for it takes 0.1 s
    open_closed_streams()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # such as SIGHUP after `nohup`
            signal.signal(number, _leave)  # until the server installs its own handlers
    server = settings.build(ServerConfig)
    config = settings.build(EngineConfig)
    if config.num_ranks > 1:
        _join_ranks(config)
    else:
        config = _with_disk_cache(config)
    from mlxserve import machine
    from mlxserve.api.access.policy import read_access
    from mlxserve.api.app import create_app
    from mlxserve.api.server import logs
    from mlxserve.api.server.connection import Limits
    from mlxserve.api.server.drain import Drain
    from mlxserve.api.server.last_resort import LastResort
    from mlxserve.api.server.open_requests import OpenRequests
    from mlxserve.api.server.server import HttpServer, bind, stop_at_end_of_input, url_of
    from mlxserve.api.server.server import serve as run_server
    from mlxserve.api.server.watchdog import Watchdog

    logs.configure(server.log_level)
    access = read_access(server, os.environ.get("MLXSERVE_API_KEY"))
    limits = Limits.of(server).within(machine.allow_open_files())
    with bind(server.host, server.port) as listener:
        if exit_with_parent or (config.num_ranks > 1 and config.hostfile is not None):
            stop_at_end_of_input(STOP)
        chat = build(config)
        drain, open_requests = Drain(), OpenRequests()
        app = create_app(
            chat,
            aliases=server.alias,
            unlisted_names=() if config.model is None else (config.model,),
            access=access,
            drain=drain,
            open_requests=open_requests,
        )
        _keep_what_is_loaded()
        running = HttpServer(
            app,
            on_ready=lambda: say(f"mlxserve is ready at {url_of(listener)}"),
            stop_engine=chat.close,
            limits=limits,
            drain=drain,
            open_requests=open_requests,
            drain_seconds=server.drain_seconds,
            on_signal=LastResort().end_within,
        )
        watchdog = Watchdog(chat, end_after=server.watchdog_seconds, shut_down=running.stop)
        watchdog.start()
        is_private = exit_with_parent  # a chat's own: no other may use it
        try:
            with (
                nullcontext()
                if is_private
                else registered(
                    url_of(listener), chat.model_name, needs_key=access.keyring().is_locked
                )
            ):
                run_server(running, listener)
        finally:
            watchdog.stop()
            chat.close()
            forget_unwritten()
    if watchdog.exit_code:
        print("error: the engine has failed; the log says why.", file=sys.stderr, flush=True)
        if config.num_ranks > 1:  # the engine's thread may wait for another rank for ever
            os._exit(watchdog.exit_code)
        sys.exit(watchdog.exit_code)


def _join_ranks(config: EngineConfig) -> None:
    """Go on as rank 0; be another rank, if a launcher started this process as one; or start the
    launcher and end with it. Raises InvalidConfig."""
    from mlxserve.ranks.environment import own_rank

    rank = own_rank()
    if rank:
        from mlxserve import machine

        machine.import_mlx_lm()
        from mlxserve.ranks.run import run_worker  # imports mlx

        run_worker(config)
    if rank is None and config.hostfile is not None:
        was_told = run_by_launcher(
            config.hostfile, config.distributed_backend, config.master_port + 1, STOP
        )
        if not was_told:  # mlx.launch does not say how its ranks ended
            print("error: the ranks have ended by themselves.", file=sys.stderr, flush=True)
        sys.exit(0 if was_told else RANKS_ENDED)


def _with_disk_cache(config: EngineConfig) -> EngineConfig:
    if config.disk_cache_size is not None:
        return config
    size = default_bytes(disk_folder(config.disk_cache_dir)) / (1 << 30)
    return config.with_options(disk_cache_size=size)


def _keep_what_is_loaded() -> None:
    """Exempt what exists now from garbage collections, which would stop all threads to look at it.

    A full collection took 160 ms with it, and takes 10 ms without. Garbage is kept as well: 1,300 of
    94,000 objects, and finding them would take 50 ms before the server is ready.
    """
    gc.freeze()
    gc.enable()


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """End while the model loads. Not by SystemExit: the interpreter would end under a thread that is
    inside mlx, which aborts the process."""
    os._exit(130 if number == signal.SIGINT else 0)

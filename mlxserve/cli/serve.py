"""`mlxserve serve`: serves a model over HTTP."""

# Annotations are read by typer at run time, so this file does not postpone them.

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Annotated, NoReturn

import typer

from mlxserve.api.config import ServerConfig
from mlxserve.chat.registry.entries import RegisteredModel
from mlxserve.cli.building import build_registry, register
from mlxserve.cli.options import ModelName
from mlxserve.cli.ranks import (
    RANKS_ENDED,
    STOP,
    BackOff,
    RankProcesses,
    launcher_command,
    own_command,
    run_again,
)
from mlxserve.cli.running_servers import registered, running_servers
from mlxserve.cli.servers import serve_in_background
from mlxserve.cli.settings import ModelSettings, Settings
from mlxserve.cli.streams import forget_unwritten, open_closed_streams, print_error, say
from mlxserve.core.config import EngineConfig
from mlxserve.disk.folder import default_bytes, disk_folder
from mlxserve.ranks.environment import LENDER


def serve(
    settings: Settings,
    model_name: ModelName = None,
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
    # Until all is loaded: little of that is garbage, and looking for it takes 0.1 s.
    gc.disable()
    open_closed_streams()
    _leave_on_signals()
    if model_name is not None:
        settings = settings.with_model(model_name)
    server = settings.build(ServerConfig)
    models = [
        replace(model, config=_with_server_defaults(model.config)) for model in settings.models()
    ]
    config = models[0].config
    if config.num_ranks > 1 and len(models) == 1:
        _join_ranks(config, server, is_private=exit_with_parent)
    exit_code = _serve(server, models, settings, is_private=exit_with_parent)
    if exit_code:
        print_error("the engine has failed; the log says why.")
        # The engine's thread may wait for another rank for ever.
        if config.num_ranks > 1:
            os._exit(exit_code)
        sys.exit(exit_code)


def _serve(
    server: ServerConfig, models: Sequence[ModelSettings], settings: Settings, *, is_private: bool
) -> int:
    """Load models and serve them; return the exit code.

    settings: of models that are added
    is_private: for the parent process alone
    """
    from mlxserve.api.access.description import opened_without_key
    from mlxserve.api.access.policy import read_access
    from mlxserve.api.build import ModelServer
    from mlxserve.api.server import logs
    from mlxserve.api.server.connection import Limits
    from mlxserve.api.server.server import reachable_url, stop_at_end_of_input, url_of
    from mlxserve.cli.lent_listener import LentListener
    from mlxserve.system import machine

    logs.configure(server.log_level)
    access = read_access(server, os.environ.get("MLXSERVE_API_KEY"))
    if (opened := opened_without_key(access)) is not None:
        logging.getLogger(__name__).warning(opened)
    limits = Limits.from_config(server).within(machine.allow_open_files())
    lent = LentListener.from_environment()
    with _bound(server) if lent is None else lent.listener as listener:
        config = models[0].config
        is_one_of_ranks = config.num_ranks > 1 and config.hostfile is not None
        if is_private or is_one_of_ranks or lent is not None:
            stop_at_end_of_input(STOP)
        (registry, executor), url = build_registry(models, server), url_of(listener)

        def added(name: str) -> RegisteredModel:
            model = settings.other_model(name)
            model = replace(model, config=_with_server_defaults(model.config).of_one_of_several())
            return register(model, server, executor)

        running = ModelServer(
            registry,
            executor,
            server,
            access,
            limits=limits,
            on_ready=lambda: say(f"mlxserve is ready at {reachable_url(listener)}"),
            register=added if config.num_ranks == 1 else None,
        )
        _keep_what_is_loaded()
        needs_key = access.keyring().is_locked
        try:
            with registered(
                url,
                [model.name for model in registry.models],
                [name for model in registry.models for name in model.names[1:]],
                needs_key=needs_key,
                is_private=is_private,
            ):
                if lent is not None:
                    lent.be_ready()
                exit_code = running.run(listener)
                if lent is not None and not exit_code:
                    lent.end()
                return exit_code
        finally:
            forget_unwritten()


def _bound(server: ServerConfig) -> socket.socket:
    """Listen on the address; name a server of this user that does. Raises MlxServeError."""
    from mlxserve.api.server.server import AddressInUse, bind

    try:
        return bind(server.host, server.port)
    except AddressInUse as error:
        running = next((each for each in running_servers() if each.port == server.port), None)
        if running is None:
            raise
        raise AddressInUse(
            f"A server of yours with {running.model} uses port {server.port} already ({running.url}). Use it, "
            f"end it with `mlxserve stop {server.port}`, or choose another port with --port."
        ) from error


def _join_ranks(config: EngineConfig, server: ServerConfig, *, is_private: bool) -> None:
    """Continue as rank 0; otherwise run as another rank, or start all of them.

    A process that a launcher started as another rank follows rank 0, and a process that starts all ranks ends
    with them. Raises InvalidConfig.
    """
    from mlxserve.ranks.environment import own_rank, starts_again

    rank = own_rank()
    if rank:
        from mlxserve.system import machine

        machine.import_mlx_lm()
        from mlxserve.ranks.run import run_worker  # imports mlx

        run_worker(config)
    is_first = rank is None and not starts_again()
    if is_first and (config.hostfile is not None or config.max_rank_restarts):
        sys.exit(_start_ranks(config, server, is_private=is_private))


def _start_ranks(config: EngineConfig, server: ServerConfig, *, is_private: bool) -> int:
    """Start all ranks, and again after a failure; return the exit code. Raises MlxServeError."""
    from mlxserve.api.server.server import stop_at_end_of_input
    from mlxserve.cli.lent_listener import ListenerLender

    processes = RankProcesses(STOP)
    if is_private:
        stop_at_end_of_input(STOP)
    with _bound(server) as listener, ListenerLender(listener) as lender:
        environment: dict[str, str] = {}
        advice = "The log says why. Start the server again once that is mended."
        if config.hostfile is None:
            command = own_command()
            environment[LENDER] = str(lender.path)
        else:
            first_port = config.master_port + 1
            command = launcher_command(
                config.hostfile, config.distributed_backend, first_port, lender.path
            )
            advice = (
                "The log says why. Check that every machine is awake and can be reached "
                f"(`mlxserve doctor --hostfile {config.hostfile}`), and start the server again."
            )

        def start() -> int:
            code = processes.run(command, environment)
            if (
                config.hostfile is None
                or processes.is_stopped
                or lender.has_ended
                or lender.was_ready
            ):
                return code
            # mlx.launch does not say how its ranks ended.
            print_error("the ranks have ended by themselves.")
            return RANKS_ENDED

        return run_again(processes, lender, start, BackOff(config.max_rank_restarts), advice)


def _with_server_defaults(config: EngineConfig) -> EngineConfig:
    """Apply defaults of a server that the library does not have."""
    if config.disk_cache_size is None:
        size = default_bytes(disk_folder(config.disk_cache_dir)) / (1 << 30)
        config = config.with_options(disk_cache_size=size)
    return config.with_options(trial_process=config.trial_process or "auto")


def _keep_what_is_loaded() -> None:
    """Exempt all current objects from garbage collection, which stops all threads to scan them.

    A full collection took 160 ms with them, and takes 10 ms without. Garbage is kept as well: 1,300
    of 94,000 objects, and finding them would take 50 ms before the server is ready.
    """
    gc.freeze()
    gc.enable()


def _leave_on_signals() -> None:
    """Exit on signals until the server installs its own handlers."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Such as SIGHUP after `nohup`.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """Exit while the model loads.

    Not by SystemExit: the interpreter would end under a thread that is inside mlx, which aborts the
    process.
    """
    os._exit(130 if number == signal.SIGINT else 0)

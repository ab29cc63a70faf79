"""`mlxserve service`: the server as a service of this user, started at login and after a failure."""

# Annotations are read by typer at run time, so this file does not postpone them.

import os
import sys
from pathlib import Path

import typer

from mlxserve.api.config import NO_FILE, ServerConfig
from mlxserve.cli.options import SCHEMAS, PanelCommand, with_settings
from mlxserve.cli.settings import OTHER_NAMES, PREFIX, Settings, flags_of, several
from mlxserve.cli.streams import print_safe
from mlxserve.core.config import EngineConfig
from mlxserve.core.option import options_of
from mlxserve.service.choice import service_manager
from mlxserve.service.unit import ServiceUnit, last_lines, log_file
from mlxserve.system.command_help import PlainTyper

_PATH_UNITS = ("file", "folder")
_NUM_LINES = 10
_NOT_RUNNING = 3  # exit status, as systemctl's and LSB's

app = PlainTyper(
    help="Run the server as a service: started at login, restarted when it fails.",
)


def install(settings: Settings) -> None:
    """Install and start the service; a second time, restart it with other options.

    Takes the options of `mlxserve serve`. API keys are not passed on: make them with
    `mlxserve key create`, or name a file with --api-key-file.
    """
    from mlxserve.api.access.policy import read_access

    server = settings.build(ServerConfig)
    settings.build(EngineConfig)
    # Without MLXSERVE_API_KEY, which the service does not have.
    read_access(server)
    unit = ServiceUnit.from_flags(_flags(settings), server.drain_seconds)
    manager = service_manager()
    manager.install(unit)
    print_safe(f"mlxserve runs from now on, and starts at login: {manager.unit_file}")
    print_safe(f"Its log is {unit.log}")
    if sys.platform == "linux":
        print_safe("To start it at boot, before you log in: loginctl enable-linger")
    if ignored := _ignored_variables():
        print_safe(
            f"Not passed on from this environment: {', '.join(ignored)}. Give them as flags, or in "
            "the configuration file.",
            to=sys.stderr,
        )


app.command(cls=PanelCommand)(with_settings(ServerConfig, EngineConfig)(install))


@app.command()
def status() -> None:
    """Show whether the service runs, and the end of its log. Exits with 3 if it does not run."""
    manager = service_manager()
    if not manager.unit_file.exists():
        print_safe("not installed; see `mlxserve service install --help`")
        raise typer.Exit(_NOT_RUNNING)
    state = manager.state()
    print_safe(state.text)
    print_safe(f"Unit: {manager.unit_file}")
    print_safe(f"Log:  {log_file()}")
    for line in last_lines(log_file(), _NUM_LINES):
        print_safe(f"  {line}")
    if not state.is_running:
        raise typer.Exit(_NOT_RUNNING)


@app.command()
def uninstall() -> None:
    """Stop the service and remove it. Models, keys, chats and the log stay."""
    manager = service_manager()
    if not manager.unit_file.exists():
        print_safe("not installed")
        return
    manager.uninstall()
    print_safe(f"Removed {manager.unit_file}. The log stays in {log_file()}")


def _flags(settings: Settings) -> list[str]:
    """Flags for `mlxserve serve`, with absolute paths: a service has another current folder."""
    units = {option.name: option.declared.unit for each in SCHEMAS for option in options_of(each)}
    flags = dict(settings.flags)
    for name, value in settings.flags.items():
        is_path = units[name] in _PATH_UNITS and value != NO_FILE
        if name == "model":
            flags[name] = tuple(_whole(path) for path in several(value))
        elif is_path:
            flags[name] = str(Path(value).expanduser().resolve())
    config = (
        [] if settings.file is None else ["--config", str(settings.file.expanduser().resolve())]
    )
    return [*config, *flags_of(flags)]


def _whole(model: str) -> str:
    """Return a path as absolute, or any other name unchanged."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _ignored_variables() -> list[str]:
    """Environment variables with options or the key, which the service does not inherit."""
    names = {name for name in os.environ if name.startswith(PREFIX)} - OTHER_NAMES
    return sorted(names | ({"MLXSERVE_API_KEY"} & os.environ.keys()))

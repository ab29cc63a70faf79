"""`mlxserve ps`, `mlxserve stop` and `mlxserve serve --background`: servers that run on their own."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json as json_format
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from mlxserve.cli.completion import served_models
from mlxserve.cli.models import Json
from mlxserve.cli.remote import ServerError, ask
from mlxserve.cli.running_servers import RunningServer, running_servers
from mlxserve.cli.streams import print_safe
from mlxserve.core.config import data_home
from mlxserve.core.errors import InvalidRequest, MlxServeError
from mlxserve.service.unit import last_lines, log_file
from mlxserve.system.files import make_marked_folder, write_new

_READY = re.compile(r"^mlxserve is ready at (http://\S+)$", re.MULTILINE)
_POLL_SECONDS = 0.1
_ASK_SECONDS = 2.0
# A server has let its answers finish by then, and has ended.
_STOP_SECONDS = 60.0
_LOG_LINES = 12


def ps(json: Json = False) -> None:
    """List the servers of this user that run now, with what they are doing, and their models."""
    servers = [(server, _activity(server)) for server in running_servers()]
    if json:
        print_safe(
            json_format.dumps([{**asdict(server), **activity} for server, activity in servers])
        )
        return
    if not servers:
        print_safe(
            "No server runs. Start one with `mlxserve serve`, or `mlxserve serve --background`."
        )
        return
    for server, activity in servers:
        minutes = int(time.time() - server.started) // 60
        age = f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
        print_safe(
            f"{server.url:28} {server.model:40} pid {server.pid:<8} {age:>12}  {_words(activity)}"
            f"{', of an open chat' if server.is_private else ''}"
        )
        for model in activity.get("models", ()):
            print_safe(f"  {model['id']:46} {_model_line(model)}")


def stop(
    which: Annotated[
        str | None,
        typer.Argument(
            help="Its address, port, model or process id, if several run; or one of a server's models.",
            autocompletion=served_models,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop every server of this user.")] = False,
) -> None:
    """Stop a server, or unload one of its models. Running answers have a few seconds to finish.

    A server with several models goes on without the one that is named: it is loaded again when a
    request asks for it.
    """
    if which is not None and not every and (server := _with_several(which)) is not None:
        ask(server.url, "POST", "/api/v1/models/unload", {"model": which})
        print_safe(f"Unloaded {which} from the server at {server.url}")
        return
    for server in _chosen(which, every=every):
        os.kill(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        while server in running_servers():
            if time.monotonic() > deadline:
                raise MlxServeError(
                    f"The server at {server.url} (process {server.pid}) has not ended after "
                    f"{_STOP_SECONDS:.0f} s. End it with `kill -9 {server.pid}`."
                )
            time.sleep(_POLL_SECONDS)
        print_safe(f"Stopped {server.url} ({server.model})")


def logs(
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, help="How many lines of its end.")
    ] = 40,
) -> None:
    """Show the end of the newest log: of a server in the background, a chat's or the service."""
    files = [*(data_home() / "logs").glob("*.log"), log_file()]
    log_files = sorted(
        (file for file in files if file.is_file()), key=lambda file: file.stat().st_mtime
    )
    if not log_files:
        raise InvalidRequest(f"There is no log yet in {data_home() / 'logs'}.")
    newest = log_files[-1]
    print_safe(f"{newest} ({len(log_files)} logs; `tail -f` follows one)", to=sys.stderr)
    for line in last_lines(newest, lines):
        print_safe(line)


def _chosen(which: str | None, *, every: bool) -> Sequence[RunningServer]:
    """Return the servers that are meant. Raises InvalidRequest if that is ambiguous."""
    servers = running_servers()
    if not servers:
        raise InvalidRequest("No server of this user runs.")
    if every:
        return servers
    names = {
        server: (server.url, server.url.rpartition(":")[2], server.model, str(server.pid))
        for server in servers
    }
    # A chat's server is stopped by its name, with all, or if there is no other.
    unnamed = [server for server in servers if not server.is_private] or servers
    matches = [server for server in servers if which and which.rstrip("/") in names[server]]
    matches = unnamed if which is None else matches
    if len(matches) == 1:
        return matches
    listed = ", ".join(f"{server.url} ({server.model})" for server in servers)
    if not matches:
        raise InvalidRequest(f"No server is {which!r}. These run: {listed}.")
    raise InvalidRequest(f"Several servers run: {listed}. Name one, or stop all with --all.")


def _with_several(model: str) -> RunningServer | None:
    """Return the only server with this model and others; None if none. Raises InvalidRequest."""
    matches = [
        server
        for server in running_servers()
        if server.others and model in (server.model, *server.others)
    ]
    if len(matches) > 1:
        urls = ", ".join(each.url for each in matches)
        raise InvalidRequest(f"Several servers have {model!r}: {urls}. Stop one by its address.")
    return matches[0] if matches else None


def _model_line(model: dict[str, Any]) -> str:
    if model["state"] == "unloaded":
        return f"{'':>9}  not loaded"
    memory, num_requests = f"{model['memory'] / (1 << 30):6.2f} GiB", model["num_requests"]
    left = model["unloads_in_seconds"]
    use = f"{num_requests} request{'s' * (num_requests > 1)}" if num_requests else "idle"
    stays = "" if num_requests else ", stays" if left is None else f", {left:.0f} s left"
    stays = ", pinned" if model.get("pinned") else stays
    adapters = f", adapters: {', '.join(model['adapters'])}" if model.get("adapters") else ""
    state = f" ({model['state']})" if model["state"] != "loaded" else ""
    return f"{memory}  {use}{stays}{state}{adapters}"


def _activity(server: RunningServer) -> dict[str, Any]:
    """Return a server's running and waiting requests, and models; empty if it does not say."""
    try:
        reply = ask(server.url, "GET", "/ready", seconds=_ASK_SECONDS)
    except ServerError:
        return {}
    names = [name for name in ("num_requests_running", "num_requests_waiting") if name in reply]
    activity = {name: reply[name] for name in names}
    if server.others or server.adapters:
        with suppress(ServerError):  # the key may not see them
            models = ask(server.url, "GET", "/api/v1/models", seconds=_ASK_SECONDS)
            activity["models"] = models["data"]
    return activity


def _words(activity: dict[str, Any]) -> str:
    if "num_requests_running" not in activity:
        return ""
    return f"{activity['num_requests_running']} running, {activity['num_requests_waiting']} waiting"


def _new_log(log: Path) -> BinaryIO:
    """Open a new log file. Raises MlxServeError."""
    try:
        make_marked_folder(log.parent)
        write_new(log)
        return log.open("wb")
    except OSError as error:
        raise MlxServeError(
            f"The server's log cannot be written: {error}. Set MLXSERVE_HOME to a folder that can, or "
            "start it without --background."
        ) from error


def serve_in_background(arguments: Sequence[str]) -> None:
    """Start `mlxserve serve` with these arguments, and return once it is ready.

    Raises MlxServeError with the end of its log if it fails.
    """
    log = data_home() / "logs" / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    with _new_log(log) as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlxserve", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # it outlives the terminal
        )
    while True:
        has_ended = process.poll() is not None  # in this order, the last lines are not missed
        text = log.read_text(errors="replace")
        if ready := _READY.search(text):
            print_safe(f"mlxserve is ready at {ready[1]}")
            print_safe(f"It runs in the background; its log is {log}. `mlxserve stop` ends it.")
            return
        if has_ended:
            last = "\n".join(text.splitlines()[-_LOG_LINES:])
            raise MlxServeError(f"The server did not start. The end of {log}:\n{last}")
        time.sleep(_POLL_SECONDS)

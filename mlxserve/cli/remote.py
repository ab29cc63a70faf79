"""Requests to a running server, for the commands that need one."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli.own_key import key_for
from mlxserve.cli.running_servers import newest_server
from mlxserve.core.errors import InvalidConfig, MlxServeError
from mlxserve.system.well_formed import well_formed_value

if TYPE_CHECKING:
    import httpx

_WARNING_HEADER = "x-mlxserve-warning"
USUAL_URL = "http://127.0.0.1:8000"
# Timeout; a long prefix is computed before the server replies.
_SECONDS = 600.0

Url = Annotated[
    str | None,
    typer.Option(
        help="The running server; by default MLXSERVE_URL from the environment, else the newest of "
        "`mlxserve ps`. The API key is that of MLXSERVE_API_KEY, else your own of `mlxserve key list`."
    ),
]


class ServerError(MlxServeError):
    """The server refused the request or cannot be reached."""


def url_of(explicit: str | None, model: str | None = None) -> str:
    """Return the given address, else MLXSERVE_URL, else that of the newest running server.

    A server that has the model goes first.
    """
    url = explicit or os.environ.get("MLXSERVE_URL")
    if not url:
        server = newest_server(model) or newest_server()
        url = server.url if server is not None else USUAL_URL
    return url.rstrip("/").removesuffix("/v1")


def ask(
    url: str | None, method: str, path: str, body: Any = None, *, seconds: float = _SECONDS
) -> Any:
    """Request a JSON reply. Raises ServerError with the server's message."""
    base = url_of(url)
    with _client(base, seconds) as client:
        reply = client.request(method, path, json=well_formed_value(body))
    return _content(reply, base)


def stream(
    url: str, path: str, body: Any, on_warning: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each event of a reply, up to [DONE].

    on_warning: called with the reply's warnings, if it has any

    Raises ServerError, also for an error event in the middle.
    """
    base = url_of(url)
    sent = well_formed_value(body)
    with _client(base, _SECONDS) as client, client.stream("POST", path, json=sent) as reply:
        if not reply.is_success:
            reply.read()
            _content(reply, base)
        if (warning := reply.headers.get(_WARNING_HEADER)) is not None:
            on_warning(warning)
        for line in reply.iter_lines():
            if not line.startswith("data:"):
                continue
            if (data := line.removeprefix("data:").strip()) == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ServerError(f"The server at {base} stopped: {event['error']['message']}")
            yield event


@contextmanager
def _client(base: str, seconds: float) -> Iterator["httpx.Client"]:
    """Open a client. Raises ServerError if the server goes away or its key is unreadable."""
    import httpx

    try:
        key = key_for(base)
    except InvalidConfig as error:
        raise ServerError(str(error)) from error
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(
            base_url=base,
            timeout=seconds,
            trust_env=False,  # a proxy from the environment must not see local traffic
            verify=not base.startswith("http:"),  # reading certificates takes 40 ms
            headers=headers,
        ) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise ServerError(
            f"No server answers at {base} ({error}). Start one with `mlxserve serve`, or pass the "
            "address of another with --url."
        ) from error


def _content(reply: "httpx.Response", base: str) -> Any:
    try:
        content = reply.json()
    except ValueError as error:
        raise ServerError(f"The server at {base} is not mlxserve.") from error
    if reply.is_success:
        return content
    try:
        message = content["error"]["message"]
    except (KeyError, TypeError):
        message = f"status {reply.status_code}"
    if reply.status_code == 401:
        message += " This command sends MLXSERVE_API_KEY, else your own key of `mlxserve key list`."
    raise ServerError(f"The server at {base} refused: {message}")

"""Requests to a running server, for the commands that need one."""

# Annotations are read by typer at run time, so this file does not postpone them.

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.errors import MlxServeError

if TYPE_CHECKING:
    import httpx

USUAL_URL = "http://127.0.0.1:8000"
_SECONDS = 600.0  # timeout; a long prefix is computed before the server replies

Url = Annotated[
    str | None,
    typer.Option(
        help=f"The running server; by default MLXSERVE_URL from the environment, else {USUAL_URL}. "
        "The API key is taken from MLXSERVE_API_KEY."
    ),
]


class ServerError(MlxServeError):
    """The server refused the request or cannot be reached."""


def url_of(given: str | None) -> str:
    return (given or os.environ.get("MLXSERVE_URL") or USUAL_URL).rstrip("/").removesuffix("/v1")


def ask(
    url: str | None, method: str, path: str, body: Any = None, *, seconds: float = _SECONDS
) -> Any:
    """The server's JSON reply. Raises ServerError with the server's message."""
    import httpx

    key = os.environ.get("MLXSERVE_API_KEY")
    base = url_of(url)
    try:
        # trust_env=False: a proxy from the environment must not see local traffic.
        with httpx.Client(base_url=base, timeout=seconds, trust_env=False) as client:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            reply = client.request(method, path, json=body, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise ServerError(
            f"No server answers at {base} ({error}). Start one with `mlxserve serve`, or pass the "
            "address of another with --url."
        ) from error
    return _content(reply, base)


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
        message += " This command reads the key from MLXSERVE_API_KEY."
    raise ServerError(f"The server at {base} refused: {message}")

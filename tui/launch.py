"""Starting the terminal: the server first, because it has the most to load, then the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tui.colours import DEFAULT
from tui.home import Home
from tui.talk.connection import ConnectOptions, Connector

if TYPE_CHECKING:
    from tui.chat.store import Store
    from tui.opening import FirstFrame


def main(
    *,
    url: str | None,
    model: str | None,
    engine_args: Sequence[str] = (),
    server_args: Sequence[str] = (),
    frame: FirstFrame | None = None,
) -> int:
    """Run the terminal until the reader leaves; the process's exit code.

    url: an OpenAI-compatible server to attach to; None: start one, and end it at the end
    model: the model to ask for; None: the server's first
    engine_args: options of the engine, for a server that is started and for what fits beside it
    server_args: more for `mlxserve serve` when one is started
    frame: what the terminal shows already
    """
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if not all(stream.isatty() for stream in streams) or os.environ.get("TERM") == "dumb":
        print(
            "mlxserve chat needs a terminal. For scripts, use `mlxserve run`, "
            "or `mlxserve serve` and its HTTP API.",
            file=sys.stderr,
        )
        return 2
    wanted = ConnectOptions(
        url=url,
        model=model,
        server_args=[*engine_args, *server_args],
        api_key=os.environ.get("MLXSERVE_API_KEY"),
    )
    home = Home.from_environment()
    connector = Connector(wanted, home)
    try:
        connector.begin()
        return _show(connector, home, engine_args, frame)
    finally:
        connector.stop_server()


def _show(
    connector: Connector, home: Home, engine_args: Sequence[str], frame: FirstFrame | None
) -> int:
    from tui.app import ChatApp  # a second, while the server loads
    from tui.talk.models import Models

    store, warning = _open_store(home)
    theme_name = store.setting("theme") or DEFAULT
    app = ChatApp(
        connector,
        store,
        home,
        theme_name=theme_name,
        warning=warning,
        models=Models(options=engine_args),
        frame=frame,
    )
    if frame is not None:
        frame.restore_signals()  # from here on the app acts on them
    app.run()
    return app.return_code or 0


def _open_store(home: Home) -> tuple[Store, str]:
    """The chats on disk; where that fails, a store that forgets and a sentence that says so."""
    from tui.chat.store import Store, StoreError

    try:
        return Store.open(home.chats), ""
    except StoreError as error:
        return Store.in_memory(), f"{error} Until then chats are forgotten when you leave."

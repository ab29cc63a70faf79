"""Starts the terminal: first the server, which has the most to load, then the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tui.background import is_light_by_name
from tui.home import Home
from tui.talk.connection import ConnectOptions, Connector

if TYPE_CHECKING:
    from mlxserve.history.store import Store
    from tui.chat.mentions import ReadDocument
    from tui.opening import FirstFrame


def main(
    *,
    url: str | None,
    model: str | None,
    engine_args: Sequence[str] = (),
    server_args: Sequence[str] = (),
    frame: FirstFrame | None = None,
    notice: str = "",
    continues: bool = False,
    is_found: bool = False,
    read_key: Callable[[str], str | None] = lambda _url: None,
    read_document: ReadDocument | None = None,
) -> int:
    """Run the terminal until the user quits, and return the process's exit code.

    url: an OpenAI-compatible server to attach to; None: start one, and stop it when quitting
    model: the model to request; None: the server's first
    engine_args: engine options, for a server started here and for judging which models fit
    server_args: further flags for `mlxserve serve` when a server is started here
    frame: the opening frame, if it is on the screen already
    notice: shown below the welcome
    continues: open the last chat, with the model that answered in it unless one is named
    read_key: the API key for the server at an address, if there is one
    read_document: reads a document that a message mentions; None if only short texts can be sent
    is_found: the server is one of this user's that runs, and not one that was named
    """
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if not all(stream.isatty() for stream in streams) or os.environ.get("TERM") == "dumb":
        print(
            "mlxserve chat needs a terminal. For scripts, use `mlxserve run`, "
            "or `mlxserve serve` and its HTTP API.",
            file=sys.stderr,
        )
        return 2
    options = instead = ConnectOptions(
        url=url,
        is_found=is_found,
        model=model,
        server_args=[*engine_args, *server_args],
        read_key=read_key,
    )
    home = Home.from_environment()
    store, warning = open_store(home)
    names_model = model is not None or "--model" in engine_args
    if continues and not names_model and (url is None or is_found):
        options = replace(options, model=store.last_model())
    connector = Connector(options, home, instead=None if options is instead else instead)
    try:
        connector.begin()
        return _show(
            connector,
            store,
            home,
            engine_args,
            frame,
            warning=warning,
            notice=notice,
            continues=continues,
            read_document=read_document,
        )
    finally:
        connector.stop_server()


def _show(
    connector: Connector,
    store: Store,
    home: Home,
    engine_args: Sequence[str],
    frame: FirstFrame | None,
    *,
    warning: str,
    notice: str,
    continues: bool,
    read_document: ReadDocument | None,
) -> int:
    from mlxserve.hub.model_choices import ModelCatalog

    # Takes a second, while the server loads.
    from tui.app import ChatApp
    from tui.opening import driver_after
    from tui.paint.theme import DARK, LIGHT

    said, typed = (None, "") if frame is None else frame.read_answer()
    named = is_light_by_name()
    usual = LIGHT if (said if named is None else named) else DARK
    app = ChatApp(
        connector,
        store,
        home,
        theme_name=store.setting("theme") or usual.name,
        warning=warning,
        notice=notice,
        continues=continues,
        models=ModelCatalog(options=engine_args),
        read_document=read_document,
        driver=None if frame is None else driver_after(frame, typed),
    )
    app.run()
    if app.answering.has_left_answer and connector.server is None:
        print("The answer goes on in the server. `mlxserve chat -c` shows it.")
    elif app.answering.has_left_answer:
        print("Saved. The answer stopped with its server: `mlxserve chat -c`, then /continue.")
    elif app.has_chat and not warning:
        print("Saved. `mlxserve chat -c` continues this chat.")
    return app.return_code or 0


def open_store(home: Home) -> tuple[Store, str]:
    """Open the chats on disk, or chats in memory with a warning that says why."""
    from mlxserve.history.chat_file import StoreError
    from mlxserve.history.store import Store

    try:
        return Store.open(home.chats), ""
    except StoreError as error:
        return Store.in_memory(), f"{error} Until then, chats are lost when you quit."

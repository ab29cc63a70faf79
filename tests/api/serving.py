"""Servers in a thread of the test's process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app, create_server_app
from mlxserve.api.server.connection import Limits
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.in_flight import InFlight
from mlxserve.api.server.server import HttpServer, bind, serve, url_of
from mlxserve.chat.registry.registry import ModelRegistry
from tests.api.fake_chat import FakeChat

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

Serve: TypeAlias = Callable[..., AbstractContextManager["Running"]]
StartServer: TypeAlias = Callable[..., "Running"]


@dataclass
class Running:
    """A server in a thread of this process."""

    url: str
    port: int
    server: HttpServer
    thread: threading.Thread

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(
    chat: FakeChat | TextModel,
    *,
    access: AccessPolicy | None = None,
    limits: Limits | None = None,
    drain_seconds: float = 0.2,
    stop_engine: Callable[[], None] | None = None,
    port: int = 0,
    registry: ModelRegistry | None = None,
) -> Iterator[Running]:
    """A server over a chat, on a thread of its own.

    registry: of several models, whose first is loaded; then `chat` lends its executor only
    """
    listener = bind("127.0.0.1", port)
    url = url_of(listener)
    port = listener.getsockname()[1]
    is_ready = threading.Event()
    drain, open_requests = Drain(), InFlight()
    beside: dict[str, Any] = {"access": access, "drain": drain, "open_requests": open_requests}
    server = HttpServer(
        create_app(chat, **beside)  # type: ignore[arg-type]
        if registry is None
        else create_server_app(registry, chat.executor, **beside),
        on_ready=is_ready.set,
        stop_engine=stop_engine or chat.close,
        limits=limits,
        drain=drain,
        open_requests=open_requests,
        drain_seconds=drain_seconds,
    )
    thread = threading.Thread(target=serve, args=(server, listener))
    thread.start()
    assert is_ready.wait(timeout=30)
    running = Running(url, port, server, thread)
    try:
        yield running
    finally:
        running.stop()

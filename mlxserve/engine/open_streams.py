"""OpenStreams: delivers the outputs of live requests to their streams."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from mlxserve.core.errors import EngineFailed, EngineStopped
from mlxserve.engine.output_stream import OutputStream, deliver_all
from mlxserve.request import Output, Request


class OpenStreams:
    """The open streams of one engine, on its thread."""

    def __init__(self) -> None:
        self._of_request: dict[str, OutputStream] = {}

    def open(self, stream: OutputStream, requests: Sequence[Request]) -> None:
        """Deliver the outputs of these requests to this stream from now on."""
        self._of_request |= dict.fromkeys((request.id for request in requests), stream)

    def ids(self) -> Collection[str]:
        """Ids of the requests whose streams are open."""
        return self._of_request.keys()

    def deliver(self, outputs: Sequence[Output]) -> None:
        """Deliver outputs to their callers' event loops, with one callback per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Output]]] = {}
        for output in outputs:
            stream = self._of_request.get(output.request_id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del self._of_request[output.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, items in by_loop.items():
            deliver_all(loop, items)

    def fail_others(self, live: Collection[str], error: Exception) -> None:
        """End the streams of requests that are not in `live`, which aborts their other requests."""
        lost = [name for name in self._of_request if name not in live]
        for stream in {self._of_request.pop(name) for name in lost}:
            deliver_all(stream.loop, [(stream, EngineFailed.because_of(error))])

    def end(self, reason: EngineStopped) -> None:
        """End every stream. Callable from any thread once the engine has failed."""
        for stream in set(self._of_request.values()):
            deliver_all(stream.loop, [(stream, reason)])
        self._of_request.clear()

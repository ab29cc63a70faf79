"""What the API costs beside the engine: CPU time of the event loop's thread per streamed token.

The server runs in this process, its loop, the engine and the client each on a thread of their own,
so that the loop's time is known apart from what computing takes. It holds all that happens to a
token between the engine and the socket: detokenising, stop strings, framing, writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from mlxserve.api.app import create_app
from mlxserve.api.drain import Drain
from mlxserve.api.server import Server, bind, serve, url_of
from mlxserve.bench.client import LoadClient
from mlxserve.bench.report import Figure, Report
from mlxserve.build import build_chat
from mlxserve.chat import Chat
from mlxserve.config import EngineConfig

_PAGES = 512


def bench_overhead(model: str, *, runs: int, streams: int, tokens: int) -> Report:
    """Microseconds of CPU per token with so many answers at once; the first run warms up."""
    chat = build_chat(EngineConfig(model=model, num_pages=_PAGES, disable_log_stats=True))
    with _served(chat) as (url, loop_time):
        found = [
            asyncio.run(_run(url, chat.model_name, loop_time, streams, tokens))
            for _ in range(runs + 1)
        ]
    return Report(
        "overhead",
        {"model": chat.model_name, "streams": streams, "tokens": tokens, "runs": runs},
        (Figure("the event loop's CPU per streamed token", "µs", tuple(found[1:])),),
    )


@contextlib.contextmanager
def _served(chat: Chat) -> Iterator[tuple[str, Callable[[], float]]]:
    """(address, a function that reads the CPU seconds of the server's event loop)."""
    ready = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def on_ready() -> None:
        loops.append(asyncio.get_running_loop())
        ready.set()

    async def loop_time() -> float:
        return time.thread_time()

    drain = Drain()
    server = Server(
        create_app(chat, drain=drain),
        on_ready=on_ready,
        stop_engine=chat.close,
        drain=drain,
        drain_seconds=0,
    )
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=serve, args=(server, listener), name="mlxserve-api")
        thread.start()
        ready.wait()
        try:
            yield (
                url_of(listener),
                lambda: asyncio.run_coroutine_threadsafe(loop_time(), loops[0]).result(),
            )
        finally:
            server.stop()
            thread.join()
            chat.close()


async def _run(
    url: str, model: str, loop_time: Callable[[], float], streams: int, tokens: int
) -> float:
    async with LoadClient(url, model) as client:
        before = loop_time()
        await asyncio.gather(
            *(client.ask(f"Line {number}: w1 w2 w3", tokens) for number in range(streams))
        )
        seconds = loop_time() - before
    return 1e6 * seconds / sum(exchange.num_completion for exchange in client.exchanges)

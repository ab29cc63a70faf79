"""The API's cost: CPU time of the event loop's thread per streamed token.

The server runs in this process, with its event loop and the engine on separate threads, so that the
loop's time is separate from the time of computing; the client runs in its own process. The time
includes all that happens to a token between engine and socket: detokenising, stop strings, framing,
writing. Requests for a single token measure the fixed cost of a request, which is subtracted.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

from mlxserve.api.app import create_app
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.in_flight import InFlight
from mlxserve.api.server.server import HttpServer, bind, serve, url_of
from mlxserve.bench.client import LoadClient, TimedRequest
from mlxserve.bench.report import Figure, Report
from mlxserve.build import build_text_model
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig

_PAGES = 512


def bench_overhead(model: str, *, runs: int, streams: int, tokens: int) -> Report:
    """Microseconds of CPU per token and per request with `streams` concurrent answers.

    The first run warms up.
    """
    chat = build_text_model(
        EngineConfig().with_options(model=model, num_pages=_PAGES, disable_log_stats=True)
    )
    per_request, per_token = [], []
    with served(chat) as (url, loop_time), _client() as client:

        def spent(num_tokens: int) -> tuple[float, int]:
            before = loop_time()
            count = client.submit(
                stream_answers, url, chat.model_name, streams, num_tokens
            ).result()
            return 1e6 * (loop_time() - before), count

        spent(tokens)
        for _ in range(runs):
            short, num_short = spent(1)
            long, num_long = spent(tokens)
            per_token.append((long - short) / (num_long - num_short))
            per_request.append(short / streams)
    return Report(
        "overhead",
        {"model": chat.model_name, "streams": streams, "tokens": tokens, "runs": runs},
        (
            Figure("event loop's CPU per streamed token", "µs", tuple(per_token)),
            Figure("per request, including its first token", "µs", tuple(per_request)),
        ),
    )


@contextlib.contextmanager
def served(chat: TextModel) -> Iterator[tuple[str, Callable[[], float]]]:
    """(address, a function that reads the CPU seconds of the server's event loop)."""
    ready = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def on_ready() -> None:
        loops.append(asyncio.get_running_loop())
        ready.set()

    async def loop_time() -> float:
        return time.thread_time()

    drain, open_requests = Drain(), InFlight()
    server = HttpServer(
        create_app(chat, drain=drain, open_requests=open_requests),
        on_ready=on_ready,
        stop_engine=chat.close,
        drain=drain,
        open_requests=open_requests,
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


def _client() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


def stream_answers(url: str, model: str, streams: int, tokens: int) -> int:
    """Number of tokens received. Runs in the client's process. Raises RuntimeError."""

    async def ask() -> list[TimedRequest]:
        async with LoadClient(url, model) as client:
            await asyncio.gather(
                *(client.ask(f"Line {number}: w1 w2 w3", tokens) for number in range(streams))
            )
        return client.requests

    requests = asyncio.run(ask())
    if failed := next((request.error for request in requests if request.error), None):
        raise RuntimeError(f"The server refused a request: {failed}")
    return sum(request.num_completion for request in requests)

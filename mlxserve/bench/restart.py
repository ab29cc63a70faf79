"""First-token time of a long prompt: cold, from memory, and from disk after a restart.

Instead of a restart the model may be unloaded and loaded again.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx

from mlxserve.bench.client import LoadClient, TimedRequest
from mlxserve.bench.report import Figure, Report, ratios
from mlxserve.bench.servers import Contender, ServerFailed, our_server

_SEED = 22
_PAGE_SIZE = 32
_VOCABULARY = 250  # token ids that every model has
_RELOAD_SECONDS = 600.0
_GIB = "8"  # GiB of disk space: more than a prompt of any length needs


def bench_restart(
    model: str,
    *,
    pairs: int,
    num_tokens: int,
    reloads: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Time one prompt on two servers that follow each other. Raises ServerFailed.

    reloads: on one server, which unloads its model and loads it again
    """
    draw = random.Random(_SEED)
    times: dict[str, list[float]] = {"cold": [], "from memory": [], "from disk": []}
    num_read: list[float] = []
    options: tuple[str, ...] = (
        "--num-pages",
        str(num_tokens // _PAGE_SIZE + 64),
        "--page-size",
        str(_PAGE_SIZE),
    )
    options += ("--max-model-len", str(num_tokens + 64), "--disk-cache-size", _GIB)
    for number in range(pairs + 1):
        prompt = [draw.randrange(1, _VOCABULARY) for _ in range(num_tokens)]
        with tempfile.TemporaryDirectory() as folder:
            disk = ("--disk-cache-dir", str(Path(folder)))
            progress(f"round {number}: cold, then from memory")
            with our_server("mlxserve", model, (*options, *disk)) as server:
                cold, again = (asyncio.run(_ask(server, prompt)) for _ in range(2))
                if reloads:
                    progress(f"round {number}: loaded again, from disk")
                    _reload(server)
                    read = asyncio.run(_ask(server, prompt))
            if not reloads:
                progress(f"round {number}: from disk")
                with our_server("mlxserve", model, (*options, *disk)) as server:
                    read = asyncio.run(_ask(server, prompt))
        if number:  # the first round warms up
            for name, request in zip(times, (cold, again, read), strict=True):
                times[name].append(request.ttft)
            num_read.append(float(read.num_cached))
    figures = [
        Figure(f"first token {name}", "s", tuple(seconds)) for name, seconds in times.items()
    ]
    figures += [
        Figure(f"cold : {name}", "", ratios(times["cold"], times[name]))
        for name in ("from memory", "from disk")
    ]
    what = "reload" if reloads else "restart"
    figures.append(Figure(f"tokens found after the {what}", "", tuple(num_read)))
    settings = {"model": model, "pairs": pairs, "prompt tokens": num_tokens, "after": what}
    return Report("restart", settings, tuple(figures))


def _reload(server: Contender) -> None:
    """Unload and load the model. Raises ServerFailed."""
    for what in ("unload", "load"):
        reply = httpx.post(
            f"{server.url}/api/v1/models/{what}",
            json={"model": server.model},
            timeout=_RELOAD_SECONDS,
            trust_env=False,
        )
        if not reply.is_success:
            raise ServerFailed(f"The server did not {what} its model: {reply.text[:300]}")


async def _ask(server: Contender, token_ids: list[int]) -> TimedRequest:
    async with LoadClient(server.url, server.model) as client:
        # Compiles what every request needs.
        await client.ask([1, 2, 3], 1)
        request = await client.ask(token_ids, 1)
    if request.error is not None:
        raise ServerFailed(f"The server refused the prompt: {request.error}")
    return request

"""Start-up time: from a server's start until it is ready, and to its first token."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from mlxserve.bench.client import LoadClient
from mlxserve.bench.report import Figure, Report, ratios
from mlxserve.bench.servers import Contender, mlx_lm_server, our_server
from mlxserve.bench.serving import MLX_LM
from mlxserve.core.errors import InvalidConfig

READY = "until it is ready, s"
_NAMES = (READY, "CPU until it is ready, s", "first token after that, s")


def bench_startup(model: str, *, against: Sequence[str], pairs: int) -> Report:
    """Start each server alone, in turn. Raises ServerFailed, InvalidConfig."""
    if others := [address for address in against if address != MLX_LM]:
        raise InvalidConfig(
            f"--against {others[0]}: a running server cannot be started; use {MLX_LM}"
        )
    starts: dict[str, Callable[[Mapping[str, str]], AbstractContextManager[Contender]]] = {
        "mlxserve": lambda environment: our_server("mlxserve", model, environment=environment)
    }
    if against:
        starts[MLX_LM] = lambda environment: mlx_lm_server(model, environment)
    runs: dict[str, list[tuple[float, ...]]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory() as folder:
        # Installed packages have bytecode; the empty value lets Python write it here as well.
        environment = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        for number in range(pairs + 1):
            for name, start in starts.items():
                measured = _start(start(environment))
                # The first round compiles, and reads the files into memory.
                if number:
                    runs[name].append(measured)
    figures = []
    for at, what in enumerate(_NAMES):
        columns = {name: tuple(run[at] for run in repeats) for name, repeats in runs.items()}
        figures += [Figure(what, "", values, who) for who, values in columns.items()]
        if against:
            figures.append(
                Figure(what, "", ratios(columns["mlxserve"], columns[MLX_LM]), f"÷ {MLX_LM}")
            )
    return Report("startup", {"model": model, "pairs": pairs}, tuple(figures))


def _start(server: AbstractContextManager[Contender]) -> tuple[float, ...]:
    with server as running:
        first = asyncio.run(_first_token(running))
        return running.start_seconds, running.start_cpu_seconds, first


async def _first_token(server: Contender) -> float:
    async with LoadClient(server.url, server.model) as client:
        request = await client.ask("w1 w2 w3", 1)
    return request.ended - request.started

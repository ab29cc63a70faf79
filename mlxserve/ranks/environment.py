"""This process's rank, and rank 0's address, from the environment. Standard library only.

mlx.launch passes a process its rank by the environment, and so does rank 0 those that it starts:

    MLX_RANK                                its rank (OMPI_COMM_WORLD_RANK, PMI_RANK with MPI)
    MLX_HOSTFILE, MLX_JACCL_COORDINATOR     where rank 0 is, for the backends ring and jaccl
    MASTER_ADDR, MASTER_PORT                the same, if set: local ranks, and MPI
    MLX_SERVER_LENDER                       who starts all ranks again if one fails (mlxserve/cli/lent_listener.py)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from mlxserve.core.errors import InvalidConfig

RANK = "MLX_RANK"
HOSTFILE = "MLX_HOSTFILE"
JACCL_COORDINATOR = "MLX_JACCL_COORDINATOR"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
LENDER = "MLX_SERVER_LENDER"
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def own_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's rank; None without a launcher. Raises InvalidConfig."""
    for name in (RANK, *_MPI_RANKS):
        if text := environment.get(name):
            try:
                return int(text)
            except ValueError as error:
                raise InvalidConfig(f"{name} must be a number, got {text[:40]!r}.") from error
    return None


def lead_address(port: int, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return (host, port) at which rank 0 waits for the others. Raises InvalidConfig."""
    if address := environment.get(MASTER_ADDR):
        return address, int(environment.get(MASTER_PORT) or port)
    if coordinator := environment.get(JACCL_COORDINATOR):
        return coordinator.rpartition(":")[0], port
    if (file := environment.get(HOSTFILE)) is None:
        raise InvalidConfig(
            f"Nothing says where rank 0 is: start the ranks with mlx.launch, or set {MASTER_ADDR}."
        )
    try:
        first = json.loads(Path(file).read_text(encoding="utf-8"))[0]
        host = (first if isinstance(first, str) else first[0]).rpartition(":")[0]
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise InvalidConfig(f"{HOSTFILE}={file} cannot be read: {error}") from error
    return host, port


def starts_again(environment: Mapping[str, str] = os.environ) -> bool:
    """True if a process on this machine starts all ranks again when one has failed."""
    path = environment.get(LENDER)
    return path is not None and path != "" and Path(path).exists()


def ranks_on_this_machine(environment: Mapping[str, str] = os.environ) -> int:
    """Number of ranks that share this machine's memory: those of the ring with its host."""
    file, rank = environment.get(HOSTFILE), own_rank(environment)
    if file is None or rank is None:
        return 1
    try:
        hosts = json.loads(Path(file).read_text(encoding="utf-8"))
        names = [(h if isinstance(h, str) else h[0]).rpartition(":")[0] for h in hosts]
        return names.count(names[rank])
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        # mlx will say what is wrong with it.
        return 1

"""Models that could be chosen, and getting one: by child processes, so that nothing heavy is loaded.

`mlxserve models --json` lists them, `mlxserve pull NAME --json` downloads one and says how far it
is. A download that is ended is only paused: what is there already is not asked for again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tui.sanitise import one_line
from tui.talk.errors import ChatError

_PROGRAM = (sys.executable, "-m", "mlxserve")


class ModelSource(StrEnum):
    SERVER = "server"  # the server that is connected has it
    BUNDLED = "bundled"
    DOWNLOADED = "downloaded"
    FOLDER = "folder"
    SUGGESTED = "suggested"  # not on this machine yet


@dataclass(frozen=True, slots=True)
class Model:
    """Something to choose. What is not known of it is None."""

    name: str
    source: ModelSource
    weight_size: int | None = None  # bytes
    fits: bool | None = None  # weights, a step and the context wanted, into this machine's memory
    num_tokens: int | None = None  # of context that fit
    context: int | None = None  # tokens that are wanted

    @property
    def is_here(self) -> bool:
        return self.source is not ModelSource.SUGGESTED

    @property
    def verdict(self) -> str:
        """Whether it fits into memory, in words."""
        if self.fits is None or self.num_tokens is None:
            return ""
        if self.fits:
            return "fits"
        wanted = "" if self.context is None else f" of {self.context:,}"
        return f"{self.num_tokens:,}{wanted}" if self.num_tokens else "too large"


@dataclass(frozen=True, slots=True)
class Downloaded:
    """How far a download is. `total` is None while it is not known."""

    done: int
    total: int | None

    @property
    def fraction(self) -> float | None:
        return min(1.0, self.done / self.total) if self.total else None


class Models:
    """The models of this machine, asked of the command line.

    options: of the server that is to run them, as flags: they decide how much memory there is, and
    for how many tokens; what the environment and the file say, the command line reads itself
    """

    def __init__(self, program: Sequence[str] = _PROGRAM, *, options: Sequence[str] = ()) -> None:
        self._program = tuple(program)
        self._options = tuple(options)

    async def find(self) -> list[Model]:
        """Those on this machine first. Raises ChatError."""
        async with self._child("models", "--json", *self._options) as child:
            written, _ = await child.communicate()
        try:
            cards = json.loads(written)["models"]
            return [_model(card) for card in cards]
        except (ValueError, KeyError, TypeError) as error:
            raise ChatError(
                "The models of this machine could not be listed. "
                "`mlxserve models` in another window says why."
            ) from error

    async def download(self, name: str) -> AsyncGenerator[Downloaded, None]:
        """How far it is, until it is there. Closing it pauses the download. Raises ChatError."""
        async with self._child("pull", name, "--json") as child:
            assert child.stdout is not None, "it was opened with a pipe"
            async for line in child.stdout:
                said = _object(line)
                if "error" in said:
                    raise ChatError(one_line(str(said["error"]), 400))
                if "path" in said:
                    return
                if isinstance(done := said.get("done"), int):
                    total = said.get("total")
                    yield Downloaded(done, total if isinstance(total, int) else None)
        raise ChatError(f"The download of {one_line(name, 80)} has ended early. Try it again.")

    @asynccontextmanager
    async def _child(self, *arguments: str) -> AsyncGenerator[asyncio.subprocess.Process, None]:
        child = await asyncio.create_subprocess_exec(
            *self._program,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl+C in the terminal is for us to act on
        )
        try:
            yield child
        finally:
            if child.returncode is None:
                child.terminate()
                await child.wait()


def _model(card: Mapping[str, Any]) -> Model:
    return Model(
        str(card["name"]),
        ModelSource(card["source"]),
        int(card["weight_size"]),
        bool(card["fits"]),
        int(card["num_tokens"]),
        int(card["context"]),
    )


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}

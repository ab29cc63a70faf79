"""Lists and downloads models in child processes, so that a chat or a page imports nothing heavy.

`mlxserve models --json` lists them; `mlxserve pull NAME --json` downloads one and reports its
progress. An interrupted download is only paused: the next one resumes where it stopped.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from mlxserve.core.errors import MlxServeError
from mlxserve.system.terminal_text import one_line

BUNDLED = "mlxserve-mini"
_PROGRAM = (sys.executable, "-m", "mlxserve")
END_SECONDS = 5.0  # time for a terminated child to end
# What a context of at least this many tokens is enough for.
_GOOD_FOR = (
    (32_768, "long documents"),
    (8192, "chats and files"),
    (2048, "short chats"),
    (1, "a few messages"),
    (0, "too large"),
)


class ModelCommandFailed(MlxServeError):
    """A command that lists, downloads, deletes or selects models failed; the message says why."""


class ModelOrigin(StrEnum):
    SERVER = "server"  # offered by the connected server
    BUNDLED = "included"
    DOWNLOADED = "downloaded"
    FOLDER = "folder"
    ELSEWHERE = "elsewhere"  # on this machine, kept by another program
    SUGGESTED = "suggested"  # not downloaded yet

    @classmethod
    def _missing_(cls, value: object) -> ModelOrigin | None:
        """Map other sources that `mlxserve models` names: Ollama, LM Studio, a Python package."""
        return cls.ELSEWHERE if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class Model:
    """A model to choose from; None means unknown."""

    name: str
    source: ModelOrigin
    weight_size: int | None = None  # bytes
    fits: bool | None = None  # memory holds the weights, one step and the requested context
    num_tokens: int | None = None  # context that fits into memory
    context: int | None = None  # tokens that are requested
    needed: int | None = None  # bytes of weights, a step and the requested context
    short_name: str = ""  # such as qwen3.5:4b; empty if it has none
    downloads: int | None = None  # downloads on the hub, for models of a search
    is_recommended: bool = False  # the best of the catalogue that suits this machine
    is_gguf: bool = False  # a repository of several GGUF files, of which a name chooses one

    def matches(self, words: str) -> bool:
        """True if every word is part of its name or its short name."""
        names = f"{self.name} {self.short_name}".casefold()
        return all(word in names for word in words.casefold().split())

    @property
    def is_here(self) -> bool:
        return self.source is not ModelOrigin.SUGGESTED

    @property
    def refusal(self) -> str:
        """Why this machine cannot run it, as a sentence; empty if it can or if unknown."""
        if self.fits is not False or self.num_tokens != 0:
            return ""
        need = "" if self.needed is None else f": it needs {self.needed / 1e9:.1f} GB"
        return f"{one_line(self.name, 60)} is too large for this machine's memory{need}."

    @property
    def usable_context(self) -> int | None:
        """Usable context in tokens: limited by memory and by the model's training."""
        if self.num_tokens is None or self.context is None:
            return self.num_tokens
        return min(self.num_tokens, self.context)

    @property
    def good_for(self) -> str:
        """The use that its context allows, or a hub model's popularity; empty if unknown."""
        if self.downloads is not None:
            return f"{'GGUF, ' * self.is_gguf}{self.downloads:,} downloads"
        tokens = self.usable_context
        if tokens is None:
            return ""
        if self.name == BUNDLED:
            return "a first look"
        return next(words for enough, words in _GOOD_FOR if tokens >= enough)


def best_of(models: Sequence[Model]) -> Model | None:
    """The model that suits this machine best, by `mlxserve models`."""
    return next((model for model in models if model.is_recommended), None)


@dataclass(frozen=True, slots=True)
class Downloaded:
    """The progress of a download, in bytes. `total` is None until it is known."""

    done: int
    total: int | None

    @property
    def fraction(self) -> float | None:
        return min(1.0, self.done / self.total) if self.total else None


class ModelCatalog:
    """The models on this machine, as `mlxserve models` reports them.

    options: flags of the server that will run them; they decide the memory and the context to fit
    (the child process reads the environment and the configuration file itself)
    """

    def __init__(self, program: Sequence[str] = _PROGRAM, *, options: Sequence[str] = ()) -> None:
        self._program = tuple(program)
        self._options = tuple(options)
        self.disk_free: int | None = None  # bytes where downloads go, when `find` looked last

    async def find(self) -> list[Model]:
        """List the models, those on this machine first. Raises ModelCommandFailed."""
        async with self._child("models", "--json", *self._options) as child:
            written, _ = await child.communicate()
        try:
            listed = json.loads(written)
            self.disk_free = listed.get("disk_free")
            best = (listed.get("recommended") or {}).get("best")
            models = [_model(card) for card in listed["models"] if _writes(card)]
            return [replace(m, is_recommended=m.name == best) for m in models]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelCommandFailed(
                "Cannot list the models on this machine. "
                "Run `mlxserve models` in another window to see why."
            ) from error

    async def search(self, words: str) -> list[Model]:
        """Search the hub for these words; the most popular of each format come first.

        Raises ModelCommandFailed.
        """
        arguments = ("search", "--json", "--", *words.split())
        async with self._child(*arguments, errors=asyncio.subprocess.PIPE) as child:
            written, said = await child.communicate()
        try:
            return [
                Model(
                    str(card["name"]),
                    ModelOrigin.SUGGESTED,
                    downloads=int(card["downloads"]),
                    is_gguf=card["format"] == "gguf",
                )
                for card in json.loads(written)
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelCommandFailed(
                _words_of(said) or "The hub cannot be searched now."
            ) from error

    async def download(self, name: str) -> AsyncGenerator[Downloaded | Model, None]:
        """Download a model unless it is here; yield the progress, then the model.

        Closing the iterator pauses the download. Raises ModelCommandFailed.

        name: a folder, a repository, or a short name such as qwen3.5:4b
        """
        async with self._child("pull", "--json", "--", name) as child:
            assert child.stdout is not None, "opened with a pipe"
            async for line in child.stdout:
                said = _object(line)
                if "error" in said:
                    raise ModelCommandFailed(one_line(str(said["error"]), 400))
                if "path" in said:
                    yield _pulled(said, name)
                    return
                if isinstance(done := said.get("done"), int):
                    total = total if isinstance(total := said.get("total"), int) else None
                    # Nothing is downloaded of what is here.
                    if done or total:
                        yield Downloaded(done, total)
        raise ModelCommandFailed(f"The download of {one_line(name, 80)} stopped early. Try again.")

    async def remove(self, name: str) -> None:
        """Delete a downloaded model. Raises ModelCommandFailed."""
        await self._do(
            "rm", "--yes", "--", name, failure=f"{one_line(name, 80)} cannot be deleted."
        )

    async def use(self, name: str) -> None:
        """Make this the default model of other commands. Raises ModelCommandFailed."""
        await self._do("use", "--", name, failure=f"{one_line(name, 80)} cannot be remembered.")

    async def _do(self, *arguments: str, failure: str) -> None:
        """Raise ModelCommandFailed with the command's message, else with `failure`."""
        async with self._child(*arguments, errors=asyncio.subprocess.PIPE) as child:
            _, said = await child.communicate()
        if child.returncode:
            raise ModelCommandFailed(_words_of(said) or failure)

    @asynccontextmanager
    async def _child(
        self, *arguments: str, errors: int = asyncio.subprocess.DEVNULL
    ) -> AsyncGenerator[asyncio.subprocess.Process, None]:
        child = await asyncio.create_subprocess_exec(
            *self._program,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl+C in the terminal must not reach it
        )
        try:
            yield child
        finally:
            await _end(child)


def _words_of(errors: bytes) -> str:
    """One line from a command's stderr."""
    return one_line(errors.decode(errors="replace").strip().removeprefix("error: "), 400)


async def _end(child: asyncio.subprocess.Process) -> None:
    """Terminate the child and wait for it, also if the task is cancelled meanwhile.

    An event loop that closes first would warn about the process later. So it is killed if the task
    is cancelled, or if it ignores the termination.
    """
    if child.returncode is not None:
        return
    with suppress(ProcessLookupError):
        child.terminate()
    waiting = asyncio.ensure_future(child.wait())
    try:
        await asyncio.wait({waiting}, timeout=END_SECONDS)
    finally:
        if not waiting.done():
            with suppress(ProcessLookupError):
                child.kill()
        await waiting


def _pulled(said: Mapping[str, Any], name: str) -> Model:
    """Return the model as it is on this machine now."""
    if "weight_size" not in said:
        return Model(name, ModelOrigin.DOWNLOADED)
    return replace(_model(said), name=name)


def _writes(card: Mapping[str, Any]) -> bool:
    """True if the hub's card is that of a chat model."""
    return str(card.get("purpose", "completion")) == "completion"


def _model(card: Mapping[str, Any]) -> Model:
    return Model(
        str(card["name"]),
        ModelOrigin(card["source"]),
        int(card["weight_size"]),
        bool(card["fits"]),
        int(card["num_tokens"]),
        int(card["context"]),
        int(card["needed"]) if "needed" in card else None,
        str(card.get("short_name") or ""),
    )


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}

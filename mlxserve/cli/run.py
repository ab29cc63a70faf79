"""`mlxserve run`: answers one prompt on the terminal or in a pipe."""

# Annotations are read by typer at run time, so this file does not postpone them.

import base64
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli.building import build
from mlxserve.cli.completion import first_model
from mlxserve.cli.own_key import has_key
from mlxserve.cli.piped import piped_text
from mlxserve.cli.remote import stream
from mlxserve.cli.running_servers import RunningServer, newest_server, served_name
from mlxserve.cli.settings import Settings, flag_of
from mlxserve.cli.streams import print_safe
from mlxserve.cli.terminal import run_terminal
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidParameter, InvalidRequest, ModelNotFound
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.images.data_urls import data_url
from mlxserve.system.counted import counted
from mlxserve.text.documents.document import NOT_ALL_READ
from tui.chat.sampling import HIGHEST_TEMPERATURE

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

# A name as `qwen3.5:4b`, of a model that is known or not; few prompts of one word look so.
_SIZED = re.compile(r"[a-z][\w.-]*:e?\d+(\.\d+)?[bm](-[\w.-]+)?", re.IGNORECASE)


def run(
    settings: Settings,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="The prompt, after a model's name or without; piped input is appended (in a loop that "
            "reads it, give < /dev/null). - reads stdin only.",
            autocompletion=first_model,
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="PNG, JPEG, WebP or GIF before the prompt, for a model that sees; may be repeated.",
        ),
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file",
            "-f",
            metavar="PATH",
            help="A PDF, DOCX, HTML or text, or a folder.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help=f"Sampling temperature, from 0 (greedy) to {HIGHEST_TEMPERATURE:g}."),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print speed and cached tokens to stderr.")
    ] = False,
    own: Annotated[bool, typer.Option("--own", help="Load the model here in any case.")] = False,
) -> None:
    """Answer one prompt on the terminal or in a pipe; without one, open the chat.

    Asks a server of yours that runs and has the model (see `mlxserve ps`), unless options of the engine
    are given; else loads the model for this answer.
    """
    model, prompt = model_and_prompt(words or ())
    if model is not None:
        settings = settings.with_model(model)
    given_any = image or file or (system, max_tokens, temperature) != (None,) * 3
    if prompt is None and sys.stdin.isatty() and not given_any:
        run_terminal(settings, None, None, own_server=own)
    config = settings.build(EngineConfig)
    from mlxserve.api.server import logs

    logs.configure("warning")
    images = [readable(each) for each in image or ()]
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": whole_prompt(prompt)})
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stop_on_repetition": True,
    }
    params = {name: value for name, value in options.items() if value is not None}
    try:
        refuse_bad(params)
    except InvalidParameter as error:
        raise InvalidRequest(
            f"{flag_of(error.name)}{str(error).removeprefix(error.name)}"
        ) from error
    documents = _documents(file or ())
    server = None if own else _server(settings, config)
    as_part = _as_path if server is None else _as_url
    sent = with_parts(messages, [*documents, *map(as_part, images)])
    try:
        report = (
            _answer_here(config, sent, params, _adapter(settings, config))
            if server is None
            else _answer_there(server, config.model, sent, params)
        )
    except BrokenPipeError:
        # The reader (such as `head`) closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    if stats:
        print_safe(report, to=sys.stderr)


def refuse_bad(params: Mapping[str, Any]) -> None:
    """Raises InvalidParameter for options that no model takes, before one is loaded.

    This includes sampling parameters that give noise.
    """
    if not 0 <= (temperature := params.get("temperature", 0)) <= HIGHEST_TEMPERATURE:
        raise InvalidParameter(
            "temperature",
            f"must be from 0 (greedy) to {HIGHEST_TEMPERATURE:g}, got {temperature:g}",
        )
    replace(SamplingParams(), **params)


def readable(file: Path) -> Path:
    """Return the file if it is readable. Raises InvalidRequest."""
    if not file.expanduser().is_file():
        raise InvalidRequest(f"There is no image {str(file)!r}. Give --image the path of a file.")
    return file.expanduser()


def _documents(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read documents, in a process of their own, as parts of a message. Raises InvalidRequest."""
    if not paths:
        return []
    from mlxserve.cli.documents import read_part

    read = [read_part(path) for path in paths]
    for path, (_, size) in zip(paths, read, strict=True):
        print_safe(f"{path}: {size}\n", end="", to=sys.stderr)
    return [part for part, _ in read]


def with_parts(
    messages: Sequence[Mapping[str, Any]], parts: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Insert documents and images before the text of the last message."""
    if not parts:
        return messages
    *earlier, last = messages
    content = [*parts, {"type": "text", "text": last["content"]}]
    return [*earlier, {**last, "content": content}]


def _as_path(file: Path) -> dict[str, Any]:
    """Return an image part for the library."""
    return {"type": "image", "path": file}


def _as_url(file: Path) -> dict[str, Any]:
    """Return an image part for a server, which may lack access to the file."""
    content = base64.b64encode(file.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": data_url(content)}}


def model_and_prompt(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Tell a model's name from the prompt in the arguments. Raises InvalidRequest."""
    match tuple(words):
        case ():
            return None, None
        case (one,):
            return (one, None) if _is_model(one) else (None, one)
        case (model, prompt) if "/" in model or _is_model(model):
            return model, prompt
        case (model, _):
            raise InvalidRequest(
                f"{model!r} is not a model that is known here. Give the prompt as one argument, in "
                "quotes, and a model before it by its whole name, or with --model."
            )
    raise InvalidRequest("Give the prompt as one argument, in quotes.")


def _is_model(word: str) -> bool:
    """True if a word names a model, such as `qwen3.5:4b`, a family or a model folder."""
    from mlxserve.hub.embedded import MODEL_NAME
    from mlxserve.hub.files import existing_path
    from mlxserve.hub.gguf_places import find_gguf
    from mlxserve.hub.hub_cache import snapshots
    from mlxserve.hub.known_models import families, repository_of

    if not word or any(sign.isspace() for sign in word):
        return False
    if (path := existing_path(word)) is not None:
        return path.suffix == ".gguf" or (path / "config.json").exists()
    if word == MODEL_NAME or repository_of(word) is not None or word.lower() in families():
        return True
    if _SIZED.fullmatch(word) or snapshots(word):
        return True
    try:
        return find_gguf(word) is not None
    except ModelNotFound:  # another quantisation of the repository may be here
        return True


def _server(settings: Settings, config: EngineConfig) -> RunningServer | None:
    """Return the running server to use; None to load the model in this process."""
    if settings.file is not None or set(settings.flags) - {"model"}:
        return None
    return newest_server(config.model, has_key=has_key, takes_private=True)


def _adapter(settings: Settings, config: EngineConfig) -> str | None:
    """Return the first adapter of the command line; those of the file are for servers."""
    return next(iter(config.adapters), None) if "adapter" in settings.flags else None


def _answer_there(
    server: RunningServer,
    model: str | None,
    messages: Sequence[Mapping[str, Any]],
    params: Mapping[str, Any],
) -> str:
    """Answer on the server, leaving out the model's thinking. Raises ServerError.

    Prints the answer and returns a line about its speed.
    """
    name = served_name(server, model)
    body = {"model": name, "messages": messages, "stream": True, **params}
    body["stream_options"] = {"include_usage": True}
    started = time.perf_counter()
    first, text, thought = started, "\n", False
    usage: dict[str, Any] = {}
    for event in stream(server.url, "/v1/chat/completions", body, on_warning=_tell_cuts):
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            piece = choice["delta"].get("content") or ""
            thought = thought or bool(choice["delta"].get("reasoning_content"))
            if first == started and (piece or thought):
                first = time.perf_counter()
            text = piece or text
            print_safe(piece, end="")
    print_safe("" if text.endswith("\n") else "\n", end="")
    if thought and text == "\n":
        _note("the answer ended in the model's thinking")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    num_pages = (usage.get("cache") or {}).get("num_pages", 0)
    prompt = _prompt_label(usage.get("prompt_tokens", 0), cached, num_pages)
    answer = (usage.get("completion_tokens", 0), first - started, time.perf_counter() - first)
    return f"{prompt}, {_speed(*answer)} ({server.url})"


def _tell_cuts(warning: str) -> None:
    """Print what a reply's warnings say about documents that did not fit."""
    for sentence in warning.split("; "):
        if NOT_ALL_READ in sentence:
            _note(sentence.encode("ascii", "replace").decode("unicode_escape"))


def _note(sentence: str) -> None:
    print_safe(f"note: {sentence}", to=sys.stderr)


def _answer_here(
    config: EngineConfig,
    messages: Sequence[Mapping[str, Any]],
    params: Mapping[str, Any],
    adapter: str | None,
) -> str:
    """Load the model and print its answer; return a line about its speed."""
    import asyncio

    model = build(config)
    try:
        return asyncio.run(_stream_answer(model.with_adapter(adapter), messages, params))
    finally:
        model.close()


def whole_prompt(prompt: str | None) -> str:
    """Append piped text to the prompt. Raises InvalidRequest if both are missing."""
    wants_stdin = prompt is None or prompt == "-" or not sys.stdin.isatty()
    piped = piped_text().rstrip("\n") if wants_stdin else ""
    parts = [part for part in (None if prompt == "-" else prompt, piped) if part]
    if not parts:
        raise InvalidRequest("There is no prompt. Pass it as an argument or pipe it in.")
    return "\n\n".join(parts)


async def _stream_answer(
    model: "TextModel", messages: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any]
) -> str:
    import asyncio

    writer = model.require_writer()
    params = replace(model.default_params, **overrides)
    if isinstance(messages[-1]["content"], list):
        from mlxserve.chat.document_prompts import DocumentPrompts
        from mlxserve.chat.given_messages import read_given

        read = partial(model.executor.run, "")
        conversation = await read_given(
            messages,
            read,
            documents=DocumentPrompts(model.codec),
            sees=writer.supports_images,
            no_vision_reason=writer.no_vision_reason,
            on_cut=_note,
        )
        messages = writer.fit(conversation).messages
    prompt = await asyncio.to_thread(writer.render, messages)
    started = time.perf_counter()
    first = started
    text = "\n"
    async for delta in await writer.submit(prompt, params):
        if first == started and delta.token_ids:
            first = time.perf_counter()
        text = delta.text or text
        print_safe(delta.text, end="")
    print_safe("" if text.endswith("\n") else "\n", end="")
    usage = delta.usage
    assert usage is not None
    num_pages = 0 if usage.cache is None else usage.cache.num_pages
    asked = _prompt_label(usage.prompt_tokens, usage.cached_tokens, num_pages)
    answer = (usage.completion_tokens, first - started, time.perf_counter() - first)
    return f"{asked}, {_speed(*answer)}"


def _prompt_label(num_tokens: int, num_cached: int, num_pages: int) -> str:
    """Format a prompt's tokens, and how much of it was found in the cache."""
    computed = f"{counted(num_tokens - num_cached, 'token')} computed"
    pages = f"{counted(num_pages, 'page')} from the cache, {computed}"
    return f"prompt {counted(num_tokens, 'token')} ({pages if num_pages else f'{num_cached:,} cached'})"


def _speed(num_tokens: int, to_first: float, after_first: float) -> str:
    """Format an answer's tokens and speed.

    to_first, after_first: seconds to the first token and after it
    """
    rate = (num_tokens - 1) / after_first if after_first > 0 else 0.0
    answer = f"answer {counted(num_tokens, 'token')}, first after {to_first:.2f} s"
    return f"{answer}, then {rate:.1f} tokens/s" if num_tokens > 1 else answer

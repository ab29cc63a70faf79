"""`POST /api/v1/render`: parses Markdown into a tree of elements, in a process that can be killed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.api.errors import json_response
from mlxserve.api.fair_work import run_fairly
from mlxserve.api.page.highlighting import MAX_CHARACTERS as MAX_CODE
from mlxserve.api.page.highlighting import Node, highlighter
from mlxserve.api.page.markdown import code_elements, unmarked
from mlxserve.helpers.helper import BEHIND_THE_ENGINE, Helper
from mlxserve.helpers.piecewise import Piecewise
from mlxserve.helpers.work import RunFairly, Work
from mlxserve.system.code_languages import lexer_name

MAX_TEXTS = 1_000
MAX_CHARACTERS = 500_000  # of all texts of one request
MAX_SECONDS = 2.0  # of a processor, for one request; what is left then is not parsed
TEXT_SECONDS = 1.0  # for one text; most take 3 ms, 45,000 characters up to 1 s
_MEMORY = 256 << 20  # bytes
_CHARACTERS_PER_SECOND = 400_000  # on two busy cores of an x86 server
_TEXTS_PER_SECOND = 10_000  # whose code is found


@cache
def markdown_helper() -> Helper:
    """Return this process's helper, started with the first text."""
    return Helper(
        "mlxserve.api.page.markdown_worker:MarkdownWorker",
        TEXT_SECONDS,
        name="Markdown",
        memory=_MEMORY,
        niceness=BEHIND_THE_ENGINE,
    )


class RenderRequest(RequestBody):
    """The body of `POST /api/v1/render`."""

    texts: Annotated[
        list[Annotated[str, Field(max_length=MAX_CHARACTERS)]], Field(max_length=MAX_TEXTS)
    ]

    @model_validator(mode="after")
    def _is_not_too_long(self) -> RenderRequest:
        if sum(map(len, self.texts)) > MAX_CHARACTERS:
            raise ValueError(f"texts: together they may have {MAX_CHARACTERS:,} characters")
        return self


class Renderer:
    """Parses Markdown and highlights its code, in two helper processes."""

    def __init__(self, helper: Helper | None = None) -> None:
        """helper: runs a `MarkdownWorker`."""
        self._code = highlighter()
        self._helper = helper or markdown_helper()

    async def nodes(self, texts: Sequence[str], fairly: RunFairly) -> list[list[Node]]:
        """Return the blocks of each text. Raises the errors of `fairly`."""
        seconds = sum(map(len, texts)) / _CHARACTERS_PER_SECOND
        parser = Piecewise(self._helper, "trees", TEXT_SECONDS, MAX_SECONDS)
        trees = await parser.results(texts, fairly, seconds=seconds)
        completing: Work[tuple[list[list[Node]], list[_Code]]] = Work(
            len(texts) / _TEXTS_PER_SECOND, partial(_completed, texts, trees)
        )
        nodes, code = await fairly(completing)
        await self._highlight(code, fairly)
        return nodes

    async def growing(self, text: str, fairly: RunFairly) -> tuple[list[Node], int, int]:
        """Parse the end of a text as `Markdown.growing` does. Code is not highlighted."""
        parser = Piecewise(self._helper, "growing", TEXT_SECONDS, MAX_SECONDS)
        seconds = len(text) / _CHARACTERS_PER_SECOND
        [parsed] = await parser.results([text], fairly, seconds=seconds)
        return (unmarked(text), 0, 0) if parsed is None else parsed

    async def highlight(self, nodes: Sequence[Node], fairly: RunFairly) -> None:
        """Cut the code in these blocks into coloured parts."""
        await self._highlight(list(_code(nodes)), fairly)

    async def _highlight(self, code: Sequence[_Code], fairly: RunFairly) -> None:
        if not code:
            return
        blocks = [(element.lexer, element.text) for element in code]
        for element, spans in zip(code, await self._code.spans(blocks, fairly), strict=True):
            if spans is not None:
                element.element[2:] = spans


class Rendering:
    """The endpoint that renders Markdown."""

    def __init__(self, helper: Helper | None = None) -> None:
        """helper: runs a `MarkdownWorker`."""
        self._renderer = Renderer(helper)

    def routes(self) -> list[Route]:
        return [BodyRoute("/api/v1/render", self.render, body=RenderRequest, of_model=False)]

    async def render(self, request: Request, body: RenderRequest) -> Response:
        """Parses Markdown for the page: each text as nested lists of [tag, attributes, child, …]."""
        nodes = await self._renderer.nodes(body.texts, partial(run_fairly, request))
        return json_response({"data": nodes})


@dataclass(frozen=True, slots=True)
class _Code:
    """An element with code in a known language."""

    element: list[Any]
    lexer: str

    @property
    def text(self) -> str:
        return str(self.element[2])


def _completed(
    texts: Sequence[str], trees: Sequence[list[Node] | None]
) -> tuple[list[list[Node]], list[_Code]]:
    """Return the nodes of each text, without formatting where there are none, and their code."""
    nodes = [
        unmarked(text) if tree is None else tree for text, tree in zip(texts, trees, strict=True)
    ]
    return nodes, [element for each in nodes for element in _code(each)]


def _code(nodes: Iterable[Node]) -> Iterator[_Code]:
    for element in code_elements(nodes):
        _, attributes, text = element
        lexer = lexer_name(attributes["language"])
        if lexer is not None and 0 < len(text) <= MAX_CODE:
            yield _Code(element, lexer)

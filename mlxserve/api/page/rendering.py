"""`POST /api/v1/render`: parses Markdown into a tree of elements, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from mlxserve.api.page.markdown import Markdown, code_elements, unmarked
from mlxserve.helpers.fair_executor import SHORT_SECONDS, Lane, lane_of
from mlxserve.system.code_languages import lexer_name

MAX_TEXTS = 1_000
MAX_CHARACTERS = 500_000  # of all texts of one request
MAX_SECONDS = 2.0  # of one request; what is left then is not parsed
# Seconds of a first try among short work: most answers take 3 ms, 60,000 characters up to 1.3 s.
TRY_SECONDS = 0.1
_CHARACTERS_PER_SECOND = 400_000  # on two busy cores of an x86 server


class RenderRequest(RequestBody):
    """The body of `POST /api/v1/render`."""

    texts: Annotated[list[str], Field(max_length=MAX_TEXTS)]

    @model_validator(mode="after")
    def _is_not_too_long(self) -> RenderRequest:
        if sum(map(len, self.texts)) > MAX_CHARACTERS:
            raise ValueError(f"texts: together they may have {MAX_CHARACTERS:,} characters")
        return self


class Rendering:
    """The endpoint that renders Markdown."""

    def __init__(self) -> None:
        self._code = highlighter()

    def routes(self) -> list[Route]:
        return [BodyRoute("/api/v1/render", self.render, body=RenderRequest, of_model=False)]

    async def render(self, request: Request, body: RenderRequest) -> Response:
        """Parses Markdown for the page: each text as nested lists of [tag, attributes, child, …]."""
        parsing = _Parsing(body.texts)
        seconds = min(sum(map(len, body.texts)) / _CHARACTERS_PER_SECOND, MAX_SECONDS)
        if lane_of(seconds) is Lane.SHORT:
            await run_fairly(request, seconds, partial(parsing.go_on, TRY_SECONDS))
        if not parsing.is_done:
            expected = max(seconds, 1.01 * SHORT_SECONDS)
            await run_fairly(request, expected, partial(parsing.finish, MAX_SECONDS))
        await self._colour(request, parsing.code)
        return json_response({"data": parsing.nodes})

    async def _colour(self, request: Request, elements: list[_Code]) -> None:
        """Highlight the code of these elements."""
        blocks = [(code.lexer, code.text) for code in elements]
        spans = await self._code.spans(blocks, partial(run_fairly, request))
        for code, nodes in zip(elements, spans, strict=True):
            if nodes is not None:
                code.element[2:] = nodes


@dataclass(frozen=True, slots=True)
class _Code:
    """An element with code in a known language."""

    element: list[Any]
    lexer: str

    @property
    def text(self) -> str:
        return str(self.element[2])


class _Parsing:
    """The progress of parsing some texts.

    nodes, code: results of the texts parsed so far
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.nodes: list[list[Node]] = []
        self.code: list[_Code] = []
        self._texts = texts

    @property
    def is_done(self) -> bool:
        return len(self.nodes) == len(self._texts)

    def go_on(self, seconds: float) -> None:
        """Parse for this time of this thread; the next call restarts an unfinished text."""
        parser, end = Markdown(), time.thread_time() + seconds
        for text in self._texts[len(self.nodes) :]:
            nodes = parser.nodes(text, max(0.0, end - time.thread_time()))
            if nodes is None:
                return
            self.nodes.append(nodes)
            self.code += _code(nodes)

    def finish(self, seconds: float) -> None:
        """Parse for this time, and leave the remaining texts without formatting."""
        self.go_on(seconds)
        self.nodes += map(unmarked, self._texts[len(self.nodes) :])


def _code(nodes: Iterable[Node]) -> Iterator[_Code]:
    for element in code_elements(nodes):
        _, attributes, text = element
        lexer = lexer_name(attributes["language"])
        if lexer is not None and 0 < len(text) <= MAX_CODE:
            yield _Code(element, lexer)

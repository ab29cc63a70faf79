"""Code is coloured in a process that can be ended, in its client's turn, and short work never waits for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
from starlette.testclient import TestClient

from mlxserve.api.page import highlighting
from mlxserve.api.page.highlighting import (
    MAX_CHARACTERS,
    Block,
    Highlighter,
    Spans,
    new_helper,
)
from mlxserve.helpers.fair_executor import FairExecutor, Lane, lane_of
from mlxserve.helpers.helper import Helper
from mlxserve.helpers.work import Work
from tests.waiting import until

T = TypeVar("T")
CODE = 'def f(x):\n    return "a" + 1  # é'
PYTHON = ("python", CODE)
# Bash's rule for $'…' reads two backslashes in two ways: 60 of them take years, in one call of `re`.
ENDLESS = ("bash", "$'" + "\\" * 400)


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helper]:
    monkeypatch.setattr(highlighting, "BLOCK_SECONDS", 0.3)
    helper = new_helper()
    yield helper
    helper.close()


@pytest.fixture
def code(helper: Helper) -> Highlighter:
    return Highlighter(helper)


class Turns:
    """Runs work at once, and keeps the lanes that it would have had."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []

    async def __call__(self, work: Work[T]) -> T:
        self.lanes.append(lane_of(work.seconds))
        result: T = work.run()
        return result


def spans(code: Highlighter, *blocks: Block, turns: Turns | None = None) -> list[Spans]:
    return asyncio.run(code.spans(blocks, turns or Turns()))


def text_of(nodes: Spans) -> str:
    return "".join(node if isinstance(node, str) else node[2] for node in nodes or ())


def is_coloured(nodes: Spans) -> bool:
    return any(not isinstance(node, str) for node in nodes or ())


def test_code_is_coloured_and_keeps_every_character(code: Highlighter) -> None:
    [nodes] = spans(code, PYTHON)
    assert text_of(nodes) == CODE
    classes = [node[1]["class"] for node in nodes or () if not isinstance(node, str)]
    assert set(classes) == {"keyword", "name", "string", "number", "comment"}
    assert ["span", {"class": "comment"}, "# é"] in (nodes or ())


def test_blocks_of_a_request_are_one_job(code: Highlighter) -> None:
    blocks = [("css", "a { color: red }"), PYTHON, ("json", '{"a": [1, "b"]}'), ("html", "<a>")] * 9
    turns = Turns()
    for (_, source), nodes in zip(blocks, spans(code, *blocks, turns=turns), strict=True):
        assert text_of(nodes) == source
        assert is_coloured(nodes)
    assert turns.lanes == [Lane.SHORT, Lane.MEDIUM]


def test_a_process_at_hand_is_used_among_short_work(code: Highlighter) -> None:
    turns = Turns()
    spans(code, PYTHON, turns=turns)
    assert turns.lanes == [Lane.SHORT, Lane.MEDIUM], "it had to be started"
    turns.lanes.clear()
    assert is_coloured(spans(code, PYTHON, turns=turns)[0])
    assert turns.lanes == [Lane.SHORT]


def test_much_code_is_not_among_short_work(
    monkeypatch: pytest.MonkeyPatch, code: Highlighter
) -> None:
    monkeypatch.setattr(highlighting, "BLOCK_SECONDS", 60.0)
    turns = Turns()
    block = ("python", f"#{'a' * 998}\n" * (MAX_CHARACTERS // 1000))
    assert all(map(is_coloured, spans(code, *[block] * 3, turns=turns)))
    assert turns.lanes == [Lane.MEDIUM]


def test_short_work_does_not_wait_for_a_process_that_has_a_job(
    helper: Helper, code: Highlighter
) -> None:
    job = helper.begin("runs", [ENDLESS], 600.0, seconds=600)

    class Ending(Turns):
        """Ends the job when longer work begins."""

        async def __call__(self, work: Work[T]) -> T:
            if lane_of(work.seconds) is not Lane.SHORT:
                job.cancel()
            return await super().__call__(work)

    turns = Ending()
    assert is_coloured(spans(code, PYTHON, turns=turns)[0])
    assert turns.lanes == [Lane.SHORT, Lane.MEDIUM]


def test_a_block_that_does_not_end_is_plain_and_the_others_are_not(
    helper: Helper, code: Highlighter
) -> None:
    first, endless, last = spans(code, PYTHON, ENDLESS, PYTHON)
    assert endless is None
    assert first == last
    assert is_coloured(first)
    assert helper.num_started == 2


def test_a_request_has_few_processes_ended(helper: Helper, code: Highlighter) -> None:
    assert spans(code, *[ENDLESS] * 9, PYTHON) == [None] * 10
    assert helper.num_started == 2
    assert is_coloured(spans(code, PYTHON)[0])


def test_what_is_left_when_the_time_is_over_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highlighting, "MAX_SECONDS", 0.0)
    helper = new_helper()
    assert spans(Highlighter(helper), PYTHON, PYTHON) == [None, None]
    helper.close()


def test_an_error_of_a_lexer_costs_its_block(helper: Helper, code: Highlighter) -> None:
    first, unknown, last = spans(code, PYTHON, ("no lexer", "x"), PYTHON)
    assert (is_coloured(first), unknown, is_coloured(last)) == (True, None, True)
    assert helper.num_started == 1


def test_nothing_is_coloured_after_the_end(helper: Helper, code: Highlighter) -> None:
    helper.close()
    assert spans(code, PYTHON) == [None]


def test_no_code_needs_no_turn(helper: Helper, code: Highlighter) -> None:
    turns = Turns()
    assert spans(code, turns=turns) == []
    assert turns.lanes == []
    assert helper.num_started == 0


def test_a_client_that_leaves_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, helper: Helper, code: Highlighter
) -> None:
    monkeypatch.setattr(highlighting, "BLOCK_SECONDS", 600.0)

    async def leave() -> None:
        executor = FairExecutor()
        asked = asyncio.ensure_future(code.spans([ENDLESS], partial(executor.run, "client")))
        await until(lambda: helper.is_running)
        asked.cancel()
        await until(lambda: not helper.is_running)
        executor.close()

    asyncio.run(leave())


def test_the_process_imports_no_more_than_it_needs() -> None:
    listing = "import mlxserve.api.page.highlight_worker, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, check=True)
    loaded = set(done.stdout.decode().split())
    assert not loaded & {"mlx", "mlx.core", "starlette", "pydantic", "numpy", "markdown_it"}


# ---- the route


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """The blocks that the route has coloured."""
    asked: list[Block] = []

    async def spans(_self: Highlighter, blocks: Sequence[Block], _in_turn: object) -> list[Spans]:
        asked.extend(blocks)
        return [None] * len(blocks)

    monkeypatch.setattr(Highlighter, "spans", spans)
    return asked


def render(client: TestClient, *texts: str) -> Any:
    reply = client.post("/api/v1/render", json={"texts": texts})
    assert reply.status_code == 200
    return reply.json()["data"]


def test_code_of_a_known_language_is_coloured_wherever_it_is(
    client: TestClient, asked: list[Block]
) -> None:
    render(client, "```PY\na\n```\n- b\n  > ~~~js x\n  > c\n  > ~~~", "", "```sh\nd\n```")
    assert asked == [("python", "a"), ("javascript", "c"), ("bash", "d")]


@pytest.mark.parametrize("size", [5_000, 20_000, 50_000])
def test_brackets_in_a_template_language_are_not(
    client: TestClient, asked: list[Block], size: int
) -> None:
    """20,000 took 16.7 s of a processor in the lexer of html+ng2, which is not among the known ones."""
    brackets = "(" * size
    [[element]] = render(client, f"```html+ng2\n{brackets}\n```")
    assert element == ["pre", {"language": "html+ng2"}, brackets]
    assert asked == []


def test_nor_is_code_without_a_language_or_with_too_many_characters(
    client: TestClient, asked: list[Block]
) -> None:
    for text in ["`a`", "    a", "```\na\n```", "```python\n```", "```klingon\na\n```"]:
        render(client, text)
    render(client, f"```python\n{'x' * (MAX_CHARACTERS + 1)}\n```")
    assert asked == []


def test_code_that_does_not_end_is_shown_plain(
    monkeypatch: pytest.MonkeyPatch, client: TestClient
) -> None:
    """By the process that all servers of this one share."""
    monkeypatch.setattr(highlighting, "BLOCK_SECONDS", 0.3)
    lexer, source = ENDLESS
    good = f"```python\n{CODE}\n```"
    [[first], [endless], [last]] = render(client, good, f"```{lexer}\n{source}\n```", good)
    assert endless == ["pre", {"language": lexer}, source]
    assert first == last
    assert is_coloured(first[2:])
    assert text_of(first[2:]) == CODE

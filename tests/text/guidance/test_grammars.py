"""What is compiled, what is refused, and what the cache shares."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import psutil
import pytest

from mlxserve.core.errors import EngineStopped, HelperUnavailable, InvalidParameter
from mlxserve.core.sampling_params import Structure, StructureKind
from mlxserve.helpers.fair_executor import THREAD_LANES, FairExecutor, lane_of
from mlxserve.helpers.helper import BEHIND_THE_ENGINE
from mlxserve.helpers.work import Work
from mlxserve.hub.embedded import model_path
from mlxserve.text.guidance.grammars import TRIES, Grammars
from mlxserve.text.guidance.matcher_host import MatcherHost, RowOutcome
from mlxserve.text.guidance.structures import MAX_DEPTH, MAX_PROPERTIES, MAX_SOURCE
from mlxserve.text.tokenizer import Tokenizer
from tests.text.guidance.call_formats import AMBIGUOUS, outcome
from tests.waiting import wait_until


def compiled(grammars: Grammars, kind: StructureKind, source: str) -> Any:
    return asyncio.run(grammars.compile(Structure(kind, source, "response_format")))


def digit(grammars: Grammars) -> Any:
    return compiled(grammars, StructureKind.REGEX, "[0-9]")


BAD: Sequence[tuple[StructureKind, str, str]] = [
    (StructureKind.JSON_SCHEMA, '{"type": "objec"}', "Invalid type"),
    (StructureKind.JSON_SCHEMA, '{"type": "string", "pattern": "(a"}', "unclosed group"),
    (StructureKind.REGEX, "(?=a)b", "look-around"),
    (StructureKind.JSON_SCHEMA, '{"$ref": "http://x/y"}', "does not fetch"),
    (StructureKind.JSON_SCHEMA, '{"$ref": "#"}', "may refer to itself without an end"),
    (
        StructureKind.JSON_SCHEMA,
        '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
        "may refer to itself without an end",
    ),
    (StructureKind.JSON_SCHEMA, '{"not": {}}', "the keyword 'not' cannot be enforced"),
    (StructureKind.JSON_SCHEMA, '{"items": {"if": {}}}', "the keyword 'if' cannot be enforced"),
    (StructureKind.JSON_SCHEMA, "[]", "a JSON schema must be an object"),
    (
        StructureKind.JSON_SCHEMA,
        json.dumps({"properties": {str(n): {} for n in range(MAX_PROPERTIES + 1)}}),
        "more than 500 properties",
    ),
    (
        StructureKind.JSON_SCHEMA,
        '{"items":' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 1),
        "deeper than 32",
    ),
    (StructureKind.JSON_SCHEMA, '{"enum": [' + '"x", ' * MAX_SOURCE + '"x"]}', "longer than 65536"),
    (StructureKind.REGEX, "(", "unclosed group"),
    (StructureKind.GRAMMAR, 'start: "a" foo', "unknown name"),
]


def test_an_unsupported_structure_is_refused_by_its_field(grammars: Grammars) -> None:
    for kind, source, message in BAD:
        with pytest.raises(InvalidParameter, match=message) as caught:
            compiled(grammars, kind, source)
        assert caught.value.name == "response_format", kind


@pytest.mark.parametrize(
    "source",
    [
        '{"type": "string", "pattern": "(a+)+b"}',
        '{"type": "string", "pattern": ".{0,100000}"}',
        '{"type": "array", "minItems": 1000000, "items": {}}',
    ],
)
def test_schemas_that_hang_other_servers_compile_quickly(source: str, grammars: Grammars) -> None:
    assert outcome(compiled(grammars, StructureKind.JSON_SCHEMA, source).open()) is RowOutcome.MASK


def test_a_schema_that_is_too_large_is_refused_without_a_process(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, 2100, FairExecutor())
    before = psutil.Process().children()
    schema = json.dumps({"properties": {str(n): {} for n in range(MAX_PROPERTIES + 1)}})
    with pytest.raises(InvalidParameter, match="more than 500 properties"):
        compiled(grammars, StructureKind.JSON_SCHEMA, schema)
    assert psutil.Process().children() == before
    grammars.close()


def test_matchers_of_one_grammar_share_no_state(tokenizer: Tokenizer, grammars: Grammars) -> None:
    one, other = digit(grammars).open(), digit(grammars).open()
    assert outcome(one, tokenizer.encode("3")) is RowOutcome.STOPPED
    assert outcome(other) is RowOutcome.MASK


def explosive(first: int) -> str:
    """A schema whose automaton has a million states."""
    patterns = [f"(a|b)*a(a|b){{{number}}}" for number in range(first, 20)]
    parts = [{"type": "string", "pattern": pattern} for pattern in patterns]
    return json.dumps({"allOf": parts})


HOSTILE: list[tuple[StructureKind, str]] = [
    (StructureKind.GRAMMAR, f"start: a\n{AMBIGUOUS}"),
    (StructureKind.JSON_SCHEMA, explosive(1)),
    (StructureKind.JSON_SCHEMA, explosive(2)),
]


def test_hostile_sources_are_refused_and_the_next_compiles(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.text.guidance.grammars.TRIES", (0.02, 0.2))
    for kind, source in HOSTILE:
        with pytest.raises(InvalidParameter, match=r"response_format: (takes|needs) more than"):
            compiled(grammars, kind, source)
        good = compiled(grammars, StructureKind.REGEX, f"x{len(source)}")
        assert outcome(good.open()) is RowOutcome.MASK


def test_a_source_that_was_killed_is_refused_without_another_try(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.text.guidance.grammars.TRIES", (0.02, 0.1))
    grammars = Grammars(tokenizer, 2100, FairExecutor())
    for _ in range(2):
        with pytest.raises(InvalidParameter, match=r"takes more than 0\.1 s"):
            compiled(grammars, *HOSTILE[0])
        # A second try, without a limit, would not return.
        monkeypatch.setattr("mlxserve.text.guidance.grammars.TRIES", (1e6,))
    grammars.close()


def test_a_source_that_was_killed_is_refused_to_its_own_key_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a refusal tells that another key has sent the source, or takes it away from that key."""
    monkeypatch.setattr("mlxserve.text.guidance.grammars.TRIES", (0.02, 0.1))
    grammars = Grammars(tokenizer, 2100, FairExecutor())
    tried: list[str] = []
    refuse = grammars.refuse

    def counted(structure: Structure, client: str, reason: str) -> None:
        tried.append(client)
        refuse(structure, client, reason)

    monkeypatch.setattr(grammars, "refuse", counted)
    kind, source = HOSTILE[0]
    for client in ("evil", "evil", "good", "@127.0.0.1:1", "@127.0.0.1:2", "good"):
        with pytest.raises(InvalidParameter, match=r"takes more than 0\.1 s"):
            asyncio.run(grammars.compile(Structure(kind, source, "response_format"), client))
    grammars.close()
    assert tried == ["evil", "good", "@127.0.0.1:1"]


def test_a_schema_of_another_key_is_compiled_as_if_it_were_new() -> None:
    host = MatcherHost((model_path() / "tokenizer.json").read_text(), 2100, [2])
    source = (StructureKind.REGEX.value, "[0-9]{1,20}")
    counts = []
    for number, owner in enumerate(("good", "evil", "", "good", "evil", "")):
        rows = [(number, source, True, False, (), owner)]
        while next(host.follow(rows, ()))[1] is RowOutcome.LATER:
            pass
        counts.append(host.num_kept())
    assert counts == [1, 2, 3, 3, 3, 3]


@pytest.mark.slow
def test_a_source_whose_compiler_was_stopped_is_not_refused(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, 2100, FairExecutor())
    others = set(psutil.Process().children())
    # Both processes are set up then: a pause while one starts counts as its start, of up to a minute.
    outcome(compiled(grammars, StructureKind.REGEX, "[0-9]").open())
    for child in set(psutil.Process().children()) - others:
        child.suspend()
    with pytest.raises(HelperUnavailable, match=r"response_format: .* paused; send the request ag"):
        compiled(grammars, StructureKind.REGEX, "[a-z]")
    assert outcome(compiled(grammars, StructureKind.REGEX, "[a-z]").open()) is RowOutcome.MASK
    grammars.close()


def wait_for_work(others: set[psutil.Process]) -> None:
    """In a fork of a child of this process that is not one of the others."""

    def used() -> float:
        processes = set(psutil.Process().children()) - others
        try:
            forks = [fork for process in processes for fork in process.children()]
            return max((fork.cpu_times().user for fork in forks), default=0.0)
        except psutil.NoSuchProcess:  # that of an earlier try
            return 0.0

    wait_until(lambda: used() >= 0.5)


@pytest.mark.slow
def test_closing_kills_what_compiles_at_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.text.guidance.grammars.TRIES", (0.2, 1e4))
    grammars = Grammars(tokenizer, 2100, FairExecutor())
    others = set(psutil.Process().children())
    compiled(grammars, StructureKind.REGEX, "[0-9]")
    children = set(psutil.Process().children()) - others
    assert len(children) == 2

    async def close_meanwhile() -> None:
        structure = Structure(*HOSTILE[0], "response_format")
        work = asyncio.create_task(grammars.compile(structure))
        await asyncio.to_thread(wait_for_work, others)
        hosts = set(psutil.Process().children()) - others
        children.update(hosts, *(host.children() for host in hosts))
        assert len(children) >= 4
        grammars.close()
        with pytest.raises(EngineStopped):
            await work

    asyncio.run(close_meanwhile())
    wait_until(lambda: not any(child.is_running() for child in children))
    with pytest.raises(EngineStopped):
        digit(grammars)


def test_a_compilation_that_ends_its_process_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs more memory than it may take."""
    monkeypatch.setattr("mlxserve.text.guidance.grammars.COMPILE_BYTES", 64 << 20)
    monkeypatch.setattr("mlxserve.text.guidance.grammars.TRIES", (100.0,))
    grammars = Grammars(tokenizer, 2100, FairExecutor())
    with pytest.raises(InvalidParameter, match="needs more than 64 MB to compile"):
        compiled(grammars, StructureKind.JSON_SCHEMA, explosive(1))
    assert digit(grammars)
    grammars.close()


def test_the_process_that_compiles_ends_when_no_source_is_new(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.text.guidance.grammars.IDLE_SECONDS", 0.1)
    grammars = Grammars(tokenizer, 2100, FairExecutor())
    others = set(psutil.Process().children())
    for source in ("[0-9]", "[a-z]"):
        compiled(grammars, StructureKind.REGEX, source)
        # The one for masks stays.
        wait_until(lambda: len(set(psutil.Process().children()) - others) == 1)
    grammars.close()


def test_masks_that_take_too_long_altogether_fail_their_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is within its deadline, and together they would hold up the others' masks."""
    monkeypatch.setattr("mlxserve.text.guidance.matcher_host.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("mlxserve.text.guidance.matcher_host.TOKEN_SECONDS", 0.0)
    host = MatcherHost((model_path() / "tokenizer.json").read_text(), 2100, [2])
    found = RowOutcome.LATER
    while found is RowOutcome.LATER:
        [[_, found, reason, _]] = host.follow([(1, ("regex", "[0-9]"), True, False, (), "")], ())
    assert (found, reason) == (RowOutcome.FAILED, "its masks took too long altogether")


def test_usual_sources_of_others_pass_those_that_take_seconds(tokenizer: Tokenizer) -> None:
    """Also where each is of another client, and was there first."""
    grammars = Grammars(tokenizer, 2100, FairExecutor())
    ended: list[str] = []

    async def ask(client: str, kind: StructureKind, source: str) -> None:
        with contextlib.suppress(InvalidParameter):
            await grammars.compile(Structure(kind, source, "response_format"), client)
        ended.append(client)

    async def scenario() -> None:
        await ask("first", StructureKind.REGEX, "[0-9]")
        bombs = [
            asyncio.ensure_future(
                ask("evil", StructureKind.REGEX, f"(a{{1000}}){{{2000 + number}}}")
            )
            for number in range(8)
        ]
        await asyncio.sleep(0)
        await ask("good", StructureKind.JSON_SCHEMA, '{"type": "object"}')
        for bomb in bombs:
            bomb.cancel()
        await asyncio.gather(*bombs, return_exceptions=True)

    asyncio.run(scenario())
    assert ended.index("good") <= 2
    grammars.close()


def test_the_client_of_a_source_that_was_refused_goes_last(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.text.guidance.grammars.TRIES", (0.02, 0.1))
    executor = FairExecutor()
    grammars = Grammars(tokenizer, 2100, executor)
    structure = Structure(*HOSTILE[0], "response_format")
    with pytest.raises(InvalidParameter, match="takes more than"):
        asyncio.run(grammars.compile(structure, "evil"))
    assert order_of(executor, ["evil", "evil", "good", "other"])[:2] == ["good", "other"]
    grammars.close()


def order_of(executor: FairExecutor, clients: Sequence[str]) -> list[str]:
    """In which jobs of the long lane run that were queued in this order."""
    done: list[str] = []

    async def scenario() -> None:
        may_begin = threading.Event()
        blocker = asyncio.ensure_future(executor.run("x", Work(9.0, lambda: may_begin.wait(30))))
        jobs = [executor.run(client, Work(9.0, partial(done.append, client))) for client in clients]
        queued = asyncio.gather(*jobs)
        await asyncio.sleep(0)
        may_begin.set()
        await asyncio.gather(blocker, queued)

    asyncio.run(scenario())
    return done


def test_each_try_waits_in_another_lane() -> None:
    """Those that take long hold up neither usual sources nor other short work."""
    assert [lane_of(seconds) for seconds in TRIES] == list(THREAD_LANES)


@pytest.mark.slow
def test_only_the_shortest_tries_do_not_give_way_to_the_engine(tokenizer: Tokenizer) -> None:
    others, own = set(psutil.Process().children()), psutil.Process().nice()
    grammars = Grammars(tokenizer, 2100, FairExecutor())
    digit(grammars)
    with pytest.raises(InvalidParameter):
        compiled(grammars, StructureKind.JSON_SCHEMA, explosive(1))
    found = sorted(child.nice() - own for child in set(psutil.Process().children()) - others)
    grammars.close()
    assert found == [0, 0, BEHIND_THE_ENGINE, BEHIND_THE_ENGINE], "one of these is for masks"

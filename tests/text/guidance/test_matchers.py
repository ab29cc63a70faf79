"""The engine's side of the process that computes masks: messages, deadlines, and a new process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from random import Random
from typing import Any

import psutil
import pytest

from mlxserve.core.sampling_params import Structure, StructureKind
from mlxserve.helpers.errors import JobFailed
from mlxserve.helpers.helper import Helper
from mlxserve.helpers.job import Job
from mlxserve.hub.embedded import model_path
from mlxserve.system.suspend_clock import RUNNING
from mlxserve.text.guidance.guide import AnswerGuide, Plan
from mlxserve.text.guidance.matcher_host import MatcherHost, RowOutcome
from mlxserve.text.guidance.matchers import MAX_FORESEEN, Grammar, Matchers
from mlxserve.text.tokenizer import Tokenizer
from tests.text.guidance.call_formats import LATE, allowed_tokens, drawn, outcome

HOST = "mlxserve.text.guidance.matcher_host:MatcherHost"
MODULE = "mlxserve.text.guidance.matchers"
VOCABULARY = 2100


class Counted(Helper):
    """Counts the rows of each job."""

    def __init__(self, target: str = HOST, memory: int = 1 << 30) -> None:
        text = (model_path() / "tokenizer.json").read_text()
        super().__init__(target, text, VOCABULARY, [2], name="masks", memory=memory)
        self.num_rows: list[int] = []

    def begin(self, method: str, *arguments: Any, seconds: float) -> Job:
        self.num_rows.append(len(arguments[0]))
        return super().begin(method, *arguments, seconds=seconds)


class Masks:
    """Matchers, and what they refused."""

    def __init__(self, tokenizer: Tokenizer, helper: Counted) -> None:
        self.helper = helper
        self.refused: list[str] = []
        self.matchers = Matchers(
            helper, VOCABULARY, lambda _structure, _client, reason: self.refused.append(reason)
        )
        self.tokenizer = tokenizer

    def regex(self, source: str) -> Grammar:
        return Grammar(Structure(StructureKind.REGEX, source), self.matchers)

    def late(self) -> Grammar:
        return Grammar(Structure(StructureKind.GRAMMAR, LATE), self.matchers)

    def guide(self, grammar: Grammar) -> AnswerGuide:
        plan = Plan(vocab_size=VOCABULARY, end_ids=frozenset({2}), answer=grammar)
        return AnswerGuide(plan)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


@pytest.fixture
def masks(tokenizer: Tokenizer) -> Iterator[Masks]:
    made = Masks(tokenizer, Counted())
    yield made
    made.matchers.close()


@pytest.mark.parametrize(
    "source", ["temperature: [0-9]{2} degrees", "(yes, certainly|no, certainly not)[.!]", "abc"]
)
def test_masks_after_forced_tokens_are_those_once_they_are_read(masks: Masks, source: str) -> None:
    guide, step_by_step = (masks.guide(masks.regex(source)) for _ in range(2))
    masks.matchers.num_foreseen = MAX_FORESEEN
    for _ in range(20):
        mask = guide.mask()
        masks.matchers.num_foreseen = 0
        for number, token in enumerate(guide.foreseen):
            step_by_step.read([token])
            assert step_by_step.mask() == guide.mask(1 + number)
        masks.matchers.num_foreseen = MAX_FORESEEN
        tokens = [*guide.foreseen] or allowed_tokens(mask or b"")[:1]
        if not guide.foreseen:
            step_by_step.read(tokens)
        assert step_by_step.mask() is not None
        guide.read(tokens)
        if tokens == [2]:
            break
    else:
        pytest.fail("the grammar does not end")


def test_no_forced_token_completes_its_grammar() -> None:
    """What follows a call that is complete is not up to its grammar."""
    host = MatcherHost((model_path() / "tokenizer.json").read_text(), VOCABULARY, [2])
    source = StructureKind.GRAMMAR.value, 'start: "yes, certainly"'
    is_new = True
    forced: list[Any] = []
    while is_new:
        [[_, outcome_of_row, _, _, *forced]] = host.follow(
            [(1, source, True, False, (), "")], (), MAX_FORESEEN
        )
        is_new = outcome_of_row is RowOutcome.LATER
    assert len(forced) > 3
    for token in forced:
        [[_, outcome_of_row, *_]] = host.follow([(1, source, False, False, [token], "")], ())
        assert outcome_of_row is RowOutcome.MASK


def test_likely_tokens_are_foreseen_as_far_as_the_grammar_allows_them(masks: Masks) -> None:
    """Each with the mask that it has once it is read, and none after others were read."""
    guide, step_by_step = (masks.guide(masks.regex("[a-z ]{3,40}[.]")) for _ in range(2))
    allowed = masks.ids("the cat sat")
    guide.foresee(MAX_FORESEEN)
    guide.expect([*allowed, *masks.ids("9"), *allowed])
    assert guide.mask()
    assert guide.foreseen == tuple(allowed[:MAX_FORESEEN])
    for number, token in enumerate(guide.foreseen):
        step_by_step.read([token])
        assert step_by_step.mask() == guide.mask(1 + number)
    guide.read(allowed[:1])
    assert guide.foreseen == (), "until the next answer"
    assert guide.mask()
    assert guide.foreseen == (), "nothing is likely"


def test_what_a_grammar_forces_is_foreseen_in_place_of_what_is_likely(masks: Masks) -> None:
    guide = masks.guide(masks.regex("temperature: [0-9]{2} degrees"))
    guide.foresee(MAX_FORESEEN)
    guide.expect(masks.ids("cold"))
    assert guide.mask()
    assert guide.foreseen
    assert masks.tokenizer.decode(list(guide.foreseen)).startswith("temp")


def test_forced_tokens_are_found_where_they_are_wanted(masks: Masks) -> None:
    grammar = masks.regex("temperature: [0-9]{2} degrees")
    for most in (0, 2, MAX_FORESEEN):
        guide = masks.guide(grammar)
        guide.foresee(most)
        assert guide.mask()
        assert len(guide.foreseen) <= most
        assert bool(guide.foreseen) == (most > 0)
        guide.read([guide.foreseen[0] if most else masks.ids("temp")[0]])
        assert guide.foreseen == (), "until the next answer"


def settled(guides: list[AnswerGuide]) -> list[bytes | None]:
    """As a step does: first all ask, then each is waited for."""
    for guide in guides:
        guide.ask()
    return [guide.mask() for guide in guides]


def test_the_tokens_of_a_step_are_sent_in_one_message(masks: Masks) -> None:
    guides = [masks.guide(masks.regex("[0-9]{9}")) for _ in range(5)]
    settled(guides)
    before = len(masks.helper.num_rows)
    for text in "123":
        for guide in guides:
            guide.read(masks.ids(text))
        settled(guides)
    assert masks.helper.num_rows[before:] == [5, 5, 5]


def test_slow_masks_are_sent_one_by_one_after_those_of_other_clients(
    tokenizer: Tokenizer,
) -> None:
    masks = Masks(tokenizer, Counted("tests.text.guidance.broken_hosts:Slow"))
    slow = Grammar(Structure(StructureKind.REGEX, "slow"), masks.matchers, "evil")
    quick = Grammar(Structure(StructureKind.REGEX, "quick"), masks.matchers, "good")
    matchers = [slow.open() for _ in range(6)] + [quick.open() for _ in range(2)]
    assert all(matcher.wait(60) for matcher in matchers)
    before = len(masks.helper.num_rows)
    for matcher in matchers:
        matcher.consume(1)
    assert matchers[-1].wait(60)
    assert masks.helper.num_rows[before] == 2
    assert all(matcher.wait(60) for matcher in matchers)
    assert masks.helper.num_rows[before:] == [2] + [1] * 6
    masks.matchers.close()


def test_masks_need_no_message_while_nothing_was_read(masks: Masks) -> None:
    guide = masks.guide(masks.regex("[0-9]{9}"))
    first = guide.mask()
    before = len(masks.helper.num_rows)
    assert guide.is_ready
    assert guide.mask() == first
    assert len(masks.helper.num_rows) == before


def test_a_mask_that_takes_too_long_fails_its_own_answer_only(
    masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them the process was at work on, in whatever order they asked."""
    monkeypatch.setattr(f"{MODULE}.MASK_SECONDS", 0.5)
    digits = masks.regex("[0-9]{9}")
    alone = masks.guide(digits)
    bad = masks.guide(masks.late())
    guides = [masks.guide(digits), bad, masks.guide(digits)]
    for text in "123":
        alone.read(masks.ids(text))
        for guide in guides:
            guide.read(masks.ids(text))
        expected, found = alone.mask(), settled(guides)
        assert [found[0], found[2]] == [expected, expected]
    assert bad.error == "it took longer than 0.5 s"
    assert [guide.error for guide in guides] == [None, bad.error, None]
    assert allowed_tokens(bad.mask() or b"") == [2]
    assert masks.refused == ["cannot be followed: it took longer than 0.5 s"]
    assert masks.helper.num_started == 2
    for guide in (guides[0], guides[2]):
        guide.read(masks.ids("456789"))
        assert allowed_tokens(guide.mask() or b"") == [2]


def test_the_thread_that_asks_does_not_wait_for_a_slow_mask(
    masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits a moment for the message, and then for none until it is answered."""
    monkeypatch.setattr(f"{MODULE}.MASK_SECONDS", 1e6)
    bad = masks.guide(masks.late())
    bad.mask()
    bad.read(masks.ids("123"))
    assert not bad.is_ready
    waited: list[float] = []
    monkeypatch.setattr(Job, "receive", lambda self, timeout=0.0: waited.append(timeout) or [])
    for _ in range(100):
        assert not bad.is_ready
    assert set(waited) == {0}
    monkeypatch.undo()
    masks.helper.stop()


def test_a_process_that_is_killed_is_replaced_and_no_answer_changes(masks: Masks) -> None:
    source = '\\{"name": "[a-z]{3,9}", "tags": \\[("[a-z]{1,5}",)*"x"\\]\\}'

    def tokens(*, kills: bool) -> list[int]:
        guide, found = masks.guide(masks.regex(source)), []
        for number, token in enumerate(drawn(guide, Random(3), 200)):
            found.append(token)
            if kills and number % 20 == 2:
                masks.helper.stop()
        assert guide.error is None
        return found

    alone = tokens(kills=False)
    assert len(alone) > 15
    assert tokens(kills=True) == alone
    assert masks.helper.num_started > 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_an_operator_killed_or_stopped_costs_no_answer(
    masks: Masks, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.MASK_SECONDS", 0.5)
    guide = masks.guide(masks.regex("[0-9]{9}"))
    first = guide.mask()
    children = psutil.Process().children()
    helpers = [child for child in children if "mlxserve.helpers.child" in child.cmdline()]
    pid = max(helpers, key=psutil.Process.create_time).pid  # numbers of processes begin again
    os.kill(pid, number)
    again = masks.guide(masks.regex("[0-9]{9}"))
    assert again.mask() == first
    assert (guide.error, again.error, masks.refused) == (None, None, [])


@pytest.mark.slow
def test_grammars_are_compiled_beside_the_masks_of_others(masks: Masks) -> None:
    """500 times 1,000 characters take most of a second; until then the others get their masks."""
    guide = masks.guide(masks.regex("[0-9]{9}"))
    guide.mask()
    heavy = masks.regex("(a{1000}){300}").open()
    heavy.ask()
    num_masks = 0
    while not heavy.is_settled and num_masks < 9:
        guide.read(masks.ids("1"))
        guide.mask()
        num_masks += 1
    assert num_masks == 9
    assert outcome(heavy) is RowOutcome.MASK


def test_answers_that_are_gone_leave_nothing_in_the_process(masks: Masks) -> None:
    keep = masks.guide(masks.regex("[0-9]{9}"))
    keep.mask()
    for _ in range(20):
        masks.guide(masks.regex("[0-9]{9}")).mask()
    keep.read(masks.ids("1"))
    keep.mask()
    masks.matchers.receive(60)  # the end of that message, which the next job would wait for
    assert masks.helper.call("num_open", seconds=60) == 1


def test_a_large_process_starts_again_and_no_answer_changes(
    masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide, other = (masks.guide(masks.regex("[0-9]{9}")) for _ in range(2))
    assert guide.mask() == other.mask()
    monkeypatch.setattr(f"{MODULE}.KEPT_BYTES", -(1 << 40))
    # So late that a restart is due, and from then on so slow that no start takes long enough for another.
    real, began = RUNNING.now, RUNNING.now()
    monkeypatch.setattr(RUNNING, "now", lambda: began + 1e4 + (real() - began) / 100)
    guide.read(masks.ids("1"))
    mask = guide.mask()
    assert masks.helper.num_started == 2
    monkeypatch.undo()
    other.read(masks.ids("1"))
    assert other.mask() == mask


@pytest.mark.parametrize("kind", ["Raises", "Lies", "Forces", "Silent"])
def test_a_process_that_answers_nonsense_fails_the_answers_that_asked(
    tokenizer: Tokenizer, kind: str
) -> None:
    helper = Counted(f"tests.text.guidance.broken_hosts:{kind}")
    masks = Masks(tokenizer, helper)
    guide = masks.guide(masks.regex("[0-9]"))
    assert allowed_tokens(guide.mask() or b"") == [2]
    assert guide.error
    masks.matchers.close()


def test_a_system_that_refuses_processes_fails_the_answers_that_asked(
    masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(24, "Too many open files")

    guide = masks.guide(masks.regex("[0-9]"))
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", refuse)
        assert allowed_tokens(guide.mask() or b"") == [2]
    assert guide.error is not None
    assert "Too many open files" in guide.error
    assert masks.guide(masks.regex("[0-9]")).mask()


@pytest.mark.slow
def test_the_host_drops_grammars_that_need_too_much_memory(masks: Masks) -> None:
    """Three of them would keep 110 to 220 MiB each."""
    for number in (300, 301, 302):
        matcher = masks.regex(f"(a{{1000}}){{{number}}}").open()
        assert outcome(matcher) is RowOutcome.MASK
        del matcher
    for _ in range(40):  # the process looks now and then
        masks.guide(masks.regex("[0-9]")).mask()
    assert masks.helper.num_grown < 330 << 20


def test_jobs_of_a_host_that_cannot_be_made_fail(tokenizer: Tokenizer) -> None:
    helper = Helper(HOST, "no tokenizer", 10, [2], name="masks", memory=1 << 30)
    with pytest.raises(JobFailed):
        helper.call("num_kept", seconds=60)
    helper.close()

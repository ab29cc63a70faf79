"""The evaluation counts right answers of any callable; its exit status shows missed bars."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from tests.training import evaluate as examination
from tests.training.__main__ import main
from tests.training.abilities import ABILITIES, Ability, copying
from tests.training.conversation import Dialogue
from tests.training.evaluate import HEADER, AbilityResult, evaluate, line

COPY = Ability("copy", copying.copy, bar=0.9)


def knows(conversations: Sequence[Dialogue]) -> list[str]:
    return [conversation.answer for conversation in conversations]


def knows_half(conversations: Sequence[Dialogue]) -> list[str]:
    return [c.answer if i % 2 else "no idea" for i, c in enumerate(conversations)]


def test_right_answers_pass() -> None:
    (result,) = evaluate(20, 0, knows, [COPY])
    assert result.share == 1
    assert result.is_passed
    assert not result.misses


def test_half_right_misses_the_bar_and_keeps_the_wrong_answers() -> None:
    (result,) = evaluate(20, 0, knows_half, [COPY])
    assert result.share == 0.5
    assert not result.is_passed
    assert [miss.given for miss in result.misses] == ["no idea"] * 10


def test_an_ability_without_a_bar_always_passes() -> None:
    (result,) = evaluate(20, 0, knows_half, [Ability("copy", copying.copy, bar=None)])
    assert result.share == 0.5
    assert result.is_passed


def test_prompts_do_not_contain_the_answer() -> None:
    seen: list[str] = []

    def spies(conversations: Sequence[Dialogue]) -> list[str]:
        seen.extend(m["role"] for c in conversations for m in c.prompt[-1:])
        return knows(conversations)

    list(evaluate(5, 0, spies))
    assert set(seen) == {"user", "tool"}


def test_the_table_shows_ability_share_bar_and_prompts() -> None:
    assert HEADER.split() == ["ability", "right", "bar", "prompts"]
    for ability in ABILITIES:
        shown = line(AbilityResult(ability, 40, ()))
        figures = ["100.0%", "none" if ability.bar is None else f"{ability.bar:.0%}", "40"]
        assert shown.startswith(ability.name)
        assert shown.split()[-3:] == figures


@pytest.mark.parametrize(("student", "status"), [(knows, 0), (knows_half, 1)])
def test_the_command_exits_with_1_if_a_bar_was_missed(
    student: examination.Answerer,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(examination, "Student", lambda folder: nullcontext(student))
    arguments = ["evaluate", "--prompts", "4", "--misses", "1", "--ability", "copy a line"]
    assert main(arguments) == status
    shown = capsys.readouterr().out
    assert ("missed" in shown) == ("expected:" in shown) == bool(status)


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("generate", "tokenizer", "train", "evaluate"))


def test_generate_prints_conversations_of_the_chosen_ability(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "--ability", "copy a line", "--num", "3"]) == 0
    assert capsys.readouterr().out.count("=== copy a line\n[user]") == 3

"""The examination counts right answers, whoever gives them, and its status tells if a bar fell."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from mlxserve.mini.training import evaluate as examination
from mlxserve.mini.training.__main__ import main
from mlxserve.mini.training.abilities import ABILITIES, Ability, copying
from mlxserve.mini.training.conversation import Dialogue
from mlxserve.mini.training.evaluate import HEADER, AbilityResult, evaluate, line

COPY = Ability("copy", copying.copy, bar=0.9)


def knows(conversations: Sequence[Dialogue]) -> list[str]:
    return [conversation.answer for conversation in conversations]


def knows_half(conversations: Sequence[Dialogue]) -> list[str]:
    return [c.answer if i % 2 else "no idea" for i, c in enumerate(conversations)]


def test_a_perfect_student_passes() -> None:
    (result,) = evaluate(20, 0, knows, [COPY])
    assert result.share == 1
    assert result.is_passed
    assert not result.misses


def test_half_right_is_a_missed_bar_with_its_misses_kept() -> None:
    (result,) = evaluate(20, 0, knows_half, [COPY])
    assert result.share == 0.5
    assert not result.is_passed
    assert [miss.given for miss in result.misses] == ["no idea"] * 10


def test_an_ability_without_a_bar_is_measured_and_never_missed() -> None:
    (result,) = evaluate(20, 0, knows_half, [Ability("copy", copying.copy, bar=None)])
    assert result.share == 0.5
    assert result.is_passed


def test_a_student_never_sees_the_answer() -> None:
    seen: list[str] = []

    def spies(conversations: Sequence[Dialogue]) -> list[str]:
        seen.extend(m["role"] for c in conversations for m in c.prompt[-1:])
        return knows(conversations)

    list(evaluate(5, 0, spies))
    assert set(seen) == {"user", "tool"}


def test_the_table_names_every_ability_its_figure_its_bar_and_its_prompts() -> None:
    assert HEADER.split() == ["ability", "right", "bar", "prompts"]
    for ability in ABILITIES:
        shown = line(AbilityResult(ability, 40, ()))
        figures = ["100.0%", "none" if ability.bar is None else f"{ability.bar:.0%}", "40"]
        assert shown.startswith(ability.name)
        assert shown.split()[-3:] == figures


@pytest.mark.parametrize(("student", "status"), [(knows, 0), (knows_half, 1)])
def test_the_commands_status_tells_whether_a_bar_was_missed(
    student: examination.Answerer,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(examination, "Student", lambda folder: nullcontext(student))
    arguments = ["evaluate", "--prompts", "4", "--misses", "1", "--ability", "copy a line"]
    assert main(arguments) == status
    shown = capsys.readouterr().out
    assert ("missed" in shown) == ("wanted:" in shown) == bool(status)


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("generate", "tokenizer", "train", "evaluate"))


def test_generate_prints_conversations_of_the_ability_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "--ability", "copy a line", "--num", "3"]) == 0
    assert capsys.readouterr().out.count("=== copy a line\n[user]") == 3

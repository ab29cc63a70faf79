from tui.chat.pasted import MAX_CHARACTERS, MAX_LINES, Pastes

LONG = "x\n" * MAX_LINES


def test_marks_of_different_pastes_differ_and_the_same_paste_has_one() -> None:
    pastes = Pastes()
    marks = [pastes.fold(text) for text in (LONG, LONG + "y", LONG, "z" * (MAX_CHARACTERS + 1))]
    assert marks == [
        "[pasted 11 lines]",
        "[pasted 11 lines, 2]",
        "[pasted 11 lines]",
        "[pasted 1,001 characters]",
    ]
    assert pastes.unfolded(f"a {marks[0]} b {marks[1]}") == f"a {LONG} b {LONG}y"


def test_what_a_paste_contains_is_no_mark_itself() -> None:
    pastes = Pastes()
    mark = pastes.fold(LONG)
    outer = pastes.fold(LONG + mark)
    assert pastes.unfolded(outer) == LONG + mark


def test_only_whole_marks_stand_for_something() -> None:
    pastes = Pastes()
    assert pastes.unfolded("[pasted 11 lines]") == "[pasted 11 lines]"
    mark = pastes.fold(LONG)
    assert pastes.unfolded(mark[:-1]) == mark[:-1]
    assert (pastes.mark_before("a" + mark), pastes.mark_after(mark + "a")) == (mark, mark)
    assert (pastes.mark_before(mark[:-1]), pastes.mark_after(mark[1:])) == ("", "")


def test_the_oldest_pastes_are_forgotten() -> None:
    pastes = Pastes()
    marks = [pastes.fold(LONG + str(number)) for number in range(25)]
    assert pastes.unfolded(marks[0]) == marks[0]
    assert pastes.unfolded(marks[-1]) == LONG + "24"

"""The first line gives way from its end."""

from textual.content import Content

from tui.widgets.title_line import fitting

PARTS = [
    Content(words)
    for words in ("mini", "41 / 4.1k", "temperature 0.7", "with a system prompt", "http://x:1")
]


def test_whole_parts_are_left_out_from_the_end() -> None:
    for room, line in [
        (100, "mini · 41 / 4.1k · temperature 0.7 · with a system prompt · http://x:1"),
        (60, "mini · 41 / 4.1k · temperature 0.7 · with a system prompt"),
        (40, "mini · 41 / 4.1k · temperature 0.7"),
        (33, "mini · 41 / 4.1k"),
        (4, "mini"),
        (3, "mi…"),
        (0, ""),
    ]:
        assert fitting(PARTS, room).plain == line, room


def test_columns_are_counted_not_characters() -> None:
    assert fitting([Content("模型"), Content("b")], 7).plain == "模型"
    assert fitting([Content("模型"), Content("b")], 8).plain == "模型 · b"


def test_without_parts_there_is_nothing() -> None:
    assert fitting([], 10).plain == ""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.strip import Strip

from tui.paint.markdown import MarkdownStream
from tui.paint.painter import PLAIN_SIZE, Painter
from tui.paint.theme import palette

PALETTE = palette(dark=True)
FRAGMENTS = [
    *("\x1b[31m", "\x1b]8;;http://x\x1b\\", "\x9b", "\u202e", "&#27;", "&#x202e;", "\x07"),
    *("[bold]", "[/]", "[link=x]", "\\", "`", "```\n", "~~~py\n", "    ", "\n", "\n\n", "a"),
    *("- ", "1. ", "> ", "# ", "|a|b|\n", "|-|-|\n", "![i](\x1b[0m)", "[t](http://h/\x1b)"),
    *("**", "~~", "你好", "👩‍🚀", "\t", "<script>", "---\n", "word " * 9, "[r]: /u\n", "[r]"),
]
HOSTILE = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)


@cache
def painter(width: int) -> Painter:
    return Painter(width, PALETTE)


def lines(text: str, width: int = 60) -> list[Strip]:
    picture = MarkdownStream.whole(text, painter(width))
    return [picture.line(y) for y in range(picture.num_lines)]


def shown(text: str, width: int = 60) -> list[str]:
    return [line.text.rstrip() for line in lines(text, width)]


@settings(deadline=None)
@given(HOSTILE, st.integers(20, 90))
def test_no_text_puts_a_control_character_on_the_screen(text: str, width: int) -> None:
    for line in lines(text, width):
        assert all(character.isprintable() or character == "\u200d" for character in line.text)
        assert not any(segment.control for segment in line)
        assert not any(segment.style and segment.style.link for segment in line)


@settings(deadline=None)
@given(HOSTILE)
def test_a_line_has_the_right_width(text: str) -> None:
    for line in lines(text):
        assert line.cell_length == sum(cell_len(segment.text) for segment in line)


@settings(deadline=None)
@given(st.text("ab 你\n", max_size=300), st.integers(8, 40))
def test_prose_and_code_fit_into_the_width(text: str, width: int) -> None:
    for line in lines(f"{text}\n\n```\n{text}\n```", width):
        assert line.cell_length <= max(width, 12)


LISTS = "- a\n- b\n  - c\n\n9. x\n10. y\n\n- [ ] open\n- [x] done"
LIST_LINES = ["• a", "• b", "  ◦ c", "", " 9. x", "10. y", "", "• ☐ open", "• ☑ done"]
MARKUP = "[bold red]no[/] [@click=app.quit]x[/]"
CODE = "```python\nif x:\n\ty  = 1\n```"
SHOWN = {
    "console markup is text": (MARKUP, [MARKUP]),
    "HTML is text": ("<b>x</b>\n\n<!-- y -->", ["<b>x</b>", "", "<!-- y -->"]),
    "the target of a link": ("[bank](https://x.example)", ["bank (https://x.example)"]),
    "a target that is shown": ("<https://a.example>", ["https://a.example"]),
    "a script is not a link": ("[x](javascript:alert)", ["[x](javascript:alert)"]),
    "lists are marked, numbered and nested": (LISTS, LIST_LINES),
    "a loose list": ("1. a\n\n   b\n\n2. c", ["1. a", "", "   b", "", "2. c"]),
    "code with its spaces and language": (CODE, ["  python", "  if x:", "      y  = 1"]),
    "a quote has a bar": ("> a\n>\n> b", ["▌ a", "▌", "▌ b"]),
    "an image": ("![cat](http://h/c.png)", ["[image: cat] http://h/c.png"]),
    "line breaks are kept": ("roses\nviolets", ["roses", "violets"]),
    **{f"nothing: {text!r}": (text, list[str]()) for text in ("", "\n\n", "   ", "[a]: /b")},
}


def test_markdown_is_shown() -> None:
    for what, (text, expected) in SHOWN.items():
        assert shown(text) == expected, what


def test_a_long_line_of_code_is_folded_not_cut() -> None:
    assert [line.strip() for line in shown("```\n" + "x" * 25 + "\n```", 14)] == ["x" * 10] * 2 + [
        "x" * 5
    ]


def test_known_languages_are_coloured_and_unknown_ones_are_not() -> None:
    def colours(text: str) -> set[str]:
        return {str(s.style.color) for line in lines(text) for s in line if s.style}

    assert len(colours("```python\ndef f(): return 'x'\n```")) > len(
        colours("```zzz\ndef f()\n```")
    )


def test_columns_of_a_table_are_aligned() -> None:
    table = shown("| a | bb |\n|:--|--:|\n| ccc | 1 |\n| d | 22 |")
    assert [line.split() for line in table if "─" not in line] == [
        *(["a", "bb"], ["ccc", "1"], ["d", "22"])
    ]
    assert table[2].index("1") == table[3].index("22") + 1


def test_a_table_wider_than_the_screen_becomes_a_list() -> None:
    header, row = "|" + "h|" * 12, "|" + "v|" * 12
    assert shown(f"{header}\n|{'-|' * 12}\n{row}", 20) == ["h: v"] * 12


def test_a_giant_paragraph_is_shown_unparsed() -> None:
    text = "**word** " * (PLAIN_SIZE // 8)
    assert "".join(shown(text)).startswith("**word** **word**")


def test_deep_nesting_gives_a_bounded_number_of_lines() -> None:
    for text in [">" * 500 + "a", "- " * 500, "[" * 500, "*a" * 500, "`" * 999]:
        assert len(lines(text, 40)) < 5_000, text


@pytest.mark.parametrize("width", [20, 80])
@pytest.mark.parametrize(
    "source",
    [
        "> " * 400 + "the end",
        "\n".join(f"{'  ' * depth}- level {depth}" for depth in range(60)) + " the end",
        "\n".join(f"{' ' * 9 * depth}999999. level {depth}" for depth in range(9)) + " the end",
    ],
)
def test_deeply_nested_text_stays_visible(source: str, width: int) -> None:
    picture = MarkdownStream.whole(source, Painter(width, palette(dark=True)))
    lines = [picture.line(y) for y in range(picture.num_lines)]
    assert "the end" in " ".join(" ".join(line.text for line in lines).split())
    assert max(line.cell_length for line in lines) <= width

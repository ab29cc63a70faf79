import itertools
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from textual.strip import Strip

from tui.paint.markdown import MAX_OPEN_LINES, MAX_OPEN_SIZE, MarkdownStream, code_blocks
from tui.paint.painter import Painter
from tui.paint.theme import palette

PALETTE = palette(dark=True)
FRAGMENTS = [
    *("word", " ", "two words ", "\n", "\n\n", "\r\n", "\r", "    ", "\t", "  "),
    *("- ", "* ", "1. ", "2. ", "3) ", "> ", "# ", "## ", "===\n", "---\n", "***", "*", "_", "`"),
    *("```", "```py\n", "```\n", "~~~\n", "|a|b|\n", "|-|-|\n", "|c|", "\\", "<b>", "&amp;"),
    *("[a]", "[a]: /u\n", "[a]: /v 'title'\n", "[b](/w)", "![c](/x)", "[ ] ", "\u202e", "\x1b"),
]
MARKDOWN = st.lists(st.sampled_from(FRAGMENTS), max_size=60).map("".join)


@cache
def painter(width: int = 40) -> Painter:
    return Painter(width, PALETTE)


def picture(stream: MarkdownStream) -> list[Strip]:
    return [stream.line(y) for y in range(stream.num_lines)]


def whole(text: str) -> list[Strip]:
    return picture(MarkdownStream.whole(text, painter()))


def streamed(text: str, cuts: list[int]) -> MarkdownStream:
    """The text fed in these pieces, with a flush after each."""
    stream = MarkdownStream(painter())
    edges = [0, *sorted(cuts), len(text)]
    for start, end in itertools.pairwise(edges):
        stream.feed(text[start:end])
        stream.flush()
    return stream


def finished(stream: MarkdownStream) -> list[Strip]:
    stream.show_final(stream.final_painting(painter()))
    return picture(stream)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"so \(a^2\) and \[b\]", r"so \(a^2\) and \[b\]"),
        (r"a \* b", "a * b"),
        ("a \\", "a \\"),
        (r"`\(x\)`", r"\(x\)"),
    ],
)
def test_the_signs_around_a_formula_are_kept(text: str, shown: str) -> None:
    assert whole(text)[0].text.rstrip() == shown


@settings(max_examples=150, deadline=None)
@given(text=MARKDOWN, data=st.data())
def test_any_pieces_give_the_painting_of_the_whole_text(text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    assert finished(streamed(text, cuts)) == whole(text)


@settings(max_examples=150, deadline=None)
@given(text=MARKDOWN, data=st.data())
def test_short_blocks_are_right_before_the_end(text: str, data: st.DataObject) -> None:
    text = text.replace("]:", "")  # a definition further down may change what is above it
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    # A "\r" at the very end is held back: it may be half of a line end.
    text = text.rstrip("\r")
    assert picture(streamed(text, cuts)) == whole(text)


LONG = {
    "fence": "```python\n" + 'x = """a"""  # comment\n' * 200 + "```\n\nafter\n",
    "open fence": "~~~\n" + "plain\n" * 200,
    "indented fence": "  ```\n" + "    y\n" * 200 + "  ```\n",
    "list": "before\n\n" + "- item *one*\n  more\n" * 150 + "\nafter",
    "loose list": "".join(f"{n}. item\n\n   again\n\n" for n in range(3, 120)),
    "list of ones": "1. item\n" * 200,
    "nested list": "- a\n  - b\n    - c\n" * 100,
    "paragraph": "word *word* " * 800,
    "table": "|a|b|\n|-|-|\n" + "|c|d|\n" * 250,
    "quote": "> said\n" * 200,
    "one line of code": "```\n" + "x" * 10_000,
    "links": "[a] [b]\n\n" * 100 + "[a]: /u\n[b]: /v\n",
}


@pytest.mark.slow
def test_long_blocks_end_in_the_painting_of_the_whole_text() -> None:
    for name in LONG:
        for size in [97, 4_000]:
            text = LONG[name]
            stream = streamed(text, list(range(0, len(text), size)))
            assert finished(stream) == whole(text), (name, size)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fence", "open fence", "list", "loose list", "nested list"])
def test_the_open_end_of_a_long_block_stays_short(name: str) -> None:
    stream = MarkdownStream(painter())
    for line in LONG[name].splitlines(keepends=True):
        stream.feed(line)
        stream.flush()
        assert stream.num_open_lines <= 3 * MAX_OPEN_LINES


def test_a_growing_block_that_cannot_be_cut_shows_only_its_end() -> None:
    stream = streamed("word " * 4_000, [])
    assert stream.num_open_lines * 40 <= 2 * MAX_OPEN_SIZE
    assert len(finished(stream)) > 400


def test_a_growing_list_keeps_counting() -> None:
    text = "".join(f"{n}. item\n" for n in range(5, 205))
    numbers = [line.text.split(".")[0].strip() for line in picture(streamed(text, [500, 1_000]))]
    assert numbers == [str(n) for n in range(5, 205)]


def test_a_growing_fence_shows_its_language_once() -> None:
    text = LONG["fence"]
    texts = [line.text.strip() for line in picture(streamed(text, list(range(0, 4_000, 50))))]
    assert texts.count("python") == 1
    assert "```" not in "".join(texts)


def test_frozen_lines_are_not_repainted() -> None:
    stream = streamed("one\n\ntwo\n\nthree", [])
    first = stream.line(0)
    stream.feed(" more\n\nfour")
    stream.flush()
    assert stream.line(0) is first
    finished(stream)
    assert stream.line(0) is first


def test_a_link_definition_further_down_counts_at_the_end() -> None:
    stream = streamed("[a]\n\ntext\n\n[a]: http://h\n", [6, 12])
    assert stream.line(0).text == "[a]"
    assert finished(stream)[0].text == "a (http://h)"


@settings(deadline=None)
@example(text="- a\n\n2", width=20)
@given(text=MARKDOWN, width=st.integers(10, 80))
def test_a_new_width_gives_the_painting_of_that_width(text: str, width: int) -> None:
    stream = MarkdownStream.whole(text, painter())
    stream.repaint(painter(width))
    assert picture(stream) == picture(MarkdownStream.whole(text, painter(width)))


def test_a_new_width_keeps_the_open_end() -> None:
    stream = streamed("one\n\ntwo words here", [])
    stream.repaint(painter(10))
    assert [line.text for line in picture(stream)] == ["one", "", "two words ", "here"]


def test_a_flush_without_new_text_paints_nothing() -> None:
    stream = streamed("one", [])
    assert stream.flush() is False


def test_code_blocks_are_found() -> None:
    assert code_blocks("```\na\n```\n\n- x\n\n  ```py\n  b\n  ```\n\nend") == ["a\n", "b\n"]
    assert code_blocks("none") == []

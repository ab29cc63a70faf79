"""Answers in llama.cpp's tests are read as llama.cpp reads them, with the table of rows and without.

The archive is that of `test_public_templates`. In 0.3.36 there are 463 cases: 375 whole answers, 72 that
go on after a text of the request, 9 judged before their end, and 7 with the thinking inside the text.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.templates.judged_answers import expected, read_answer
from tests.templates.llama_cpp_answers import Case, Form, Message, Unread, cases, cases_in
from tests.templates.public_templates import MISSING

pytestmark = pytest.mark.templates

_FENCES = "A model was asked for JSON and writes it in a code block, which stays in the text."
_PREFIX = "What the prompt says already is not repeated in the reasoning."
_SPOKEN = "A marker of thinking after a text is text, so that an answer may speak of it."
_FOREIGN = "A call to a tool that the request does not have is shown, not dropped."
# Cases that mlxserve reads otherwise on purpose.
POLICIES = {
    "Qwen3.5-4B:2377": "A model that opens thinking again, which the prompt has opened, thinks one thought.",
    "mistralai-Ministral-3-14B-Reasoning-2512:2648": _FENCES,
    "meta-llama-Llama-3.1-8B-Instruct:6302": _FENCES,
    "google-gemma-4-31B-it:3155": _SPOKEN,
    "google-gemma-4-31B-it:3161": _SPOKEN,
    "google-gemma-4-31B-it:3167": _SPOKEN,
    "inclusionai-ling-3.0-flash:4716": "The prompt opened thinking, so a text before a call is reasoning; the case asks for none.",
    "MiniMax-M3:5793": "A value that is an object by its markup, and may be one by its schema, is an object.",
    "Apriel-1.6-15b-Thinker-fixed:6211": _PREFIX,
    "Apriel-1.6-15b-Thinker-fixed:6219": _PREFIX,
    "openai-gpt-oss-120b:6547": _FOREIGN,
    "openai-gpt-oss-120b:6556": _FOREIGN,
}
# Cases that are refused, or not read as they should be.
KNOWN = {
    "fireworks-ai-llama-3-firefunction-v2:5970": "The template wants tools as a text named `functions`.",
    "fireworks-ai-llama-3-firefunction-v2:5971": "The template wants tools as a text named `functions`.",
    "llama-cpp-deepseek-r1:6029": "The template gives tojson a generator, which jinja2 does not take.",
    "muse-glimmer:6391": "Markup of a call that a text to the user quotes is called.",
}


def whole_answers() -> list[Case]:
    return [case for case in cases() if isinstance(case, Case) and case.form is Form.WHOLE]


def left(*, is_learnt: bool) -> Iterator[str]:
    """Names of the cases that are not read as llama.cpp reads them."""
    for case in whole_answers():
        if read_answer(case, is_learnt=is_learnt) != expected(case):
            yield case.name


def test_every_case_of_the_file_is_understood() -> None:
    if not cases():
        pytest.skip(MISSING)
    assert not [case for case in cases() if isinstance(case, Unread)]
    assert len(whole_answers()) >= 363


def test_whole_answers_are_read_right() -> None:
    if not cases():
        pytest.skip(MISSING)
    wrong = set(left(is_learnt=False))
    assert wrong == {*POLICIES, *KNOWN}
    assert len(wrong) <= 0.05 * len(whole_answers())


def test_most_whole_answers_are_read_right_without_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not cases():
        pytest.skip(MISSING)
    monkeypatch.setattr("mlxserve.text.format_choice.FORMATS", ())
    wrong = sorted(left(is_learnt=True))
    assert len(whole_answers()) - len(wrong) >= 300
    assert len(wrong) <= 0.2 * len(whole_answers()), wrong


@pytest.mark.parametrize("size", range(1, 8))
def test_an_answer_in_pieces_is_the_whole_answer(size: int) -> None:
    if not cases():
        pytest.skip(MISSING)
    for case in whole_answers():
        assert read_answer(case, size=size) == read_answer(case), case.name


# ---- the reader of the file

SOURCE = r"""
static common_chat_tool look_tool{ /* .name = */ "look", "Looks.", R"({"type": "object"})" };
const common_chat_msg message_plain = simple_assist_msg("Hello,\n" "w\xc3\xb6rld");  // a comment
static void test_more(const std::string & path, bool detailed_debug) {
    auto other = peg_tester(path, detailed_debug);
    other.test("more").run();
}
static void test_template_output_peg_parsers(bool detailed_debug) {
    {
        auto tst = peg_tester("models/templates/One.jinja", detailed_debug);
        const std::string call = R"X(<look>)")X";
        tst.test("a" + call).tools({ look_tool }).enable_thinking(false)
            .expect_content("b").expect_tool_calls({ { "look", "{}", {} } }).run();
        tst.test("c").messages({ anything() }).expect(message_plain).run();
        tst.test("d").is_partial(true).run();
        tst.test("e").unheard_of("x").run();
    }
    for (const char * tmpl : { "Two.jinja", "Three.jinja" }) {
        test_more(tmpl, detailed_debug);
    }
}
"""


def test_cases_are_taken_out_of_source_text() -> None:
    first, second, third, fourth, *others = cases_in(SOURCE)
    assert isinstance(first, Case)
    assert (first.template, first.text, first.thinking) == ("One", 'a<look>)"', False)
    assert [tool["function"]["name"] for tool in first.tools] == ["look"]
    assert first.expected == Message("b", "", (("look", "{}"),))
    assert isinstance(second, Case)
    assert (second.expected.content, second.form) == ("Hello,\nwörld", Form.WHOLE)
    assert isinstance(third, Case)
    assert third.form is Form.PARTIAL
    assert isinstance(fourth, Unread)
    assert (fourth.line, fourth.reason) == (16, "`.unheard_of`")
    assert [case.name for case in others if isinstance(case, Case)] == ["Two:6", "Three:6"]

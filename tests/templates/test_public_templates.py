"""Public chat templates: what each writes for calls is read back, and learnt without the table of rows.

They are those in the source distribution of llama-cpp-python, which is not part of this repository:

    python3 -m pip download --no-deps --no-binary=llama-cpp-python llama-cpp-python==0.3.36
    uv run pytest -m templates

A test of a template stands alone, so a run that was broken off goes on with `--last-failed`.
"""

from __future__ import annotations

import pytest

from mlxserve.text.format_choice import choose_among
from tests.templates import families
from tests.templates.public_templates import MISSING, chosen, templates, texts_of

pytestmark = pytest.mark.templates


def test_the_archive_is_there() -> None:
    if not templates():
        pytest.skip(MISSING)
    assert len(templates()) >= 70


@pytest.mark.parametrize("name", templates() or [pytest.param("", marks=pytest.mark.skip(MISSING))])
def test_what_a_template_writes_is_read_back(name: str) -> None:
    if texts_of(name) is None:
        pytest.skip("the template shows no calls")
    choice = chosen(name)
    assert choice.reads_back, choice.row


def test_most_templates_are_learnt_without_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    if not templates():
        pytest.skip(MISSING)
    monkeypatch.setattr("mlxserve.text.format_choice.FORMATS", ())
    shown = {name: texts for name in templates() if (texts := texts_of(name)) is not None}
    learnt = {name for name, texts in shown.items() if choose_among([], texts).reads_back}
    # 70 of 87 is the claim.
    assert len(learnt) >= 0.9 * len(shown), sorted(shown.keys() - learnt)


def test_the_documentation_has_the_table_of_families() -> None:
    """After a change: `python -m tests.templates.families`."""
    if not templates():
        pytest.skip(MISSING)
    assert families.PAGE.read_text(encoding="utf-8") == families.page()

"""Public chat templates: what each writes for calls is read back, and learnt without the table of rows.

They are those in the source distribution of llama-cpp-python, which is not part of this repository:

    python3 -m pip download --no-deps --no-binary=llama-cpp-python llama-cpp-python==0.3.36
    uv run pytest -m templates

A test of a template stands alone, so a run that was broken off goes on with `--last-failed`.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from mlxserve.text.call_probes import CallTexts, call_texts
from mlxserve.text.format_choice import FormatChoice, choose_among, recognise
from mlxserve.text.parsing.formats import FORMATS
from mlxserve.text.probes import Probe, RenderEach
from mlxserve.text.template_caps import find_abilities
from tests.text.rendering import renderer, worker

pytestmark = pytest.mark.templates

ROOT = Path(__file__).parent.parent.parent
ARCHIVES = "llama_cpp_python-*.tar.gz"
MISSING = (
    f"There is no {ARCHIVES} in {ROOT.name}/. Run "
    "`python3 -m pip download --no-deps --no-binary=llama-cpp-python llama-cpp-python==0.3.36` there."
)
THINKING = {"enable_thinking": True, "thinking": True}
# Tokens of vocabularies, for templates in which the format has no words of its own.
VOCABULARY = {token for row in FORMATS for token in row.known}
OF_TOKENS = {"openai-gpt-oss-120b": "harmony", "Kimi-K3": "kimi_k3"}


@cache
def templates() -> Mapping[str, str]:
    """The public templates by their name; empty without the archive."""
    archives = sorted(ROOT.glob(ARCHIVES))
    if not archives:
        return {}
    with tarfile.open(archives[-1]) as archive:
        files = [
            member
            for member in archive.getmembers()
            if "/models/templates/" in member.name and member.name.endswith(".jinja")
        ]
        read = {Path(member.name).stem: archive.extractfile(member) for member in files}
        return {name: file.read().decode() for name, file in read.items() if file is not None}


def rendering(template: str) -> RenderEach:
    """Render probes as the product does, with the tokens around a text that a tokenizer has."""
    render_each = renderer(template)

    def rendered(probes: Sequence[Probe]) -> Sequence[str | None]:
        return render_each(
            [
                probe._replace(
                    variables={
                        "bos_token": "<s>",
                        "eos_token": "</s>",
                        **(THINKING if probe.variables is None else probe.variables),
                    }
                )
                for probe in probes
            ]
        )

    return rendered


@cache
def texts_of(name: str) -> CallTexts | None:
    template = templates()[name]
    render_each = rendering(template)
    return call_texts(render_each, find_abilities(render_each, worker().variables(template)))


def chosen(name: str) -> FormatChoice:
    tokens = VOCABULARY if name in OF_TOKENS else set()
    rows = recognise(templates()[name], tokens)
    return choose_among(
        [row for row in rows if row.name == OF_TOKENS.get(name, row.name)], texts_of(name)
    )


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

"""Public chat templates, and what the product finds about each of them.

They are those in the source distribution of llama-cpp-python, which is not part of this repository:

    python3 -m pip download --no-deps --no-binary=llama-cpp-python llama-cpp-python==0.3.36
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from mlxserve.text.call_probes import CallTexts, call_texts
from mlxserve.text.format_choice import FormatChoice, choose_among, recognise
from mlxserve.text.parsing.formats import FORMATS
from mlxserve.text.probes import Probe, RenderEach
from mlxserve.text.template_caps import TemplateCaps, find_abilities
from tests.text.rendering import renderer, worker

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
def caps_of(name: str) -> TemplateCaps:
    template = templates()[name]
    return find_abilities(rendering(template), worker().variables(template))


@cache
def texts_of(name: str) -> CallTexts | None:
    return call_texts(rendering(templates()[name]), caps_of(name))


def chosen(name: str) -> FormatChoice:
    tokens = VOCABULARY if name in OF_TOKENS else set()
    rows = recognise(templates()[name], tokens)
    return choose_among(
        [row for row in rows if row.name == OF_TOKENS.get(name, row.name)], texts_of(name)
    )

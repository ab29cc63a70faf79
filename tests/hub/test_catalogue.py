"""The catalogue says what mlx-lm's definitions say, and nobody names a model that it does not have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import pytest
from typer.main import get_command

from mlxserve.cli.commands import app
from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.catalog import well_known
from mlxserve.hub.class_defaults import with_class_defaults
from mlxserve.hub.files import text_config
from mlxserve.hub.known_models import KnownModel, known_models, repository_of
from mlxserve.hub.kv_shapes import kv_shape
from mlxserve.hub.model_config import check_model_config
from tests import catalogue
from tests.test_docs import PAGES

ROOT = Path(__file__).parent.parent.parent
# One of each kind that keeps something else of a text: heads, windows, shared keys, latents, states, experts.
SOME = ("llama3.2-1b", "gemma3-1b", "gemma4-e2b", "gpt-oss-20b", "glm-4.7-flash", "lfm2.5-2.6b")
FILE = catalogue.read()
_SHORT_NAME = re.compile(r"(?<![\w/.:-])[a-z][a-z0-9.-]*:e?\d+(?:\.\d+)?b(?:-[a-z0-9]+)*\b")
_REPOSITORY = re.compile(
    r"\b(?:mlx-community|lmstudio-community|prism-ml|LiquidAI|rapid-mlx)/[\w.-]*\w"
)


def rows_of(shapes: tuple[str, ...]) -> list[dict[str, Any]]:
    return [row for row in FILE["models"] if row.get("shape") in shapes]


def kept_by(shape: Mapping[str, Any]) -> tuple[int, bool]:
    """Keys and values per token and whether there are states, from the caches of a step that is not computed."""
    model = catalogue.built(shape)
    text = getattr(model, "language_model", model)
    caches = text.make_cache() if hasattr(text, "make_cache") else []
    if not caches:
        from mlx_lm.models.cache import make_prompt_cache

        caches = make_prompt_cache(text)
    text(mx.array([[1]]), cache=caches)
    kept, has_states = 0, False
    for cache in caches:
        if hasattr(cache, "keys"):
            kept += sum(
                a.shape[1] * a.shape[3] for a in (cache.keys, cache.values) if a is not None
            )
        else:
            has_states = True
    return kept, has_states


def check(row: Mapping[str, Any]) -> None:
    shape = FILE["shapes"][row["shape"]]
    assert catalogue.weight_size(shape, row) == row["weight_size"], row["repository"]
    expected = kv_shape(with_class_defaults(text_config(shape)))
    assert (expected.num_values, expected.has_states) == kept_by(shape), row["repository"]


def test_sizes_are_those_of_the_definitions() -> None:
    for shape in SOME:
        check(rows_of((shape,))[0])


@pytest.mark.slow
def test_all_sizes_are_those_of_the_definitions() -> None:
    for row in rows_of(tuple(FILE["shapes"])):
        check(row)


def test_the_file_is_as_its_script_writes_it() -> None:
    written = catalogue.FILE.read_text(encoding="utf-8")
    assert catalogue.render(FILE, written[: written.index("[[models]]")]) == written


def test_a_folder_of_config_files_replaces_shapes_and_quantisation(tmp_path: Path) -> None:
    [row] = rows_of(("llama3.2-1b",))
    folder = tmp_path / row["repository"]
    folder.mkdir(parents=True)
    config = {
        **FILE["shapes"]["llama3.2-1b"],
        "num_hidden_layers": 2,
        "torch_dtype": "bfloat16",
        "quantization": {"group_size": 32, "bits": 8},
    }
    (folder / "config.json").write_text(json.dumps(config))
    part = {"models": [dict(row)], "shapes": {"llama3.2-1b": FILE["shapes"]["llama3.2-1b"]}}
    changed = catalogue.refreshed(part, tmp_path)
    assert changed["shapes"]["llama3.2-1b"]["num_hidden_layers"] == 2
    assert "torch_dtype" not in changed["shapes"]["llama3.2-1b"]
    [model] = changed["models"]
    assert (model["bits"], model["group_size"]) == (8, 32)
    # A byte for each weight, and 4 for each group of 32: two layers, and the tied embedding.
    weights = 2 * (2 * 2048 * (2048 + 512) + 3 * 2048 * 8192) + 128_256 * 2048
    assert model["weight_size"] == pytest.approx(weights * 9 / 8, rel=1e-3)


def test_shapes_are_used_and_names_mean_one_model() -> None:
    models = FILE["models"]
    assert {row["shape"] for row in models if "shape" in row} == set(FILE["shapes"])
    names = list(chain.from_iterable(row["names"] for row in models))
    assert len(set(names)) == len(names)
    assert len({row["repository"] for row in models}) == len(models)


def test_every_model_that_writes_is_an_entry_with_the_facts_of_its_row() -> None:
    known = {entry.name: entry for entry in well_known()}
    writers = [model for model in known_models().values() if not model.purpose]
    assert len(writers) == len(known) > 70
    for model in writers:
        entry = known[model.repository]
        assert (entry.weight_size, entry.has_vision, entry.has_head) == (
            model.weight_size,
            model.sees,
            model.has_head,
        )
        assert entry.context, model.repository


def test_a_shape_that_cannot_be_served_would_be_seen() -> None:
    for model in known_models().values():
        if model.config is not None:
            check_model_config(model.config, model.repository)
    with pytest.raises(UnsupportedModel):
        check_model_config({"model_type": "llama", "hidden_size": "wide"}, "bad")


def drafted() -> list[KnownModel]:
    return [model for model in known_models().values() if model.draft]


def test_heads_and_assistants_of_this_year_are_known() -> None:
    drafts = {model.names[0]: model.draft for model in drafted()}
    assert drafts["qwen3.5:4b"] == "mlx-community/Qwen3.5-4B-MTP-4bit"
    assert drafts["gemma4:31b"] == "mlx-community/gemma-4-31B-it-assistant-bf16"
    assert len(drafts) >= 10
    assert [m.names[0] for m in known_models().values() if m.has_head] == [
        "qwen3.8:27b-mtp",
        "qwen3.6:35b-8bit",
    ]


def test_the_readme_has_the_table_that_the_catalogue_gives() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert catalogue.models_table() in readme


def helps() -> Iterator[str]:
    """All texts of --help."""

    def walk(command: click.Command) -> Iterator[str]:
        yield command.help or ""
        yield command.epilog or ""
        for parameter in command.params:
            yield getattr(parameter, "help", None) or ""
        for inner in getattr(command, "commands", {}).values():
            yield from walk(inner)

    yield from walk(get_command(app))


def texts() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        yield page.name, page.read_text(encoding="utf-8")
    for text in helps():
        yield "--help", text
    for pattern in (
        ".github/ISSUE_TEMPLATE/*.yml",
        "mlxserve/**/*.py",
        "mlxserve/api/page/files/*.js",
        "tui/**/*.py",
    ):
        for file in sorted(ROOT.glob(pattern)):
            yield file.name, file.read_text(encoding="utf-8")


def test_every_model_that_is_named_is_in_the_catalogue() -> None:
    drafts = {model.draft for model in drafted()}
    for place, text in texts():
        for name in _SHORT_NAME.findall(text):
            assert repository_of(name) is not None, f"{place}: {name}"
        for name in _REPOSITORY.findall(text):
            assert name in known_models() or name in drafts, f"{place}: {name}"


def test_the_first_model_of_the_readme_is_of_this_year() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = repository_of(_SHORT_NAME.findall(readme)[0])
    assert first is not None
    assert not known_models()[first].is_earlier

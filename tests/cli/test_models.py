"""`mlxserve models`, offline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxserve.cli.models import fit_text
from mlxserve.hub.catalog import MemoryFit
from mlxserve.hub.known_models import known_models
from mlxserve.hub.recommendation import Recommendation, recommend
from mlxserve.system import machine
from tests.cli.commands import Run
from tests.memory_table import mac


def test_models_are_listed_with_whether_they_fit(offline: Run) -> None:
    done = offline("models", "--json")
    listed = json.loads(done.out)
    assert listed["context"] is None
    assert listed["models"][0]["context"] == 4096, "the context it was trained for"
    assert listed["models"][0]["name"] == "mlxserve-mini"
    assert listed["models"][0]["fits"] is True
    assert {model["source"] for model in listed["models"]} >= {"included", "suggested"}


def test_the_list_has_a_heading_and_stars_what_suits_the_machine(
    offline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory", lambda: mac(16))
    monkeypatch.setattr(machine, "is_metal", lambda: True)
    listed = offline("models").out.splitlines()
    assert listed[0] == "On this machine:"
    assert listed[1].split() == ["Model", "Short", "name", "From", "Kind", "Size", "Context"]
    starred = [line for line in listed if line.startswith(("★", "☆"))]
    assert [line.split()[2] for line in starred] == ["qwen3.5:4b", "lfm2.5:1.2b", "this"]
    assert starred[0].endswith(" tokens (vision, draft repository)")
    _, _, others = "\n".join(listed).partition("To download")
    names = [line[2:].split()[1] for line in others.splitlines()[2:7]]
    suited = recommend(mac(16).limit(), is_metal=True)
    assert names[2:] == [known_models()[name].names[0] for name in suited.others[:3]]
    assert starred[2].startswith("★ suits this machine best")
    card = json.loads(offline("models", "--json").out)
    assert card["recommended"] == {
        "best": "mlx-community/Qwen3.5-4B-MLX-4bit",
        "faster": "mlx-community/LFM2.5-1.2B-Instruct-4bit",
    }
    [best] = [m for m in card["models"] if m["name"] == card["recommended"]["best"]]
    assert (best["vision"], best["head"]) == (True, False)
    assert best["draft"] == "mlx-community/Qwen3.5-4B-MTP-4bit"


def test_nothing_is_starred_where_nothing_suits(
    offline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.cli.models.recommended_for", lambda _: Recommendation())
    assert "★" not in offline("models").out
    card = json.loads(offline("models", "--json").out)
    assert card["recommended"] == {"best": None, "faster": None}


def test_the_memory_of_a_draft_model_is_counted(offline: Run) -> None:
    draft, needed = ("--draft-model", "mlxserve-mini"), []
    for flags in ((), draft, (*draft, "--speculative-tokens", "0")):
        listed = json.loads(offline("models", "--json", *flags).out)["models"]
        needed.append({model["name"]: model["needed"] for model in listed})
    plain, drafted, off = needed
    assert drafted["mlxserve-mini"] > 1.9 * plain["mlxserve-mini"], "itself twice"
    assert all(drafted[name] > plain[name] for name in plain)
    assert off == plain


def test_a_model_with_windows_says_how_many_share_its_memory(offline: Run) -> None:
    assert fit_text(MemoryFit(True, 200, 5, 100, 1)) == "fits, 1 window"
    assert (
        fit_text(MemoryFit(False, 1_200, 5, 4_096, 7)) == "1,200 of 4,096 tokens, up to 7 windows"
    )
    assert fit_text(MemoryFit(False, 0, 5, 100, 4)) == "too large"
    listed = json.loads(offline("models", "--json").out)["models"]
    windows = {model["name"]: model["num_windows"] for model in listed}
    assert windows["mlxserve-mini"] is None
    assert windows["mlx-community/gemma-3-1b-it-qat-4bit"] > 0
    assert "A window is what some layers keep" in offline("models").out


def test_models_uses_the_context_and_memory_of_a_server_with_the_same_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: Run
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("max_model_len = 3000\nport = 9000\n")
    listed = json.loads(offline("models", "--json", "--config", str(file)).out)
    assert {model["context"] for model in listed["models"]} == {3000}
    monkeypatch.setenv("MLXSERVE_MAX_MODEL_LEN", "2000")
    monkeypatch.setenv("MLXSERVE_CONFIG", str(file))
    half = json.loads(offline("models", "--json", "--gpu-memory-utilization", "0.45").out)
    assert half["context"] == 2000
    assert half["memory"] == pytest.approx(listed["memory"] / 2, rel=0.01)


def test_adapters_that_the_options_name_are_listed_with_what_is_wrong_with_them(
    tmp_path: Path, offline: Run
) -> None:
    given = ("--adapter", f"none={tmp_path}")
    [adapter] = json.loads(offline("models", "--json", *given).out)["adapters"]
    assert (adapter["name"], adapter["folder"]) == ("mlxserve-mini:none", str(tmp_path))
    assert "has no adapter_config.json" in adapter["refusal"]
    assert "mlxserve-mini:none" in offline("models", *given).out

from __future__ import annotations

from pathlib import Path

import pytest

from tui.chat.sampling import Preset, Sampling, SamplingRefused, preset


def test_what_is_set_becomes_fields_and_words() -> None:
    sampling = Sampling().changed("temperature", "0.7").changed("seed", "3")
    sampling = sampling.changed("effort", "low")
    assert sampling.fields == {"temperature": 0.7, "seed": 3, "reasoning_effort": "low"}
    assert sampling.label == "temperature 0.7, seed 3, effort low"
    assert sampling.changed("seed", "off").label == "temperature 0.7, effort low"
    assert Sampling().label == ""


def test_what_cannot_be_set_says_what_can() -> None:
    for name, text, words in [
        ("temprature", "1", "These can: temperature, top_p"),
        ("temperature", "warm", "temperature is a number from 0 to 2, or off"),
        ("temperature", "9", "from 0 to 2"),
        ("temperature", "-1", "from 0 to 2"),
        ("temperature", "nan", "from 0 to 2"),
        ("top_p", "0", "from 0.01 to 1"),
        ("min_p", "2", "from 0 to 1"),
        ("max_tokens", "0", "a whole number from 1"),
        ("max_tokens", "1.5", "a whole number"),
        ("seed", "", "seed is a whole number, or off"),
        ("effort", "huge", "none, minimal, low, medium, high, xhigh, max, or off"),
    ]:
        with pytest.raises(SamplingRefused, match=words):
            Sampling().changed(name, text)


def test_it_is_stored_as_text() -> None:
    sampling = Sampling().changed("top_k", "20").changed("effort", "high")
    assert Sampling.from_text(sampling.as_text()) == sampling


def test_anything_else_that_is_stored_is_the_default() -> None:
    for text in [None, "", "nonsense", "[]", '{"warmth": 1}', '{"top_p": 9}']:
        assert Sampling.from_text(text) == Sampling(), text


def test_presets_are_sections_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "presets.toml"
    with pytest.raises(SamplingRefused, match="Write it in that file first"):
        preset(file, "creative")
    file.write_text("[creative]\ntemperature = 1.1\ntop_p = 0.95\n[broken]\nwarmth = 1\n")
    creative = preset(file, "creative")
    assert creative.sampling.fields == {"temperature": 1.1, "top_p": 0.95}
    assert creative.system is None
    with pytest.raises(SamplingRefused, match="It has: creative, broken"):
        preset(file, "precise")
    with pytest.raises(SamplingRefused, match=r"\[broken\].*'warmth' cannot be set"):
        preset(file, "broken")
    file.write_text("[")
    with pytest.raises(SamplingRefused, match="cannot be read"):
        preset(file, "creative")


def test_a_preset_may_have_a_system_prompt(tmp_path: Path) -> None:
    file = tmp_path / "presets.toml"
    file.write_text('[brief]\nsystem = "Be brief."\n[bad]\nsystem = 7\n[empty]\nsystem = ""\n')
    assert preset(file, "brief") == Preset(Sampling(), "Be brief.")
    assert preset(file, "empty").system == ""
    with pytest.raises(SamplingRefused, match="system is a text, in quotes"):
        preset(file, "bad")
    file.write_text("bad = 7\n")
    with pytest.raises(SamplingRefused, match="not a table"):
        preset(file, "bad")

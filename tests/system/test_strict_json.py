"""Numbers that JSON has no way to write are refused."""

from __future__ import annotations

import json

import pytest

from mlxserve.system.strict_json import finite, refuse_constant


def test_numbers_of_json_are_read_and_all_others_refused() -> None:
    for text in ("0", "-1.5", "1e308", "12345678901234567890.0"):
        value = json.loads(text, parse_constant=refuse_constant, parse_float=finite)
        assert value == float(text)
    for text in ("NaN", "Infinity", "-Infinity", "1e999", "[-1e999]"):
        with pytest.raises(ValueError, match=r"is not a JSON number|is out of range"):
            json.loads(text, parse_constant=refuse_constant, parse_float=finite)

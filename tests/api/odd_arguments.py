"""Arguments of calls that models write and JSON, a client or a template cannot take."""

from __future__ import annotations

import json
from typing import Any

_DEEP = '{"a": ' * 32 + "1" + "}" * 32
# Name: the arguments of a call as the model writes them, and the object of which clients hear; None
# where it is the text under one name.
ODD: dict[str, tuple[str, dict[str, Any] | None]] = {
    "half of an emoji": (r'{"city": "\ud83d x"}', {"city": "\ufffd x"}),
    "the other half": (r'{"city": "x\ude00"}', {"city": "x\ufffd"}),
    "halves in the wrong order": (r'{"city": "\ude00\ud83d"}', {"city": "\ufffd\ufffd"}),
    "half of an emoji as a key": (r'{"\ud83d": 1}', {"\ufffd": 1}),
    "halves as keys": (r'{"\ud83d": 1, "\ude00": 2}', {"\ufffd": 2}),
    "half of an emoji within": (r'{"a": [{"b": ["\ud83d"]}]}', {"a": [{"b": ["\ufffd"]}]}),
    "half of an emoji before an emoji": (r'{"city": "\ud83d\ud83d\ude00"}', {"city": "\ufffd😀"}),
    "arguments as text, with half of one": (r'"{\"city\": \"\\ud83d\"}"', {"city": "\ufffd"}),
    "arguments as text, with a raw half": (r'"{\"city\": \"\ud83d\"}"', {"city": "\ufffd"}),
    "an emoji": (r'{"city": "\ud83d\ude00"}', {"city": "😀"}),
    "a backslash before a half": (r'{"city": "\\ud83d"}', {"city": r"\ud83d"}),
    "NaN": ('{"city": NaN}', None),
    "minus infinity": ('{"city": -Infinity}', None),
    "an exponent that is too large": ('{"city": 1e999}', None),
    "the same below": ('{"city": [{"a": -1E+999}]}', None),
    "a small exponent": ('{"city": 1e-999}', {"city": 0.0}),
    "a thousand lists": (f'{{"city": {"[" * 1_010}{"]" * 1_010}}}', None),
    "a hundred objects": ('{"city": ' * 100 + "1" + "}" * 100, None),
    "33 levels": ('{"city": ' * 33 + "1" + "}" * 33, None),
    "32 levels": (_DEEP, json.loads(_DEEP)),
    "4,400 digits": (f'{{"city": {"7" * 4_400}}}', None),
    "40 digits": (f'{{"city": {"7" * 40}}}', {"city": int("7" * 40)}),
    "a raw line break": ('{"city": "a\nb\tc"}', {"city": "a\nb\tc"}),
    "an escape that JSON has not": (r'{"city": "\x41"}', None),
    "an escape of three digits": (r'{"city": "\u123"}', None),
    "a zero byte": (r'{"city": "\u0000"}', {"city": "\0"}),
    "a comma at the end": ('{"city": "a",}', {"city": "a"}),
    "words of Python": ('{"city": None}', {"city": None}),
    "quotes of Python": ("{'city': 'a'}", {"city": "a"}),
    "a zero before a number": ('{"city": 01}', None),
    "a sign alone": ('{"city": -}', None),
    "a key twice": ('{"city": 1, "city": 2}', {"city": 2}),
    "an empty key": ('{"": 1}', {"": 1}),
}

"""Chat templates of families that nobody has seen: small ones of ours, each with a syntax of its own."""

from __future__ import annotations

_TURN = "{{ '<|' + m.role + '|>' + m.content }}{% CALLS %}{{ '<|end|>\n' }}"
_ALL = "{{ tools | tojson }}{% for m in messages %}" + _TURN + "{% endfor %}"
_OPENED = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_EACH = "{% for call in m.tool_calls %}{% set f = call.function %}BODY{% endfor %}"
_PAIRS = "{% for key, value in f.arguments.items() %}PAIR{% endfor %}"
_RAW = "{{ value if value is string else value | tojson }}"


def _template(before: str, body: str, after: str) -> str:
    calls = f"{{% if m.tool_calls %}}{before}{_EACH.replace('BODY', body)}{after}{{% endif %}}"
    return _ALL.replace("{% CALLS %}", calls) + _OPENED


def _elements(head: str, pair: str, tail: str, around: tuple[str, str] = ("", "")) -> str:
    return _template(around[0], head + _PAIRS.replace("PAIR", pair) + tail, around[1])


CALLING: dict[str, str] = {
    "an object between markers": _template(
        "",
        '<ask>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</ask>',
        "",
    ),
    "a list of objects": _template(
        "<|asks|>[",
        '{{ ", " if not loop.first }}{"name": "{{ f.name }}", "parameters": '
        "{{ f.arguments | tojson }}}",
        "]<|/asks|>",
    ),
    "an object keyed by its name": _template(
        "<|asks|>[",
        '{{ ", " if not loop.first }}{"{{ f.name }}": {{ f.arguments | tojson }}}',
        "]<|/asks|>",
    ),
    "a name before an object": _template(
        "", "[ASK]{{ f.name }}[WITH]{{ f.arguments | tojson }}", ""
    ),
    "numbered names before objects": _template(
        "<|asks|>",
        "<|ask|>functions.{{ f.name }}:{{ loop.index0 }}<|with|>{{ f.arguments | tojson }}<|/ask|>",
        "<|/asks|>",
    ),
    "a name and a code block": _template(
        "<|asks|>",
        '{{ "\n" if not loop.first }}<|ask|>function<|sep|>{{ f.name }}\n```json\n'
        "{{ f.arguments | tojson }}\n```<|/ask|>",
        "<|/asks|>",
    ),
    "elements": _elements(
        "<ask>\n<tool={{ f.name }}>\n", "<arg={{ key }}>\n" + _RAW + "\n</arg>\n", "</tool>\n</ask>"
    ),
    "elements in a section": _elements(
        '<ask name="{{ f.name }}">\n',
        '<arg name="{{ key }}">' + _RAW + "</arg>\n",
        "</ask>\n",
        ("<asks>\n", "</asks>"),
    ),
    "elements of keys and values": _elements(
        "<ask:x>{{ f.name }}\n", "<k:x>{{ key }}</k:x>\n<v:x>" + _RAW + "</v:x>\n", "</ask:x>"
    ),
    "Dots": _elements(
        '<invoke name="{{ f.name }}">\n',
        '<parameter name="{{ key }}">' + _RAW + "</parameter>\n",
        "</invoke>\n",
        ("<dots_function_call>\n", "</dots_function_call>"),
    ),
    "K2 Horizon": _elements(
        "<ifm|tool_call>{{ f.name }}\n",
        "<ifm|arg_key>{{ key }}</ifm|arg_key>\n<ifm|arg_value>" + _RAW + "</ifm|arg_value>\n",
        "</ifm|tool_call>\n",
        ("<ifm|tool_calls>\n", "</ifm|tool_calls>"),
    ),
    "elements with types": _elements(
        '<ask name="{{ f.name }}">\n',
        '<arg name="{{ key }}" string="{{ "true" if value is string else "false" }}">'
        + _RAW
        + "</arg>\n",
        "</ask>\n",
        ("<|asks|>\n", "<|/asks|>"),
    ),
    "calls in Python's syntax": _template(
        "<|asks|>[",
        '{{ ", " if not loop.first }}{{ f.name }}('
        + _PAIRS.replace("PAIR", '{{ key }}={{ value | tojson }}{{ ", " if not loop.last }}')
        + ")",
        "]<|/asks|>",
    ),
}
# Every value is written as a text, numbers too, as some templates of Llama 4 and FunctionGemma do.
AS_TEXTS: dict[str, str] = {
    "Gemma's objects": _template(
        "",
        "<ask>call:{{ f.name }}{{ '{' }}"
        + _PAIRS.replace("PAIR", '{{ key }}:<q>{{ value }}<q>{{ "," if not loop.last }}')
        + "}</ask>",
        "",
    ),
    "calls in Python's syntax": _template(
        "<|asks|>[",
        '{{ ", " if not loop.first }}{{ f.name }}('
        + _PAIRS.replace("PAIR", '{{ key }}="{{ value }}"{{ ", " if not loop.last }}')
        + ")",
        "]<|/asks|>",
    ),
    "calls in Python's syntax, without markers": _template(
        "[",
        '{{ ", " if not loop.first }}{{ f.name }}('
        + _PAIRS.replace("PAIR", "{{ key }}='{{ value }}'{{ ', ' if not loop.last }}")
        + ")",
        "]",
    ),
    "objects": _template(
        "",
        '<ask>{"name": "{{ f.name }}", "arguments": {{ "{" }}'
        + _PAIRS.replace("PAIR", '"{{ key }}": "{{ value }}"{{ ", " if not loop.last }}')
        + "}}</ask>",
        "",
    ),
    "a name before an object": _template(
        "",
        "[ASK]{{ f.name }}[WITH]{{ '{' }}"
        + _PAIRS.replace("PAIR", '"{{ key }}": "{{ value }}"{{ ", " if not loop.last }}')
        + "}",
        "",
    ),
}
# A message for each call, after the name of its tool.
FUNCTIONARY = (
    "{{ '>>>${recipient}' }}{{ tools | tojson }}{% for m in messages %}{{ '<|h|>' + m.role + '<|/h|>' }}"
    "{% if m.role == 'assistant' %}{% if m.content %}{{ '>>>all\\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{{ '>>>' + call.function.name + '\\n' + call.function.arguments }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant<|/h|>>>>{% endif %}"
)
# Written so that nobody can tell the arguments apart.
UNREADABLE = _template(
    "<ask>", "{{ f.name }} {{ f.arguments.values() | list | join(' ') }}", "</ask>"
)

"""Small chat templates that raise, or lose text, in the places where public ones do."""

from __future__ import annotations

from collections.abc import Mapping

_SAY = "<{{ m.role }}>{{ m.content }}"
_CALL = "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} ARGS]{% endfor %}"
_JSON = _CALL.replace("ARGS", "{{ c.function.arguments | tojson }}")
_EITHER = _CALL.replace(
    "ARGS",
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
)
_TEXT = _CALL.replace("ARGS", "{{ '' + c.function.arguments }}")
_ITEMS = _CALL.replace(
    "ARGS", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
)
_END = "{% if add_generation_prompt %}<assistant>{% endif %}"
_TOOLS = "{% for t in tools or [] %}({{ t | tojson }}){% endfor %}"


def _template(each: str, *, before: str = "", tools: str = _TOOLS) -> str:
    return f"{tools}{before}{{% for m in messages %}}{each}</>{{% endfor %}}{_END}"


def _refuse(condition: str, why: str) -> str:
    return f"{{% if {condition} %}}{{{{ raise_exception('{why}') }}}}{{% endif %}}"


_NO_LATE_SYSTEM = _refuse(
    "m.role == 'system' and not loop.first", "System message must be at the beginning."
)
_NO_SYSTEM = _refuse("m.role == 'system'", "System role not supported")
# Users and answers take turns; calls and results do not count.
_TURNS = (
    "{% set ns = namespace(n=0) %}",
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    + _refuse("(m.role == 'user') != (ns.n % 2 == 0)", "roles must alternate")
    + "{% set ns.n = ns.n + 1 %}{% endif %}",
)
_NINE = (
    "{% for c in m.tool_calls or [] %}"
    + _refuse("c.id | length != 9", "Tool call IDs should be alphanumeric strings with length 9!")
    + "{% endfor %}"
    + _refuse("m.role == 'tool' and m.tool_call_id | length != 9", "length 9!")
)
_ONE_CALL = _refuse(
    "m.tool_calls and m.tool_calls | length != 1",
    "This model only supports single tool-calls at once!",
)
_AFTER_A_CALL = (
    "{% set last = namespace(call=none) %}",
    "{% if m.tool_calls %}{% set last.call = m.tool_calls[-1] %}{% endif %}"
    + _refuse(
        "m.role == 'tool' and not last.call", "no previous assistant message with a tool call"
    )
    + "{% if m.role != 'tool' and not m.tool_calls %}{% set last.call = none %}{% endif %}",
)
_DESCRIBED = (
    "{% for t in tools or [] %}({{ t.function.name + ': ' + t.function.description }}){% endfor %}"
)
_TYPED = (
    "{% for t in tools or [] %}({% for k, v in t.function.parameters.properties.items() %}"
    "{{ k + ': ' + v.type }}{% endfor %}){% endfor %}"
)
# Hermes names types by Python's words, and looks into every other one, letter by letter and without end.
_PYTHON_TYPES = (
    "{% macro python_type(spec) %}"
    "{% set words = {'string': 'str', 'integer': 'int', 'number': 'float', 'boolean': 'bool'} %}"
    "{% if words[spec.type] is defined %}{{ words[spec.type] }}"
    "{% elif spec.type == 'array' %}{{ 'list[' + python_type(spec | items) + ']' }}"
    "{% elif spec.type == 'object' %}dict"
    "{% elif spec.type is iterable %}Union[{% for t in spec.type %}{{ python_type({'type': t}) }},{% endfor %}]"
    "{% else %}Any{% endif %}{% endmacro %}"
    "{% for t in tools or [] %}({{ t.function.name + ': ' + t.function.description }}"
    "{% for k, v in t.function.parameters.properties.items() %}{{ k + ': ' + python_type(v) }};"
    "{% endfor %}){% endfor %}"
)
_HAS_CONTENT = _refuse(
    "m.role == 'assistant' and not m.content and not m.tool_calls",
    "Assistant message must have a content or a list of tool calls.",
)
_KNOWN_ROLES = _refuse(
    "m.role not in ('user', 'assistant', 'tool')", "Only user, assistant and tool"
)
_STRICT_TURNS = _refuse(
    "(m.role == 'user') != (loop.index0 % 2 == 0)",
    "Conversation roles must alternate user/assistant/user/assistant/...",
)
_NEEDS_A_USER = _refuse(
    "messages | selectattr('role', 'equalto', 'user') | list | length == 0",
    "No user query found in messages.",
)
_SYSTEM_FIRST = "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</>{% set messages = messages[1:] %}{% endif %}"

RULES: Mapping[str, str] = {
    "takes everything": _template(_SAY + _EITHER),
    "qwen 3": _template(
        _SAY.replace("<{{ m.role }}>", "<{{ m.role }}>{{ m.reasoning_content or '' }}") + _EITHER
    ),
    "qwen 3.5": _template(
        _NO_LATE_SYSTEM
        + "<{{ m.role }}>{{ m.reasoning_content or '' }}|{{ m.content }}"
        + _ITEMS.replace(".items()", " | items"),
        before=_NEEDS_A_USER,
    ),
    "qwen 2.5": _template(_SAY + _JSON),
    "mistral small 3.2": _template(
        _TURNS[1] + _NINE + _KNOWN_ROLES + _SAY + _JSON, before=_SYSTEM_FIRST + _TURNS[0]
    ),
    "mistral nemo": _template(_TURNS[1] + _NINE + _SAY + _JSON, before=_SYSTEM_FIRST + _TURNS[0]),
    "mistral 7b": _template(_NO_SYSTEM + _TURNS[1] + _NINE + _SAY + _JSON, before=_TURNS[0]),
    "ministral 3": _template(
        _TURNS[1] + _KNOWN_ROLES + _HAS_CONTENT + _SAY + _EITHER, before=_SYSTEM_FIRST + _TURNS[0]
    ),
    "llama 3.1": _template(_ONE_CALL + _SAY + _JSON),
    "llama 3.2": _template(_ONE_CALL + _SAY + _JSON, before=_SYSTEM_FIRST + _NEEDS_A_USER),
    "llama 3.3 that shows one call": _template(
        _SAY + _JSON.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    ),
    "llama 3.3 that drops a text beside a call": _template(
        _ONE_CALL
        + "{% if m.tool_calls %}<assistant>"
        + _JSON
        + "{% else %}"
        + _SAY
        + "{% endif %}",
        before="{% if tools %}" + _NEEDS_A_USER + "{% endif %}",
    ),
    "gemma 2": _template(_NO_SYSTEM + _STRICT_TURNS + _SAY, tools=""),
    "gemma 3": _template(
        _STRICT_TURNS + _SAY,
        tools="",
        before="{% if messages[0].role == 'system' %}{{ messages[0].content }}"
        "{% set messages = messages[1:] %}{% endif %}",
    ),
    "gemma 4": _template(
        _SAY
        + _ITEMS.replace("ARGS", "")
        .replace(
            "{% for k",
            "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{% for k",
        )
        .replace("{% endfor %}]", "{% endfor %}{% endif %}]")
    ),
    "gpt-oss": _template(
        _AFTER_A_CALL[1]
        + _refuse(
            "m.tool_calls and m.content and m.thinking", "Cannot pass both content and thinking"
        )
        + "<{{ m.role }}>{{ m.thinking or '' }}{{ m.content }}"
        + _EITHER.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
        before=_AFTER_A_CALL[0],
        tools=_DESCRIBED,
    ),
    "minimax m2": _template(
        _AFTER_A_CALL[1] + "<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content }}" + _ITEMS,
        before=_AFTER_A_CALL[0],
    ),
    "deepseek v3": _template(
        "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}" + _TEXT + "{% endif %}",
        before="{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}",
    ),
    "glm 4.7": _template("<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content }}" + _ITEMS),
    "hermes 3": _template(_SAY + _JSON, tools=_PYTHON_TYPES),
    "seed-oss": _template(
        "<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content }}" + _EITHER, tools=_TYPED
    ),
    "lfm 2": _template(_SAY),
    "granite 3.3": _template(_SAY, before=_SYSTEM_FIRST),
    "phi 4 mini": _template("{% if m.content %}" + _SAY + "{% endif %}"),
    "nemotron": _template(
        _NO_LATE_SYSTEM + _SAY + _EITHER,
        before="{% set messages = messages | list %}",
    ),
    "command r": _template(
        "{% if m.role in ('user', 'assistant', 'tool') %}" + _SAY + _JSON + "{% endif %}",
        before=_SYSTEM_FIRST,
    ),
    "a template without tools": _template(
        _refuse("m.role not in ('user', 'assistant', 'system')", "Unexpected role") + _SAY, tools=""
    ),
    "reasoning under its short name": _template(
        "<{{ m.role }}>{{ m.reasoning or '' }}{{ m.content }}" + _EITHER
    ),
}

# An answer with calls shows the calls and nothing else.
_CALLS_ALONE = "{% if m.tool_calls %}<assistant>" + _JSON + "{% else %}" + _SAY + "{% endif %}"

# Rules that lose a text, a call or the system message, or raise after a call that was not run.
LOSING: Mapping[str, str] = {
    "mistral small 3.2: a text beside a call": _template(
        _TURNS[1] + _NINE + _KNOWN_ROLES + _CALLS_ALONE, before=_SYSTEM_FIRST + _TURNS[0]
    ),
    "mistral nemo: the system message beside a last message of the user's": _template(
        _TURNS[1]
        + _NINE
        + "{% if m.role == 'user' and loop.last and system is defined %}{{ system }}{% endif %}"
        + _CALLS_ALONE,
        before="{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set messages = messages[1:] %}{% endif %}" + _TURNS[0],
    ),
    "gpt-oss: a text beside a call once an answer follows": _template(
        "{% set after = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | list %}"
        "{% if m.tool_calls and after and not after[-1].tool_calls %}" + _JSON + "{% else %}"
        "{{ m.reasoning_content or '' }}" + _SAY + _JSON + "{% endif %}"
    ),
    "nemotron: a call at the end": _template(
        _SAY + "{% if not loop.last %}" + _JSON + "{% endif %}"
    ),
    "llama 3.3: a call in the first message": _template(
        _SAY + _JSON,
        before="{% if tools %}<user>{{ messages[0].content }}</>{% set messages = messages[1:] %}"
        "{% endif %}",
    ),
    "kimi k3: a result without the name of its call": _template(
        _refuse("m.role == 'tool' and not m.name", "a result without its call") + _SAY + _JSON
    ),
    "hermes: no list of tools": _template(_SAY + _JSON, tools=_TOOLS.replace(" or []", "")),
}

# Templates whose prompt changes at its beginning with each new user message.
MOVING: Mapping[str, str] = {
    "mistral small 3.2: the tools are before the last user message": _template(
        _TURNS[1]
        + _NINE
        + _KNOWN_ROLES
        + "{% if m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
        + _TOOLS
        + "{% endif %}"
        + _SAY
        + _JSON,
        before=_SYSTEM_FIRST + _TURNS[0],
        tools="",
    ),
    "qwen 3.5: reasoning is shown after the last user message": _template(
        _NO_LATE_SYSTEM
        + "<{{ m.role }}>{{ m.reasoning_content or '' if loop.index0 > last.user else '' }}|{{ m.content }}"
        + _JSON,
        before="{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set last.user = loop.index0 %}{% endif %}{% endfor %}",
    ),
}


def _guard(each: str, *, before: str = "") -> str:
    """The rules of a template alone, to be put before another one."""
    return f"{before}{{% for m in messages %}}{each}{{% endfor %}}"


GUARDS: Mapping[str, str] = {
    "qwen 3.5": _guard(_NO_LATE_SYSTEM, before=_NEEDS_A_USER),
    "mistral small 3.2": _guard(
        "{% if not (loop.first and m.role == 'system') %}"
        + _TURNS[1]
        + _NINE
        + _KNOWN_ROLES
        + "{% endif %}",
        before=_TURNS[0],
    ),
    "llama 3.3": _guard(_ONE_CALL),
    "gpt-oss": _guard(
        _AFTER_A_CALL[1]
        + _refuse(
            "m.tool_calls and m.content and m.thinking", "Cannot pass both content and thinking"
        ),
        before=_AFTER_A_CALL[0]
        + "{% for t in tools or [] %}{% if t.function.name + t.function.description %}{% endif %}{% endfor %}",
    ),
}

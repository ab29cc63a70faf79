"""Formats that are learnt from the chat templates of their models, and so are no rows of the table.

`test_each_row_is_learnt_from_what_it_writes` learns each of them, field by field.
"""

from __future__ import annotations

from typing import Any

from mlxserve.text.parsing.formats import CallFormat, Syntax

_JSON_CALL = '{"name": "$name", "arguments": $arguments}'
_LISTED: dict[str, Any] = {"opening": "[", "joint": ", ", "closing": "]"}
_DSML: dict[str, Any] = {
    "syntax": Syntax.ELEMENTS,
    "opening": "\n",
    "joint": "",
    "call": '<｜DSML｜invoke name="$name">\n$parameters</｜DSML｜invoke>\n',
    "parameter": '<｜DSML｜parameter name="$key" string="$string">$value</｜DSML｜parameter>\n',
}
LEARNT: tuple[CallFormat, ...] = (
    CallFormat(
        "deepseek_v32",
        starts=("<｜DSML｜function_calls>",),
        ends=("</｜DSML｜function_calls>",),
        **_DSML,
    ),
    CallFormat(
        "deepseek_v4", starts=("<｜DSML｜tool_calls>",), ends=("</｜DSML｜tool_calls>",), **_DSML
    ),
    CallFormat(
        "minimax_m3",
        Syntax.TAGS,
        starts=("]<]minimax[>[<tool_call>",),
        ends=("]<]minimax[>[</tool_call>",),
        opening="\n",
        joint="",
        call=']<]minimax[>[<invoke name="$name">$arguments</invoke>\n',
        quote="]<]minimax[>[",
    ),
    CallFormat(
        "minimax_m2",
        Syntax.ELEMENTS,
        starts=("<minimax:tool_call>",),
        ends=("</minimax:tool_call>",),
        opening="\n",
        joint="",
        call='<invoke name="$name">\n$parameters</invoke>\n',
        parameter='<parameter name="$key">$value</parameter>\n',
    ),
    CallFormat(
        "function_gemma",
        Syntax.OBJECT,
        starts=("<start_function_call>",),
        ends=("<end_function_call>",),
        call="call:$name$arguments",
        quote="<escape>",
    ),
    CallFormat(
        "longcat",
        Syntax.ELEMENTS,
        starts=("<longcat_tool_call>",),
        ends=("</longcat_tool_call>",),
        call="$name\n$parameters",
        parameter="<longcat_arg_key>$key</longcat_arg_key>\n"
        "<longcat_arg_value>$value</longcat_arg_value>\n",
    ),
    CallFormat(
        "hunyuan_v3",
        Syntax.ELEMENTS,
        starts=("<tool_calls>",),
        ends=("</tool_calls>",),
        opening="\n",
        joint="",
        call="<tool_call>$name<tool_sep>\n$parameters</tool_call>\n",
        parameter="<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
    ),
    CallFormat(
        "glm47",
        Syntax.ELEMENTS,
        ends=("</tool_call>",),
        call="$name$parameters",
        parameter="<arg_key>$key</arg_key><arg_value>$value</arg_value>",
    ),
    CallFormat(
        "glm45",
        Syntax.ELEMENTS,
        ends=("</tool_call>",),
        call="$name\n$parameters",
        parameter="<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
    ),
    CallFormat(
        "mistral_list",
        Syntax.JSON,
        starts=("[TOOL_CALLS]",),
        call='{"name": "$name", "arguments": $arguments, "id": "$id"}',
        **_LISTED,
    ),
    CallFormat(
        "apertus",
        Syntax.JSON,
        starts=("<|tools_prefix|>",),
        ends=("<|tools_suffix|>",),
        call='{"$name": $arguments}',
        **_LISTED,
    ),
    CallFormat(
        "internlm2",
        Syntax.JSON,
        starts=("<|action_start|><|plugin|>",),
        ends=("<|action_end|>",),
        call='\n{"name": "$name", "parameters": $arguments}',
    ),
    CallFormat("gigachat31", Syntax.JSON, starts=("<|function_call|>",), call=_JSON_CALL),
    CallFormat("functools", Syntax.JSON, starts=("functools",), call=_JSON_CALL, **_LISTED),
    CallFormat("granite_code", Syntax.JSON, starts=("<function_call>",), call=f" {_JSON_CALL}"),
    CallFormat(
        "nemotron_nano",
        Syntax.JSON,
        starts=("<TOOLCALL>",),
        ends=("</TOOLCALL>",),
        call=_JSON_CALL,
        **_LISTED,
    ),
    CallFormat(
        "tool_calls",
        Syntax.JSON,
        starts=("<tool_calls>",),
        ends=("</tool_calls>",),
        call=_JSON_CALL,
        **_LISTED,
    ),
)

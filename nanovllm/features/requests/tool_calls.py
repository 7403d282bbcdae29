"""Tool calls: finds them in a text, and makes the grammar of a text that must be one.

Models write calls in the form of Qwen's chat templates or in the form of Qwen3-Coder's:

    <tool_call>                                 <tool_call>
    {"name": "add", "arguments": {"a": 1}}      <function=add>
    </tool_call>                                <parameter=a>
                                                1
                                                </parameter>
                                                </function>
                                                </tool_call>
"""

from __future__ import annotations

import json
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.utils.checks import check_scalar, unknown_name

START, END = re.compile(r"<tool_call>\s*"), r"(\s*</tool_call>)?"
FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
DECODER = json.JSONDecoder(strict=False)  # models write newlines in strings
Fields = dict[str, Any]
FORM = '{"type": "function", "function": {"name": ...}}'
EMPTY: Fields = {"type": "object", "additionalProperties": False}


def parse_tool_calls(text: str, tools: list[Fields] | None = None) -> tuple[str, list[Fields]]:
    """Return the rest of a text, and its tool calls in OpenAI's format.

    tools: in OpenAI's format. They give the types of parameters in the form of Qwen3-Coder. There a
        value is a string, unless its schema has another type and the value is JSON.

    What is not a call, such as broken JSON, remains in the text. If there are calls, white space is
    removed at both ends of the text, and after a call that follows white space. </tool_call> may be
    missing. Raises TypeError or ValueError for tools in another format.
    """
    check_scalar("text", text, str)
    tools = [] if tools is None else tools
    check_tools(tools)
    calls: list[Fields] = []
    rest, position = "", 0
    while start := START.search(text, position):
        found, after = read_calls(text, start.end(), tools)
        rest += text[position : start.start() if found else after]
        position = after
        # White space on one side of a call is enough.
        end = END + r"\s*" * rest[-1:].isspace()
        if found and (match := re.compile(end).match(text, after)):
            position = match.end()
        for name, arguments in found:
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append(Fields(id=f"call_{uuid.uuid4().hex}", type="function", function=function))
    rest += text[position:]
    return rest.strip() if calls else rest, calls


def check_tools(tools: Any) -> list[str]:
    """Return the names of tools in OpenAI's format. Raises TypeError or ValueError for others."""
    names = []
    for i, tool in enumerate(check_scalar("tools", tools, list)):
        names.append(function_name(f"tools[{i}]", tool))
        schema, where = tool["function"].get("parameters") or {}, f"tools[{i}].function.parameters"
        check_scalar(where, schema, dict)
        check_scalar(f"{where}.properties", schema.get("properties", {}), dict)
    return names


def function_name(what: str, value: Any) -> str:
    """Return the name of a function in OpenAI's format. Raises ValueError for another format."""
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise ValueError(f"{what} must have the form {FORM}, not {value!r:.200}")


def read_calls(text: str, start: int, tools: list[Fields]) -> tuple[list[tuple[str, Fields]], int]:
    """Return the names and arguments of the calls at a position, and the position after them."""
    if function := FUNCTION.match(text, start):
        known = {tool["function"]["name"]: tool["function"] for tool in tools}
        schema = known.get(function[1], {}).get("parameters") or {}
        properties = schema.get("properties", {}).items()
        types = {n: each.get("type") for n, each in properties if isinstance(each, dict)}
        arguments: Fields = dict(PARAMETER.findall(function[2]))
        for name, value in arguments.items():
            if (kind := types.get(name, "string")) != "string":
                with suppress(ValueError, RecursionError):
                    arguments[name] = read_json(value.lower() if kind == "boolean" else value)[0]
        return [(function[1], arguments)], function.end()
    with suppress(KeyError, TypeError, ValueError, RecursionError):
        value, end = read_json(text, start)
        calls = value if isinstance(value, list) else [value]
        found = [(call["name"], call.get("arguments", {})) for call in calls]
        if found and all(isinstance(n, str) and isinstance(a, dict) for n, a in found):
            return found, end
    return [], start


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the JSON value at a position, and the position after it. Raises ValueError."""
    value, end = DECODER.raw_decode(text, start)
    json.dumps(value, allow_nan=False)  # Python reads NaN, which is not JSON
    return value, end


@dataclass(frozen=True)
class ToolUse:
    """What a request in OpenAI's format says of tools. Raises TypeError or ValueError."""

    tools: list[Fields]
    choice: Any  # "none", "auto", "required", or {"type": "function", "function": {"name": ...}}
    parallel: bool = True  # whether there may be several calls

    def __post_init__(self) -> None:
        check_scalar("parallel_tool_calls", self.parallel, bool)
        names = check_tools(self.tools)
        if isinstance(self.choice, dict):
            if (name := function_name("tool_choice", self.choice)) not in names:
                raise ValueError(unknown_name("function in tool_choice", name, names))
        else:
            check_scalar("tool_choice", self.choice, str, ("none", "auto", "required"))
        if self.is_forced and not names:
            raise ValueError(f"tool_choice={self.choice!r} needs tools")

    @property
    def is_forced(self) -> bool:
        return self.choice not in ("none", "auto")

    def grammar(self) -> StructuredOutputsParams:
        """Return the grammar of an output that must be a list of calls."""
        functions = [tool["function"] for tool in self.tools]
        if is_named := isinstance(self.choice, dict):
            functions = [f for f in functions if f["name"] == self.choice["function"]["name"]]
        calls = []
        for function in functions:
            arguments = function.get("parameters") or EMPTY
            properties = {"name": {"const": function["name"]}, "arguments": arguments}
            calls.append(EMPTY | {"properties": properties, "required": [*properties]})
        schema: Fields = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        if is_named or not self.parallel:
            schema["maxItems"] = 1
        return StructuredOutputsParams(json=schema)

    def parse(self, text: str) -> tuple[str, list[Fields]]:
        """Return the rest of an output, and its tool calls."""
        if self.choice == "none":
            return text, []
        rest, calls = parse_tool_calls("<tool_call>" * self.is_forced + text, self.tools)
        return (rest, calls if self.parallel else calls[:1]) if calls else (text, [])

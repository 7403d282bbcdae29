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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.utils.checks import check_scalar, unknown_name

TAG = re.compile(r"</?tool_call>|</(?:function|parameter)>|<(function|parameter)=([^<>\n]+)>")
END_BLOCK, END_FUNCTION, END_PARAMETER = "</tool_call>", "</function>", "</parameter>"
JSON = re.compile(r"\s*(?=[{[])")
DECODER = json.JSONDecoder(strict=False)  # models write newlines in strings
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
TYPES |= {dict: "object", type(None): "null"}
# Chat templates show the words of Python to models.
WORDS = {"true": True, "false": False, "null": None, "none": None}
Fields = dict[str, Any]
FORM = '{"type": "function", "function": {"name": ...}}'
EMPTY: Fields = {"type": "object", "additionalProperties": False}


def parse_tool_calls(text: str, tools: list[Fields] | None = None) -> tuple[str, list[Fields]]:
    """Return the rest of a text, and its tool calls in OpenAI's format.

    tools: in OpenAI's format. They give the types of parameters in the form of Qwen3-Coder. There a
        value is a string, unless its schema allows another type and the whole value is of it.

    What is not a call, such as broken JSON, remains in the text. If there are calls, white space is
    removed at both ends of the text, and after a call that follows white space. </tool_call> may be
    missing. In the form of Qwen3-Coder, any tag may be missing if a later one shows what ends.
    Raises TypeError or ValueError for tools in another format.
    """
    check_scalar("text", text, str)
    tools = [] if tools is None else tools
    check_tools(tools)
    functions = [tool["function"] for tool in tools]
    tags = Tags(text, {each["name"]: each.get("parameters") or {} for each in functions})
    calls: list[Fields] = []
    rest = ""
    position = 0
    for i, tag in enumerate(tags.tags):
        if tag.start() < position:
            continue
        is_block = tag[0] == "<tool_call>"
        found, after = read_json_calls(text, tag.end()) if is_block else ([], 0)
        if not found:
            found, after = tags.read_functions(i + (is_block and tags.is_joined(i)))
        if not found:
            continue
        rest += text[position : tag.start()]
        # White space on one side of a call is enough.
        end = re.compile(r"(\s*</tool_call>)?" + r"\s*" * rest[-1:].isspace())
        position = match.end() if (match := end.match(text, after)) else after
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
        where = f"tools[{i}].function.parameters"
        schema = check_scalar(where, tool["function"].get("parameters") or {}, dict)
        check_scalar(f"{where}.properties", referred(schema, schema).get("properties", {}), dict)
    return names


def function_name(what: str, value: Any) -> str:
    """Return the name of a function in OpenAI's format. Raises ValueError for another format."""
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise ValueError(f"{what} must have the form {FORM}, not {value!r:.200}")


class Tags:
    """The tags of a text, and which of them belong together.

    One pass from the last tag to the first finds this out, so that the time does not grow with the
    square of the number of openings without an end.
    """

    def __init__(self, text: str, schemas: Fields) -> None:
        """schemas: the parameters of each tool, by its name."""
        self.text, self.schemas = text, schemas
        self.properties: Fields = {
            name: referred(schema, schema).get("properties", {}) for name, schema in schemas.items()
        }
        self.parameters = set().union(*self.properties.values())  # of all tools
        self.tags = list(TAG.finditer(text))
        self.kinds = [tag[1] or tag[0] for tag in self.tags] + [""] * 3
        # The tag that ends a value to which the text before tag i belongs. If there is none, -1,
        # which is also an index: of an entry after the last tag.
        self.ends = [-1] * len(self.kinds)
        # Whether a </parameter> that ends a value follows, before a parameter begins.
        self.in_value = [False] * len(self.kinds)
        # Whether a function that continues at tag i has an end.
        self.complete = [False] * len(self.kinds)
        next_end = len(self.tags)  # of a function
        for i in reversed(range(len(self.tags))):
            kind = self.kinds[i]
            end = self.ends[i + 1]
            next_end = i if kind == END_FUNCTION else next_end
            # A function that a value quotes is a part of the value.
            is_whole = kind == "function" and self.is_joined(i, "parameter")
            after = next_end + 1 if is_whole else i + 1
            self.ends[i], self.in_value[i] = self.ends[after], self.in_value[after]
            if self._ends_value(i):
                self.ends[i] = i
                if kind in ("parameter", END_PARAMETER):
                    self.in_value[i] = kind == END_PARAMETER
            if kind == "function":
                self.complete[i] = self.is_joined(i) and self.complete[i + 1]
            elif kind == "parameter":
                self.complete[i] = self.complete[end + (self.kinds[end] == END_PARAMETER)]
            else:
                self.complete[i] = kind in (END_FUNCTION, END_BLOCK)

    def is_joined(self, i: int, kind: str = "") -> bool:
        """Return whether only white space separates a tag and the next one, which is a `kind`."""
        if i + 1 >= len(self.tags) or (kind and kind != self.kinds[i + 1]):
            return False
        return not self.text[self.tags[i].end() : self.tags[i + 1].start()].strip()

    def _ends_value(self, i: int) -> bool:
        """Return whether a tag ends a value. Otherwise a value may quote it."""
        kind, tag = self.kinds[i], self.tags[i]
        if kind == "parameter":  # </parameter> is missing
            is_known = not self.parameters or tag[2] in self.parameters
            return is_known or self.text[tag.start() - 1] == "\n"
        is_end = kind in (END_FUNCTION, END_BLOCK) or (kind == END_PARAMETER and self.is_joined(i))
        return is_end and not self.in_value[i + 1]

    def read_functions(self, i: int) -> tuple[list[tuple[str, Fields]], int]:
        """Return the names and arguments of the functions at a tag, and the position after them."""
        found, after = [], 0
        while self.kinds[i] == "function" and self.complete[i]:
            name, arguments = self.tags[i][2], Fields()
            schema, properties = self.schemas.get(name, {}), self.properties.get(name, {})
            i += 1
            while self.kinds[i] == "parameter":
                tag, end = self.tags[i], self.ends[i + 1]
                value = self.text[tag.end() : self.tags[end].start()]
                types = allowed_types(properties.get(tag[2]), schema, set())
                arguments[tag[2]] = typed(value.removeprefix("\n").removesuffix("\n"), types)
                i = end + (self.kinds[end] == END_PARAMETER)
            found.append((name, arguments))
            has_end = self.kinds[i] == END_FUNCTION
            after = self.tags[i].end() if has_end else self.tags[i].start()
            i += has_end and self.is_joined(i, "function")
        return found, after


def referred(schema: Any, root: Fields) -> Fields:
    """Return a schema, or the part of `root` that its $ref names; {} if that is not an object."""
    if isinstance(schema, dict) and isinstance(pointer := schema.get("$ref"), str):
        schema = root
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}


def allowed_types(schema: Any, root: Fields, seen: set[str]) -> set[str]:
    """Return the types in JSON that a schema allows: "string" if it names none.

    root: the schema that has the definitions.
    seen: the references that were followed, which can form a cycle.
    """
    schema = schema if isinstance(schema, dict) else {}
    lists = {key: value for key, value in schema.items() if isinstance(value, list)}
    names = lists.get("type", [schema.get("type")])
    names = [*names, "properties" in schema and "object", "items" in schema and "array"]
    values = [schema["const"]] if "const" in schema else lists.get("enum", [])
    types = {name for name in names if isinstance(name, str)}
    types |= {TYPES.get(type(value), "string") for value in values}
    members = [each for key in ("anyOf", "oneOf", "allOf") for each in lists.get(key, [])]
    if pointer := str(schema.get("$ref", "")):
        if pointer in seen:
            return types
        seen.add(pointer)
        members.append(referred(schema, root))
    for member in members:
        types |= allowed_types(member, root, seen)
    return types | {"integer"} if "number" in types else types or {"string"}


def typed(value: str, types: set[str]) -> Any:
    """Return the value of a parameter as one of the types, or else as the string that it is."""
    word = value.strip().lower()
    if word == "none" and "string" in types:
        return value
    if word in WORDS and TYPES[type(WORDS[word])] in types:
        return WORDS[word]
    with suppress(ValueError, RecursionError):
        read = DECODER.decode(value)
        json.dumps(read, allow_nan=False)  # Python reads NaN, which is not JSON
        if "string" not in types or TYPES[type(read)] in types - {"string"}:
            return read
    return value


def read_json_calls(text: str, start: int) -> tuple[list[tuple[str, Fields]], int]:
    """Return the names and arguments of the calls at a position, and the position after them."""
    found: list[tuple[str, Fields]] = []
    after = start
    with suppress(KeyError, TypeError, ValueError, RecursionError):
        while match := JSON.match(text, after):
            value, end = DECODER.raw_decode(text, match.end())
            json.dumps(value, allow_nan=False)
            found += [read_call(call) for call in (value if isinstance(value, list) else [value])]
            after = end
    return found, after


def read_call(call: Any) -> tuple[str, Fields]:
    """Return the name and the arguments of a call. Raises an error if it has no such form."""
    name, arguments = call["name"], call.get("arguments")
    if arguments is None:
        arguments = call.get("parameters")
    if isinstance(arguments, str):
        arguments = typed(arguments or "null", {"object", "null"})
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("a call has a name and an object")
    return name, arguments


@dataclass(frozen=True)
class ToolUse:
    """What a request in OpenAI's format says of tools. Raises TypeError or ValueError."""

    tools: list[Fields]
    choice: Any  # "none", "auto", "required", or {"type": "function", "function": {"name": ...}}
    parallel: bool = True  # whether there may be several calls
    removed: Sequence[str] = ()  # special tokens that are no part of what remains of an output

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
        calls: list[Fields] = []
        for function in functions:
            # With an $id, its references are to its own definitions.
            arguments = {"$id": f"tool:{len(calls)}"} | (function.get("parameters") or EMPTY)
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
        rest = rest if calls else text
        for marker in self.removed:
            rest = rest.replace(marker, "")
        return rest, calls if self.parallel else calls[:1]

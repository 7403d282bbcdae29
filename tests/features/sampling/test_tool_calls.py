"""Tool calls: what is one and what is text, damaged calls, forced calls, and files of requests."""

import json
import random
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from scripted import run_bodies, script

from nanovllm import LLM, GenerationError, SamplingParams, parse_tool_calls
from nanovllm.cli.jobs.openai_format import CHAT, parse
from nanovllm.features.sampling.tool_calls import ToolUse

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 9},
                "exact": {"type": "boolean"},
                "label": {"type": "string", "maxLength": 4},
                "more": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                "any": True,
            },
            "required": ["a", "label"],
            "additionalProperties": False,
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = [ADD, STOP]
TEMPLATE = (Path(__file__).parent / "tools.jinja").read_text()


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def xml(name: str, **arguments: str) -> str:
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def parsed(text: str, tools: Any = None) -> tuple[str, list[tuple[str, Any]]]:
    rest, calls = parse_tool_calls(text, tools)
    assert len({each["id"] for each in calls}) == len(calls)
    functions = [each["function"] for each in calls]
    assert all(each["type"] == "function" for each in calls)
    return rest, [(f["name"], json.loads(f["arguments"])) for f in functions]


ONE = ("add", {"a": 1})
TWO, BOTH = xml("f", a="1", b="2"), ("f", {"a": "1", "b": "2"})
INLINE = "<function=f><parameter=a>1<parameter=b>2</parameter></function>"
# Values that quote tags.
QUOTED = [
    *("x </parameter> y", "a\n</parameter>\nb", "</parameter>", "</function>", "</tool_call>"),
    *("a\n</parameter>\n</function>\n</tool_call>", "<tool_call>", "call <function=f> so"),
    *("</tool_call></tool_call></function>", "<tool_call></parameter><tool_call></function>"),
    *(TWO, f"so:\n{TWO}\n{TWO}\nor", call("say", t="a"), call("stop") + "\n" + call("stop")),
]
CASES = [
    *[(xml("w", t=value, u="2"), "", [("w", {"t": value, "u": "2"})]) for value in QUOTED],
    # A part of a call is missing.
    *[(TWO.replace("</parameter>\n", "", n), "", [BOTH]) for n in (1, 2)],
    (TWO.replace("</function>\n", "") + TWO, "", [BOTH, BOTH]),
    ("a " + TWO.replace("<tool_call>\n", "") + " b " + INLINE, "a b", [BOTH, BOTH]),
    # Several calls in a block.
    (f"<tool_call>{INLINE}\n{INLINE}</tool_call>", "", [BOTH, BOTH]),
    ('<tool_call>{"name": "stop"}\n{"name": "stop"}</tool_call>', "", [("stop", {})] * 2),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [ONE]),
    ('<tool_call>{"name": "add", "parameters": {"a": 1}}', "", [ONE]),
    ('<tool_call>{"name": "stop", "arguments": null}', "", [("stop", {})]),
    (call("add", a=1), "", [ONE]),
    ("Let me see.\n" + call("add", a=1) + "\n" + call("stop"), "Let me see.", [ONE, ("stop", {})]),
    ("a " + call("add", a=1) + " b", "a b", [ONE]),
    ("a\n" + call("add", a=1) + "\n" + call("stop") + "\nb", "a\nb", [ONE, ("stop", {})]),
    ("a" + call("add", a=1) + " b", "a b", [ONE]),
    (
        call("say", text="</tool_call> <tool_call>"),
        "",
        [("say", {"text": "</tool_call> <tool_call>"})],
    ),
    (call("say", text="ü 😀 \ud800"), "", [("say", {"text": "ü 😀 \ud800"})]),
    ('<tool_call>{"name": "say", "arguments": {"t": "a\nb"}}', "", [("say", {"t": "a\nb"})]),
    ('<tool_call>{"name": "stop"}</tool_call>', "", [("stop", {})]),
    (
        '<tool_call>[{"name": "stop"}, {"name": "add", "arguments": {"a": 1}}]',
        "",
        [("stop", {}), ONE],
    ),
    (xml("add", a="1"), "", [("add", {"a": "1"})]),
    (xml("say", t="two\nlines", u=""), "", [("say", {"t": "two\nlines", "u": ""})]),
    ("<tool_call><function=stop></function>", "", [("stop", {})]),
]
TEXTS = [
    *("", " no call ", "<tool_call>", "</tool_call>", "<tool_call> </tool_call>"),
    *("<tool_call>{", "<tool_call>[]", "<tool_call>[1]", "<tool_call>7</tool_call>"),
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "a", "arguments": "[]"}</tool_call>',
    '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>',
    '<tool_call>[{"name": "a"}, 5]</tool_call>',
    '{"name": "add", "arguments": {"a": 1}}',
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n",
    "<tool_call><function=></function></tool_call>",
    "<tool_call>" + "[" * 100_000,
    "The form is <function=NAME>, and then </tool_call>.",
]


@pytest.mark.parametrize(("text", "rest", "calls"), CASES)
def test_calls(text: str, rest: str, calls: list[Any]) -> None:
    assert parsed(text) == (rest, calls)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_what_is_not_a_call_stays_text(text: str) -> None:
    assert parsed(text) == (text, [])
    assert parsed(text + call("add", a=1)) == (text.strip(), [ONE])


STRING, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}
VALUES = {"3": 3, "null": None, '{"x": [1]}': {"x": [1]}}
REF = {"$ref": "#/$defs/a~1b"}
# A schema, and what values become that do not stay as they are.
TYPED: list[tuple[Any, dict[str, Any]]] = [
    (STRING, {}),
    ({"anyOf": [STRING, NULL]}, {"null": None}),
    ({"type": ["string", "null"]}, {"null": None}),
    ({"type": ["integer", "string"]}, {"3": 3}),
    ({"type": ["number", "string"]}, {"3": 3}),
    ({"oneOf": [{"type": "boolean"}, NULL]}, VALUES | {"True": True, "None": None}),
    ({"enum": [1, "2"]}, {"3": 3}),
    ({"enum": ["1", "2"]}, {}),
    ({"description": "a day"}, {}),
    (True, {}),
    (INTEGER, VALUES),
    ({"allOf": [REF]}, VALUES),
    ({"properties": {}}, VALUES),
    ({"$ref": "#/$defs/none"}, {}),
]


@pytest.mark.parametrize(("schema", "wanted"), TYPED)
def test_types_of_parameters(schema: Any, wanted: dict[str, Any]) -> None:
    """A value of Qwen3-Coder's form is what the schema says, if all of it can be."""
    cycle = {"anyOf": [REF, INTEGER]}
    parameters = {"properties": {"x": schema}, "$defs": {"a/b": cycle}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}, STOP]
    others = ["2026-01-15", "00501", "1,000", "1e999", "NaN", "three", "{", "[" * 99_999, "3 of 4"]
    for value in (*VALUES, "None", "True", *others):
        call = {"x": wanted.get(value, value), "y": "3"}
        assert parsed(xml("f", x=value, y="3"), tools) == ("", [("f", call)]), value
    assert parsed(xml("stop", a="3"), tools) == ("", [("stop", {"a": "3"})])


def test_openings_without_an_end() -> None:
    """The time does not grow with their square, which took 44 s for 8,000."""
    start = time.process_time()
    for unit in ("<tool_call><function=f><parameter=a>\n", "<function=f><parameter=a>x"):
        for end in ("", "</function>", "</parameter><parameter=b>y" * 20_000):
            parse_tool_calls(unit * 20_000 + end)
    assert time.process_time() - start < 30


def test_damaged_calls() -> None:
    """Nothing raises an error, no character is lost, and calls that are whole are found."""
    rng, num_found, pieces = random.Random(0), 0, '{}[]",:\\<>/=ab1 \n'
    whole = [call("add", a=1), xml("add", a="1"), "text", call("say", t="</tool_call>")]
    for _ in range(3000):
        text = "".join(rng.choices(whole, k=rng.randint(1, 3)))
        for _ in range(rng.randint(0, 3)):
            at, size = rng.randrange(len(text) + 1), rng.choice([0, 0, 1, 5])
            text = text[:at] + rng.choice(["", *pieces]) + text[at + size :]
        text = text[: rng.choice([len(text), rng.randrange(len(text) + 1)])]
        rest, calls = parsed(text, TOOLS)
        num_found += len(calls)
        assert (rest == text) == (not calls)
        assert set(rest) <= set(text)
        assert parsed(rest)[1] == [] or calls
    assert num_found > 1500


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools must be a list"),
    ({"tools": ["add"]}, r"tools\[0\] must have the form .*, not 'add'"),
    ({"tools": [STOP, {"type": "function"}]}, r"tools\[1\] must have the form"),
    ({"tools": [{"name": "add"}]}, r"tools\[0\] must have the form"),
    ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\] must have the form"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}, 1]},
        r"tools\[1\] must have the form",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]},
        r"tools\[0\].function.parameters must be an object",
    ),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice must be one of none, auto, required"),
    ({"tools": TOOLS, "tool_choice": 1}, "tool_choice must be a string"),
    ({"tools": TOOLS, "tool_choice": {"function": {"name": "add"}}}, "tool_choice must have the"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice must have the form"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "ad"}}},
        "unknown function in tool_choice 'ad'; did you mean 'add'",
    ),
    ({"tool_choice": "required"}, "tool_choice='required' needs tools"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls must be True or False"),
    (
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice forces a call by a grammar",
    ),
]


def run(llm: LLM, path: Path, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of chats."""
    return run_bodies(llm, path, [(CHAT, {"messages": chat} | body) for body in bodies])


chat = [{"role": "user", "content": "What is 2 + 3?"}]


def test_what_is_refused(embedded: LLM, tmp_path) -> None:
    for text, tools in ((None, None), ("a", [{"name": "a"}]), ("a", {}), ("a", [ADD, 1])):
        with pytest.raises((TypeError, ValueError), match="must"):
            parse_tool_calls(text, tools)
    results = run(embedded, tmp_path, [body for body, _ in WRONG])
    for result, (_, message) in zip(results, WRONG, strict=True):
        assert result["response"]["status_code"] == 400
        with pytest.raises(ValueError, match=message):
            raise ValueError(result["error"]["error"]["message"])


def test_a_file_with_tools(embedded: LLM, tmp_path) -> None:
    """The template gets the tools."""
    said = "Yes. " + call("add", a=2) + call("stop")
    template = "{{ tools[0].function.name if tools else 'none' }}"
    fields = {"chat_template": TEMPLATE, "max_tokens": 60, "tools": TOOLS}
    tokenizer = embedded.get_tokenizer()
    results = run(
        embedded,
        tmp_path,
        [
            fields,
            fields | {"chat_template": template},
            {"chat_template": template, "tools": []},
            fields | {"tool_choice": "none"},
        ],
    )
    usage = [result["response"]["body"]["usage"]["prompt_tokens"] for result in results]
    assert usage[0] == usage[3] > usage[1]
    assert usage[1:3] == [len(tokenizer.encode(text)) for text in ("add", "none")]
    assert len(ToolUse(TOOLS, "auto", parallel=False).parse(said)[1]) == 1
    assert ToolUse(TOOLS, "none").parse(said) == (said, [])


@pytest.mark.extra
@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
def test_references_of_forced_calls(embedded: LLM) -> None:
    """They are to the definitions of the tool's own schema, or to all of it."""
    calls = []
    for name, values in (("f", [1]), ("g", ["x"])):
        items = {"v": {"$ref": "#/$defs/v"}, "next": {"$ref": "#"}}
        schema = {"type": "object", "properties": items, "additionalProperties": False}
        schema |= {"$defs": {"v": {"enum": values}}}
        calls.append({"type": "function", "function": {"name": name, "parameters": schema}})
    grammar = ToolUse(calls, "required").grammar()
    params = SamplingParams(structured_outputs=grammar, max_tokens=60)
    for value, context in (("x", nullcontext()), (1, pytest.raises(GenerationError))):
        said = json.dumps([{"name": "g", "arguments": {"next": {"v": value}}}])
        ids = [*embedded.get_tokenizer().encode(said), 1033]
        params.logits_processors = [script(ids)]
        with context:
            output = embedded.generate("a", params, use_tqdm=False)[0].outputs[0]
            assert output.text == said


@pytest.mark.extra
@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
def test_forced_calls(embedded: LLM, tmp_path) -> None:
    name = {"type": "function", "function": {"name": "add"}}
    fields = {"tools": TOOLS, "n": 4, "temperature": 1, "seed": 2, "max_tokens": 220}
    required = fields | {"tool_choice": "required"}
    results = run(
        embedded,
        tmp_path,
        [
            required,
            required | {"parallel_tool_calls": False},
            fields | {"tool_choice": name},
            fields | {"tool_choice": name, "max_tokens": 3},
        ],
    )
    choices = [result["response"]["body"]["choices"] for result in results]
    names = set()
    for each in (*choices[0], *choices[1], *choices[2]):
        if each["finish_reason"] == "length":
            assert "tool_calls" not in each["message"]
            continue
        assert (each["finish_reason"], each["message"]["content"]) == ("tool_calls", None)
        for made in each["message"]["tool_calls"]:
            arguments = json.loads(made["function"]["arguments"])
            names.add(made["function"]["name"])
            if made["function"]["name"] == "add":
                assert 0 <= arguments["a"] <= 9
                assert len(arguments["label"]) <= 4
    assert names == {"add", "stop"}
    assert ToolUse(TOOLS, "required").parse('[{"name": "stop"}, {"name": "stop"}]')[1][1:]
    single = [each["message"].get("tool_calls", []) for each in choices[1] + choices[2]]
    assert max(map(len, single)) == 1
    assert all(made["function"]["name"] == "add" for calls in single[4:] for made in calls)
    assert {each["finish_reason"] for each in choices[3]} == {"length"}
    assert all(each["message"]["content"].startswith("[") for each in choices[3])


def test_calls_of_answers(embedded: LLM) -> None:
    said = ["Yes. " + call("add", a=2) + call("stop"), "No. <tool_call>{", xml("add", a="2")]
    encode = embedded.get_tokenizer().encode
    answers = []
    for i, text in enumerate(said * 2):
        body = {"messages": chat} | ({"tools": TOOLS} if i < len(said) else {})
        job = parse(embedded, CHAT, body, "qwen3-nano")
        params = SamplingParams(max_tokens=99, logits_processors=[script([*encode(text), 1033])])
        requests = replace(job, params=params).submit(embedded)
        while not requests[0].ended:
            embedded.engine.run_step()
        answers += job.response("batch-1", requests)["choices"]
    assert [answer["finish_reason"] for answer in answers] == [
        *("tool_calls", "stop", "tool_calls"),
        *["stop"] * 3,
    ]
    messages = [answer["message"] for answer in answers]
    assert [message["content"] for message in messages] == ["Yes.", said[1], None, *said]
    calls = [[c["function"] for c in message.get("tool_calls", [])] for message in messages]
    add = {"name": "add", "arguments": '{"a": 2}'}
    assert calls == [[add, {"name": "stop", "arguments": "{}"}], [], [add], [], [], []]

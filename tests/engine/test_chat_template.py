"""Chats, and messages that are refused."""

import json
import warnings
from pathlib import Path

import pytest
from engines import still_serves

from nanovllm import LLM, SamplingParams
from nanovllm.engine.chat_template import render

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_chat_forms(embedded: LLM) -> None:
    one = [{"role": "user", "content": "Reverse cab"}]
    many = embedded.chat([one, [{"role": "user", "content": "Uppercase dog"}]], use_tqdm=False)
    assert [o["text"] for o in many] == ["bac", "DOG"]
    assert embedded.chat(one, use_tqdm=False)[0]["text"] == "bac"
    quiet = embedded.chat(one, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})[0]
    assert quiet["text"] == "bac"
    assert len(quiet.prompt_token_ids) > len(many[0].prompt_token_ids)


def test_chat_template_kwargs_overrule_the_arguments(embedded: LLM) -> None:
    """As in vLLM, where they are joined with a dict of the arguments."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    template = "{{ tools | length }}{{ messages[0].content }}{{ tokenizer }}"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    def prompt(more: dict[str, object], **arguments: object) -> str | None:
        [out] = embedded.chat(chat, GREEDY, use_tqdm=False, chat_template_kwargs=more, **arguments)
        return out.prompt

    asked = "<|im_start|>assistant\n"
    assert prompt({}).endswith("<|im_end|>\n" + asked)
    assert prompt({"add_generation_prompt": False}).endswith("Well<|im_end|>\n")
    assert prompt({"add_generation_prompt": True}, add_generation_prompt=False).endswith(asked)
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt(more).endswith("Well")
    more = {"tools": [tool, tool], "chat_template": template, "tokenizer": "!"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prompt(more, tools=[tool], chat_template="{{ 1 }}") == "2Hi!"
    for more in ({"tools": [tool]}, {"tools": [tool], "chat_template": "{{ 1 }}"}):
        with pytest.warns(UserWarning, match="the chat template ignores `tools`"):
            prompt(more)
    with pytest.raises(ValueError, match="add_generation_prompt are not compatible"):
        prompt({}, continue_final_message=True)
    for name in ("messages", "tokenize"):
        with pytest.raises(ValueError, match="cannot render these messages .TypeError: "):
            prompt({name: True})
    for value in (False, 0, None, ""):  # they are variables like any others
        more = {"x": value, "chat_template": "{{ x }}, {{ x is defined }}"}
        assert prompt(more) == f"{value}, True"
    with pytest.raises(TypeError, match="chat_template_kwargs must be an object, not 5"):
        prompt(5)


PARTS = [{"type": "text", "text": "Reverse"}, {"type": "text", "text": "cab"}]
USES = "<{{ messages[0].content }}>"
ITERATES = "<{% for part in messages[0].content %}{{ part.text }};{% endfor %}>"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (USES, "<Reverse\ncab>"),
        ("<{{ '' + messages[0].content }}>", "<Reverse\ncab>"),  # TypeError for a list
        ("<{{ messages[0].content | tojson }}>", '<"Reverse\\ncab">'),
        ("{% if messages[0].content is string %}" + USES + "{% endif %}", "<Reverse\ncab>"),
        (ITERATES, "<Reverse;cab;>"),
        (None, "<|im_start|>user\nReversecab<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_content_parts(embedded: LLM, template: str | None, shown: str) -> None:
    """A template that takes strings only gets a string, and one that iterates gets the parts."""
    for content in (PARTS, ["Reverse", "cab"]):
        chat = [{"role": "user", "content": content}]
        out = embedded.chat(chat, GREEDY, use_tqdm=False, chat_template=template)[0]
        assert out.prompt == shown


def call_of(arguments: object) -> list[dict[str, object]]:
    """A conversation with a tool call, in OpenAI's format."""
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    asked = {"role": "assistant", "content": None, "tool_calls": calls}
    return [{"role": "user", "content": "Rain?"}, asked]


def test_arguments_of_tool_calls_are_parsed(embedded: LLM) -> None:
    """As in vLLM, templates get a dict where OpenAI's format has a string in JSON."""
    shown = "{% for name, value in messages[1].tool_calls[0].function.arguments.items() %}"
    shown += "{{ name }}={{ value }};{% endfor %}"
    tokenizer = embedded.engine.input_processor.tokenizer
    for arguments, text in (
        ('{"city": "Malmö", "days": 2}', "city=Malmö;days=2;"),
        ({"city": "Malmö"}, "city=Malmö;"),
        ("", ""),
        (None, ""),
    ):
        chat = call_of(arguments)
        assert render(chat, tokenizer, {"chat_template": shown}) == text
        # Templates such as that of R1-0528-Qwen3 write text, which is JSON.
        given = (
            arguments
            if isinstance(arguments, str) and arguments
            else json.dumps(arguments or {}, ensure_ascii=False)
        )
        for joined in ("'<' + {} + '>'", "{} + '>'"):
            joined = joined.format("messages[1].tool_calls[0].function.arguments")
            written = render(chat, tokenizer, {"chat_template": f"{{{{ {joined} }}}}"})
            assert written.strip("<>") == given
        assert chat == call_of(arguments)  # the messages of the caller are unchanged
    [out] = embedded.chat(call_of('{"x": 1}'), GREEDY, use_tqdm=False, chat_template=shown + "!")
    assert out.prompt == "x=1;!"
    [out] = embedded.chat(call_of("{}"), GREEDY, use_tqdm=False)  # its content is None
    assert "<|im_start|>assistant\n<|im_end|>" in out.prompt
    with pytest.raises(ValueError, match="the arguments '{x: 1}' of a tool call are no JSON"):
        embedded.chat(call_of("{x: 1}"), use_tqdm=False)
    for calls in ([], 5, [5], [{"function": 5}], [{"name": "f", "arguments": "{}"}]):
        chat = [{"role": "user", "content": "hi", "tool_calls": calls}]
        shown = render(chat, tokenizer, {"chat_template": "{{ messages[0].tool_calls }}"})
        assert shown == str(calls)


def test_chats(embedded: LLM) -> None:
    for messages, error, word in (
        ([], ValueError, "empty"),
        ([[]], ValueError, "empty"),
        ([{"content": "hi"}], ValueError, "'role'"),
        ([{"role": 3, "content": "hi"}], ValueError, "'role'"),
        (["hi"], ValueError, "not 'hi'"),
        ("hi", TypeError, "messages must be a list"),
        (None, TypeError, "messages must be a list"),
        ({"role": "user", "content": "hi"}, TypeError, "messages must be a list"),
        ([{"role": "user"}], TypeError, "content of a message .* not None"),
        ([{"role": "user", "content": 5}], TypeError, "content of a message .* not 5"),
        ([{"role": "user", "content": [5]}], ValueError, "type 5 is not supported"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            ValueError,
            "'image_url' is not supported: the models take text only",
        ),
    ):
        with pytest.raises(error, match=word):
            embedded.chat(messages, use_tqdm=False)
    still_serves(embedded)


def test_a_broken_chat_template(embedded: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    for template in ("{% if %}", "{{ raise_exception('no such role') }}"):
        with pytest.raises(ValueError, match="the chat template cannot render.*chat_template="):
            embedded.chat(chat, chat_template=template, use_tqdm=False)


def test_chat_templates_of_another_type(embedded: LLM, tmp_path) -> None:
    """A path is a common mistake, and would be the text of every prompt."""
    chat = [{"role": "user", "content": "hi"}]
    for template in (5, b"{{ 1 }}", Path("a.jinja"), ["{{ 1 }}"]):
        with pytest.raises(TypeError, match="chat_template must be a string"):
            embedded.chat(chat, chat_template=template, use_tqdm=False)
    path = tmp_path / "a.jinja"
    path.write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match=r"a.jinja' is a file; pass its text: Path\('.*read_text"):
        embedded.chat(chat, chat_template=str(path), use_tqdm=False)

"""Chat templates that are passed with a request, and their limits."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest
from engines import still_serves

from nanovllm import LLM

TEMPLATES = [
    ("{{ 1/0 }}", "ZeroDivisionError"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{% include 'x' %}", "no loader"),
    ("{% extends 'x' %}", "no loader"),
    ("{% for i in range(1000000000000) %}{% endfor %}", "Range too big"),
    ("{{ 'a' + 1 }}", "TypeError"),
    ("{{ 'a' * 100000000000000 }}", "MemoryError"),
    ("{{ messages[0].no.such }}", "UndefinedError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{{ 10 ** 10 ** 9 }}", "the operator .* is not accepted"),
    ("{% macro f(n) %}{% endmacro %}{{ f(1, **{'n': 2}) }}", "TypeError"),
    ("{% for i in range(70) %}{{ 'a' * 1000000 }}{% endfor %}", "more than 67108864 characters"),
]


@pytest.mark.parametrize(("template", "word"), TEMPLATES, ids=str)
def test_chat_templates_that_fail(embedded: LLM, template: str, word: str) -> None:
    for content in ("hi", [{"type": "text", "text": "hi"}]):
        chat = [{"role": "user", "content": content}]
        with pytest.raises(ValueError, match=f"the chat template cannot .*{word}") as error:
            embedded.chat(chat, chat_template=template, use_tqdm=False)
        assert str(error.value).endswith(f"the template, which is {template!r}")
    still_serves(embedded)


def test_chat_templates_of_another_type(embedded: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    for template in (5, b"{{ 1 }}", Path("a.jinja"), ["{{ 1 }}"]):
        with pytest.raises(TypeError, match=re.escape(f"must be a string, not {template!r}")):
            embedded.chat(chat, chat_template=template, use_tqdm=False)
    still_serves(embedded)


def test_the_path_of_a_chat_template(embedded: LLM, tmp_path: Path) -> None:
    """It is a common mistake, and would be the text of every prompt."""
    path = tmp_path / "a.jinja"
    chat = [{"role": "user", "content": "hi"}]
    for template in (str(path), "a.jinja"):  # no such file: as in vLLM it is a text
        [out] = embedded.chat(chat, chat_template=template, use_tqdm=False)
        assert out.prompt == template
    path.write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match=r"a.jinja' is a file; pass its text: Path\('.*read_text"):
        embedded.chat(chat, chat_template=str(path), use_tqdm=False)


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "{% set s = namespace(x=3) %}{% for i in range(99999) %}{% set s.x = s.x * s.x %}{% endfor %}",
]


@pytest.mark.parametrize("template", ENDLESS)
@pytest.mark.parametrize("content", ["hi", [{"type": "text", "text": "hi"}]], ids=["text", "parts"])
def test_chat_templates_that_do_not_end(
    embedded: LLM, monkeypatch: pytest.MonkeyPatch, template: str, content: object
) -> None:
    """A limit of time stops them: no thread is left."""
    monkeypatch.setattr("nanovllm.features.chat_template.MAX_SECONDS", 0.1)
    chat = [{"role": "user", "content": content}]
    ways = [{"chat_template": template}, {"chat_template_kwargs": {"chat_template": template}}]
    for options in ways:
        with pytest.raises(
            ValueError, match="chat_template=.* takes more than 0.1 seconds; end its"
        ):
            embedded.chat(chat, use_tqdm=False, **options)
    for thread in threading.enumerate():
        if thread.name == "nanovllm limited":
            thread.join(100)
            assert not thread.is_alive()
    monkeypatch.undo()
    [out] = embedded.chat(chat, use_tqdm=False, chat_template="a **{{ messages[0].role }}**")
    assert out.prompt == "a **user**"
    still_serves(embedded)


def test_ctrl_c_ends_a_chat_template(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox limits a range to 100,000, but not loops in loops."""
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            embedded.chat([{"role": "user", "content": "hi"}], chat_template=template)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    still_serves(embedded)


def test_the_file_can_be_deleted(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.engine.input_processor, "render_with_limits", None)
    chat = [{"role": "user", "content": "Reverse cab"}]
    with pytest.raises(ValueError, match="chat_template needs nanovllm/features/chat_template.py"):
        embedded.chat(chat, chat_template="{{ 1 }}", use_tqdm=False)
    assert embedded.chat(chat, use_tqdm=False)[0]["text"] == "bac"

"""`nanovllm chat`: a conversation in the terminal."""

import io
import signal
import sys
import threading
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.tools import chat


def talk(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, text: str, *arguments: str
) -> tuple[int, list[Any]]:
    """Run `nanovllm chat` on these lines -> exit status, and the messages of each prompt."""
    prompts: list[Any] = []
    render = llm.engine.input_processor.chat_prompt

    def chat_prompt(messages: list[Any], *args: object, **kwargs: object) -> Any:
        prompts.append([m["content"] for m in messages])
        return render(messages, *args, **kwargs)

    monkeypatch.setattr(llm.engine.input_processor, "chat_prompt", chat_prompt)
    monkeypatch.setattr("nanovllm.tools.chat.LLM", lambda *_, **__: llm)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return chat.main([*arguments, "--temperature", "0"]), prompts


def test_a_conversation(
    embedded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "What is 12 + 30?\n\nWhat is 2 + 3?\n/new\nSpell garden\n"
    status, prompts = talk(monkeypatch, embedded, lines)
    assert status == 0
    assert capsys.readouterr().out.splitlines() == ["12 + 30 = 42", "2 + 3 = 5", "g-a-r-d-e-n"]
    first = ["What is 12 + 30?"]
    assert prompts == [first, [*first, "12 + 30 = 42", "What is 2 + 3?"], ["Spell garden"]]


def test_a_question_that_does_not_fit_is_left_out(
    embedded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, prompts = talk(monkeypatch, embedded, "word " * 3000 + "\nWhat is 2 + 3?\n")
    assert status == 0
    assert len(prompts[1]) == 1
    captured = capsys.readouterr()
    assert captured.out == "2 + 3 = 5\n"
    assert "/new begins a new conversation" in captured.err


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    embedded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = embedded.stream

    def interrupted(*args: Any) -> Any:
        for i, new in enumerate(stream(*args)):
            if i == 2:
                signal.raise_signal(signal.SIGINT)
            yield new

    assert threading.current_thread() is threading.main_thread()
    monkeypatch.setattr(embedded, "stream", interrupted, raising=False)
    status, _prompts = talk(monkeypatch, embedded, "Count from 1 to 9\n")
    monkeypatch.undo()
    assert status == 0
    assert 0 < len(capsys.readouterr().out) < len("1, 2, 3, 4, 5, 6, 7, 8, 9\n")
    assert embedded.stats()["running"] == 0


def test_a_model_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["--model", "./nowhere"]) == 1
    assert "there is no directory './nowhere'" in capsys.readouterr().err

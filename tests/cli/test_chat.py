"""`nanovllm chat`: a conversation in the terminal."""

import io
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import nanovllm.__main__ as program
from nanovllm import LLM, StreamOutput
from nanovllm.cli import chat

Talk = Callable[..., tuple[int, list[Any]]]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def talk(embedded: LLM, monkeypatch) -> Talk:
    """Runs `nanovllm chat` on these lines -> exit status, and the messages of each prompt."""
    prompts: list[Any] = []
    render = embedded.engine.input_processor.chat_prompt

    def chat_prompt(messages: list[Any], *args: object, **kwargs: object) -> Any:
        prompts.append([m["content"] for m in messages])
        return render(messages, *args, **kwargs)

    def run(text: str, *arguments: str) -> tuple[int, list[Any]]:
        prompts.clear()
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return chat.main([*arguments, "--temperature", "0"]), [*prompts]

    monkeypatch.setattr(embedded.engine.input_processor, "chat_prompt", chat_prompt)
    monkeypatch.setattr("nanovllm.cli.chat.LLM", lambda *_, **__: embedded)
    return run


def test_a_conversation(talk: Talk, capsys: Capture) -> None:
    lines = "What is 12 + 30?\n\nWhat is 2 + 3?\n/new\nSpell garden\n"
    status, prompts = talk(lines)
    assert status == 0
    assert capsys.readouterr().out.splitlines() == ["12 + 30 = 42", "2 + 3 = 5", "g-a-r-d-e-n"]
    first = ["What is 12 + 30?"]
    assert prompts == [first, [*first, "12 + 30 = 42", "What is 2 + 3?"], ["Spell garden"]]


def test_a_question_that_does_not_fit_is_left_out(talk: Talk, capsys: Capture) -> None:
    status, prompts = talk("word " * 3000 + "\nWhat is 2 + 3?\n")
    assert status == 1
    assert len(prompts[1]) == 1
    captured = capsys.readouterr()
    assert captured.out == "2 + 3 = 5\n"
    assert "/new begins a new conversation" in captured.err


def test_the_prefix_cache_outlives_the_chat(
    talk: Talk, embedded: LLM, tmp_path, capsys: Capture
) -> None:
    arguments, cached = ("--system", "word " * 100, "--prefix-cache", str(tmp_path / "new")), []
    for _ in range(2):
        embedded.reset_prefix_cache()
        before = embedded.engine.scheduler.cached_tokens
        assert talk("What is 2 + 3?\n", *arguments)[0] == 0
        cached.append(embedded.engine.scheduler.cached_tokens - before)
    assert cached[0] == 0
    assert cached[1] > 100
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    [file] = (tmp_path / "new").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert talk("What is 2 + 3?\n", *arguments)[0] == 1
    assert f"error: {file} is damaged, remove it" in capsys.readouterr().err


def test_commands(talk: Talk, capsys: Capture) -> None:
    for end in ("/quit", "/exit"):
        status, prompts = talk(f"/help\n{end}\nSpell garden\n")
        assert (status, prompts) == (0, [])
        shown = capsys.readouterr().out
        assert all(command in shown for command in ("/new", "/quit", "/exit", "Ctrl-D"))


def test_a_mistyped_command_is_no_question(talk: Talk, capsys: Capture) -> None:
    status, prompts = talk("/quti\n/clear\n /etc\n/QUIT\nSpell garden\n")
    assert (status, prompts) == (1, [["/etc"]])
    said = capsys.readouterr().err
    assert "unknown command '/quti'; did you mean '/quit'?; a question may begin" in said
    assert "unknown command '/clear'; known: /new, /quit" in said


def test_a_terminal_without_the_characters(embedded: LLM, monkeypatch) -> None:
    answer = [StreamOutput(0, 0, "Größe", [], "stop")]
    monkeypatch.setattr(embedded, "stream", lambda *_: (new for new in answer), raising=False)
    monkeypatch.setattr("nanovllm.cli.chat.LLM", lambda *_, **__: embedded)
    shown = io.BytesIO()
    question = io.BytesIO("你好\n".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(question, encoding="ascii"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert program.main(["chat"]) == 0
    assert shown.getvalue() == b"Gr??e\n"


def test_an_answer_that_is_cut_is_marked(talk: Talk, capsys: Capture) -> None:
    question = "Count from 1 to 9\n"
    assert talk(question, "--max-tokens", "4")[0] == 0
    captured = capsys.readouterr()
    assert len(captured.out) < len("1, 2, 3, 4, 5")
    assert captured.err == "[cut: the answer reached --max-tokens or max_model_len]\n"
    assert talk(question)[0] == 0
    assert capsys.readouterr() == ("1, 2, 3, 4, 5, 6, 7, 8, 9\n", "")


def test_an_answer_without_a_token_is_an_error(
    talk: Talk, embedded: LLM, monkeypatch, capsys: Capture
) -> None:
    failed = StreamOutput(0, 0, "", [], "error")
    monkeypatch.setattr(embedded, "stream", lambda *_: (new for new in [failed]), raising=False)
    status, _prompts = talk("Spell garden\n")
    assert status == 1
    assert "no token could be sampled" in capsys.readouterr().err


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    talk: Talk, embedded: LLM, monkeypatch, capsys: Capture
) -> None:
    stream = embedded.stream

    def interrupted(*args: Any) -> Any:
        for i, new in enumerate(stream(*args)):
            if i == 2:
                signal.raise_signal(signal.SIGINT)
            yield new

    assert threading.current_thread() is threading.main_thread()
    monkeypatch.setattr(embedded, "stream", interrupted, raising=False)
    status, _prompts = talk("Count from 1 to 9\n")
    monkeypatch.undo()
    assert status == 0
    assert 0 < len(capsys.readouterr().out) < len("1, 2, 3, 4, 5, 6, 7, 8, 9\n")
    assert embedded.stats()["running"] == 0


def test_a_model_that_does_not_exist(capsys: Capture) -> None:
    assert chat.main(["--model", "./nowhere"]) == 1
    assert "there is no directory './nowhere'" in capsys.readouterr().err


def test_thinking_is_dimmed_in_a_terminal(
    talk: Talk, embedded: LLM, monkeypatch, capsys: Capture
) -> None:
    """It is no part of the conversation, nor of what goes to a pipe."""
    parts = [("So", ""), ("", "\n5"), ("", "!")]
    answer = [StreamOutput(0, 0, text, [], None, reasoning=thought) for thought, text in parts]
    monkeypatch.setattr(embedded, "stream", lambda *_: (new for new in answer), raising=False)
    for is_terminal, shown in ((False, "\n5!\n"), (True, "\033[2mSo\033[0m\n5!\n")):
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
            status, prompts = talk("What is 2 + 3?\nWhy?\n")
        assert (status, prompts[-1]) == (0, ["What is 2 + 3?", "\n5!", "Why?"])
        assert capsys.readouterr().out == shown * 2

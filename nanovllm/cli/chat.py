"""Runs a conversation with a model in the terminal. Answers are streamed.

  nanovllm chat
  nanovllm chat --model Qwen/Qwen3-0.6B --system "Answer in one sentence." --set dtype=bfloat16

Ctrl-C ends an answer. /new begins a new conversation. Ctrl-D, /quit or /exit ends the program, and
/help shows this. A question that begins with "/" needs a space before it. The exit status is 1 if
the model cannot be loaded, or if a question fails that is read from a file or a pipe.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from nanovllm import LLM, SamplingParams
from nanovllm.cli.options import add_model_options
from nanovllm.utils.checks import unknown_name

HELP = """Ctrl-C ends an answer.
/new             begins a new conversation
/quit or /exit   ends the chat, as Ctrl-D does
/help            shows this text"""
COMMANDS = ("/new", "/quit", "/exit", "/help")


class Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(self, llm: LLM, system: str | None, params: SamplingParams) -> None:
        self.llm, self.params = llm, params
        self.start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.start)

    def answer(self, question: str) -> None:
        """Print the answer while it is generated. Ctrl-C ends it; the text so far remains.

        Raises ValueError if the conversation is too long or no token can be sampled, and then
        leaves out the question.
        """
        self.messages.append({"role": "user", "content": question})
        text, finish_reason = "", None
        try:
            variables = {"add_generation_prompt": True}
            prompt = self.llm.engine.input_processor.chat_prompt(self.messages, variables)
            with contextlib.closing(self.llm.stream(prompt, self.params)) as stream:
                for new in stream:
                    text, finish_reason = text + new.text, new.finish_reason
                    print(new.text, end="", flush=True)
            if finish_reason == "error":
                raise ValueError("no token could be sampled, because the model computed NaN")
        except KeyboardInterrupt:
            pass
        except ValueError:
            self.messages.pop()
            raise
        print()
        if finish_reason == "length":
            print("[cut: the answer reached --max-tokens or max_model_len]", file=sys.stderr)
        self.messages.append({"role": "assistant", "content": text})


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("nanovllm chat", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--system", metavar="TEXT", help="a system message")
    add("--temperature", type=float, help="0 is greedy (the checkpoint's default)")
    length = "largest number of tokens of an answer (all that max_model_len leaves)"
    add("--max-tokens", type=int, metavar="N", help=length)
    add_model_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Read questions from stdin and print the answers until the end of the input."""
    args = make_parser().parse_args(argv)
    try:
        llm = LLM(args.model, **dict(args.set))
        params = llm.get_default_sampling_params()
        params.max_tokens = args.max_tokens
        if args.temperature is not None:
            params.temperature = args.temperature
        chat = Conversation(llm, args.system, params.clone())
        llm.engine.input_processor.get_tokenizer()  # transformers' is not needed
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # `input` uses it: lines of any length, a history
            import readline  # noqa: F401
        print(HELP)
    failed = False
    while True:
        try:
            question = input("> " if terminal else "").rstrip()
        except EOFError:
            return int(failed)
        except KeyboardInterrupt:
            print()
            continue
        command = question.lower()
        if command in ("/quit", "/exit"):
            return int(failed)
        if command == "/new":
            chat.messages = list(chat.start)
        elif command == "/help":
            print(HELP)
        elif command.startswith("/"):
            message = unknown_name("command", question, COMMANDS)
            print(f"{message}; a question may begin with a space", file=sys.stderr)
            failed = not terminal
        elif command.strip():
            try:
                chat.answer(question.strip())
            except ValueError as error:
                print(f"error: {error}; /new begins a new conversation", file=sys.stderr)
                failed = not terminal

"""Runs a conversation with a model in the terminal. Answers are streamed.

  nanovllm chat
  nanovllm chat --model Qwen/Qwen3-0.6B --system "Answer in one sentence." --set dtype=bfloat16
  nanovllm chat --prefix-cache ~/.cache/chat
  nanovllm chat --model Qwen/Qwen3-0.6B --set reasoning_parser=qwen3

Ctrl-C ends an answer. /new begins a new conversation. Ctrl-D, /quit or /exit ends the program, and
/help shows this. A question that begins with "/" needs a space before it. The exit status is 1 if
the model cannot be loaded, or if a question fails that is read from a file or a pipe.

With reasoning_parser, a terminal shows the thinking dimmed. It is not part of the conversation, nor
of the output to a file or a pipe.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from nanovllm import LLM, SamplingParams
from nanovllm.cli.options import add_model_options
from nanovllm.engine.chat_template import Message
from nanovllm.utils.checks import unknown_name

HELP = """Ctrl-C ends an answer.
/new             begins a new conversation
/quit or /exit   ends the chat, as Ctrl-D does
/help            shows this text"""
DIM = "\033[2m%s\033[0m"  # thinking in a terminal
COMMANDS = ("/new", "/quit", "/exit", "/help")


def answer(llm: LLM, messages: list[Message], question: str, params: SamplingParams) -> None:
    """Print the answer while it is generated, and append question and answer to `messages`.

    Ctrl-C ends the answer; the text so far remains. Raises ValueError, and leaves `messages` as
    they are, if the conversation is too long or no token can be sampled.
    """
    asked = [*messages, {"role": "user", "content": question}]
    text = ""
    finish_reason = None
    with contextlib.suppress(KeyboardInterrupt):
        variables = {"add_generation_prompt": True}
        prompt = llm.engine.input_processor.chat_prompt(asked, variables)
        with contextlib.closing(llm.stream(prompt, params)) as stream:
            for new in stream:
                text += new.text
                finish_reason = new.finish_reason
                if new.reasoning and sys.stdout is not None and sys.stdout.isatty():
                    print(DIM % new.reasoning, end="")
                print(new.text, end="", flush=True)
    if finish_reason == "error":
        raise ValueError("no token could be sampled, because the model computed NaN")
    print()
    if finish_reason == "length":
        print("[cut: the answer reached --max-tokens or max_model_len]", file=sys.stderr)
    messages[:] = [*asked, {"role": "assistant", "content": text}]


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("nanovllm chat", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--system", metavar="TEXT", help="a system message")
    add("--temperature", type=float, help="0 is greedy (the checkpoint's default)")
    length = "largest number of tokens of an answer (all that max_model_len leaves)"
    add("--max-tokens", type=int, metavar="N", help=length)
    add("--prefix-cache", metavar="DIR", help="keep the KV of prompts here for the next chat")
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
        params = params.clone()  # checks the fields
        llm.engine.input_processor.get_tokenizer()  # transformers' is not needed
        if args.prefix_cache is not None:
            llm.load_prefix_cache(args.prefix_cache)
        failed = converse(llm, params, args.system)
        if args.prefix_cache is not None:
            llm.save_prefix_cache(args.prefix_cache)
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(failed)


def converse(llm: LLM, params: SamplingParams, system: str | None) -> bool:
    """Answer questions until the end of the input. Returns whether one failed, as in `main`."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
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
            return failed
        except KeyboardInterrupt:
            print()
            continue
        command = question.lower()
        if command in ("/quit", "/exit"):
            return failed
        if command == "/new":
            messages = list(start)
        elif command == "/help":
            print(HELP)
        elif command.startswith("/"):
            message = unknown_name("command", question, COMMANDS)
            print(f"{message}; a question may begin with a space", file=sys.stderr)
            failed = not terminal
        elif command.strip():
            try:
                answer(llm, messages, question.strip(), params)
            except ValueError as error:
                print(f"error: {error}; /new begins a new conversation", file=sys.stderr)
                failed = not terminal

"""Runs a conversation with a model in the terminal. Answers are streamed.

  nanovllm chat
  nanovllm chat --model Qwen/Qwen3-0.6B --system "Answer in one sentence." --set dtype=bfloat16

Ctrl-C ends an answer, Ctrl-D ends the program, and /new begins a new conversation.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.api.config import EMBEDDED
from nanovllm.tools.jobs.run_batch import option


class Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(self, llm: LLM, system: str | None, params: SamplingParams) -> None:
        self.llm, self.params = llm, params
        self.start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.start)

    def restart(self) -> None:
        """Forget all messages but the system message."""
        self.messages = list(self.start)

    def answer(self, question: str) -> None:
        """Print the answer while it is generated. Ctrl-C ends it; the text so far remains.

        Raises ValueError if the conversation is too long, and then leaves out the question.
        """
        self.messages.append({"role": "user", "content": question})
        text = ""
        try:
            variables = {"add_generation_prompt": True}
            prompt = self.llm.engine.input_processor.chat_prompt(self.messages, variables)
            with contextlib.closing(self.llm.stream(prompt, self.params)) as stream:
                for new in stream:
                    text += new.text
                    print(new.text, end="", flush=True)
        except KeyboardInterrupt:
            pass
        except ValueError:
            self.messages.pop()
            raise
        print()
        self.messages.append({"role": "assistant", "content": text})


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("nanovllm chat", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--model", default=EMBEDDED, help="a directory, hub id or smollm2-135m (%(default)s)")
    add("--system", metavar="TEXT", help="a system message")
    add("--temperature", type=float, help="0 is greedy (the checkpoint's default)")
    add(
        "--max-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="largest number of tokens of an answer (%(default)s)",
    )
    pair: dict[str, Any] = {"type": option, "action": "append", "default": []}
    add("--set", **pair, metavar="OPTION=VALUE", help="an option of LLM(), like max_num_seqs=1")
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
    except KeyboardInterrupt:
        return 130
    if sys.stdin.isatty():
        print("Ctrl-C ends an answer, Ctrl-D ends the chat, /new begins a new conversation.")
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if question == "/new":
            chat.restart()
        elif question:
            try:
                chat.answer(question)
            except ValueError as error:
                print(f"error: {error}; /new begins a new conversation", file=sys.stderr)

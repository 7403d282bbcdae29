"""The program `nanovllm`, which is also `python -m nanovllm`.

nanovllm chat                              a conversation with the embedded model
nanovllm chat --model Qwen/Qwen3-0.6B      a conversation with another model
nanovllm convert model.gguf model/         converts a GGUF file to a checkpoint
nanovllm run-batch -i in.jsonl -o out.jsonl
                                           runs a file of requests in OpenAI's batch format
nanovllm lm-eval run --model nanovllm ...  runs lm_eval's tasks
nanovllm check                             compares the kernels with plain torch, and times them

`nanovllm COMMAND --help` shows the options of a command, with an example, and `nanovllm --version`
the version.
"""

import importlib
import io
import os
import sys

from nanovllm import __version__
from nanovllm.utils.checks import unknown_name

COMMANDS = {
    "chat": "nanovllm.cli.chat",
    "check": "nanovllm.cli.check",
    "convert": "nanovllm.cli.convert",
    "lm-eval": "nanovllm.cli.jobs.lm_eval",
    "run-batch": "nanovllm.cli.jobs.run_batch",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names. Returns the exit status."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the shell has closed it; `input` and others need it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack characters of an answer
    try:
        try:
            return run_command(argv)
        finally:
            print(end="", flush=True)  # an error at the exit of the interpreter has no handler
    except KeyboardInterrupt:  # while modules are imported; the commands handle it themselves
        return 130
    except OSError as error:  # mostly of stdout, because the commands handle errors of files
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # a reader that ends early is no error: `head`
            print(f"nanovllm: {error}", file=sys.stderr)
        return 1


def run_command(argv: list[str] | None) -> int:
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if command == "--version":
        print(f"nanovllm {__version__}")
        return 0
    if command == "lessons":
        print("the lessons are in a clone of the repository: python -m lessons", file=sys.stderr)
        return 2
    if command not in COMMANDS:
        print(f"nanovllm: {unknown_name('command', command, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(COMMANDS[command])
    except ImportError as error:  # an optional package; the message says how to install it
        print(f"nanovllm {command}: {error}", file=sys.stderr)
        return 1
    return module.main(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())

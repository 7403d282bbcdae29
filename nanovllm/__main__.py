"""The program `nanovllm`, which is also `python -m nanovllm`.

nanovllm chat                              a conversation with the embedded model
nanovllm chat --model Qwen/Qwen3-0.6B      a conversation with another model
nanovllm convert model.gguf model/         converts a GGUF file to a checkpoint
nanovllm run-batch -i in.jsonl -o out.jsonl
                                           runs a file of requests in OpenAI's batch format
nanovllm lm-eval run --model nanovllm ...  runs lm_eval's tasks

`nanovllm COMMAND --help` shows the options of a command, with an example.
"""

import ast
import importlib
import os
import sys
from pathlib import Path

from nanovllm.utils.checks import unknown_name

COMMANDS = {
    "chat": "nanovllm.cli.chat",
    "convert": "nanovllm.cli.convert",
    "lm-eval": "nanovllm.cli.jobs.lm_eval",
    "run-batch": "nanovllm.cli.jobs.run_batch",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names. Returns the exit status."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the caller has closed it, as the shell does for >&-
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        try:
            return run_command(argv)
        finally:
            sys.stdout.flush()  # an error at the exit of the interpreter could not be handled
    except KeyboardInterrupt:  # while modules are imported; the commands handle it themselves
        return 130
    except BrokenPipeError:  # the program that reads the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run_command(argv: list[str] | None) -> int:
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if command == "lessons":
        print(
            "nanovllm lessons: in a clone of the repository, run python -m lessons", file=sys.stderr
        )
        return 2
    if command == "lessons":
        print("the lessons are in a clone of the repository: python -m lessons", file=sys.stderr)
        return 2
    if command not in COMMANDS:
        print(f"nanovllm: {unknown_name('command', command, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(COMMANDS[command])
    except ImportError as error:
        is_deleted = (error.name or "").startswith("nanovllm.")
        reason = f"needs {error.name}, which this copy of nanovllm does not have"
        help_asked = not is_deleted and not {"-h", "--help"}.isdisjoint(arguments)
        if help_asked:
            print(docstring(COMMANDS[command]), end="\n\n")
        print(f"nanovllm {command}: {reason if is_deleted else error}", file=sys.stderr)
        return 0 if help_asked else 1
    return module.main(arguments) or 0


def docstring(module: str) -> str:
    """Return the docstring of a module that cannot be imported, because it needs a package."""
    path = Path(__file__).parents[1] / f"{module.replace('.', '/')}.py"
    return str(ast.get_docstring(ast.parse(path.read_text())))


if __name__ == "__main__":
    sys.exit(main())

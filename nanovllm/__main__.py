"""The program `nanovllm`, which is also `python -m nanovllm`.

nanovllm chat                              a conversation with the embedded model
nanovllm chat --model Qwen/Qwen3-0.6B      a conversation with another model
nanovllm convert model.gguf model/         converts a GGUF file to a checkpoint
nanovllm run-batch -i in.jsonl -o out.jsonl
                                           runs a file of requests in OpenAI's batch format
nanovllm lessons                           lists the lessons and exercises
nanovllm lm-eval run --model nanovllm ...  runs lm_eval's tasks

`nanovllm COMMAND --help` shows the options of a command, with an example.
"""

import importlib
import sys

COMMANDS = {
    "chat": "nanovllm.tools.chat",
    "convert": "nanovllm.tools.convert",
    "lessons": "nanovllm.lessons.command",
    "lm-eval": "nanovllm.tools.jobs.lm_eval",
    "run-batch": "nanovllm.tools.jobs.run_batch",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names. Returns the exit status."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"nanovllm: unknown command {command!r}; the commands are {known}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(COMMANDS[command])
    except ImportError as error:
        reason = str(error)
        if (error.name or "").startswith("nanovllm."):  # a file that can be deleted
            reason = f"needs {error.name}, which this copy of nanovllm does not have"
        print(f"nanovllm {command}: {reason}", file=sys.stderr)
        return 1
    return module.main(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())

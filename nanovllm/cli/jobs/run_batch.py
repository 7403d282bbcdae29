"""Runs a file of requests: nanovllm run-batch -i in.jsonl -o out.jsonl --model NAME

Each line of the input is a request in OpenAI's batch format. Each result is a line of the output,
written as soon as it is known. The order of the output therefore differs from the input.

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
  {"id": ..., "custom_id": "a", "response": {"status_code": 200, "body": {...}, ...}, "error": null}

The result of an invalid line is an error. If the run is stopped at any point, even with kill -9,
run the same command again to resume it. The exit status is 1 if any line has an error. docs/jobs.md
has the details.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from nanovllm.cli.jobs.openai_format import Job, parse
from nanovllm.cli.jobs.openai_responses import error_body
from nanovllm.cli.options import add_model_options
from nanovllm.config import EMBEDDED
from nanovllm.engine.request import Request
from nanovllm.llm import LLM
from nanovllm.utils.checks import check_scalar, located

# What each result begins with, and what a result without an error ends with.
START = b'{"id": "batch-'
SUCCESS = b'"error": null}\n'


class BatchFiles:
    """The input and the output of a run.

    The id of a result has the number of the line that it answers, so the output says which lines
    are done. A kill or a full disk can leave a last line without a newline. This line is cut off,
    and its request is computed again.

    Raises OSError if a file cannot be opened, and ValueError if the output has lines that do not
    belong to this input, or two results of one line. The output is then unchanged.
    """

    def __init__(self, source: Path, target: Path, retry_errors: bool = False) -> None:
        self.source = source
        self.target = target
        # Number of a line, from 1 -> its custom_id, and the message of its error or None.
        self.done: dict[int, tuple[str | None, str | None]] = {}
        custom_ids = {number: custom_id for number, custom_id, _ in self.requests()}
        self.num_requests = len(custom_ids)
        if target.exists() and not target.is_file():
            raise ValueError(f"{target} is not a regular file; name another output")
        target.touch()
        size = self._read_results()
        for number, (custom_id, _) in self.done.items():
            if custom_ids.get(number, ...) != custom_id:
                raise ValueError(
                    f"{target} has the result of {custom_id!r} for line {number} of {source}, "
                    "which is another request; name another output"
                )
        if retry_errors:
            self._remove_errors()
        else:
            os.truncate(target, size)

    def _remove_errors(self) -> None:
        """Replace the output by a file without its errors, which is complete before that."""
        rest = self.target.with_name(self.target.name + ".rest")
        with self.target.open("rb") as old, rest.open("wb") as new:
            new.writelines(line for line in old if line.endswith(SUCCESS))
        rest.replace(self.target)
        self.done = {n: result for n, result in self.done.items() if result[1] is None}

    def _read_results(self) -> int:
        """Read which lines are done. Returns the size of the complete lines in bytes."""
        size = 0
        twice = []
        with self.target.open("rb") as results:
            for line in results:
                if not START.startswith(line[: len(START)]):
                    raise ValueError(
                        f"{self.target} has a line that run-batch did not write: {line!r:.80}; "
                        "name another output"
                    )
                if line.endswith(b"\n"):
                    if not self.mark_done(result := json.loads(line)):
                        twice.append(f"{result['id']} ({result['custom_id']!r})")
                    size += len(line)
        if twice:
            raise ValueError(
                f"{self.target} has two results of each of {len(twice)} lines, such as "
                f"{', '.join(twice[:9])}; remove one of each, or name another output"
            )
        return size

    def mark_done(self, result: dict[str, Any]) -> bool:
        """Note that a result is in the output. Returns whether it is the first of its line."""
        error = result["error"] and result["error"]["error"]["message"]
        number = int(result["id"].removeprefix("batch-"))
        num_done = len(self.done)
        self.done[number] = result["custom_id"], error
        return len(self.done) > num_done

    def errors(self) -> list[str]:
        """Return the custom_id and the message of each result with an error."""
        return [f"{i!r}: {error}" for i, error in self.done.values() if error is not None]

    def requests(self) -> Iterator[tuple[int, str | None, Any]]:
        """Yield the number, the custom_id and the content of each line that is not empty.

        The content is a dict. If the line is wrong, it is an exception, and the custom_id is None.
        """
        with self.source.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                custom_id = None
                request = None
                try:
                    with located("the line is not JSON: "):
                        request = json.loads(line)
                    check_scalar("the line", request, dict)
                    custom_id = check_scalar("custom_id", request.get("custom_id"), str)
                except (RecursionError, TypeError, ValueError) as error:
                    request = error
                if line.strip():
                    yield number, custom_id, request


def run_batch(
    llm: LLM, files: BatchFiles, model: str = EMBEDDED, trust_chat_templates: bool = False
) -> None:
    """Compute the lines that are left.

    model: the name that lines may give for the model of `llm`; a line may also give none.
    trust_chat_templates: whether a line may have a chat template, which is a program.
    """
    left = (item for item in files.requests() if item[0] not in files.done)
    in_flight: dict[int, tuple[str | None, Job | Exception, list[Request]]] = {}
    max_in_flight = 2 * llm.engine.scheduler.max_num_seqs
    options = {"total": files.num_requests, "initial": len(files.done), "unit": "req"}
    with tqdm(desc="Running", **options) as bar, files.target.open("ab") as results:
        while True:
            for number, custom_id, request in islice(left, max_in_flight - len(in_flight)):
                try:
                    if isinstance(request, Exception):
                        raise request
                    if (method := request.get("method")) is not None:
                        check_scalar("method", method, str, ("POST",))
                    url = request.get("url")
                    body = request.get("body")
                    job = parse(llm, url, body, model, trust_chat_templates)
                    in_flight[number] = custom_id, job, job.submit(llm)
                except Exception as error:
                    in_flight[number] = custom_id, error, []
            if not in_flight:
                return
            llm.engine.run_step()
            ended = [n for n, (*_, parts) in in_flight.items() if all(p.ended for p in parts)]
            for number in ended:
                result = make_result(number, *in_flight.pop(number))
                results.write(json.dumps(result, allow_nan=False).encode() + b"\n")
                results.flush()
                files.mark_done(result)
                bar.update()


def make_result(
    number: int, custom_id: str | None, job: Job | Exception, requests: list[Request]
) -> dict[str, Any]:
    """Return the result of a job whose requests have ended, or of an error."""
    name = f"batch-{number}"
    body = None
    error = None
    try:
        if isinstance(job, Exception):
            raise job
        body = job.response(name, requests)
    except Exception as failure:
        error = error_body(failure)
    status = error["error"]["code"] if error else 200
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": name, "custom_id": custom_id, "response": response, "error": error}


@contextmanager
def only_writer(target: Path) -> Iterator[None]:
    """Hold the lock of an output, so that no other process writes to it.

    The system releases the lock when this process ends, also by kill -9. Raises ValueError, with
    the id of the process that holds it. Without locks, a warning is printed.
    """
    target = target.resolve()  # the same for each name of it
    path = target.parent / f".{target.name}.lock"
    with ExitStack() as stack:
        try:
            if target.parent.is_dir() and (target.is_file() or not target.exists()):
                stack.enter_context(FileLock(path).acquire(timeout=0))
        except Timeout:
            raise ValueError(
                f"{holder_of(path)} writes to {target}; wait for it, or name another output"
            ) from None
        except (OSError, NotImplementedError) as error:
            print(
                f"warning: {path} cannot be locked ({error}); start no other run-batch with this "
                "output",
                file=sys.stderr,
            )
        else:
            # A soft lock, which filelock takes where the system has none, has the id already.
            if holder_of(path) != f"process {os.getpid()}":
                with suppress(OSError):  # on Windows, no process can write to a locked file
                    path.write_text(f"{os.getpid()}\n")
        yield


def holder_of(lock: Path) -> str:
    """Return "process " and the id of the process that wrote a lock file last, if it is known."""
    with suppress(OSError, ValueError):
        if number := lock.read_text().partition("\n")[0]:
            return f"process {number}"
    return "another process"


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("nanovllm run-batch", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    file: dict[str, Any] = {"type": Path, "required": True, "metavar": "FILE"}
    add("-i", "--input-file", **file, help="the requests (.jsonl)")
    add("-o", "--output-file", **file, help="the results (.jsonl)")
    add("--served-model-name", metavar="NAME", help="the model in the lines, if it is not --model")
    add("--trust-chat-templates", action="store_true", help="accept a chat_template, a program")
    add("--retry-errors", action="store_true", help="compute lines with errors again")
    add_model_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    args = make_parser().parse_args(argv)
    options = dict(args.set)
    try:
        if options.get("tensor_parallel_size", 1) != 1:
            raise ValueError("tensor_parallel_size: one process writes the output; use 1")
        with only_writer(args.output_file):
            files = BatchFiles(args.input_file, args.output_file, args.retry_errors)
            num_old_errors = len(files.errors())
            if len(files.done) < files.num_requests:
                name = args.served_model_name or args.model
                run_batch(LLM(args.model, **options), files, name, args.trust_chat_templates)
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: start the same command again to resume", file=sys.stderr)
        return 130
    errors = files.errors()
    new = f"{len(errors) - num_old_errors} new"
    print(f"{len(files.done)} results in {args.output_file}, {len(errors)} with an error ({new})")
    if errors:
        first = f"the first error is of {' '.join(errors[0].split())}"
        print(f"{first}; --retry-errors computes lines with errors again", file=sys.stderr)
    return int(bool(errors))

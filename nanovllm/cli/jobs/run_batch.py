"""Runs a file of requests: nanovllm run-batch -i in.jsonl -o out.jsonl --model NAME

Each line of the input is a request in OpenAI's batch format. Each result is a line of the output,
written as soon as it is known. The order of the output therefore differs from the input.

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
  {"id": ..., "custom_id": "a", "response": {"status_code": 200, "body": {...}, ...}, "error": null}

The result of an invalid line is an error. If the run is stopped at any point, even with kill -9,
run the same command again to resume it. The exit status is 1 if any line has an error. docs/jobs.md
says more.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanovllm.cli.jobs.openai_format import Job, error_body, parse
from nanovllm.config import EMBEDDED
from nanovllm.engine.request import Request
from nanovllm.llm import LLM
from nanovllm.utils.checks import check_scalar

START = b'{"id": "batch-'  # what each result begins with


class BatchFiles:
    """The input and the output of a run.

    The id of a result has the number of the line that it answers, so the output says which lines
    are done. A kill or a full disk can leave a last line without a newline. This line is cut off,
    and its request is computed again.

    retry_errors: remove results with an error from the output, so that their lines are not done.

    Raises OSError if a file cannot be opened, and ValueError if the output has lines of something
    else than this input.
    """

    def __init__(self, source: Path, target: Path, retry_errors: bool = False) -> None:
        self.source, self.target = source, target
        self.lines = source.open("rb")
        self.done: dict[int, str | None] = {}  # number of a line, from 1 -> its custom_id
        self.errors: list[str] = []  # custom_id and message of each result with an error
        if target.exists() and not target.is_file():
            raise ValueError(f"{target} is not a regular file; name another output")
        target.touch()
        os.truncate(target, self._read_results())
        if retry_errors and self.errors:
            self._remove_errors()
        requests = {(number, custom_id) for number, custom_id, _ in self.requests()}
        if others := self.done.items() - requests:
            number, custom_id = min(others)
            raise ValueError(
                f"{target} has the result of {custom_id!r} for line {number} of {source}, which "
                "is another request; name another output"
            )
        self.num_requests = len(requests)
        self.results = target.open("ab")

    def __enter__(self) -> BatchFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.lines.close()
        self.results.close()

    def _read_results(self) -> int:
        """Read which lines are done. Returns the size of all complete lines of the output."""
        size = 0
        with self.target.open("rb") as results:
            for line in results:
                if not line.endswith(b"\n") and line[: len(START)] == START[: len(line)]:
                    break
                try:
                    result = json.loads(line)
                    number = int(result["id"].removeprefix("batch-"))
                    self._mark_done(number, result["custom_id"], result["error"])
                except (AttributeError, KeyError, TypeError, ValueError):
                    raise ValueError(
                        f"{self.target} has a line that run-batch did not write: {line!r:.80}; "
                        "name another output"
                    ) from None
                size += len(line)
        return size

    def _remove_errors(self) -> None:
        """Replace the output by a file without its errors. A kill leaves one or the other."""
        rest = self.target.with_name(self.target.name + ".rest")
        with self.target.open("rb") as results, rest.open("wb") as kept:
            kept.writelines(line for line in results if json.loads(line)["error"] is None)
        rest.replace(self.target)
        self.done, self.errors = {}, []
        self._read_results()

    def _mark_done(self, number: int, custom_id: str | None, error: Any) -> None:
        self.done[number] = custom_id
        if error is not None:
            self.errors.append(f"{custom_id!r}: {error['error']['message']}")

    def requests(self) -> Iterator[tuple[int, str | None, bytes]]:
        """Yield the lines that are not empty, each with its number and its custom_id."""
        self.lines.seek(0)
        for number, line in enumerate(self.lines, 1):
            if line.strip():
                yield number, custom_id_of(line), line

    def write(
        self, number: int, custom_id: str | None, job: Job | Exception, requests: list[Request]
    ) -> None:
        """Append the result of a job whose requests have ended, or of an error."""
        name, body, error = f"batch-{number}", None, None
        try:
            if isinstance(job, Exception):
                raise job
            body = job.response(name, requests)
        except Exception as failure:
            error = error_body(failure)
        code = error["error"]["code"] if error else 200
        response = {"status_code": code, "request_id": name, "body": body}
        result = {"id": name, "custom_id": custom_id, "response": response, "error": error}
        self.results.write(json.dumps(result, allow_nan=False).encode() + b"\n")
        self.results.flush()
        self._mark_done(number, custom_id, error)


def custom_id_of(line: bytes) -> str | None:
    """Return the custom_id of a line. None if it is missing; `parse_line` then raises an error."""
    try:
        custom_id = json.loads(line)["custom_id"]
    except (KeyError, RecursionError, TypeError, ValueError):
        return None
    return custom_id if isinstance(custom_id, str) else None


def parse_line(llm: LLM, line: bytes, model: str, trust_chat_templates: bool = False) -> Job:
    """Return the job of a line. Raises an error of any type that says what is wrong."""
    try:
        request = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"the line is not JSON: {error}") from None
    check_scalar("the line", request, dict)
    check_scalar("custom_id", request.get("custom_id"), str)
    if request.get("method") != "POST":
        raise ValueError(f"method must be 'POST', not {request.get('method')!r:.80}")
    return parse(llm, request.get("url"), request.get("body"), model, trust_chat_templates)


def run_batch(
    llm: LLM,
    files: BatchFiles,
    model: str = EMBEDDED,
    max_concurrency: int = 512,
    use_tqdm: bool = True,
    trust_chat_templates: bool = False,
) -> None:
    """Compute the lines that are left.

    model: the name that lines may give for the model of `llm`; a line may also give none.
    max_concurrency: largest number of lines in memory.
    trust_chat_templates: whether a line may have a chat template, which is a program.

    If the engine, the disk or Ctrl-C ends the run, its requests are aborted and the error is
    raised.
    """
    left = (item for item in files.requests() if item[0] not in files.done)
    in_flight: dict[int, tuple[str | None, Job | Exception, list[Request]]] = {}
    options = {"total": files.num_requests, "initial": len(files.done), "unit": "req"}
    with tqdm(desc="Running", disable=not use_tqdm, **options) as bar:
        try:
            while True:
                while len(in_flight) < max_concurrency and (item := next(left, None)):
                    number, custom_id, line = item
                    job: Job | Exception
                    try:
                        job = parse_line(llm, line, model, trust_chat_templates)
                        in_flight[number] = custom_id, job, job.submit(llm)
                    except Exception as error:
                        in_flight[number] = custom_id, error, []
                if not in_flight:
                    return
                llm.engine.run_step()
                for number, (custom_id, job, requests) in [*in_flight.items()]:
                    if all(request.ended for request in requests):
                        del in_flight[number]
                        files.write(number, custom_id, job, requests)
                        bar.set_postfix_str(f"{len(files.errors)} errors", refresh=False)
                        bar.update()
        finally:  # requests are left after an error only
            llm.engine.abort(r for *_, requests in in_flight.values() for r in requests)


def option(text: str) -> tuple[str, Any]:
    """Parse OPTION=VALUE of a command line. VALUE is a Python literal, or else a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: give OPTION=VALUE, like max_num_seqs=16")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("nanovllm run-batch", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    file: dict[str, Any] = {"type": Path, "required": True, "metavar": "FILE"}
    add("-i", "--input-file", **file, help="the requests (.jsonl)")
    add("-o", "--output-file", **file, help="the results (.jsonl)")
    add("--model", default=EMBEDDED, help=f"directory or hub id ({EMBEDDED})")
    served = "the name of the model in the lines, if it is not --model"
    add("--served-model-name", metavar="NAME", help=served)
    trust = "accept a chat_template in a line; it is a program without a limit of time"
    add("--trust-chat-templates", action="store_true", help=trust)
    retry = "compute the lines again whose results are errors"
    add("--retry-errors", action="store_true", help=retry)
    pair: dict[str, Any] = {"type": option, "action": "append", "default": []}
    add("--set", **pair, metavar="OPTION=VALUE", help="an option of LLM(), like max_num_seqs=16")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    args = make_parser().parse_args(argv)
    options = dict(args.set)
    progress = ""
    try:
        if options.get("tensor_parallel_size", 1) != 1:
            raise ValueError("tensor_parallel_size: one process writes the output; use 1")
        with BatchFiles(args.input_file, args.output_file, args.retry_errors) as files:
            num_old_errors = len(files.errors)
            if len(files.done) < files.num_requests:
                llm = LLM(args.model, **options)  # its errors would come again at a resumption
                try:
                    run_batch(
                        llm,
                        files,
                        model=args.served_model_name or args.model,
                        max_concurrency=2 * llm.engine.scheduler.max_num_seqs,
                        trust_chat_templates=args.trust_chat_templates,
                    )
                finally:
                    done = f"{len(files.done)} of {files.num_requests} lines are done"
                    progress = f"; {done}: start the same command again to resume"
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}{progress}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted{progress}", file=sys.stderr)
        return 130
    num_errors = len(files.errors)
    new = f"({num_errors - num_old_errors} new)"
    print(f"{len(files.done)} results in {args.output_file}, {num_errors} with an error {new}")
    if num_errors:
        first = f"the first error is of {' '.join(files.errors[0].split())}"
        print(f"{first}; --retry-errors computes lines with errors again", file=sys.stderr)
    return int(num_errors > 0)

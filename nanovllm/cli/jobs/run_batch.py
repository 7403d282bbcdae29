"""Runs a file of requests: nanovllm run-batch -i in.jsonl -o out.jsonl --model NAME

Each line of the input is a request in OpenAI's batch format. Each result is a line of the output,
written as soon as it is known. The order of the output therefore differs from the input.

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
  {"id": ..., "custom_id": "a", "response": {"status_code": 200, "body": {...}, ...}, "error": null}

The result of an invalid line is an error. If the run is stopped at any point, even with kill -9,
run the same command again to resume it. docs/jobs.md says more.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import json
import os
import re
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tqdm import tqdm

from nanovllm.cli.jobs.openai_format import Job, error_body, parse
from nanovllm.config import EMBEDDED, engine_config
from nanovllm.engine.request import Request
from nanovllm.llm import LLM
from nanovllm.utils.checks import check_scalar

RESULT = re.compile(rb'\{"id": "batch-([0-9a-f]{16})-(\d{1,18})", ')  # what each line begins with
RECORD = re.compile(rb" *(\d{1,18}) ([0-9a-f]{16})((?: \d{1,18}:\d{1,9})*)\n")
MAX_ENDS = 2  # of the process while a line is added; then the line gets an error


class BatchFiles:
    """The input and the output of a run. Each line of the input has a hash, and is done or not.

    Each result begins with its id: the fingerprint of the input file and the number of a line. The
    constructor reads from the ids which lines are done. A result is appended with one system call,
    which kill -9 cannot undo. During the call, a kill or a full disk can leave a last line without
    a newline. This line is cut off and computed again.

    If an error ends the run before its first result, an output that the constructor has created is
    removed.

    The record, a file next to the output, names the line that is being added and counts how often
    the process ended while it added each line. It is removed if there are no counts.

    Raises OSError if a file cannot be opened. Raises ValueError in four cases: a custom_id occurs
    twice, the output has results of another input, the input has changed, or another process writes
    to the output. `left` raises ValueError if the input changes while it is read.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self.target = source, target
        if target.is_dir() or not target.absolute().parent.is_dir():
            raise ValueError(f"cannot write {target}; name a file in a directory that exists")
        for path in (source, target):
            if path.exists() and not path.is_file():
                raise ValueError(f"{path} is not a regular file, and it would be read twice")
        self.is_new = not target.exists()
        with contextlib.ExitStack() as files:
            self.lines = files.enter_context(source.open("rb"))
            self.hashes = array("Q")  # one for each line
            self.num_requests, self.fingerprint = self._scan()
            self.done = bytearray(1 + len(self.hashes))  # lines are numbered from 1
            self.num_done = 0
            self.results = files.enter_context(target.open("ab", buffering=0))
            try:
                fcntl.flock(self.results, fcntl.LOCK_EX | fcntl.LOCK_NB)
                opened = os.fstat(self.results.fileno())
                if not os.path.samestat(opened, target.stat()):  # removed, and created again
                    raise FileNotFoundError
            except (BlockingIOError, FileNotFoundError):
                raise ValueError(f"another process is writing to {target}") from None
            self.size = self._resume()  # bytes of complete lines
            self.results.truncate(self.size)
            self.ends: dict[int, int] = {}  # of the process, by number of the line
            self.record_path = target.with_name(target.name + ".adding")
            self.record_path.touch()
            self.record = files.enter_context(self.record_path.open("r+b", buffering=0))
            self._read_record()
            self._write_record()
            self.files = files.pop_all()

    def __enter__(self) -> BatchFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.ends:
            self.record_path.unlink(missing_ok=True)
        if kind is not None and self.is_new and not self.size:
            self.target.unlink(missing_ok=True)
        self.files.close()

    def _scan(self) -> tuple[int, str]:
        """Read the input once. Returns how many lines are not empty, and the fingerprint.

        Keeps a hash of each line, and a hash of each custom_id until the end of the scan.
        """
        digest = xxhash.xxh3_64()
        id_hashes = array("Q")
        num_requests = 0
        size = os.fstat(self.lines.fileno()).st_size
        with tqdm(
            total=size, desc="Reading", unit="B", unit_scale=True, delay=1, leave=False
        ) as bar:
            for line in self.lines:
                digest.update(line)
                self.hashes.append(xxhash.xxh3_64_intdigest(line))
                num_requests += bool(line.strip())
                if (custom_id := custom_id_of(line)) is not None:
                    id_hashes.append(hash_of(custom_id))
                bar.update(len(line))
        values = np.asarray(id_hashes)
        values.sort()
        suspects = set(values[1:][values[1:] == values[:-1]].tolist())
        first: dict[str, int] = {}
        self.lines.seek(0)
        for number, line in enumerate(self.lines if suspects else (), 1):
            custom_id = custom_id_of(line)
            if custom_id is None or hash_of(custom_id) not in suspects:
                continue
            if (earlier := first.setdefault(custom_id, number)) != number:
                raise ValueError(
                    f"custom_id {custom_id!r:.80} is in line {earlier} and in line {number} of "
                    f"{self.source}; give each line a different one"
                )
        return num_requests, digest.hexdigest()

    def _resume(self) -> int:
        """Mark the lines that are done. Returns the size of the complete lines of the output."""
        size = 0
        start = f'{{"id": "batch-{self.fingerprint}-'.encode()
        with self.target.open("rb") as results:
            for line in results:
                if not line.endswith(b"\n") and line[: len(start)] == start[: len(line)]:
                    break  # the last line is incomplete
                match = RESULT.match(line)
                if match and match[1].decode() != self.fingerprint:
                    raise ValueError(
                        f"{self.target} has results of another input than {self.source}, or of "
                        "other lines in it; restore them, or name another output"
                    )
                number = int(match[2]) if match else 0
                if not 0 < number < len(self.done) or not line.endswith(b"\n"):
                    raise ValueError(
                        f"{self.target} has lines that run_batch did not write; name another output"
                    )
                self._mark_done(number)
                size += len(line)
        return size

    def _mark_done(self, number: int) -> None:
        self.num_done += not self.done[number]
        self.done[number] = 1

    def _read_record(self) -> None:
        """Increase the count of a line if the last process ended while it added that line."""
        match = RECORD.match(self.record.read())
        if match and match[2].decode() == self.fingerprint:
            pairs = [pair.split(b":") for pair in match[3].split()]
            counts = {int(number): int(count) for number, count in pairs}
            counts[int(match[1])] = counts.get(int(match[1]), 0) + 1
            left = range(1, len(self.done))
            self.ends = {n: count for n, count in counts.items() if n in left and not self.done[n]}

    def _write_record(self, adding: int = 0) -> None:
        pairs = "".join(f" {number}:{count}" for number, count in self.ends.items())
        os.pwrite(self.record.fileno(), f"{adding:18} {self.fingerprint}{pairs}\n".encode(), 0)

    @contextlib.contextmanager
    def adding(self, number: int) -> Iterator[None]:
        """Record that a line is added. Raises RuntimeError after two crashes on it."""
        if self.ends.get(number, 0) >= MAX_ENDS:
            raise RuntimeError(
                f"the process ended {MAX_ENDS} times while this line was added: it crashed, or was "
                "killed; to try the line again, remove this result from the output"
            )
        self._write_record(number)
        try:
            yield
        finally:
            self._write_record()

    def left(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not done, each with its number.

        Raises ValueError at the first line that differs from the scan, because the result of
        another request would be stored under its number.
        """
        self.lines.seek(0)
        for number, known in enumerate(self.hashes, 1):
            line = self.lines.readline()
            if xxhash.xxh3_64_intdigest(line) != known:
                raise ValueError(
                    f"line {number} of {self.source} has changed since this run began; restore it"
                )
            if line.strip() and not self.done[number]:
                yield number, line

    def name(self, number: int) -> str:
        return f"batch-{self.fingerprint}-{number}"

    def write(self, number: int, result: dict[str, Any]) -> None:
        """Append a result. If this raises OSError, the complete lines of the output remain."""
        line = json.dumps({"id": self.name(number)} | result, allow_nan=False).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += self.results.write(line[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                self.results.truncate(self.size)
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self.target)) from error
        self.size += len(line)
        self._mark_done(number)
        if self.ends.pop(number, None):
            self._write_record()


def hash_of(custom_id: str) -> int:
    return xxhash.xxh3_64_intdigest(custom_id.encode("utf-8", "surrogatepass"))


def custom_id_of(line: bytes) -> str | None:
    """Return the custom_id of a line. None if it is missing; `parse_line` then raises an error."""
    try:
        custom_id = json.loads(line)["custom_id"]
    except (KeyError, RecursionError, TypeError, ValueError):
        return None
    return custom_id if isinstance(custom_id, str) else None


def parse_line(llm: LLM, line: bytes, model: str, templates: bool = False) -> Job:
    """Return the job of a line. Raises an error of any type that says what is wrong."""
    try:
        request = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"the line is not JSON: {error}") from None
    check_scalar("the line", request, dict)
    check_scalar("custom_id", request.get("custom_id"), str)
    if request.get("method") != "POST":
        raise ValueError(f"method must be 'POST', not {request.get('method')!r:.80}")
    return parse(llm, request.get("url"), request.get("body"), model, templates)


def run_batch(
    llm: LLM,
    files: BatchFiles,
    model: str = EMBEDDED,
    max_concurrency: int = 512,
    use_tqdm: bool = True,
    trust_chat_templates: bool = False,
) -> int:
    """Compute the lines that are left. Returns how many of their results have an error.

    model: the name that lines may give for the model of `llm`; a line may also give none.
    max_concurrency: largest number of lines in memory.
    trust_chat_templates: whether a line may contain a chat template, which is a program.

    If the engine, the disk or Ctrl-C ends the run, its requests are aborted and the error is
    raised.
    """
    in_flight: dict[int, tuple[str | None, Job, list[Request]]] = {}
    num_failed = 0
    start = time.monotonic()
    tokens_at_start = llm.stats()["output_tokens"]
    bar = tqdm(
        total=files.num_requests,
        initial=files.num_done,
        desc="Running",
        unit="req",
        disable=not use_tqdm,
    )

    def write(number: int, custom_id: str | None, body: Any, error: Any = None) -> None:
        nonlocal num_failed
        num_failed += error is not None
        code = 200 if error is None else error["error"]["code"]
        response = {"status_code": code, "request_id": files.name(number), "body": body}
        files.write(number, {"custom_id": custom_id, "response": response, "error": error})
        num_tokens = llm.stats()["output_tokens"] - tokens_at_start
        rate = num_tokens / (time.monotonic() - start + 1e-9)
        bar.set_postfix_str(f"output {rate:,.0f} tok/s, {num_failed} errors", refresh=False)
        bar.update()

    left = files.left()
    with bar:
        try:
            while True:
                while len(in_flight) < max_concurrency and (item := next(left, None)):
                    number, line = item
                    custom_id = custom_id_of(line)
                    try:
                        with files.adding(number):
                            job = parse_line(llm, line, model, trust_chat_templates)
                            in_flight[number] = custom_id, job, job.submit(llm)
                    except Exception as error:
                        write(number, custom_id, None, error_body(error))
                if not in_flight:
                    return num_failed
                llm.engine.run_step()
                for number, (custom_id, job, requests) in [*in_flight.items()]:
                    if all(request.ended for request in requests):
                        del in_flight[number]
                        try:
                            body, reason = job.response(files.name(number), requests), None
                        except Exception as error:
                            body, reason = None, error_body(error)
                        write(number, custom_id, body, reason)
        finally:  # requests are left after an error only
            llm.engine.abort(r for *_, requests in in_flight.values() for r in requests)


def option(text: str) -> tuple[str, Any]:
    """Parse OPTION=VALUE of a command line. VALUE is a Python literal, or else a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: give OPTION=VALUE, like max_num_seqs=16")
    if name == "model":
        raise argparse.ArgumentTypeError(f"{text}: give --model instead")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number, 1 or more")
    return int(text)


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
    in_flight = "largest number of lines in memory (twice max_num_seqs)"
    add("--max-concurrency", type=positive, metavar="N", help=in_flight)
    trust = "accept a chat_template in a line; it is a program without a limit of time"
    add("--trust-chat-templates", action="store_true", help=trust)
    pair: dict[str, Any] = {"type": option, "action": "append", "default": []}
    add("--set", **pair, metavar="OPTION=VALUE", help="an option of LLM(), like max_num_seqs=16")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    args = make_parser().parse_args(argv)
    options = dict(args.set)
    model = args.served_model_name or args.model
    progress = ""
    try:
        if options.get("tensor_parallel_size", 1) != 1:
            raise ValueError("tensor_parallel_size: one process writes the output; use 1")
        config = engine_config({"model": args.model, **options})
        with BatchFiles(args.input_file, args.output_file) as files:
            num_failed = 0
            if files.num_done < files.num_requests:
                max_concurrency = args.max_concurrency or 2 * config.max_num_seqs
                llm = LLM(args.model, **options)  # its errors would come again at a resumption
                try:
                    trust = args.trust_chat_templates
                    num_failed = run_batch(
                        llm, files, model, max_concurrency, trust_chat_templates=trust
                    )
                finally:
                    done = f"{files.num_done} of {files.num_requests} lines are done"
                    progress = f"; {done}: start the same command again to resume"
            print(f"{files.num_done} results in {args.output_file}, {num_failed} new errors")
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}{progress}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted{progress}", file=sys.stderr)
        return 130
    return 0

"""The requests of a trace: a file in the formats of Mooncake or Azure, or made. No torch."""

import csv
import json
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

HASHED = 512  # tokens of each of Mooncake's hash_ids
UNIQUE = 1 << 31  # tokens from here on belong to one request; hash_ids are below


@dataclass(frozen=True)
class TraceRequest:
    """hash_ids: one for each `HASHED` tokens of the prompt, equal where prompts are equal."""

    time: float  # seconds
    num_prompt: int
    num_output: int
    hash_ids: tuple[int, ...]

    def token_ids(self) -> list[int]:
        """Return tokens that are equal for two prompts exactly where their hash_ids are."""
        return [i for i in self.hash_ids for _ in range(HASHED)][: self.num_prompt]


def make_request(
    time: float, num_prompt: int, num_output: int, hash_ids: list[int]
) -> TraceRequest:
    """Check the values of a request. Raises ValueError."""
    for name, value in (("input", num_prompt), ("output", num_output)):
        if type(value) is not int or value < 1:
            raise ValueError(f"the {name} has {value!r} tokens; it needs at least one")
    if not time >= 0:
        raise ValueError(f"the time is {time}; it must not be negative")
    if len(hash_ids) != -(-num_prompt // HASHED):
        raise ValueError(
            f"{len(hash_ids)} hash_ids do not fit input_length={num_prompt}: each is for "
            f"{HASHED} tokens, so there must be {-(-num_prompt // HASHED)}"
        )
    if not all(type(i) is int and 0 <= i < UNIQUE for i in hash_ids):
        raise ValueError(f"hash_ids must be numbers from 0 to {UNIQUE - 1}")
    return TraceRequest(time, num_prompt, num_output, tuple(hash_ids))


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a file. Raises ValueError with the line of the first fault.

    .jsonl: lines of timestamp (ms), input_length, output_length and hash_ids, as Mooncake's traces
    (Qin et al. 2024, arXiv:2407.00079). .csv: lines of arrival (seconds, or a date), prompt tokens
    and output tokens, as Azure's traces (Patel et al. 2023, arXiv:2311.18677), with or without a
    header.
    """
    parse = {".jsonl": _from_json, ".csv": _from_csv}.get(path.suffix)
    if parse is None:
        raise ValueError(f"{path}: a trace is a .jsonl file or a .csv file")
    requests: list[TraceRequest] = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, line in enumerate(file, 1):
            is_header = number == 1 and parse is _from_csv and not line[:1].isdigit()
            if not line.strip() or is_header:
                continue
            try:
                request = parse(line, len(requests))
                if requests and request.time < requests[-1].time:
                    raise ValueError("it arrives before the line above; sort the trace by time")
            except (KeyError, TypeError, ValueError) as error:
                what = f"{error} is missing" if isinstance(error, KeyError) else error
                raise ValueError(f"{path}:{number}: {what}") from None
            requests.append(request)
    if not requests:
        raise ValueError(f"{path}: no requests")
    start = requests[0].time if parse is _from_csv else 0.0
    return [TraceRequest(r.time - start, r.num_prompt, r.num_output, r.hash_ids) for r in requests]


def _from_json(line: str, _: int) -> TraceRequest:
    fields: dict[str, Any] = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("a line must be an object with timestamp, input_length and so on")
    lengths = fields["input_length"], fields["output_length"]
    return make_request(fields["timestamp"] / 1000, *lengths, fields["hash_ids"])


def _from_csv(line: str, number: int) -> TraceRequest:
    [row] = csv.reader([line])
    if len(row) < 3:
        raise ValueError("a line needs arrival, prompt tokens and output tokens")
    arrival, num_prompt, num_output, *_ = row
    try:
        time = float(arrival)
    except ValueError:
        time = datetime.fromisoformat(arrival).timestamp()
    return alone(time, int(num_prompt), int(num_output), number)


def alone(time: float, num_prompt: int, num_output: int, number: int) -> TraceRequest:
    """Return a request whose prompt shares nothing. Raises ValueError."""
    request = make_request(time, num_prompt, num_output, [0] * -(-num_prompt // HASHED))
    tokens = (UNIQUE + number,) * len(request.hash_ids)
    return TraceRequest(time, num_prompt, num_output, tokens)


def make_chat(count: int = 500, rate: float = 2.0, seed: int = 0) -> list[TraceRequest]:
    """Return `count` turns of conversations. A turn repeats all earlier ones of its conversation.

    rate: turns per second, with exponential gaps (a Poisson process). All conversations begin with
    the same 1,024 tokens. With probability 0.7 a turn continues one of the last 20 conversations.
    It adds 100 to 1,500 tokens, mostly few, which include the answer before, and has an answer of
    20 to 600 tokens.
    """
    rng = random.Random(seed)
    ids = iter(range(2, UNIQUE))
    time = 0.0
    chats: list[tuple[int, list[int]]] = []  # tokens so far, and their hash_ids
    requests = []
    for _ in range(count):
        time += rng.expovariate(rate)
        is_new = not chats or rng.random() >= 0.7
        length, known = (1024, [0, 1]) if is_new else chats.pop(rng.randrange(len(chats)))
        length += round(100 + 1400 * rng.random() ** 3)
        known = known[: length // HASHED]
        known = [*known, *(next(ids) for _ in range(-(-length // HASHED) - len(known)))]
        requests.append(make_request(time, length, round(20 + 580 * rng.random() ** 2), known))
        # The last block is not full, so that the next turn has another one in its place.
        chats = [*chats, (length, known[: length // HASHED])][-20:]
    return requests

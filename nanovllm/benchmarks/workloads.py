"""Workloads: which requests a benchmark runs.

Owns: the table WORKLOADS, and the generator that makes requests of one of its rows. Given: settings and
a vocabulary's size. Everything is drawn from Python's random with seed 0: the same requests everywhere,
for every engine, whatever it answers.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Spec:
    """A workload's line in --help, and its numbers unless others are given."""

    help: str
    count: int  # requests; conversations, where there are several turns
    input: tuple[int, int]  # tokens of a prompt, uniform, ends included; of a turn's own text
    output: tuple[int, int]
    prefix: int = 0  # tokens that all prompts begin with
    turns: int = 1
    alone: bool = False  # one request at a time
    long_every: int = 0  # every so many prompts, one is ten times as long
    model: str | None = None  # the shape that it is for; None is the embedded model

    def __str__(self) -> str:
        """For --help."""
        into, out = (
            f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in (self.input, self.output)
        )
        extra = f", behind {self.prefix}" if self.prefix else ""
        extra += f", {self.turns} turns each" if self.turns > 1 else ""
        numbers = f"{self.count} of {into} tokens in, {out} out{extra}"
        return f"{self.help}\n{'':17}{numbers}; {self.model or 'the embedded model'}"


WORKLOADS = {
    "short": Spec("short prompts and answers; what the embedded model is for", 64, (16, 128), (16, 128)),
    "nano": Spec("nano-vllm's own benchmark: 133,966 tokens out", 256, (100, 1024), (100, 1024), model="qwen3-0.6b"),
    "cpu-mixed": Spec("a CPU's batch of mixed lengths", 16, (64, 256), (16, 128), model="qwen3-0.6b"),
    "cpu-prefix": Spec("a CPU's batch behind one prefix", 16, (32, 32), (32, 32), 512, model="qwen3-0.6b"),
    "cpu-small": Spec("many requests on a small model, where the host counts", 64, (100, 512), (50, 256), model="cpu-small"),
    "prefix": Spec("one system prompt shared by all", 64, (16, 64), (16, 64), 512),
    "chat": Spec("conversations; each turn's prompt holds the turns before it", 16, (16, 48), (16, 48), turns=4),
    "long": Spec("long prompts, short answers: prefill", 16, (8192, 8192), (16, 16), model="qwen3-0.6b"),
    "mixed": Spec("every eighth prompt is ten times as long: prefill beside decode", 64, (16, 64), (16, 128), long_every=8),
    "latency": Spec("one request at a time: batch 1", 4, (16, 128), (128, 128), alone=True),
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    outputs: list[int]  # tokens that each request generates, no fewer and no more
    rounds: list[list[int]]  # requests that run together; a round begins when the last has ended
    temperature: float = 0.6

    @property
    def num_input(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output(self) -> int:
        return sum(self.outputs)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(p) + n for p, n in zip(self.prompts, self.outputs, strict=True))

    def subset(self, chosen: Iterable[int]) -> "Workload":
        """The chosen requests alone, in the same rounds."""
        place = {old: new for new, old in enumerate(chosen)}
        rounds = [[place[i] for i in r if i in place] for r in self.rounds]
        return Workload(
            self.name,
            [self.prompts[i] for i in place],
            [self.outputs[i] for i in place],
            [r for r in rounds if r],
            self.temperature,
        )

    def common_prefix(self, round_: list[int]) -> int:
        """Tokens that all prompts of a round of two or more begin with."""
        prompts = sorted(self.prompts[i] for i in round_)
        return shared(prompts[0], prompts[-1]) if len(prompts) > 1 else 0

    def distinct(self) -> list[tuple[int, int]]:
        """Spans (start, end) of positions that some engine has to compute at least once.

        Sorted prompts stand beside those that they share most with, so what is left of each is new.
        """
        prompts = sorted(self.prompts)
        starts = [0, *(shared(a, b) for a, b in pairwise(prompts))]
        return [(s, len(p)) for s, p in zip(starts, prompts, strict=True)]


def shared(a: list[int], b: list[int]) -> int:
    """How many tokens a and b begin with in common."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def make_workload(name: str, spec: Spec, vocab_size: int) -> Workload:
    """Draw the requests: lengths and ids of the prompts, then the lengths of the outputs.

    In this order, and with ids from 0 to 10,000, `nano` is token for token what nano-vllm's bench.py
    runs. The answers within a conversation are drawn too: every engine then gets the same tokens,
    though none of them finds what it answered itself in its cache.
    """
    rng = random.Random(0)

    def ids(length: int) -> list[int]:
        return [rng.randint(0, min(10_000, vocab_size - 1)) for _ in range(length)]

    prefix = ids(spec.prefix)
    prompts: list[list[int]] = []
    for i in range(spec.count):
        long = spec.long_every and i % spec.long_every == 0
        length = rng.randint(*spec.input) * (10 if long else 1)
        prompts.append(prefix + ids(length))
    outputs: list[int] = []
    for i in range(spec.count * (spec.turns - 1)):  # a turn goes on from that of the round before
        outputs.append(rng.randint(*spec.output))
        prompts.append(prompts[i] + ids(outputs[i]) + ids(rng.randint(*spec.input)))
    outputs += [rng.randint(*spec.output) for _ in range(spec.count)]
    size = 1 if spec.alone else spec.count
    rounds = [list(range(i, min(i + size, len(prompts)))) for i in range(0, len(prompts), size)]
    return Workload(name, prompts, outputs, rounds)

"""Checks the milestones of `Engine`: python -m lessons build m1 --check FILE, to m6.

$MILESTONE, such as m3, is the last of them that is checked.
"""

import functools
import os
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from build_check import case as noted
from build_check import expect, load, same
from engine_answers import LONG, by_transformers, reference, tokenizer_and_ends
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lessons import ladder
from lessons.lesson import ask, make_llm
from lessons.lesson02_model import Attend, Model
from lessons.show import show_table

torch.set_num_threads(1)  # tiny products gain nothing from threads
LAST = int(os.environ.get("MILESTONE", "m6").removeprefix("m"))
Engine = load("engine.py", "Engine", task=f"m{LAST}")
BLOCK = 16  # slots
QUESTIONS = [
    "What is 12 + 30?\n",
    "Spell garden\n",
    "Sort 42, 7, 99\n",
    "Count from 1 to 9\n",
    "Reverse the word planet.\n",
]
SYSTEM = "You are a helpful assistant.\n" * 8  # more than 32 tokens


class Step(NamedTuple):
    ids: list[int]
    positions: list[int]
    logits: Tensor
    blocks: int  # that requests own


class Recorded(Model):
    """The model of lesson 2, which records what its steps compute."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.engine: Any = None
        self.erased = False  # whether a step finds an empty KV cache

    def logits(self, ids: Sequence[int], positions: Sequence[int], attend: Attend) -> Tensor:
        if self.erased:
            self.engine.kv.zero_()
        logits = super().logits(ids, positions, attend)
        blocks = getattr(self.engine, "blocks", None)
        used = blocks.num_blocks - blocks.num_available if blocks else 0
        self.steps.append(Step([*ids], [*positions], logits.clone(), used))
        return logits

    @property
    def computed(self) -> int:
        return sum(len(step.ids) for step in self.steps)


class Case(NamedTuple):
    what: str
    hint: str  # compares it with the case before it, which is right
    prefix: str = ""  # of all questions
    number: int = 5  # of QUESTIONS
    blocks: int = 64
    rows: int = 5
    budget: int = 512
    shuffled: bool = False  # the order in which blocks are given


# The cases of each milestone, the simplest first.
CASES = {
    1: [
        Case("One question", "", number=1),
        Case(
            "Five questions in one call",
            "One question alone is right: look at what is left of the one before.",
        ),
    ],
    2: [
        Case(
            "A prompt of several blocks that are not side by side",
            "The same in one block is right: look at the slots of positions after the first 16.",
            prefix=SYSTEM,
            number=1,
            shuffled=True,
        ),
        Case(
            "Five questions with 2 blocks in all",
            "The same with 64 blocks is right: look at the blocks of a request that has ended.",
            blocks=2,
            rows=1,
        ),
    ],
    3: [
        Case(
            "Five questions with five rows",
            "One after the other is right: look at which request a row of q, k, v and of the "
            "logits belongs to.",
        ),
        Case(
            "Five questions with two rows",
            "The same with a row for each is right: look at those that wait.",
            rows=2,
            budget=64,
        ),
        Case(
            "Five questions with three rows and a budget of 7",
            "The same with a budget of 64 is right: look at chunks. One after a prefix attends to "
            "it, and one that does not end the known tokens gives no token.",
            rows=3,
            budget=7,
        ),
    ],
    4: [
        Case(
            "Five questions that begin alike, after one another in the cache",
            "Questions that begin differently are right: look at num_computed, the positions and "
            "the slots of tokens after cached blocks.",
            prefix=SYSTEM,
            rows=1,
        ),
        Case(
            "Five questions that begin alike, with three rows and a budget of 7",
            "The same with one row is right: look at requests that match and are not admitted.",
            prefix=SYSTEM,
            rows=3,
            budget=7,
        ),
    ],
    5: [
        Case(
            "Five questions with three rows and 4 blocks in all",
            "The same with 64 blocks is right: look at what a request loses and keeps when it is "
            "preempted, and at those that stay in the plan.",
            blocks=4,
            rows=3,
        ),
        Case(
            "Five questions that begin alike, with five rows and 16 blocks in all",
            "The same without a common beginning is right: look at requests that are admitted and "
            "preempted in one step.",
            prefix=SYSTEM,
            blocks=16,
            budget=40,
        ),
    ],
}


def since(milestone: int) -> Any:
    return pytest.mark.skipif(milestone > LAST, reason="a later milestone")


@functools.cache
def shared() -> tuple[Any, Recorded, set[int]]:
    """The tokenizer, the model and the end tokens."""
    tokenizer, ends = tokenizer_and_ends()
    return tokenizer, Recorded(), ends


def start(blocks: int = 64, rows: int = 4, budget: int = 64, shuffled: bool = False) -> Any:
    model = shared()[1]
    model.steps.clear()
    model.engine = Engine(model, blocks, BLOCK, rows, budget)
    if LAST >= 2:
        expect(hasattr(model.engine, "blocks"), "The engine has no self.blocks: see m2.")
        if shuffled:
            # With this seed, neither an ascending nor a descending table has the same blocks last.
            random.Random(2).shuffle(model.engine.blocks.free)
    return model.engine


@functools.cache
def texts_of(case: Case) -> list[list[int]]:
    """The tokens of each question and its answer."""
    texts = [case.prefix + question for question in QUESTIONS[: case.number]]
    return [shared()[0].encode(text) + by_transformers(text) for text in texts]


def pieces(step: Step, texts: list[list[int]]) -> list[tuple[int, int, int]]:
    """Divide the tokens of a step among requests -> (request, first and last index in the step).

    A request is -1 if no text has this token at this position.
    """
    found, first = list[tuple[int, int, int]](), 0
    while first < len(step.ids):
        last, owners = first, list(range(len(texts)))
        for i in range(first, len(step.ids)):
            token, position = step.ids[i], step.positions[i]
            if position != step.positions[first] + i - first:
                break
            left = [j for j in owners if texts[j][position : position + 1] == [token]]
            if not left and i > first:
                break
            owners, last = left, i
        taken = [request for request, *_ in found]
        owners = [j for j in owners if j not in taken] or owners
        found.append((owners[0] if owners else -1, first, last))
        first = last + 1
    return found


def first_difference(texts: list[list[int]]) -> str:
    """Say in which step the plan or the logits are wrong first, or "" if all are right."""
    tokenizer, model, _ = shared()
    for number, step in enumerate(model.steps, 1):
        parts = pieces(step, texts)
        names = [
            f"{step.positions[a]} to {step.positions[b]} of request {request}"
            if request >= 0
            else f"{tokenizer.decode([step.ids[a]])!r} at position {step.positions[a]}, where no "
            "request has it"
            for request, a, b in parts
        ]
        plan = f"Step {number} computes the tokens {', '.join(names)}"
        if any(request < 0 for request, *_ in parts):
            return f"{plan}. All logits before are right: look at what is planned and sampled."
        for request, a, b in parts:
            # Several requests can have these tokens here. It is one whose logits are right, if any.
            start, end = step.positions[a], step.positions[b]
            owners = [t for t in texts if t[start : end + 1] == list(step.ids[a : b + 1])]
            wants = [reference(tuple(text))[end] for text in owners]
            want = reference(tuple(texts[request]))[end]
            if not any(torch.allclose(step.logits[b], logits, atol=0.01) for logits in wants):
                best = (tokenizer.decode([int(x.argmax())]) for x in (want, step.logits[b]))
                right, wrong = map(repr, best)
                what = f"the most likely token should be {right}, and is {wrong}"
                return (
                    f"{plan}. This is the first step with wrong logits, of request {request} at "
                    f"position {step.positions[b]}"
                    + (f": {what}." if right != wrong else ", which do not change the token yet.")
                )
    return ""


def check_case(case: Case, milestone: int) -> Any:
    """Compare the answers with transformers'. Returns the engine."""
    tokenizer, _, ends = shared()
    texts = texts_of(case)
    questions = [case.prefix + question for question in QUESTIONS[: case.number]]
    prompts = [tokenizer.encode(question) for question in questions]
    given = [list(prompt) for prompt in prompts]
    engine = start(case.blocks, case.rows, case.budget, case.shuffled)
    try:
        with torch.inference_mode():
            outputs = engine.generate(given, [LONG] * case.number, ends)
    except NotImplementedError:
        raise
    except Exception as error:
        error.add_note(f"{case.what}. {case.hint}")
        raise
    with torch.inference_mode():
        for i, (question, prompt, got) in enumerate(zip(questions, prompts, outputs, strict=True)):
            want = texts[i][len(prompt) :]
            limit = f"{case.what}: request {i} has {len(got)} new tokens, and may have {LONG}."
            expect(len(got) <= LONG, limit)
            if list(got) != want:
                sampled = "The logits of all steps are right: look at which are sampled, and when."
                right, wrong = map(tokenizer.decode, (want, got))
                expect(
                    False,
                    f"{case.what}: transformers answers {question[-30:]!r} (request {i}) with "
                    f"{right!r}, and your engine with {wrong!r}. {case.hint}\n\n"
                    f"{first_difference(texts) or sampled}",
                )
        difference = first_difference(texts)
        expect(not difference, f"{case.what}: the answers are right by chance. {difference}")
    same(given, prompts, f"{case.what}: the prompts, which are the caller's,")
    if milestone >= 2:
        left = engine.blocks.num_available
        same(left, case.blocks, f"{case.what}: all have ended. The blocks that are available again")
    return engine


@pytest.mark.parametrize("case", CASES[1])
def test_m1(case: Case) -> None:
    check_case(case, min(LAST, 2))
    if LAST == 1:
        outputs = [by_transformers(question) for question in QUESTIONS[: case.number]]
        prompts = [len(shared()[0].encode(question)) for question in QUESTIONS[: case.number]]
        want = sum(prompts) + sum(len(output) - 1 for output in outputs)
        what = f"{case.what}, prompts of {prompts} tokens and outputs of {[*map(len, outputs)]}."
        what += " If each token is computed once, and the last one never, the computed tokens"
        same(shared()[1].computed, want, what)


@since(2)
@pytest.mark.parametrize("case", CASES[2])
def test_m2(case: Case) -> None:
    check_case(case, 2)


@since(2)
def test_m2_keys_are_in_the_slots() -> None:
    engine = start(8, 1, 64, shuffled=True)
    order = engine.blocks.free[::-1]
    engine.kv.fill_(torch.nan)
    with torch.inference_mode():
        engine.generate([[7] * 30], [5], set())
    used = (~engine.kv[0, 0].isnan().all(-1).all(-1)).nonzero()[:, 0].tolist()
    want = sorted(order[i // BLOCK] * BLOCK + i % BLOCK for i in range(34))
    what = f"A prompt of 30 tokens and 5 of output, in the blocks {order[:3]}. The slots of self.kv"
    same(used, want, f"{what} that are written, for all tokens but the last,")
    finite = not shared()[1].steps[-1].logits.isnan().any()
    expect(
        finite,
        "self.kv is full of NaN before the first step, and slots that nobody has written are read.",
    )


@since(2)
def test_m2_earlier_keys_are_read_from_the_slots() -> None:
    model, results = shared()[1], []
    for model.erased in (False, True):
        with torch.inference_mode():
            start(8, 1, 64).generate([[7] * 30], [2], set())
        results.append(model.steps[-1].logits)
    model.erased = False
    differs = not torch.allclose(*results)
    expect(
        differs, "self.kv is erased before step 2, which should change its logits, and does not."
    )


@since(2)
def test_m2_blocks_are_taken_when_a_token_needs_them() -> None:
    start(8, 1, 64).generate([[7] * 15], [6], set())
    used, text = (
        [step.blocks for step in shared()[1].steps],
        "A prompt of 15 tokens and 6 of output",
    )
    same(used, [1, 1, 2, 2, 2, 2], f"{text}: the blocks of {BLOCK} slots that each step owns")


@since(3)
def test_m3_a_row_is_free_when_a_request_ends() -> None:
    start(rows=2).generate([[300 + i, 5] for i in range(4)], [2, 10, 4, 4], set())
    what = (
        "Two rows, and requests for [2, 10, 4, 4] tokens. Two wait until the first has ended. The"
    )
    same(len(shared()[1].steps), 10, f"{what} steps of all")


@since(3)
@pytest.mark.parametrize("case", CASES[3])
def test_m3(case: Case) -> None:
    check_case(case, 3)
    steps, outputs = shared()[1].steps, [by_transformers(question) for question in QUESTIONS]
    most = max(len(step.ids) for step in steps)
    expect(most <= case.budget, f"A step computes {most} tokens, and the budget is {case.budget}.")
    rows = max(len(pieces(step, texts_of(case))) for step in steps)
    expect(rows <= case.rows, f"{case.what}: a step computes tokens of {rows} requests.")
    alone = sum(map(len, outputs))
    expect(
        len(steps) < alone,
        f"{case.what} take {len(steps)} steps, as many as one after the other. A step should "
        "compute tokens of several requests.",
    )


@since(3)
def test_m3_blocks_are_taken_chunk_by_chunk() -> None:
    start(rows=1, budget=BLOCK).generate([[7] * 40], [1], set())
    what = f"A prompt of 40 tokens in chunks of {BLOCK}: the blocks of {BLOCK} slots that each step"
    same([step.blocks for step in shared()[1].steps], [1, 2, 3], f"{what} owns")


@since(4)
@pytest.mark.parametrize("case", CASES[4])
def test_m4(case: Case) -> None:
    check_case(case, 4)


@since(4)
def test_m4_a_prefix_is_computed_once() -> None:
    tokenizer, model, ends = shared()
    prompts = [tokenizer.encode(SYSTEM + question) for question in QUESTIONS[:2]]
    common = next(i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)
    common = common // BLOCK * BLOCK
    engine = start()
    for prompt in prompts:
        model.steps.clear()
        with torch.inference_mode():
            [got] = engine.generate([prompt], [LONG], ends)
    what = f"Two prompts begin with the same {common} tokens, in full blocks, and run one after the"
    want = len(prompts[1]) + len(got) - 1 - common
    same(model.computed, want, f"{what} other. The tokens that the second computes")
    with torch.inference_mode():
        start(rows=2, budget=len(prompts[0])).generate(prompts, [3, 1], set())
    what = (
        f"The same two, of {[*map(len, prompts)]} tokens. The second is admitted in step 2, while"
    )
    want = len(prompts[0]) + 2 + len(prompts[1]) - common
    same(model.computed, want, f"{what} the first runs. The tokens that both compute")


@since(4)
def test_m4_requests_wait_without_blocks() -> None:
    """With this budget, requests with a cached prefix wait for more than one step."""
    engine, prefix, taken = start(rows=3, budget=7), [7] * 40, list[int]()
    attach = engine.blocks.attach_cached

    def counted(seq: Any, matched: list[Any]) -> None:
        taken.append(len(matched))
        attach(seq, matched)

    engine.blocks.attach_cached = counted
    with torch.inference_mode():
        engine.generate([prefix], [1], set())
        engine.generate([[*prefix, 10 + i] for i in range(5)], [1] * 5, set())
    same(engine.blocks.num_available, 64, "When all have ended, the available blocks")
    what = "5 prompts begin with the same 32 tokens, which are cached. The tokens that all compute"
    same(shared()[1].computed - len(prefix), 5 * 9, what)
    what = "5 requests have taken these 2 blocks from the cache, once each. The lengths of what"
    same([n for n in taken if n], [2] * 5, f"{what} attach_cached gets")
    owned = max(step.blocks for step in shared()[1].steps)
    engine = start(blocks=6, rows=1)
    with torch.inference_mode():
        for head in (7, 8):
            engine.generate([[head] * 33], [1], set())
        shared()[1].steps.clear()
        engine.generate([[6] * 10, [7] * 33, [8] * 33], [60, 1, 1], set())
    owned = max(step.blocks for step in shared()[1].steps)
    what = "One request of 70 tokens runs in 5 blocks, and two with cached prefixes wait. The most"
    same(owned, 5, f"{what} blocks that are owned in a step")


@since(4)
def test_m4_a_prefix_with_hits_survives_documents() -> None:
    prefix, engine = [7] * 32, start(blocks=6, rows=1)
    with torch.inference_mode():
        for i in range(3):
            engine.generate([[*prefix, 10 + i]], [1], set())
        engine.generate([[20 + i] * 40 for i in range(3)], [1] * 3, set())
        shared()[1].steps.clear()
        engine.generate([[*prefix, 30]], [1], set())
    what = "A prefix of 32 tokens has 2 hits, and then 3 documents need its blocks, if blocks "
    what += "without hits are not evicted first. The tokens that the next chat computes"
    same(shared()[1].computed, 1, what)


@since(5)
def test_m5_the_last_one_admitted_waits() -> None:
    engine = start(blocks=3, rows=3)
    prompts = [[301] * 14, [302] * 14, [303] * 13]
    what = "Requests of 14, 14 and 13 tokens, for 12 more, in 3 blocks of 16 slots. "
    with torch.inference_mode(), noted(what + CASES[5][0].hint):
        engine.generate([list(prompt) for prompt in prompts], [12] * 3, set())
    steps = shared()[1].steps
    # The oldest has a token in each of its 12 steps, and nothing of it is computed again.
    oldest = [step.positions for step in steps[:12]]
    want = [*range(14), *range(14, 25)]
    got = [p for positions in oldest for p in head_of(positions)]
    same(
        got,
        want,
        f"{what}The oldest is never preempted: the positions that the first 12 steps "
        "compute of it, which come first in each,",
    )
    what += "The second was preempted after the third, so it waits at the head. A block of its "
    what += "first 16 tokens is cached. "
    first = steps[12].positions[0] if len(steps) > 12 else None
    same(first, 16, f"{what}The first position that step 13 computes")
    same(engine.blocks.num_available, 3, f"{what}When all have ended, the available blocks")


@since(5)
@pytest.mark.parametrize("case", CASES[5])
def test_m5(case: Case) -> None:
    check_case(case, 5)
    most = max(step.blocks for step in shared()[1].steps)
    expect(most <= case.blocks, f"{case.what}: a step owns {most} blocks.")


def head_of(positions: list[int]) -> list[int]:
    """The positions of the first request of a step."""
    breaks = (i for i, (a, b) in enumerate(pairwise(positions), 1) if b != a + 1)
    return positions[: next(breaks, len(positions))]


def as_bytes(token: int) -> bytes:
    of_sign = {sign: number for number, sign in bytes_to_unicode().items()}
    [text] = shared()[0].convert_ids_to_tokens([token])
    return bytes(of_sign[sign] for sign in text)


@since(6)
@pytest.mark.parametrize("stops", [[], [", 7"], ["0 =", "arden"], ["\n", "5, 6, 7"]], ids=str)
@pytest.mark.parametrize(("blocks", "budget"), [(64, 64), (4, 7)])
def test_m6(stops: list[str], blocks: int, budget: int) -> None:
    tokenizer, _, ends = shared()
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    want = [output.outputs[0].text for output in ask(llm, QUESTIONS, max_tokens=LONG, stop=stops)]
    engine, given, parts = start(blocks, 3, budget), list(stops), [list[str]() for _ in QUESTIONS]
    prompts, free = [tokenizer.encode(question) for question in QUESTIONS], list[int]()
    what = f"Stop strings {stops}, {blocks} blocks and a budget of {budget}. "
    with torch.inference_mode():
        for number, text in engine.stream(prompts, [LONG] * 5, ends, given, as_bytes):
            expect(text != "", f"{what}`stream` yields an empty text of request {number}.")
            parts[number].append(text)
            free.append(engine.blocks.num_available)
    for number, (part, text) in enumerate(zip(parts, want, strict=True)):
        same(
            "".join(part),
            text,
            f"{what}The streamed text of request {number}, in {len(part)} parts,",
        )
    same(engine.blocks.num_available, blocks, f"{what}When all have ended, the available blocks")
    same(free[-1], blocks, f"{what}The available blocks when the last text is yielded")
    if not stops:
        same(
            len(parts[3]),
            len(by_transformers(QUESTIONS[3])),
            f"{what}Each token of request 3 can be shown at once. The parts of its text",
        )
    same(given, stops, f"{what}The list of stop strings, which is the caller's,")


@since(6)
def test_m6_a_stop_string_ends_a_request() -> None:
    tokenizer, model, ends = shared()
    prompt = tokenizer.encode(QUESTIONS[3])
    with torch.inference_mode():
        list(start().stream([prompt], [LONG], ends, ["3"], as_bytes))
    output = by_transformers(QUESTIONS[3])
    want = next(i for i, token in enumerate(output, 1) if b"3" in as_bytes(token))
    what = (
        f"{QUESTIONS[3]!r} with stop=['3'], which token {want} of the output completes. The steps"
    )
    same(len(model.steps), want, what)


@since(6)
def test_m6_a_stream_is_closed_early() -> None:
    tokenizer, model, ends = shared()
    prompts = [tokenizer.encode(question) for question in QUESTIONS]
    engine, what = start(rows=3), "A stream of 5 requests with three rows"
    with torch.inference_mode():
        stream = engine.stream(prompts, [LONG] * 5, ends, [], as_bytes)
        next(stream)
        same(len(model.steps), 1, f"{what}. The steps when it yields the first text")
        stream.close()
        what += " is closed after the first text. "
        same(engine.blocks.num_available, 64, f"{what}The blocks that are available again")
        [got] = engine.generate(prompts[:1], [LONG], ends)
    same(got, by_transformers(QUESTIONS[0]), f"{what}What `generate` then answers")


def test_the_rung(capsys: pytest.CaptureFixture[str]) -> None:
    """The table compares the engine with nanovllm on the rung of the same lesson."""
    rung = ladder.rungs_of({1: "3", 2: "5", 3: "6"}.get(LAST, "8"))[-1]
    llm = make_llm(**rung.options)
    requests = ladder.make_requests(llm, 8)
    prompts, numbers = [ids for ids, _ in requests], [number for _, number in requests]

    def yours() -> ladder.Run:
        engine, model = start(256, ladder.ROWS, ladder.BUDGET), shared()[1]
        times = [ladder.time.monotonic()]
        with torch.inference_mode():
            tokens = engine.generate([list(ids) for ids in prompts], numbers, set())
        times.append(ladder.time.monotonic())
        slots = BLOCK * max(step.blocks for step in model.steps)
        if not slots:  # the longest text
            slots = 1 + max(max(step.positions) for step in model.steps)
        return ladder.Run(tokens, [len(step.ids) for step in model.steps], slots, times)

    runs: list[tuple[str, Callable[[], ladder.Run]]] = [
        (f"your engine at m{LAST}", yours),
        (f"nanovllm, {rung.adds}", lambda: rung.run(llm, requests)),
    ]
    rows, first = [], None
    for name, run in runs:
        best = min((run() for _ in range(2)), key=lambda each: each.seconds)
        first = first or best
        expect(first.tokens == best.tokens, "8 requests: your tokens differ from nanovllm's.")
        speed = sum(numbers) / best.seconds
        rows.append((name, len(best.steps), sum(best.steps), best.slots, f"{speed:,.0f}"))
    with capsys.disabled():
        print("\n\n8 requests of the ladder:\n")
        show_table(("engine", "steps", "computed", "slots", "tokens/s"), rows)

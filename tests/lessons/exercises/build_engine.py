"""Checks `Engine`: python -m lessons build engine --check FILE"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from build_check import expect, load, same
from torch import Tensor
from transformers import AutoModelForCausalLM, TypicalLogitsWarper
from transformers.utils.logging import disable_progress_bar

from lessons.lesson import ask, make_llm, timed
from lessons.lesson02_model import Attend, Model
from lessons.show import show_table
from nanovllm.config import EMBEDDED
from nanovllm.loading.checkpoint import find_checkpoint

torch.set_num_threads(1)  # tiny products gain nothing from threads
disable_progress_bar()
Engine = load("engine.py", "Engine")
QUESTIONS = [
    "What is 12 + 30?\n",
    "Spell garden\n",
    "Sort 42, 7, 99\n",
    "Count from 1 to 9\n",
    "Reverse the word planet.\n",
]
SYSTEM = "You are a helpful assistant.\n" * 8  # more than 32 tokens


class Recorded(Model):
    """The model of lesson 2, which records what its steps compute."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []  # tokens of each

    def logits(self, ids: Sequence[int], positions: Sequence[int], attend: Attend) -> Tensor:
        self.steps.append(len(ids))
        return super().logits(ids, positions, attend)


@functools.cache
def shared() -> tuple[Any, Recorded, Any, set[int]]:
    """The tokenizer, the model, transformers' model and the end tokens."""
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    model = AutoModelForCausalLM.from_pretrained(find_checkpoint(EMBEDDED), dtype=torch.float32)
    return llm.get_tokenizer(), Recorded(), model, set(llm.engine.input_processor.eos_token_ids)


def start(num_blocks: int = 64, rows: int = 4, budget: int = 64) -> Any:
    shared()[1].steps.clear()
    return Engine(shared()[1], num_blocks, 16, rows, budget)


@functools.cache
def by_transformers(text: str, number: int, typical_p: float = 0) -> list[int]:
    tokenizer, _, model, ends = shared()
    ids: list[int] = tokenizer.encode(text)
    output: list[int] = []
    while len(output) < number and not (output and output[-1] in ends):
        logits = model(torch.tensor([ids + output])).logits[:, -1]
        warped = TypicalLogitsWarper(typical_p)(None, logits) if typical_p else logits
        output.append(int(warped.argmax()))
    return output


def compare(got: list[int], question: str, number: int, detail: str = "", p: float = 0) -> None:
    want, decode = by_transformers(question, number, p), shared()[0].decode
    what = f"{question!r}{detail}: transformers answers {decode(want)!r}, and your engine"
    expect(got == want, f"{what} {decode(got)!r}.")


@torch.inference_mode()
@pytest.mark.parametrize(("number", "rows", "budget"), [(1, 4, 64), (5, 4, 64), (5, 3, 7)])
def test_answers(number: int, rows: int, budget: int) -> None:
    """Also with fewer rows than questions, and a budget that cuts prompts into chunks."""
    prompts = [shared()[0].encode(question) for question in QUESTIONS[:number]]
    engine = start(rows=rows, budget=budget)
    outputs = engine.generate(prompts, [12] * number, shared()[3])
    what = f"{number} question{'s' * (number > 1)} with {rows} rows and a budget of {budget}"
    for question, got in zip(QUESTIONS, outputs, strict=False):
        compare(got, question, 12, f", one of {what}" if number > 1 else "")
    most, steps = max(shared()[1].steps), len(shared()[1].steps)
    expect(most <= budget, f"A step computes {most} tokens, and the budget is {budget}.")
    expect(
        number == 1 or steps < sum(map(len, outputs)),
        f"{what} take {steps} steps, as many as one after the other. A step should compute tokens "
        "of several requests.",
    )
    same(engine.blocks.num_available, 64, f"{what} have ended. The available blocks, of 64,")


@torch.inference_mode()
def test_the_longest_output_runs_first() -> None:
    new = [2, 2, 37, 2, 2]
    start(rows=2).generate([[300 + i, 5] for i in range(5)], new, set())
    what = f"Two rows, and requests for {new} tokens. If the longest runs first, the steps of all"
    same(len(shared()[1].steps), max(new), what)


@torch.inference_mode()
def test_a_prefix_is_computed_once() -> None:
    tokenizer, model, _, ends = shared()
    prompts = [tokenizer.encode(SYSTEM + question) for question in QUESTIONS[:2]]
    common = next(i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b) // 16 * 16
    engine = start()
    for prompt, question in zip(prompts, QUESTIONS, strict=False):
        model.steps.clear()
        [got] = engine.generate([prompt], [12], ends)
        compare(got, SYSTEM + question, 12)
    what = (
        f"Two prompts begin with the same {common} tokens, in full blocks, and run one after the "
    )
    want = len(prompts[1]) + len(got) - 1 - common
    same(sum(model.steps), want, f"{what}other. The tokens that the second computes")


@torch.inference_mode()
def test_a_prefix_is_attached_once() -> None:
    """With this budget, requests with a cached prefix wait for more than one step."""
    engine, prefix = start(rows=3, budget=7), [7] * 40
    engine.generate([prefix], [1], set())
    engine.generate([[*prefix, 10 + i] for i in range(5)], [1] * 5, set())
    what = "Requests take their cached prefix once, even if they wait for several steps after that."
    same(engine.blocks.num_available, 64, f"{what} When all have ended, the available blocks")
    what = "5 prompts begin with the same 32 tokens, which are cached. The tokens that all compute"
    same(sum(shared()[1].steps) - len(prefix), 5 * 9, what)
    engine = start(rows=2)
    engine.generate([prefix], [1], set())
    engine.generate([[*prefix, 10 + i] for i in range(2)], [1] * 2, set())
    what = "2 prompts begin with the same 32 tokens, which are cached, and both have a row. The "
    same(sum(shared()[1].steps) - len(prefix), 2 * 9, f"{what}tokens that both compute")


@torch.inference_mode()
def test_a_prefix_with_hits_survives_documents() -> None:
    prefix, engine = [7] * 32, start(num_blocks=6, rows=1)
    for i in range(3):
        engine.generate([[*prefix, 10 + i]], [1], set())
    engine.generate([[20 + i] * 40 for i in range(3)], [1] * 3, set())
    shared()[1].steps.clear()
    engine.generate([[*prefix, 30]], [1], set())
    what = (
        "A prefix of 32 tokens has 2 hits, and then 3 documents need its blocks, if blocks without "
    )
    what += "hits are not evicted first. The tokens that the next chat computes"
    same(sum(shared()[1].steps), 1, what)


@torch.inference_mode()
def test_waiting_requests_hold_no_blocks() -> None:
    """Two cached prefixes have 4 of 6 blocks, and a request that runs alone needs 5."""
    prefixes = [[7] * 32, [8] * 32]
    try:
        for length in (70, 10):  # takes 5 blocks at once, or one after the other
            engine = start(num_blocks=6, rows=1)
            for prefix in prefixes:
                engine.generate([[*prefix, 9]], [1], set())
            prompts = [[6] * length, *([*prefix, 9] for prefix in prefixes)]
            engine.generate(prompts, [80 - length, 1, 1], set())
    except Exception as error:  # whatever a block manager without blocks raises
        what = "With one row a request needs 5 of 6 blocks, and your engine raises"
        expect(False, f"{what} {error!r}. No request that has to wait may hold blocks.")


@torch.inference_mode()
def test_one_new_token_attends_by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax, calls = sys.modules["softmax"], list[int]()
    update = softmax.update

    def counted(state: Any, scores: Tensor, values: Tensor) -> Any:
        calls.append(len(scores))
        return update(state, scores, values)

    monkeypatch.setattr(softmax, "update", counted)
    monkeypatch.setitem(Engine.attend.__globals__, "update", counted)
    start().generate([[7] * 20], [2], set())
    what = "A request with one new token should attend through tiles, but `update` of softmax.py is"
    expect(len(calls) > 0, f"{what} not called.")


@torch.inference_mode()
def test_the_filter_is_used() -> None:
    text = "What is "
    for p in (0.05, 0.2):
        [got] = start().generate([shared()[0].encode(text)], [6], shared()[3], p)
        compare(got, text, 6, f" with typical_p={p}", p)


@torch.inference_mode()
def test_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is expected: the table compares tokens per second."""
    tokenizer, model, reference, ends = shared()
    prompts = [tokenizer.encode(f"Count from {i} to {i + 4}\n") for i in range(4)]
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=128, enable_prefix_caching=False)
    ask(llm, prompts, max_tokens=2)

    def yours() -> int:
        outputs = Engine(model, 64, 16, 4, 512).generate(prompts, [24] * 4, ends)
        return sum(map(len, outputs))

    def transformers() -> int:
        options = dict(max_new_tokens=24, do_sample=False, eos_token_id=sorted(ends))
        inputs = [torch.tensor([ids]) for ids in prompts]
        masks = [torch.ones_like(ids) for ids in inputs]
        outputs = [
            reference.generate(ids, attention_mask=mask, pad_token_id=0, **options)
            for ids, mask in zip(inputs, masks, strict=True)
        ]
        return sum(out.shape[1] - ids.shape[1] for out, ids in zip(outputs, inputs, strict=True))

    def nanovllm() -> int:
        return sum(len(output["token_ids"]) for output in ask(llm, prompts, max_tokens=24))

    rows = []
    for name, run in (
        ("transformers, one after the other", transformers),
        ("your engine", yours),
        ("nanovllm in plain torch", nanovllm),
    ):
        tokens, seconds = timed(run, repeats=2)
        rows.append((name, tokens, f"{tokens / seconds:,.0f}"))
    with capsys.disabled():
        print("\n\n4 questions:\n")
        show_table(("engine", "tokens", "tokens/s"), rows)

"""The embedded model is the end-to-end test: whatever the engine does, its answers stay right."""

import random
from itertools import islice, pairwise

import pytest
import torch
from checkpoints import wrong_by_task

from nanovllm import LLM
from tools.training import data

FLOOR = 0.98  # of the open tasks; the closed ones must all be right


def floor_of(task: str) -> float:
    return FLOOR if task in data.OPEN_TASKS else 1.0


@pytest.mark.slow
def test_accuracy(embedded: LLM) -> None:
    """Of the closed tasks in all phrasings. With AVX2 alone bfloat16 takes five times as long."""
    for task, (failed, total) in wrong_by_task(embedded, number=50, every=1).items():
        assert len(failed) <= (1 - floor_of(task)) * total, (task, failed[:3])


@pytest.mark.slow
def test_accuracy_in_bf16(wrong_in_bf16: dict) -> None:
    for task, (failed, total) in wrong_in_bf16.items():
        assert len(failed) <= (1 - floor_of(task)) * total, (task, failed[:3])


def test_second_turn_finds_the_first(embedded: LLM) -> None:
    """A conversation goes on; its earlier turns are in the prefix cache, answer included."""
    first = [{"role": "user", "content": "Count from 10 to 40"}]
    answer = embedded.chat(first, use_tqdm=False)[0]
    assert answer["text"] == ", ".join(map(str, range(10, 41)))
    second = [
        *first,
        {"role": "assistant", "content": answer["text"]},
        {"role": "user", "content": "What is 3 + 4?"},
    ]
    out = embedded.chat(second, use_tqdm=False)[0]
    assert out["text"] == "3 + 4 = 7"
    assert out.num_cached_tokens >= len(answer.prompt_token_ids) + len(answer["token_ids"]) - 16


# ---- the data ----


@pytest.mark.slow
def test_training_never_sees_the_test_side() -> None:
    """No instance and no closed phrasing comes twice in 20,000 samples and all graded questions."""
    rng = random.Random(5)
    seen = {
        (s.task, s.answer)
        for s in (data.draw(rng) for _ in range(20_000))
        if s.task in data.OPEN_TASKS
    }
    questions = {data.draw(rng).question for _ in range(20_000)}
    for task in data.OPEN_TASKS:
        tested = data.graded_samples(task)
        assert len(tested) == 200
        clash = {(s.task, s.answer) for s in tested} & seen
        assert not clash, clash
    for task in ("primes", "table"):
        assert not {s.question for s in data.graded_samples(task)} & questions


def test_answers_are_right() -> None:
    """The generator's answers, checked by other means than it uses."""
    rng = random.Random(6)
    for _ in range(3000):
        s = data.draw(rng)
        if s.task in ("add", "subtract"):
            left, right = s.answer.split(" = ")
            assert eval(left) == int(right)
        elif s.task == "sort":
            numbers = [int(x) for x in s.answer.split(", ")]
            assert all(a <= b for a, b in pairwise(numbers))
            assert all(s.question.count(str(n)) for n in numbers)
        elif s.task == "count":
            numbers = [int(x) for x in s.answer.split(", ")]
            assert all(b == a + 1 for a, b in pairwise(numbers))
        elif s.task in ("reverse", "spell", "upper"):
            undone = {
                "reverse": s.answer[::-1],
                "spell": s.answer.replace("-", ""),
                "upper": s.answer,
            }
            assert undone[s.task].lower() in s.question.lower()
    assert data.primes_answer(30) == "2, 3, 5, 7, 11, 13, 17, 19, 23, 29"
    assert data.table_answer(12).endswith("12 x 10 = 120")


def test_tokenizer(embedded: LLM) -> None:
    tokenizer = embedded.get_tokenizer()
    for number in ("7", "42", "100"):
        assert len(tokenizer.encode(number)) == len(number)
    for text in ("Reverse zyxwvq!", "héllo wörld", "日本 🙂 a\tb\n", "<think>x</think>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    letters = tokenizer.encode(" zyxwvq")
    assert len(letters) == 7  # a word that is no token is letters
    assert (
        tokenizer.convert_tokens_to_ids("<|im_end|>")
        in embedded.engine.input_processor.eos_token_ids
    )


@pytest.mark.slow
def test_training_script_resumes(tmp_path, monkeypatch) -> None:
    """One pool and a resumed second, of which the engine loads the result."""
    import sys

    from transformers import Qwen3Config

    from tools.training import tokenizer as tokenizers
    from tools.training import train

    # A part of the text: the whole one takes five seconds to train a tokenizer.
    monkeypatch.setattr(tokenizers, "corpus", lambda rng: islice(data.corpus(rng), 2000))
    tokenizer = tokenizers.build()
    config = train.model_config("qwen3-nano", tokenizer).to_dict()
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=2, num_hidden_layers=2)
    small = Qwen3Config(**(config | sizes | {"layer_types": None}))
    pool, pools = train.pool, []
    replaced = dict(POOL=48, BATCH_TOKENS=1024, SAVE_EVERY=1, build=lambda: tokenizer)
    replaced |= dict(
        model_config=lambda *_: small, pool=lambda *args: pools.append(args) or pool(*args)
    )
    for name, value in replaced.items():
        monkeypatch.setattr(train, name, value)
    torch_state = torch.get_rng_state()
    for number in (1, 2):
        arguments = ["--out", str(tmp_path / "model"), "--pools", str(number), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        train.main()
        assert len(pools) == number, "the first pool is not trained again"
    torch.set_rng_state(torch_state)
    llm = LLM(str(tmp_path / "model"), dtype="float32", device="cpu")
    assert llm.generate("hello", use_tqdm=False)[0].outputs[0].finish_reason in ("stop", "length")

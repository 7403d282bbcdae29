"""Lesson 3 and the ladder: their tables say what the steps computed."""

import re
from os.path import commonprefix

import pytest

from lessons import ladder, lesson03_kv_cache
from lessons.lesson import make_llm
from lessons.lesson03_kv_cache import PROMPT
from nanovllm import LLM, SamplingParams

NUM_OUTPUT = 12  # more than the answer has: both ways go on after the end-of-sequence token


def numbers(printed: str, title: str) -> list[list[float]]:
    """The rows of numbers below the line of a table that begins with `title`."""
    table = printed[printed.index(f"\n{title}") :].strip().split("\n\n")[0]
    rows = [re.split(r"\s{2,}", line.replace(",", "")) for line in table.splitlines()[1:]]
    return [[float(cell) for cell in row] for row in rows]


def test_both_ways_give_the_engines_tokens(embedded: LLM) -> None:
    prompt = embedded.get_tokenizer().encode(PROMPT)
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    want = embedded.generate(PROMPT, params, use_tqdm=False)[0]["token_ids"]
    cached = list(lesson03_kv_cache.with_cache(embedded, prompt, NUM_OUTPUT))
    without = list(lesson03_kv_cache.without_cache(embedded, prompt, NUM_OUTPUT))
    assert [token for token, _ in without] == [token for token, _ in cached] == want
    assert [n for _, n in without] == [len(prompt) + i for i in range(NUM_OUTPUT)]
    assert [n for _, n in cached] == [len(prompt)] + [1] * (NUM_OUTPUT - 1)


def test_a_key_depends_on_the_tokens_up_to_its_own() -> None:
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    texts = ([20, 21, 22], [20, 21, 22, 30, 31], [20, 30, 22])
    key, later, earlier = (lesson03_kv_cache.third_key(llm, ids) for ids in texts)
    assert later == pytest.approx(key, abs=1e-4)
    assert earlier != pytest.approx(key, abs=1e-2)


@pytest.mark.slow
def test_lesson_3(capsys, monkeypatch) -> None:
    # Without the longest, which takes as long as all others together.
    monkeypatch.setattr(lesson03_kv_cache, "LENGTHS", lesson03_kv_cache.LENGTHS[:-1])
    lesson03_kv_cache.run()
    printed = capsys.readouterr().out
    rows = re.findall(
        r"^(\d+) +([\d,]+) +[\d.]+ +(\d+) .* as (?:fast|slow)$", printed, re.MULTILINE
    )
    assert rows == [("20", "390", "29"), ("40", "1,180", "49"), ("80", "3,960", "89")]
    keys = numbers(printed, "tokens read")
    assert len(keys) == 3
    for row in keys[1:]:
        assert row[1:] == pytest.approx(keys[0][1:], abs=2e-4)
    assert "114,688" in printed
    assert lesson03_kv_cache.QUESTIONS[0].answer == str(sum(range(4, 10)))
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.slow
def test_ladder(embedded: LLM, capsys) -> None:
    pytest.importorskip("numba")
    number, rungs = ladder.ROWS + 1, ladder.RUNGS
    results = ladder.climb(rungs, number, repeats=1)
    ladder.show(rungs, results)
    runs = dict(zip([rung.adds for rung in rungs], results, strict=True))
    requests = ladder.make_requests(embedded, number)
    lengths = [n for _, n in requests]
    prompts = [len(prompt) for prompt, _ in requests]

    # All tokens are the engine's.
    params = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
    outputs = embedded.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    want = [out["token_ids"] for out in outputs]
    assert [len(ids) for ids in want] == lengths
    assert all(run.tokens == want for run in runs.values())

    # What each rung computes, and in how many steps.
    pairs = list(zip(prompts, lengths, strict=True))
    assert sum(runs["no cache"].steps) == sum(n * p + n * (n - 1) // 2 for p, n in pairs)
    once = sum(p + n - 1 for p, n in pairs)
    batches = [lengths[i : i + ladder.ROWS] for i in range(0, number, ladder.ROWS)]
    static, continuous = runs["static batches of 8"], runs["continuous batching"]
    for name in ("a KV cache", "blocks"):
        assert (sum(runs[name].steps), len(runs[name].steps)) == (once, sum(lengths))
    assert (sum(static.steps), len(static.steps)) == (once, sum(map(max, batches)))
    assert sum(continuous.steps) == once
    assert sum(lengths) / ladder.ROWS <= len(continuous.steps) < len(static.steps)
    size = embedded.engine.scheduler.block_manager.block_size
    prefix = len(commonprefix([prompt for prompt, _ in requests])) // size * size  # noqa: RUF071
    assert prefix >= 4 * size
    shared, chunks = runs["prefix sharing"], runs[f"a token budget of {ladder.BUDGET}"]
    assert sum(chunks.steps) == once
    assert sum(shared.steps) == once - (number - 1) * prefix
    assert len(chunks.steps) > max(len(shared.steps), len(continuous.steps))
    assert len(runs["the defaults of LLM()"].steps) == max(lengths)

    # The memory that each reserves.
    assert runs["no cache"].slots == 0
    assert runs["a KV cache"].slots == 1024
    longest = max(p + n - 1 for p, n in pairs)
    assert runs["blocks"].slots == -(-longest // size) * size
    assert shared.slots < static.slots <= ladder.ROWS * runs["blocks"].slots
    assert [rung.adds for rung in ladder.rungs_of("8")] == [
        "a token budget of 32",
        "prefix sharing",
    ]
    assert [rung.adds for rung in ladder.rungs_of("3")] == ["no cache", "a KV cache"]

    printed = capsys.readouterr().out
    lines = [line.split("  ")[0] for line in printed.strip().splitlines()[1:]]
    assert lines == [f"{rung.lesson} {rung.adds}" for rung in rungs]
    assert max(map(len, printed.splitlines())) <= 100


def test_a_rung_that_changes_tokens_is_refused() -> None:
    first, *_ = ladder.RUNGS
    wrong = first._replace(run=lambda llm, requests: first.run(llm, requests[::-1]))
    with pytest.raises(AssertionError, match="no cache changes the tokens"):
        ladder.climb([first, wrong], number=2, repeats=1)

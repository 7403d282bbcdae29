"""Lessons 4 to 9 and beams: what they print is what they are meant to show."""

import math
import re

import pytest
from lesson_runs import row, run_lesson

from lessons import elective_beams as beams
from lessons import elective_samples as samples
from lessons import lesson04_roofline as roofline
from lessons import lesson06a_batching as batching
from lessons import lesson06b_chunks as chunks
from lessons import lesson08_prefix_sharing as sharing
from lessons import lesson09b_policies as policies
from lessons.lesson import ask, make_llm, shape_of
from nanovllm import BeamSearchParams


def test_a_timeline_shows_when_each_request_runs():
    llm = make_llm(num_kv_cache_blocks=64, max_num_seqs=2)
    tokens, lines = batching.serve(llm, (1, 3, 2), 3)
    assert lines == ["x..", "xxx", ".xx"]
    assert batching.serve(llm, (1, 3, 2), 2) == (tokens, ["x....", "xxx..", "...xx"])


@pytest.mark.slow
def test_batching():
    printed = run_lesson("6a")
    longest = max(batching.LENGTHS[:4]) + max(batching.LENGTHS[4:])
    static, continuous = (row(printed, name) for name in ("static batches", "continuous batching"))
    # A row-step that computes no output token is idle.
    assert static == [str(longest), str(4 * longest - sum(batching.LENGTHS))]
    assert continuous == ["10", str(4 * 10 - sum(batching.LENGTHS))]


@pytest.mark.slow
def test_prefix_sharing():
    printed = run_lesson("8")
    hashes = re.findall(r"\] +(none|\w{6}) +(\w{6})$", printed, re.MULTILINE)
    assert [parent for parent, _ in hashes] == [
        h for i in (0, 2, 4) for h in ("none", hashes[i][1])
    ]
    assert hashes[0] == hashes[2]
    assert len(set(hashes)) == 5  # A and B have one block in common, equal tokens after others none


@pytest.mark.slow
def test_samples():
    printed = run_lesson("samples")
    assert row(printed, "4") == [samples.QUESTIONS[0].answer]


def test_the_least_recently_used_block_is_evicted():
    # A was used after C, and the last block of C was released before its first.
    assert sharing.evict() == [("A", 8, 0, 0), ("C", 8, 8, 0), ("A", 8, 8, 0), ("D", 8, 4, 8)]


def test_sjf_admits_short_prompts_first_but_not_all():
    first, in_order = policies.first_tokens("sjf"), policies.first_tokens("fcfs")
    before = sum(step < first[0] for step in first.values())
    assert before == int(policies.QUESTIONS[1].answer)
    assert next(iter(in_order)) == 0
    assert sum(first.values()) < sum(in_order.values())
    assert first[0] > in_order[0] == 5  # 150 tokens in chunks of 32
    run_lesson("9b")


@pytest.mark.slow
def test_chunks():
    printed = run_lesson("6b")
    assert row(printed, "1024")[:-2] == ["604"]  # four decodes and the prompt
    *tokens, longest, total = row(printed, "64")
    assert tokens == ["64"] * 10  # 60 of the prompt in each
    assert float(longest) < float(total)
    assert str(-(-200 // (56 - 6))) == chunks.QUESTIONS[0].answer


@pytest.mark.slow
def test_preemption():
    printed = run_lesson("9a")
    pools = [line.split() for line in printed.splitlines() if line.startswith("8  ")]
    # Request 1 has lost 16 tokens; the cache keeps three of its four blocks.
    assert [pool for pool in pools if len(pool) == 4] == [
        ["8", "True", "11", "4"],
        ["8", "False", "11", "16"],
    ]


def test_roofline_costs():
    """By hand: 28 layers of q, k, v, o and gate, up, down, and the head."""
    config = shape_of("qwen3-0.6b")
    layer = 1024 * (16 + 8 + 8 + 16) * 128 + 3 * 1024 * 3072
    weights = 28 * layer + 151_936 * 1024
    cost = roofline.decode_costs(config, 4, 100)
    assert cost["weight_bytes"] == 2 * weights
    assert cost["kv_bytes"] == 4 * 100 * 114_688
    assert cost["decode_bytes"] == cost["weight_bytes"] + cost["kv_bytes"]
    assert cost["decode_flops"] == 4 * (2 * weights + 100 * 4 * 28 * 16 * 128)
    small = roofline.decode_costs(config, 4, 100, 1)
    assert (small["weight_bytes"], small["kv_bytes"]) == (weights, cost["kv_bytes"] // 2)


def test_roofline(capsys, monkeypatch):
    """With one layer, and a machine whose peaks are given."""
    peak = {"bandwidth": 20e9, "flops": 200e9}
    monkeypatch.setattr(roofline.roofline, "measure_peak", lambda *_: peak)
    for name, value in dict(LAYERS=1, VOCAB=512, ROWS=(1, 8)).items():
        monkeypatch.setattr(roofline, name, value)
    roofline.run()
    printed = capsys.readouterr().out
    words = " ".join(printed.split())
    assert "its ridge is at 10.0 FLOPs" in words
    gflops, read, ratio, limit, least, measured = row(printed, "decode of 8")
    assert float(ratio) == pytest.approx(1e3 * float(gflops) / float(read), rel=0.2)
    assert limit == "memory-bound"
    assert float(least) == pytest.approx(float(read) / 20, rel=0.05)
    assert float(measured) > 0
    assert "1,192 MB of weights and 7,340 MB of the cache, for which" in words
    assert "needs at least 427 ms" in words
    assert max(map(len, printed.splitlines())) <= 100


def test_sampling():
    run_lesson("7")


def test_beams():
    printed = run_lesson("beams")
    llm = make_llm(attention_backend="sdpa", block_size=4, num_kv_cache_blocks=64)
    greedy = ask(llm, [beams.PROMPT], max_tokens=beams.LENGTH, ignore_eos=True)[0]["token_ids"]
    params = BeamSearchParams(1, beams.LENGTH, ignore_eos=True)
    [output] = llm.beam_search(beams.PROMPT, params, use_tqdm=False)
    assert output.sequences[0].tokens[-beams.LENGTH :] == greedy  # question 2
    logprobs = [float(row(printed, name)[-1]) for name in ("beam 1", "beam 2", "beam 3", "greedy")]
    assert logprobs[0] >= logprobs[1] >= logprobs[2]
    assert logprobs[0] > logprobs[3]
    factor = math.exp(logprobs[0] - logprobs[3])
    assert f"{factor:.1f}" in " ".join(printed.split()).partition("The best beam is ")[2][:5]

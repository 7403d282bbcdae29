"""Lessons 4 to 6: what they print is what they are meant to show."""

import os

import pytest

from nanovllm.lessons import lesson4_batching as batching
from nanovllm.lessons import lesson5_prefix_sharing as sharing
from nanovllm.lessons import lesson6_scheduling as scheduling
from nanovllm.lessons.lesson import make_llm


def row(printed: str, name: str) -> list[str]:
    """The cells of the one printed line that begins with `name`."""
    [line] = [line for line in printed.splitlines() if line.startswith(name + "  ")]
    return line.removeprefix(name).split()


def test_a_timeline_shows_when_each_request_runs():
    llm = make_llm(**batching.OPTIONS, max_num_seqs=2)
    assert batching.timeline(llm, (1, 3, 2), 3) == ["P..", "PDD", ".PD"]
    assert batching.timeline(llm, (1, 3, 2), 2) == ["P....", "PDD..", "...PD"]


@pytest.mark.slow
def test_batching(capsys):
    answers = [question.answer for question in batching.run()]
    printed = capsys.readouterr().out
    assert answers == ["0", "7"]
    longest = max(batching.LENGTHS[:4]) + max(batching.LENGTHS[4:])
    static, continuous = (row(printed, name) for name in ("static batches", "continuous batching"))
    # A row-step that computes no output token is idle.
    assert static[:2] == [str(longest), str(4 * longest - sum(batching.LENGTHS))]
    assert continuous[:2] == ["10", str(4 * 10 - sum(batching.LENGTHS))]
    assert float(static[2]) > 0
    assert float(continuous[2]) > 0
    assert "request 4  ..PDDDDDDD  8 tokens" in printed
    assert "rows used  4444443221  of 4" in printed


@pytest.mark.slow
def test_prefix_sharing(capsys):
    answers = [question.answer for question in sharing.run()]
    printed = capsys.readouterr().out
    assert answers == ["96", "3"]
    assert "same 6 tokens" in printed
    assert [row(printed, str(block)) for block in range(1, 6)] == [["2"], *[["1"]] * 4]
    assert "Prefix hit: positions 0-3 of request B are cached (block 1)." in printed
    assert "Copy-on-write: block 3 to 4" in printed
    assert row(printed, "the first 8 tokens of A") == ["8", "4", "4"]
    encode = make_llm(num_kvcache_blocks=64).get_tokenizer().encode
    prompts = [encode(f"{sharing.EXAMPLES}What is 12 + {i}?\n") for i in range(8)]
    common = len(os.path.commonprefix(prompts)) // 16 * 16  # noqa: RUF071
    total = sum(map(len, prompts))
    assert common > 256
    assert row(printed, "False")[0] == str(total)
    assert row(printed, "True")[0] == str(total - 7 * common)


def test_equal_hashes_are_equal_prefixes():
    rows = sharing.hash_chains(make_llm(kvcache_block_size=4, num_kvcache_blocks=8))
    tokens, hashes = [row[1] for row in rows], [row[2] for row in rows]
    assert hashes[0] == hashes[3] != hashes[6]
    assert tokens[1] == tokens[7]
    assert hashes[1] != hashes[7]  # after another first block
    assert hashes[2] == hashes[5] == hashes[8] == "not full"


def test_the_least_recently_used_block_is_evicted():
    # A was used after C, and the last block of C was released before its first.
    assert sharing.evict() == [("A", 8, 0, 0), ("C", 8, 8, 0), ("A", 8, 8, 0), ("D", 8, 4, 8)]


def test_sjf_admits_short_prompts_first_but_not_all():
    admitted, first = scheduling.run_policy("sjf", scheduling.LENGTHS)
    assert list(admitted) == [*range(1, 9), 0, *range(9, 13)]
    in_order, first_in_order = scheduling.run_policy("fcfs", scheduling.LENGTHS)
    assert list(in_order) == list(range(13))
    assert sum(first.values()) < sum(first_in_order.values())
    assert first[0] > first_in_order[0] == 5  # 150 tokens in chunks of 32


@pytest.mark.slow
def test_scheduling(capsys):
    answers = [question.answer for question in scheduling.run()]
    printed = capsys.readouterr().out
    assert answers == ["5", "22"]
    assert row(printed, "1024")[:-2] == ["604"]  # four decodes and the prompt
    *tokens, longest, total = row(printed, "64")
    assert tokens == ["64"] * 10  # 60 of the prompt in each
    assert float(longest) < float(total)
    assert "In step 8 request 0 needs another block" in printed
    assert "Preemption: request 1 returns to the head of the queue" in printed
    assert row(printed, "32") == ["True", "9", "0"]
    pools = [line.split() for line in printed.splitlines() if line.startswith("8  ")]
    # Request 1 has lost 16 tokens; the cache keeps three of its four blocks.
    assert [pool for pool in pools if len(pool) == 4] == [
        ["8", "True", "11", "4"],
        ["8", "False", "11", "16"],
    ]

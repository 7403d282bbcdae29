"""Checks `longest_output_first`: python -m lessons build policy --check FILE"""

import dataclasses

import pytest
from build_check import check_history, expect, load, make_samples

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.policies import AGING, POLICIES
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status

longest_output_first = load("policy.py", "longest_output_first")


@pytest.fixture(autouse=True)
def _policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "mine", longest_output_first)


def make_scheduler(max_num_seqs: int, policy: str = "mine") -> Scheduler:
    return Scheduler(BlockManager(1000, 16), max_num_seqs, 8192, policy)


def request(arrival: int, new: int, prompt: int = 3) -> Sequence:
    """A request for `new` tokens. Its prompt has `prompt` tokens."""
    return make_samples([arrival] * prompt, prompt + new, arrival)[0]


def step(scheduler: Scheduler) -> list[Sequence]:
    """One step in which every sequence samples token 1. Returns the sequences that finished."""
    planned = scheduler.schedule()
    assert planned is not None
    updated = scheduler.commit(planned, [1] * len(planned.sampling_seqs))
    return [seq for seq in updated if seq.status is Status.FINISHED]


def order(new: list[int], prompts: list[int] | None = None) -> list[int]:
    """The order of admission of requests for `new` tokens, which are queued together."""
    scheduler, finished = make_scheduler(max_num_seqs=1), []
    for arrival, tokens in enumerate(new):
        scheduler.add(request(arrival, tokens, prompts[arrival] if prompts else 3))
    while scheduler.has_work():
        finished += [seq.arrival for seq in step(scheduler)]
    return finished


def num_steps(new: list[int], policy: str) -> int:
    scheduler, steps = make_scheduler(max_num_seqs=2, policy=policy), 0
    for arrival, tokens in enumerate(new):
        scheduler.add(request(arrival, tokens))
    while scheduler.has_work():
        step(scheduler)
        steps += 1
    return steps


@pytest.mark.parametrize(
    ("new", "want"),
    [
        ([100, 400, 300], [1, 2, 0]),
        ([8, 40, 24], [1, 0, 2]),
        ([30, 30, 30], [0, 1, 2]),
        ([10, 10 + AGING], [0, 1]),
        ([10, 10 + AGING + 1], [1, 0]),
    ],
)
def test_order_of_admission(new: list[int], want: list[int]) -> None:
    got = order(new)
    expect(
        got == want,
        f"Requests 0, 1, ... may generate {new} tokens, and each arrival ages a request by {AGING} "
        f"tokens. The expected order of admission is {want}, but it is {got}.",
    )


def test_a_long_prompt_is_not_a_long_output() -> None:
    got = order([10, 60], prompts=[200, 3])
    expect(
        got == [1, 0],
        "Request 0 has a prompt of 200 tokens and may generate 10, request 1 has a prompt of 3 and "
        f"may generate 60. Request 1 should be admitted first, but the order is {got}.",
    )


def test_fewer_steps_than_first_come_first_served() -> None:
    new = [40, 40, 40, 40, 160]
    fcfs, got = num_steps(new, "fcfs"), num_steps(new, "mine")
    expect(
        got == 160,
        f"Two rows, and requests for {new} tokens: fcfs takes {fcfs} steps. 160 are expected of "
        f"longest output first, because the short ones run beside the long one, but it takes "
        f"{got}.",
    )


def test_no_request_waits_forever() -> None:
    """A new long request arrives whenever one is finished."""
    scheduler, short, long = make_scheduler(max_num_seqs=1), 8, 200
    bound = (long - short) // AGING
    waiting = request(1, short)
    for seq in (request(0, long), waiting, request(2, long)):
        scheduler.add(seq)
    overtaken, arrival = 0, 3
    while waiting.status is not Status.FINISHED and overtaken <= 2 * bound:
        for seq in step(scheduler):
            overtaken += seq.arrival > waiting.arrival
            scheduler.add(request(arrival, long))
            arrival += 1
    expect(
        overtaken <= bound,
        f"A request for {short} tokens waits in a stream of requests for {long}. At most "
        f"({long} - {short}) / {AGING} = {bound} may overtake it, but {overtaken} or more do.",
    )


def fields(seq: Sequence) -> dict[str, object]:
    """A copy of what a policy may not change."""
    names = [f.name for f in dataclasses.fields(seq) if f.name != "block_hashes"]  # by a match
    values = {name: getattr(seq, name) for name in names}
    return {name: list(x) if isinstance(x, list) else x for name, x in values.items()}


def used_manager() -> BlockManager:
    """A manager whose blocks are all used, and two are cached with the tokens of a prompt."""
    blocks, seq = BlockManager(100, 16), request(arrival=5, new=50, prompt=40)
    for _ in range(100):
        blocks.append_block(seq)
    seq.num_computed = 40
    blocks.cache_full_blocks(seq)
    return blocks


def test_the_key_is_an_int_and_depends_on_the_sequence_alone() -> None:
    keys = []
    for blocks in (BlockManager(100, 16), BlockManager(7, 8), used_manager()):
        seq = request(arrival=5, new=50, prompt=40)
        before = fields(seq)
        keys += [longest_output_first(seq, blocks), longest_output_first(seq, blocks)]
        after = fields(seq)
        changed = [name for name in before if before[name] != after[name]]
        expect(not changed, f"The key must change nothing, but it changed these fields: {changed}.")
    expect(type(keys[0]) is int, f"The key must be an int, but it is {keys[0]!r}.")
    expect(
        len(set(keys)) == 1,
        "The keys of equal requests must be equal, whenever they are computed and whichever blocks "
        f"are used or cached, but are {keys}.",
    )


def test_random_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, preemptions, aborts and forks: every request gets the tokens of the oracle."""
    monkeypatch.setitem(POLICIES, "fcfs", longest_output_first)
    monkeypatch.setitem(POLICIES, "sjf", longest_output_first)
    for seed in range(200):
        check_history(seed)

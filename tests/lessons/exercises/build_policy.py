"""Checks `longest_output_first`: python -m lessons build policy --check FILE"""

import dataclasses
import itertools

import pytest
from build_check import check_history, expect, load, make_samples, same

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.policies import AGING, POLICIES
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status

longest_output_first = load("policy.py", "longest_output_first")
FIRST = 998  # arrival of the first request: others have ended long ago


@pytest.fixture(autouse=True)
def _policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "mine", longest_output_first)


def request(arrival: int, new: int, prompt: int = 3) -> Sequence:
    """A request for `new` tokens. Its prompt has `prompt` tokens."""
    seq = make_samples([arrival] * prompt, prompt + new, FIRST + arrival)[0]
    seq.request_id = f"request {arrival}"
    return seq


def make_scheduler(rows: int, new: list[int], policy: str = "mine", prompt: int = 3) -> Scheduler:
    """A scheduler with requests for `new` tokens. The first has a prompt of `prompt` tokens."""
    scheduler = Scheduler(BlockManager(1000, 16), rows, 8192, policy)
    for arrival, tokens in enumerate(new):
        scheduler.add(request(arrival, tokens, 3 if arrival else prompt))
    return scheduler


def step(scheduler: Scheduler) -> list[int]:
    """One step in which every sequence samples token 1 -> the requests that finished."""
    planned = scheduler.schedule()
    assert planned is not None
    updated = scheduler.commit(planned, [1] * len(planned.sampling_seqs))
    return [seq.arrival - FIRST for seq in updated if seq.status is Status.FINISHED]


@pytest.mark.parametrize(
    ("new", "prompt", "want"),
    [
        ([100, 400, 300], 3, [1, 2, 0]),
        ([8, 40, 24], 3, [1, 0, 2]),
        ([10, 10 + AGING + 1], 3, [1, 0]),
        ([10, 10 + AGING + 1], 200, [1, 0]),
    ],
)
def test_order_of_admission(new: list[int], prompt: int, want: list[int]) -> None:
    scheduler, finished = make_scheduler(1, new, prompt=prompt), []
    while scheduler.has_work():
        finished += step(scheduler)
    what = f"Requests 0, 1, ... (seq.arrival {FIRST}, {FIRST + 1}, ...) may generate {new} tokens, "
    what += f"each arrival ages a request by {AGING} "
    what += f"tokens, and the prompt of request 0 has {prompt} tokens. The order of admission"
    same(finished, want, what)


@pytest.mark.parametrize("first", [0, FIRST])
@pytest.mark.parametrize("prompts", [(3, 3), (200, 3), (3, 200)])
def test_two_requests(first: int, prompts: tuple[int, int]) -> None:
    for later, new, more in itertools.product((1, 7, 5000), (1, 8, 300, 3000), (-1, 0, 1)):
        counts = (new, new + AGING * later + more)
        seqs = [
            make_samples([1] * prompt, prompt + count, arrival)[0]
            for prompt, count, arrival in zip(prompts, counts, (first, first + later), strict=True)
        ]
        keys = [longest_output_first(seq, BlockManager(9, 16)) for seq in seqs]
        what = f"Requests {first} and {first + later} may generate {counts[0]} and {counts[1]} "
        what += f"tokens after prompts of {prompts[0]} and {prompts[1]}. Their keys are {keys}. "
        what += f"Whether the key of request {first + later} is the smaller one"
        same(keys[1] < keys[0], more > 0, what)


def test_fewer_steps_than_first_come_first_served() -> None:
    new, steps = [40, 40, 40, 40, 160], []
    for policy in ("fcfs", "mine"):
        scheduler, number = make_scheduler(2, new, policy), 0
        while scheduler.has_work():
            step(scheduler)
            number += 1
        steps.append(number)
    what = f"Two rows, and requests for {new} tokens: fcfs takes {steps[0]} steps. Yours, in which "
    same(steps[1], 160, f"{what}the short ones run next to the long one,")


def test_no_request_waits_forever() -> None:
    """A new long request arrives whenever one is finished."""
    short, long = 8, 200
    bound, scheduler = (long - short) // AGING, make_scheduler(1, [long, short, long])
    overtaken, arrival, finished = 0, 3, list[int]()
    while 1 not in finished and overtaken <= 2 * bound:
        finished = step(scheduler)
        for number in finished:
            overtaken += number > 1
            scheduler.add(request(arrival, long))
            arrival += 1
    expect(
        overtaken <= bound,
        f"A request for {short} tokens waits in a stream of requests for {long}. At most "
        f"({long} - {short}) / {AGING} = {bound} may overtake it, but {overtaken} or more do.",
    )


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
        for field in dataclasses.fields(seq):  # a field that is 0 would hide that it is set to 0
            if type(getattr(seq, field.name)) is int:
                setattr(seq, field.name, getattr(seq, field.name) or 7)
        seq.queue_key = (7, 7, 7)
        blocks.match(seq)  # computes block_hashes
        before = dataclasses.asdict(seq)
        keys += [longest_output_first(seq, blocks), longest_output_first(seq, blocks)]
        after = dataclasses.asdict(seq)
        changed = [name for name in before if before[name] != after[name]]
        same(changed, [], "The key must change nothing. The fields that it changed")
    expect(type(keys[0]) is int, f"The key must be an int, but it is {keys[0]!r}.")
    what = (
        "The keys of equal requests, whenever they are computed and whichever blocks are used or "
    )
    same(keys, keys[:1] * 6, f"{what}cached,")


def test_random_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, preemptions, aborts and forks: every request gets the tokens of the oracle."""
    monkeypatch.setitem(POLICIES, "fcfs", longest_output_first)
    monkeypatch.setitem(POLICIES, "sjf", longest_output_first)
    for seed in range(200):
        check_history(seed)

"""A model whose answers show one wrong slot, and random histories of the control plane run on it.

`OracleRunner` stands in the runner's place. Its "KV" is the pair (token, position) written to each
slot; its next token is a hash of all pairs that a row can read through its block table. `answer`
computes the same hash from the tokens alone, with no engine. No torch, no conftest.
"""

import random
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from types import ModuleType

from xxhash import xxh64_intdigest

from nanovllm.engine import block_manager, scheduler
from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.plan import RowSampling, StepPlan

ALPHABET = 3  # small, so that the blocks of different sequences meet


def next_token(pairs: list[tuple[int, int]], seed: int) -> int:
    return xxh64_intdigest(repr(pairs).encode(), seed % 2**64) % ALPHABET


def answer(prompt: list[int], max_length: int, stops: frozenset[int], seed: int) -> list[int]:
    """What a sequence must say, by the definition of the model."""
    ids = list(prompt)
    while len(ids) < max_length:
        ids.append(next_token([(t, i) for i, t in enumerate(ids)], seed))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


def make_samples(
    prompt: list[int],
    max_length: int,
    arrival: int = 0,
    seeds: Sequence_[int] = (0,),
    stops: frozenset[int] = frozenset(),
) -> list[Sequence]:
    """The samples of one request, one for each seed; the first computes the prompt."""
    samples = [
        Sequence(
            request_id=str(arrival),
            arrival=arrival,
            token_ids=list(prompt),
            num_prompt=len(prompt),
            max_length=max_length,
            stop_token_ids=stops,
            sampling=RowSampling(1.0, seed=seed),
            index=index,
        )
        for index, seed in enumerate(seeds)
    ]
    samples[0].forks = samples[1:]
    for fork in samples[1:]:
        fork.parent = samples[0]
    return samples


class OracleRunner:
    def __init__(self, num_blocks: int, block_size: int, num_rows: int) -> None:
        self.size = block_size
        self.memory: list[tuple[int, int] | None] = [None] * ((num_blocks + 1) * block_size)
        self.tables: list[dict[int, int]] = [{} for _ in range(num_rows)]
        self.positions = [0] * num_rows
        self.seeds = [0] * num_rows
        self.last = [0] * num_rows

    def run(self, plan: StepPlan) -> list[int]:
        size, memory = self.size, self.memory
        for join in plan.joins:
            self.tables[join.row] = dict(enumerate(join.block_table))
            self.seeds[join.row] = join.sampling.seed
        for row, index, block in plan.new_blocks:
            self.tables[row][index] = block
        copied = [memory[a * size : (a + 1) * size] for a, _ in plan.block_copies]
        for (_, b), content in zip(plan.block_copies, copied, strict=True):
            memory[b * size : (b + 1) * size] = content

        work = [(c.row, c.start, c.token_ids, c.sample) for c in plan.chunks]
        work += [(row, self.positions[row], [self.last[row]], True) for row in plan.decode_rows]
        assert len({row for row, *_ in work}) == len(work), "a row twice in a step"
        assert sum(len(ids) for _, _, ids, _ in work) == plan.num_tokens
        written: set[int] = set()
        for row, start, ids, _ in work:
            for position, token in enumerate(ids, start):
                slot = self.slot(row, position)
                assert slot >= size, "the null block was written"
                assert slot not in written, "a slot was written twice in a step"
                written.add(slot)
                memory[slot] = (token, position)
            self.positions[row] = start + len(ids)
        drawn = []
        for row, _, _, sample in work:
            if sample:
                pairs = [memory[self.slot(row, p)] for p in range(self.positions[row])]
                assert None not in pairs, "an unwritten slot was read"
                self.last[row] = next_token(pairs, self.seeds[row])  # type: ignore[arg-type]
                drawn.append(self.last[row])
        return drawn

    def slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.size] * self.size + position % self.size


class History:
    """One scheduler with its runner, and every check that holds after every action."""

    def __init__(
        self,
        rng: random.Random,
        schedulers: ModuleType = scheduler,
        managers: ModuleType = block_manager,
        hash_bits: int = 64,
    ) -> None:
        self.rng = rng
        self.size = rng.choice((1, 2, 3, 4))
        self.num_blocks = rng.randint(6, 24)
        self.budget = rng.choice((1, 2, 3, 5, 8, 64))
        self.max_num_seqs = rng.choice((1, 2, 3, 6))
        self.depth = rng.choice((0, 0, 1))  # plans left in flight
        self.blocks = managers.BlockManager(self.num_blocks, self.size, rng.random() < 0.85)
        if hash_bits < 64:
            full, mask = self.blocks._hash, (1 << hash_bits) - 1
            self.blocks._hash = lambda parent, tokens: full(parent, tokens) & mask
        policy = rng.choice(("fcfs", "sjf"))
        self.scheduler = schedulers.Scheduler(self.blocks, self.max_num_seqs, self.budget, policy)
        self.runner = OracleRunner(self.num_blocks, self.size, self.max_num_seqs)
        self.pending: deque[tuple[InFlightStep, list[int]]] = deque()
        self.seqs: list[Sequence] = []
        self.arrivals = 0
        self.steps = 0

    # ---- actions ----

    def add(self) -> None:
        rng, room = self.rng, self.num_blocks * self.size
        longest = rng.randint(2, min(room + 1, 28))
        num_prompt = rng.randint(1, longest - 1)
        prompt = [rng.randrange(ALPHABET) for _ in range(num_prompt)]
        if self.seqs and rng.random() < 0.5:  # begin as an earlier one did, its answer included
            old = rng.choice(self.seqs).token_ids
            prompt = (old[: rng.randint(1, len(old))] + prompt)[:num_prompt]
        stops = frozenset({rng.randrange(ALPHABET)} if rng.random() < 0.2 else ())
        count = rng.choice((1, 1, 1, 2, 4))
        seeds = [rng.randrange(4) for _ in range(count)]
        samples = make_samples(prompt, longest, self.arrivals, seeds, stops)
        self.arrivals += 1
        self.seqs += samples
        self.scheduler.add(samples[0])

    def abort(self) -> None:
        if self.seqs:
            seq = self.rng.choice(self.seqs)
            for sample in [s for s in self.seqs if s.arrival == seq.arrival]:
                self.scheduler.abort(sample)

    def abandon(self) -> None:
        """A step failed: nothing in flight may be relied on, so what it wrote is made unreadable."""
        self.scheduler.schedule()
        for plan in (step.plan for step in self.scheduler.in_flight):
            for _, target in plan.block_copies:
                self.spoil(range(target * self.size, (target + 1) * self.size))
            for join in plan.joins:
                self.runner.tables[join.row] = dict(enumerate(join.block_table))
            for row, index, block in plan.new_blocks:
                self.runner.tables[row][index] = block
            for c in plan.chunks:
                self.spoil(self.runner.slot(c.row, c.start + i) for i in range(len(c.token_ids)))
        self.pending.clear()
        self.scheduler.abandon()

    def spoil(self, slots) -> None:
        for slot in slots:
            self.runner.memory[slot] = None

    def reset(self) -> None:
        self.blocks.reset_prefix_cache()

    def step(self) -> None:
        before = self.scheduler.preemptions
        oldest = self.scheduler.running[0] if self.scheduler.running else None
        step = self.scheduler.schedule()
        if step is not None:
            plan = step.plan
            assert plan.num_tokens <= self.budget
            assert len(self.scheduler.running) <= self.max_num_seqs
            if self.scheduler.preemptions > before:
                assert not plan.joins, "admitted in a step that preempted"
                assert oldest is not None
                assert oldest.status is Status.RUNNING, "the oldest was preempted"
            self.pending.append((step, self.runner.run(plan)))
        while len(self.pending) > (self.depth if step is not None else 0):
            self.scheduler.commit(*self.pending.popleft())
        self.steps += 1

    def drain(self) -> None:
        """Run to the end; everything must finish in a bounded number of steps, and rightly."""
        bound = self.steps + 50 + sum(3 * s.max_length for s in self.seqs) * 2
        while self.scheduler.has_work():
            self.step()
            self.check()
            assert self.steps < bound, "stuck"
        for seq in self.seqs:
            assert seq.status is Status.FINISHED
            want = answer(
                seq.token_ids[: seq.num_prompt],
                seq.max_length,
                seq.stop_token_ids,
                seq.sampling.seed,
            )
            if seq.finish_reason == "abort":
                assert want[: len(seq.output_ids)] == seq.output_ids
            else:
                assert seq.output_ids == want
        assert self.blocks.num_available == self.num_blocks
        assert sorted(self.scheduler._free_rows) == list(range(self.max_num_seqs))

    # ---- what always holds ----

    def check(self) -> None:
        blocks, running = self.blocks.blocks, self.scheduler.running
        assert len({s.row for s in running}) == len(running) <= self.max_num_seqs
        owners = [0] * len(blocks)
        for seq in running:
            assert seq.status is Status.RUNNING
            for index in seq.block_table:
                owners[index] += 1
        assert [b.ref_count for b in blocks] == owners, "reference counts"
        free, evictable = self.blocks.free, self.blocks.evictable
        owned = [i for i, n in enumerate(owners) if n]
        assert sorted([*free, *evictable, *owned]) == list(range(1, self.num_blocks + 1)), (
            "partition"
        )
        assert all(blocks[i].identity for i in evictable)
        assert not any(blocks[i].identity for i in free)
        cached = {b.hash: b.index for b in blocks if b.identity}
        assert cached == self.blocks.index, "the index names what is cached"
        for index in cached.values():
            self.check_cached(index)
        for seq in self.seqs:
            assert seq.status is Status.RUNNING or not seq.block_table
            if seq.status is not Status.RUNNING:
                continue
            known = min(seq.num_computed, len(seq.token_ids))
            for position in range(known):
                slot = seq.block_table[position // self.size] * self.size + position % self.size
                have = self.runner.memory[slot]
                assert have == (seq.token_ids[position], position), "its context was overwritten"

    def check_cached(self, index: int) -> None:
        """A cached block holds the tokens that the index says."""
        block, content = self.blocks.blocks[index], self.runner.memory
        pairs = content[index * self.size : (index + 1) * self.size]
        named = memoryview(block.token_ids).cast("I").tolist()
        assert [p[0] if p else None for p in pairs] == named, "a cached block holds other tokens"


ACTIONS: list[tuple[Callable[[History], None], int]] = [
    (History.step, 60),
    (History.add, 25),
    (History.abort, 4),
    (History.abandon, 2),
    (History.reset, 1),
]


def run_history(
    seed: int,
    actions: int = 40,
    schedulers: ModuleType = scheduler,
    managers: ModuleType = block_manager,
) -> History:
    """One random history, from its seed alone; raises AssertionError at the first thing wrong."""
    rng = random.Random(seed)
    history = History(rng, schedulers, managers, hash_bits=rng.choice((3, 64)))
    kinds, weights = zip(*ACTIONS, strict=True)
    try:
        for _ in range(actions):
            rng.choices(kinds, weights)[0](history)
            history.check()
        history.drain()
    except Exception as error:
        raise AssertionError(f"run_history({seed}) fails: {error!r}") from error
    return history

"""A model whose output changes if one slot is wrong, and random histories of the scheduler.

`OracleRunner` takes the runner's place. Its "KV" is the pair (token, position) that is written to
each slot. Its next token is a hash of all pairs that a row reads through its block table. `answer`
computes the same tokens without an engine. A history is a scheduler with random actions.
`INVARIANTS` must hold after each action. It needs no torch.

In every second history the block hashes collide, because the last token of a block is left out of
them. A match must then tell the blocks apart by their tokens.
"""

import random
import threading
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from xxhash import xxh64_intdigest

from nanovllm.engine import block_manager, scheduler
from nanovllm.engine.observer import NO_OBSERVER, Observer
from nanovllm.engine.recovery import revert_in_flight
from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.plan import RowSampling, StepOutput, StepPlan

ALPHABET = 3  # small, so that sequences often have equal blocks
NOT_KNOWN = ALPHABET  # no request has this token

INVARIANTS = {
    "answers": "Every request ends with the tokens that the model's definition gives.",
    "context": "Through its block table a sequence finds the KV of its tokens.",
    "slots": "A step writes a slot at most once, never writes a slot of the null block, and reads "
    "only slots that were written.",
    "owners": "The reference count of a block is the number of block tables that contain it.",
    "partition": "Each block is in exactly one of three states: owned, evictable, free.",
    "index": "hash_to_block contains the cached blocks and no others.",
    "cached": "A cached block holds the tokens that it is cached with.",
    "budget": "A plan states the number of its tokens. They are at most as many as the budget, of "
    "at most max_num_seqs sequences, each once.",
    "oldest": "The oldest sequence is never preempted, and a step that preempts admits nothing.",
    "progress": "All requests end after a bounded number of steps, whatever happened before.",
    "returned": "When all requests have ended, all blocks are available and all rows are free.",
    "no error": "The scheduler and the block manager raise no exception.",
    "states": "The state of a row has consumed exactly the tokens of its context.",
    "snapshots": "A snapshot belongs to a cached block and has consumed exactly the tokens up to "
    "the end of this block.",
    "state slots": "Each slot for states has one use at a time, and a step writes it at most once.",
    "host": "Each host block is free, or cached once with the tokens that it holds.",
}


class InvariantError(AssertionError):
    """An invariant does not hold. `name` is its key in INVARIANTS."""

    def __init__(self, name: str, detail: str = "") -> None:
        super().__init__(name, detail)
        self.name = name
        self.detail = detail or INVARIANTS[name]

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def require(holds: bool, name: str, detail: str = "") -> None:
    if not holds:
        raise InvariantError(name, detail)


def next_token(pairs: list[tuple[int, int]], seed: int) -> int:
    return xxh64_intdigest(repr(pairs).encode(), seed % 2**64) % ALPHABET


def answer(prompt: list[int], max_length: int, stops: frozenset[int], seed: int) -> list[int]:
    """Return the output of a sequence, by the definition of the model."""
    pairs = [(token, i) for i, token in enumerate(prompt)]
    while len(pairs) < max_length:
        pairs.append((next_token(pairs, seed), len(pairs)))
        if pairs[-1][0] in stops:
            break
    return [token for token, _ in pairs[len(prompt) :]]


def make_samples(
    prompt: list[int],
    max_length: int,
    arrival: int = 0,
    seeds: Sequence_[int] = (0,),
    stops: frozenset[int] = frozenset(),
) -> list[Sequence]:
    """Return the samples of one request, one for each seed. The first computes the prompt."""
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
    """Runs plans on a memory of (token, position), and checks what they read and write."""

    def __init__(
        self, num_blocks: int, block_size: int, num_rows: int, host_blocks: int = 0
    ) -> None:
        self.size = block_size
        self.memory: list[tuple[int, int] | None] = [None] * ((num_blocks + 1) * block_size)
        self.host: list[list[tuple[int, int] | None]] = [[] for _ in range(host_blocks)]
        self.tables: list[dict[int, int]] = [{} for _ in range(num_rows)]
        self.positions = [0] * num_rows
        self.seeds = [0] * num_rows
        self.last = [0] * num_rows

    def run(self, plan: StepPlan) -> list[int]:
        size, memory = self.size, self.memory
        self.take_blocks(plan)
        saved = {move.target for move in plan.saves}
        require(len(saved) == len(plan.saves), "host", "a host block is saved twice in a step")
        for block, host_block in plan.saves:
            self.host[host_block] = memory[block * size : (block + 1) * size]
        copied = [memory[a * size : (a + 1) * size] for a, _ in plan.block_copies]
        for (_, b), content in zip(plan.block_copies, copied, strict=True):
            memory[b * size : (b + 1) * size] = content
        for host_block, block in plan.loads:
            memory[block * size : (block + 1) * size] = self.host[host_block]

        work = [
            (c.row, c.start, c.token_ids, 0 if c.result_kind is None else 1 + c.num_drafts)
            for c in plan.chunks
        ]
        work += [(row, self.positions[row], [self.last[row]], 1) for row in plan.decode_rows]
        require(len({row for row, *_ in work}) == len(work), "budget", "a row is twice in a step")
        num_tokens = sum(len(ids) for _, _, ids, _ in work)
        detail = f"the plan has {num_tokens} tokens and states {plan.num_tokens}"
        require(num_tokens == plan.num_tokens, "budget", detail)
        written: set[int] = set()
        for row, start, ids, _ in work:
            for position, token in enumerate(ids, start):
                slot = self.slot(row, position)
                require(slot >= size, "slots", "a slot of the null block was written")
                if slot in written:
                    raise InvariantError("slots", f"slot {slot} was written twice in a step")
                written.add(slot)
                memory[slot] = (token, position)
            self.positions[row] = start + len(ids)
        drawn = []
        for row, _, _, number in work:
            if number:
                context = self.context(row)
                ends = range(len(context) - number + 1, len(context) + 1)
                drawn += [next_token(context[:end], self.seeds[row]) for end in ends]
                # After drafts, the host has to say which token is the next.
                self.last[row] = drawn[-1] if number == 1 else NOT_KNOWN
        return drawn

    def take_blocks(self, plan: StepPlan) -> None:
        for new_row in plan.new_rows:
            self.tables[new_row.row] = dict(enumerate(new_row.block_table))
            self.seeds[new_row.row] = new_row.sampling.seed
        for row, index, block in plan.new_blocks:
            self.tables[row][index] = block

    def context(self, row: int) -> list[tuple[int, int]]:
        """Return the pairs that the row reads through its block table."""
        pairs = [self.memory[self.slot(row, i)] for i in range(self.positions[row])]
        if None in pairs:
            position = pairs.index(None)
            raise InvariantError("slots", f"position {position} was read and never written")
        return [pair for pair in pairs if pair]

    def slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.size] * self.size + position % self.size


class Action(NamedTuple):
    name: str  # a method of History, and a key of ACTIONS
    seed: int  # seeds the random numbers of the action, so earlier actions do not change it


# Name -> how often it is drawn.
ACTIONS = {"step": 60, "add": 25, "abort": 4, "abandon": 2, "reset": 1}


class History:
    """A scheduler with its runner. Every invariant is checked after every action.

    A Trace can observe it, as it observes an LLMEngine.
    """

    input_processor = SimpleNamespace(tokenizer=None)
    repeats = 0.5  # share of requests that begin like an earlier request
    sample_counts: tuple[int, ...] = (1, 1, 1, 2, 4)  # drawn for each request
    collisions = True  # whether block hashes collide in every second history
    host_blocks = 0

    def __init__(
        self,
        seed: int,
        schedulers: ModuleType = scheduler,
        managers: ModuleType = block_manager,
    ) -> None:
        """The modules may contain a fault."""
        self.rng = rng = random.Random(seed)
        self.size = rng.choice((1, 2, 3, 4))
        self.num_blocks = rng.randint(6, 24)
        self.budget = rng.choice((1, 2, 3, 5, 8, 64))
        self.max_num_seqs = rng.choice((1, 2, 3, 6))
        self.async_scheduling = rng.choice((False, False, True))
        self.block_manager = self.make_blocks(managers)
        if self.collisions and seed % 2:
            hash_block = self.block_manager.hash_block
            self.block_manager.hash_block = lambda parent, tokens: hash_block(parent, tokens[:-1])
        policy = rng.choice(("fcfs", "sjf"))
        limits = self.max_num_seqs, self.budget
        self.scheduler = schedulers.Scheduler(self.block_manager, *limits, policy)
        sizes = (self.num_blocks, self.size, self.max_num_seqs, self.host_blocks)
        self.runner = OracleRunner(*sizes)
        self.pending: deque[tuple[InFlightStep, list[int]]] = deque()
        self.seqs: list[Sequence] = []
        self.arrivals = 0
        self.steps = 0
        self.lock = threading.RLock()
        self.observer: Observer = NO_OBSERVER

    def make_blocks(self, managers: ModuleType) -> Any:
        """Make the block manager. A subclass may also change the sizes."""
        caches = self.rng.random() < 0.85
        return managers.BlockManager(self.num_blocks, self.size, caches)

    # ---- actions ----

    def do(self, action: Action) -> None:
        """Run an action and check every invariant. Raises InvariantError."""
        self.rng.seed(action.seed)
        getattr(self, action.name)()
        self.check()

    def add(self) -> None:
        rng = self.rng
        room = self.num_blocks * self.size
        longest = rng.randint(2, min(room + 1, 28))
        num_prompt = rng.randint(1, longest - 1)
        prompt = [rng.randrange(ALPHABET) for _ in range(num_prompt)]
        if (
            self.seqs and rng.random() < self.repeats
        ):  # begin like an earlier request and its answer
            old = rng.choice(self.seqs).token_ids
            prompt = (old[: rng.randint(1, len(old))] + prompt)[:num_prompt]
        stops = frozenset({rng.randrange(ALPHABET)} if rng.random() < 0.2 else ())
        seeds = [rng.randrange(4) for _ in range(rng.choice(self.sample_counts))]
        samples = make_samples(prompt, longest, self.arrivals, seeds, stops)
        self.arrivals += 1
        self.seqs += samples
        self.scheduler.add(samples[0])

    def abort(self) -> None:
        if self.seqs:
            seq = self.rng.choice(self.seqs)
            for sample in [s for s in self.seqs if s.arrival == seq.arrival]:
                self.scheduler.finish(sample, "abort")

    def abandon(self) -> None:
        """Let a step fail. The slots that it wrote are made unreadable."""
        self.observer.begin()
        step = self.scheduler.schedule()
        self.observer.scheduled(step)
        for plan in (step.plan for step in self.scheduler.in_flight):
            for _, host_block in plan.saves:
                self.runner.host[host_block] = []
            for _, target in (*plan.block_copies, *plan.loads):
                self.spoil(range(target * self.size, (target + 1) * self.size))
            self.runner.take_blocks(plan)
            for c in plan.chunks:
                self.spoil(self.runner.slot(c.row, c.start + i) for i in range(len(c.token_ids)))
        self.pending.clear()
        revert_in_flight(self.scheduler, [*self.scheduler.running, *self.scheduler.waiting])
        self.observer.reverted(RuntimeError("a step failed on purpose"))

    def spoil(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.runner.memory[slot] = None

    def reset(self) -> None:
        """Reset the prefix cache. If that is possible, all earlier KV is made unreadable."""
        if self.block_manager.reset_prefix_cache():
            self.forget_memory()

    def forget_memory(self) -> None:
        self.spoil(range(len(self.runner.memory)))
        self.runner.host = [[] for _ in self.runner.host]

    def step(self) -> None:
        preemptions = self.scheduler.preemptions
        running = list(self.scheduler.running)
        self.observer.begin()
        step = self.scheduler.schedule()
        self.observer.scheduled(step)
        if step is not None:
            plan = step.plan
            require(plan.num_tokens <= self.budget, "budget")
            require(len(self.scheduler.running) <= self.max_num_seqs, "budget")
            if self.scheduler.preemptions > preemptions:
                admitted = not set(self.scheduler.running) <= set(running)
                require(not admitted, "oldest", "a step that preempted admitted a sequence")
                kept = bool(running) and running[0].status is Status.RUNNING
                require(kept, "oldest", "the oldest sequence was preempted")
            self.pending.append((step, self.runner.run(plan)))
            self.planned()
        num_left = 1 if step is not None and self.async_scheduling and not step.is_due else 0
        while len(self.pending) > num_left:
            step_, tokens = self.pending.popleft()
            self.observer.begin()
            updated = self.scheduler.commit(step_, tokens)
            self.observer.committed(step_, updated, StepOutput(tokens))
        self.steps += 1

    def planned(self) -> None:
        """Do something between a plan and the commit of the plan before it. A subclass may."""

    def drain(self) -> None:
        """Run until all requests end with their answers, in a bounded number of steps."""
        bound = self.steps + 50 + sum(3 * s.max_length for s in self.seqs) * 2
        while self.scheduler.has_work():
            self.step()
            self.check()
            require(self.steps < bound, "progress")
        for seq in self.seqs:
            ran = seq.status is Status.FINISHED
            require(ran, "progress", f"request {seq.request_id} never ran")
            prompt, stops = seq.token_ids[: seq.num_prompt], seq.stop_token_ids
            want = answer(prompt, seq.max_length, stops, seq.sampling.seed)
            if seq.finish_reason == "abort":
                want = want[: len(seq.output_ids)]
            detail = f"request {seq.request_id} has the tokens {seq.output_ids} and not {want}"
            require(seq.output_ids == want, "answers", detail)
        require(
            self.block_manager.num_available == self.num_blocks, "returned", "blocks are missing"
        )
        rows = sorted(self.scheduler.free_rows)
        require(rows == list(range(self.max_num_seqs)), "returned", f"the free rows are {rows}")

    # ---- what always holds ----

    def check(self) -> None:
        blocks = self.block_manager.blocks
        running = self.scheduler.running
        require(len({s.row for s in running}) == len(running) <= self.max_num_seqs, "budget")
        owners = [0] * len(blocks)
        for seq in running:
            require(seq.status is Status.RUNNING, "progress", "a sequence runs and is not running")
            for index in seq.block_table:
                owners[index] += 1
        counts = [b.ref_count for b in blocks]
        if counts != owners:
            i = next(i for i in range(len(owners)) if counts[i] != owners[i])
            detail = (
                f"block {i} is in {owners[i]} block tables, and its reference count is {counts[i]}"
            )
            raise InvariantError("owners", detail)
        free = self.block_manager.free
        evictable = self.block_manager.evictable
        owned = [i for i, n in enumerate(owners) if n]
        every = sorted([*free, *evictable, *owned])
        require(every == list(range(1, self.num_blocks + 1)), "partition")
        held = {b.block_id for b in blocks if b.is_cached}
        require(held.issuperset(evictable), "partition", "evictable and not cached")
        require(held.isdisjoint(free), "partition", "free and cached")
        cached = {blocks[i].block_hash: blocks[i] for i in held}
        require(cached == self.block_manager.hash_to_block, "index")
        for index in held:
            self.check_cached(index)
        for seq in self.seqs:
            if seq.status is Status.RUNNING:
                self.check_context(seq)
            else:
                require(not seq.block_table, "owners", "a waiting sequence owns blocks")

    def check_context(self, seq: Sequence) -> None:
        size, memory = self.size, self.runner.memory
        want = [(token, i) for i, token in enumerate(seq.token_ids[: seq.num_computed])]
        have = [p for b in seq.block_table for p in memory[b * size : (b + 1) * size]]
        if have[: len(want)] != want:
            i = next(i for i, pair in enumerate(want) if have[i] != pair)
            slot = seq.block_table[i // size] * size + i % size
            detail = f"slot {slot} of request {seq.request_id} holds {have[i]} and not {want[i]}"
            raise InvariantError("context", detail)

    def check_cached(self, index: int) -> None:
        """Check that a cached block holds the tokens that it is cached with."""
        named = self.block_manager.blocks[index].token_ids
        held = [p and p[0] for p in self.runner.memory[index * self.size : (index + 1) * self.size]]
        if held != named:
            detail = f"block {index} holds {held} and is cached with {named}"
            raise InvariantError("cached", detail)


def random_actions(seed: int, number: int = 40) -> list[Action]:
    rng = random.Random(seed)
    names = rng.choices(list(ACTIONS), list(ACTIONS.values()), k=number)
    return [Action(name, rng.getrandbits(32)) for name in names]


def replay(history: History, actions: Iterable[Action]) -> None:
    """Run the actions, then run to the end. Raises InvariantError at the first fault."""
    try:
        for action in actions:
            history.do(action)
        history.drain()
    except InvariantError:
        raise
    except Exception as error:
        raise InvariantError("no error", repr(error)) from error


def run_history(seed: int, actions: int = 40, make: Any = History, **modules: ModuleType) -> Any:
    """Run the random history of a seed. Raises AssertionError at the first fault.

    make: a class of histories. It gets the seed and the modules.
    """
    history = make(seed, **modules)
    try:
        replay(history, random_actions(seed, actions))
    except InvariantError as error:
        raise AssertionError(f"run_history({seed}) fails: {error}") from error
    return history


def plain_sequence(token_ids: list[int]) -> Sequence:
    return make_samples(token_ids, 99)[0]

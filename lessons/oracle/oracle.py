"""A model whose output changes if one slot is wrong, and random histories of the scheduler.

`OracleRunner` takes the runner's place. Its "KV" is the pair (token, position) that is written to
each slot. Its next token is a hash of all pairs that a row reads through its block table. `answer`
computes the same tokens without an engine. A history is a scheduler with random actions.
`INVARIANTS` must hold after each action. In every second history the block hashes collide, because
they leave out the last token of a block: a match has to compare the tokens. It needs no torch.
"""

import random
import threading
from collections import Counter, deque
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

from xxhash import xxh64_intdigest

from nanovllm.engine import block_manager, scheduler
from nanovllm.engine.observer import NO_OBSERVER, Observer
from nanovllm.engine.recovery import revert_in_flight
from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.plan import RowSampling, StepOutput, StepPlan

ALPHABET = 3  # small, so that sequences often have equal blocks

INVARIANTS = {
    "answers": "Every request ends with the tokens that the model's definition gives.",
    "context": "Through its block table a sequence finds the KV of its tokens.",
    "slots": "A step writes a slot once, none of the null block, and reads only written slots.",
    "owners": "The reference count of a block is the number of block tables that contain it.",
    "partition": "Each block is in exactly one of three states: owned, evictable, free.",
    "index": "hash_to_block contains the cached blocks and no others.",
    "cached": "A cached block is full, and holds the tokens that it is cached with.",
    "budget": "A plan has at most as many tokens as the budget, of at most max_num_seqs sequences.",
    "oldest": "The oldest sequence is never preempted, and a step that preempts admits nothing.",
    "progress": "All requests end after a bounded number of steps, whatever happened before.",
    "returned": "When all requests have ended, all blocks are available and all rows are free.",
    "no error": "The scheduler and the block manager raise no exception.",
    "states": "The state of a row has consumed exactly the tokens of its context.",
    "snapshots": "A snapshot has consumed exactly the tokens up to the end of a cached block.",
    "state_slots": "Each slot for states has one use at a time, and a step writes it at most once.",
    "host": "Each host block is free, or cached once with the tokens that it holds.",
}


class InvariantError(AssertionError):
    """An invariant does not hold. `name` is its key in INVARIANTS."""

    def __init__(self, name: str, detail: str = "") -> None:
        self.name = name
        self.detail = detail or INVARIANTS[name]
        super().__init__(name, self.detail)

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
    prompt: list[int], max_length: int, arrival: int = 0, seeds: Iterable[int] = (0,)
) -> list[Sequence]:
    """Return the samples of one request, one for each seed. The first computes the prompt."""
    lengths = (len(prompt), max_length)
    samples = []
    for index, seed in enumerate(seeds):
        seq = Sequence(str(arrival), arrival, list(prompt), *lengths, index=index)
        seq.sampling = RowSampling(1.0, seed=seed)
        samples.append(seq)
    samples[0].forks = samples[1:]
    for fork in samples[1:]:
        fork.parent = samples[0]
    return samples


class OracleRunner:
    """Runs plans on a memory of (token, position), and checks what they read and write."""

    def __init__(self, num_blocks: int, block_size: int, num_rows: int) -> None:
        self.size = block_size
        self.memory: list[tuple[int, int] | None] = [None] * ((num_blocks + 1) * block_size)
        self.host: dict[int, list[tuple[int, int] | None]] = {}  # blocks of the host cache
        self.tables: list[dict[int, int]] = [{} for _ in range(num_rows)]
        self.positions = [0] * num_rows
        self.seeds = [0] * num_rows
        self.last = [0] * num_rows

    def run(self, plan: StepPlan) -> list[int]:
        """Return the tokens that the plan samples."""
        memory = self.memory
        slots_of = self.slots_of
        for new_row in plan.new_rows:
            self.tables[new_row.row] = dict(enumerate(new_row.block_table))
            self.seeds[new_row.row] = new_row.sampling.seed
        for row, index, block in plan.new_blocks:
            self.tables[row][index] = block
        saved = {move.target for move in plan.saves}
        require(len(saved) == len(plan.saves), "host", "a host block is saved twice in a step")
        for block, host_block in plan.saves:
            self.host[host_block] = memory[slots_of(block)]
        copied = [memory[slots_of(source)] for source, _ in plan.block_copies]
        for (_, target), content in zip(plan.block_copies, copied, strict=True):
            memory[slots_of(target)] = content
        for host_block, block in plan.loads:
            memory[slots_of(block)] = self.host[host_block]

        work = self.work(plan)
        require(len({row for row, *_ in work}) == len(work), "budget", "a row is twice in a step")
        num_tokens = sum(len(ids) for _, _, ids, _ in work)
        detail = f"the plan has {num_tokens} tokens and states {plan.num_tokens}"
        require(num_tokens == plan.num_tokens, "budget", detail)
        written = set[int]()
        for row, start, ids, _ in work:
            for position, token in enumerate(ids, start):
                slot = self.slot(row, position)
                require(slot >= self.size, "slots", "a slot of the null block was written")
                require(slot not in written, "slots", "a slot was written twice in a step")
                written.add(slot)
                memory[slot] = (token, position)
            self.positions[row] = start + len(ids)
        drawn = []
        for row, _, _, number in work:
            if number:
                context = self.context(row)
                ends = range(len(context) - number + 1, len(context) + 1)
                drawn += [next_token(context[:end], self.seeds[row]) for end in ends]
                # After drafts, the host has to say which token is the next: never ALPHABET.
                self.last[row] = drawn[-1] if number == 1 else ALPHABET
        return drawn

    def work(self, plan: StepPlan) -> list[tuple[int, int, list[int], int]]:
        """Return (row, first position, tokens to compute, number of results) of each row."""
        work = []
        for c in plan.chunks:
            number = 0 if c.result_kind is None else 1 + c.num_drafts
            work.append((c.row, c.start, c.token_ids, number))
        for row in plan.decode_rows:
            work.append((row, self.positions[row], [self.last[row]], 1))
        return work

    def context(self, row: int) -> list[tuple[int, int]]:
        """Return the pairs that the row reads through its block table."""
        pairs = [self.memory[self.slot(row, i)] for i in range(self.positions[row])]
        require(None not in pairs, "slots", "a slot was read that was never written")
        return [pair for pair in pairs if pair]

    def slot(self, row: int, position: int) -> int:
        if (block := self.tables[row].get(position // self.size)) is None:
            raise KeyError(f"the runner has no block for position {position} of row {row}")
        return block * self.size + position % self.size

    def slots_of(self, block_id: int) -> slice:
        return slice(block_id * self.size, (block_id + 1) * self.size)

    def forget(self) -> None:
        """Make everything unreadable: a step has failed, or the prefix cache has been reset."""
        self.memory = [None] * len(self.memory)
        self.host = {}


# Name of a method of History -> how often it is drawn.
ACTIONS = {"step": 60, "add": 25, "abort": 4, "abandon": 2, "reset": 1}
# A name, and what seeds the random numbers of the action, so earlier actions do not change it.
Action: TypeAlias = tuple[str, int]


class History:
    """A scheduler with its runner. A Trace can observe it, as it observes an LLMEngine."""

    input_processor = SimpleNamespace(tokenizer=None)
    repeats = 0.5  # share of requests that begin like an earlier request
    late_aborts = 0.0  # share of the plans after which a request is aborted before they end
    sample_counts: tuple[int, ...] = (1, 1, 1, 2, 4)  # drawn for each request
    collisions = True  # whether block hashes collide in every second history

    def __init__(
        self, seed: int, schedulers: ModuleType = scheduler, managers: ModuleType = block_manager
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
        limits = self.max_num_seqs, self.budget, rng.choice(("fcfs", "sjf"))
        self.scheduler = schedulers.Scheduler(self.block_manager, *limits)
        self.runner = OracleRunner(self.num_blocks, self.size, self.max_num_seqs)
        self.pending: deque[tuple[InFlightStep, list[int]]] = deque()
        self.seqs: list[Sequence] = []
        self.arrivals = self.steps = 0
        self.lock = threading.RLock()
        self.observer: Observer = NO_OBSERVER

    def make_blocks(self, managers: ModuleType) -> Any:
        """Make the block manager. A subclass may also change the sizes."""
        return managers.BlockManager(self.num_blocks, self.size, self.rng.random() < 0.85)

    def add(self) -> None:
        rng = self.rng
        longest = rng.randint(2, min(self.num_blocks * self.size + 1, 28))
        num_prompt = rng.randint(1, longest - 1)
        prompt = [rng.randrange(ALPHABET) for _ in range(num_prompt)]
        if self.seqs and rng.random() < self.repeats:  # an earlier request and its answer
            old = rng.choice(self.seqs).token_ids
            prompt = (old[: rng.randint(1, len(old))] + prompt)[:num_prompt]
        stops = frozenset({rng.randrange(ALPHABET)} if rng.random() < 0.2 else ())
        seeds = [rng.randrange(4) for _ in range(rng.choice(self.sample_counts))]
        samples = make_samples(prompt, longest, self.arrivals, seeds)
        for seq in samples:
            seq.stop_token_ids = stops
        self.arrivals += 1
        self.seqs += samples
        self.scheduler.add(samples[0])

    def abort(self) -> None:
        if self.seqs:
            seq = self.rng.choice(self.seqs)
            for sample in [s for s in self.seqs if s.arrival == seq.arrival]:
                self.scheduler.finish(sample, "abort")

    def abandon(self) -> None:
        """Let a step fail."""
        self.observer.begin()
        self.observer.scheduled(self.scheduler.schedule())
        self.runner.forget()
        self.pending.clear()
        revert_in_flight(self.scheduler, [*self.scheduler.running, *self.scheduler.waiting])
        self.observer.reverted(RuntimeError("a step failed on purpose"))

    def reset(self) -> None:
        """Reset the prefix cache, if that is possible."""
        if self.block_manager.reset_prefix_cache():
            self.runner.forget()

    def step(self) -> None:
        preemptions = self.scheduler.preemptions
        running = list(self.scheduler.running)
        self.observer.begin()
        step = self.scheduler.schedule()
        self.observer.scheduled(step)
        if step is not None:
            require(step.plan.num_tokens <= self.budget, "budget")
            if self.scheduler.preemptions > preemptions:
                left = self.scheduler.running
                detail = "a step that preempted admitted a sequence"
                require(set(left) <= set(running), "oldest", detail)
                is_left = bool(left) and left[0] is running[0]
                require(is_left, "oldest", "the oldest sequence was preempted")
            self.pending.append((step, self.runner.run(step.plan)))
            if self.rng.random() < self.late_aborts:
                self.abort()
        num_left = 1 if step is not None and self.async_scheduling and not step.is_due else 0
        while len(self.pending) > num_left:
            step_, tokens = self.pending.popleft()
            self.observer.begin()
            updated = self.scheduler.commit(step_, tokens)
            self.observer.committed(step_, updated, StepOutput(tokens))
        self.steps += 1

    def drain(self) -> None:
        """Run until all requests end with their answers, in a bounded number of steps."""
        bound = self.steps + 50 + sum(3 * s.max_length for s in self.seqs) * 2
        while self.scheduler.has_work():
            self.step()
            self.check()
            require(self.steps < bound, "progress")
        for seq in self.seqs:
            name = f"request {seq.request_id}"
            output = seq.output_ids
            require(seq.status is Status.FINISHED, "progress", f"{name} never ran")
            prompt = seq.token_ids[: seq.num_prompt]
            stops = seq.stop_token_ids
            want = answer(prompt, seq.max_length, stops, seq.sampling.seed)
            want = want[: len(output)] if seq.finish_reason == "abort" else want
            require(output == want, "answers", f"{name} has the tokens {output} and not {want}")
        available = self.block_manager.num_available
        rows = sorted(self.scheduler.free_rows)
        require(available == self.num_blocks, "returned", "blocks are missing")
        require(rows == list(range(self.max_num_seqs)), "returned", f"the free rows are {rows}")

    def check(self) -> None:
        manager = self.block_manager
        running = self.scheduler.running
        require(len({s.row for s in running}) == len(running) <= self.max_num_seqs, "budget")
        owners = Counter(block_id for seq in running for block_id in seq.block_table)
        for block in manager.blocks:
            count = block.ref_count
            tables = owners[block.block_id]
            detail = f"block {block.block_id} is in {tables} block tables, and counts {count}"
            require(count == tables, "owners", detail)
        every = sorted([*manager.free, *manager.evictable, *owners])
        require(every == list(range(1, self.num_blocks + 1)), "partition")
        cached = {block.block_id: block for block in manager.blocks if block.is_cached}
        require(manager.evictable.keys() <= cached.keys(), "partition", "evictable and not cached")
        require(cached.keys().isdisjoint(manager.free), "partition", "free and cached")
        found = {block.block_hash: block for block in cached.values()}
        require(found == manager.hash_to_block, "index")
        for block_id, block in cached.items():
            held = [pair and pair[0] for pair in self.runner.memory[self.runner.slots_of(block_id)]]
            detail = f"block {block_id} holds {held} and is cached with {block.token_ids}"
            require(held == block.token_ids, "cached", detail)
        for seq in self.seqs:
            is_running = seq.status is Status.RUNNING
            require(is_running == (seq in running), "progress", "a status is wrong")
            require(is_running or not seq.block_table, "owners", "a waiting sequence owns blocks")
            if is_running:
                self.check_context(seq)

    def check_context(self, seq: Sequence) -> None:
        """Check that a sequence finds the KV of its tokens through its block table."""
        for i, token in enumerate(seq.token_ids[: seq.num_computed]):
            slot = seq.block_table[i // self.size] * self.size + i % self.size
            held, want = self.runner.memory[slot], (token, i)
            detail = f"slot {slot} of request {seq.request_id} holds {held} and not {want}"
            require(held == want, "context", detail)


def random_actions(seed: int) -> list[Action]:
    rng = random.Random(seed)
    names = rng.choices(list(ACTIONS), list(ACTIONS.values()), k=40)
    return [(name, rng.getrandbits(32)) for name in names]


def replay(history: History, actions: Iterable[Action]) -> InvariantError | None:
    """Run the actions, then run to the end. Returns the first fault, if any."""
    try:
        for name, seed in actions:
            history.rng.seed(seed)
            getattr(history, name)()
            history.check()
        history.drain()
    except InvariantError as error:
        return error
    except Exception as error:
        return InvariantError("no error", repr(error)).with_traceback(error.__traceback__)
    return None


def run_history(seed: int, make: Any = History, **modules: ModuleType) -> Any:
    """Run the random history `make(seed, **modules)`. Raises AssertionError at the first fault."""
    history = make(seed, **modules)
    error = replay(history, random_actions(seed))
    if error is not None:
        raise AssertionError(f"run_history({seed}) fails: {error}") from error
    return history

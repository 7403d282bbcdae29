"""Scheduler and BlockManager: random histories on the oracle, state machines, mutants.

A failing history prints its seed: `run_history(seed)` repeats it.
"""

import inspect
import random
import types

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from oracle import ALPHABET, History, OracleRunner, run_history

from nanovllm.engine import block_manager, scheduler
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import RowSampling, StepPlan

HISTORIES = 20_000
MACHINE = settings(max_examples=400, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("part", range(4))
def test_random_histories(part: int) -> None:
    preemptions = evictions = 0
    for seed in range(part * HISTORIES // 4, (part + 1) * HISTORIES // 4):
        history = run_history(seed)
        preemptions += history.scheduler.preemptions
        evictions += history.blocks.evictions
    assert preemptions > HISTORIES // 4  # else the pools were too large to prove anything
    assert evictions > HISTORIES // 4


def test_row_buffers_build_what_the_plan_says() -> None:
    """The runner's own batches beside the oracle's reading of the same plans, over 1,500 histories."""
    import numpy as np
    import torch

    from nanovllm.runner.batch import RowBuffers

    class Both(OracleRunner):
        def run(self, plan: StepPlan) -> list[int]:
            self.buffers.apply(plan)
            batch, sampling = self.buffers.build(plan)
            positions = list(self.positions)
            drawn = super().run(plan)
            work = [(c.row, c.start, c.token_ids, c.sample) for c in plan.chunks]
            for row in plan.decode_rows:
                work.append((row, positions[row], [self.before[row]], True))
            ids = [t for _, _, tokens, _ in work for t in tokens]
            assert batch.input_ids.tolist() == ids
            at = [(row, start + i) for row, start, tokens, _ in work for i in range(len(tokens))]
            assert batch.positions.tolist() == [p for _, p in at]
            assert batch.slots.tolist() == [self.slot(row, p) for row, p in at]
            ends = np.cumsum([len(tokens) for _, _, tokens, _ in work])
            assert batch.query_start.tolist() == [0, *ends]
            assert batch.context_lens.tolist() == [start + len(t) for _, start, t, _ in work]
            draws = [
                (e - 1, r, s + len(t)) for e, (r, s, t, d) in zip(ends, work, strict=True) if d
            ]
            assert batch.logit_rows.tolist() == [e for e, _, _ in draws]
            assert sampling.seeds.tolist() == [self.seeds[row] for _, row, _ in draws]
            assert sampling.positions.tolist() == [p for _, _, p in draws]
            self.buffers.drawn(torch.tensor(drawn, dtype=torch.int64))
            self.before = list(self.last)
            return drawn

    for seed in range(1500):
        history = History(random.Random(seed))
        runner = Both(history.num_blocks, history.size, history.max_num_seqs)
        runner.before = [0] * history.max_num_seqs
        runner.buffers = RowBuffers(
            history.max_num_seqs, 40, history.size, ALPHABET, torch.device("cpu")
        )
        history.runner = runner
        for _ in range(40):
            history.rng.choice((History.step, History.step, History.add, History.abort))(history)
        history.drain()


# ---- mutants: one-line faults, each of which the histories must catch ----

MUTANTS = {
    "a reference is not counted": (
        block_manager,
        "            block.ref_count += 1\n",
        "            pass\n",
    ),
    "an adopted block stays evictable": (
        block_manager,
        "                del self.cached[index]\n",
        "                pass\n",
    ),
    "a stale hash is kept when a block is reused": (
        block_manager,
        "            self._unpublish(self.blocks[index])\n            self.evictions",
        "            self.evictions",
    ),
    "the parent is not checked": (block_manager, "block.parent == parent and ", ""),
    "the tokens are not compared": (
        block_manager,
        " and block.token_ids == self._tokens(seq, i)",
        "",
    ),
    "a match goes to the very end": (
        block_manager,
        "range((len(seq.token_ids) - 1) // self.block_size)",
        "range(len(seq.token_ids) // self.block_size)",
    ),
    "a block is published before it is full": (
        block_manager,
        "full = min(seq.num_computed, len(seq.token_ids)) // self.block_size",
        "full = -(-min(seq.num_computed, len(seq.token_ids)) // self.block_size)",
    ),
    "a block is published before it is computed": (
        block_manager,
        "full = min(seq.num_computed, len(seq.token_ids)) // self.block_size",
        "full = min(len(seq.block_table) * self.block_size, len(seq.token_ids)) // self.block_size",
    ),
    "a shared block is written in place": (
        block_manager,
        "if old.ref_count == 1 and not old.identity:",
        "if True:",
    ),
    "a published block is written in place": (
        block_manager,
        "if old.ref_count == 1 and not old.identity:",
        "if old.ref_count == 1:",
    ),
    "a block is appended one token late": (
        scheduler,
        "seq.num_computed == len(seq.block_table) * size",
        "seq.num_computed == len(seq.block_table) * size + 1",
    ),
    "a block is appended one token early": (
        scheduler,
        "seq.num_computed == len(seq.block_table) * size",
        "seq.num_computed + 1 == len(seq.block_table) * size",
    ),
    "a copy is not planned": (scheduler, "plan.block_copies.append(copy)", "pass"),
    "the copied block is not reported": (
        scheduler,
        "                plan.new_blocks.append((seq.row, seq.num_computed // blocks.block_size, copy[1]))\n",
        "",
    ),
    "a fork copies what is not written yet": (
        scheduler,
        "and parent.last_chunk < self.num_plans",
        "and True",
    ),
    "the first to come gives way": (
        scheduler,
        "self._preempt(self.running[-1])",
        "self._preempt(self.running[0])",
    ),
    "a victim's tokens are lost": (
        scheduler,
        "        promised = seq.num_tokens\n",
        "        promised = seq.num_tokens\n        del seq.token_ids[seq.num_prompt :]\n",
    ),
    "admission in a step that preempted": (scheduler, "and not preempted", ""),
    "a row is not given back": (
        scheduler,
        "            self._rows.append(seq.row)\n",
        "",
    ),
    "a token drawn too late is kept": (
        scheduler,
        "            if seq.status is Status.FINISHED:\n                continue  # found",
        "            if False:\n                continue  # found",
    ),
    "the budget is not spent": (scheduler, "                budget -= 1\n", ""),
    "an abandoned plan's blocks stay published": (
        scheduler,
        "            seq.num_tokens = len(seq.token_ids)\n        self.blocks.reset_prefix_cache()",
        "            seq.num_tokens = len(seq.token_ids)",
    ),
    "max_length is passed by one": (
        scheduler,
        "len(ids) >= seq.max_length",
        "len(ids) > seq.max_length",
    ),
    "a resumed chunk starts one token late": (
        scheduler,
        "seq.token_ids[start:end], sample=last",
        "seq.token_ids[start + 1 : end + 1], sample=last",
    ),
}


def mutate(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"the mutant's line is there {source.count(old)} times"
    mutant = types.ModuleType("mutant")
    mutant.__dict__["__name__"] = module.__name__  # dataclasses look their module up by name
    exec(compile(source.replace(old, new), "<mutant>", "exec"), mutant.__dict__)
    return mutant


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    module, old, new = MUTANTS[name]
    mutant = mutate(module, old, new)
    chosen = {"managers" if module is block_manager else "schedulers": mutant}
    for seed in range(HISTORIES // 10):  # a part of what the suite runs
        try:
            run_history(seed, **chosen)
        except AssertionError:
            return
    assert module is block_manager, f"no history noticed that {name}"
    with pytest.raises(AssertionError):
        check_published_tail(mutant.BlockManager)


def plain_sequence(token_ids: list[int]) -> Sequence:
    sampling = RowSampling(0, 0, 1, 0, 0)
    return Sequence("", 0, token_ids, len(token_ids), 99, frozenset(), sampling)


def check_published_tail(manager: type[BlockManager]) -> None:
    """A fork whose parent is gone owns its tail alone, but others can still find the parent's
    tokens there. No history comes by here: a fork writes while its parent runs; a beam would.
    """
    blocks = manager(4, 4)
    parent = plain_sequence([1, 2, 3, 4])
    blocks.append(parent)
    parent.num_computed = 4
    blocks.publish(parent)
    child = plain_sequence([1, 2])
    blocks.fork(parent, child, 2)
    blocks.release(parent)
    shared = child.block_table[0]
    copy = blocks.own_tail(child)
    assert copy == (shared, child.block_table[0])
    assert shared in blocks.cached
    assert blocks.match(plain_sequence([1, 2, 3, 4, 5])) == [shared]


def test_published_tail() -> None:
    check_published_tail(BlockManager)


# ---- hypothesis drives the same histories, and shrinks what it finds ----


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32), bits=st.sampled_from([3, 64]))
    def start(self, seed: int, bits: int) -> None:
        self.history = History(random.Random(seed), hash_bits=bits)

    @rule()
    def add(self) -> None:
        self.history.add()

    @rule()
    def step(self) -> None:
        self.history.step()

    @rule()
    def abort(self) -> None:
        self.history.abort()

    @rule()
    def abandon(self) -> None:
        self.history.abandon()

    @invariant()
    def all_holds(self) -> None:
        if hasattr(self, "history"):
            self.history.check()

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.drain()


class BlockManagerMachine(RuleBasedStateMachine):
    """The block manager alone: sequences that grow, fork and are released in any order."""

    manager = BlockManager

    @initialize(size=st.integers(1, 4), number=st.integers(1, 12), bits=st.sampled_from([3, 64]))
    def start(self, size: int, number: int, bits: int) -> None:
        self.blocks = self.manager(number, size)
        full = self.blocks._hash
        self.blocks._hash = lambda parent, tokens: full(parent, tokens) & ((1 << bits) - 1)
        self.live: list[Sequence] = []
        self.content: dict[int, list[int | None]] = {i: [None] * size for i in range(number + 1)}

    @rule(tokens=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=12))
    def open(self, tokens: list[int]) -> None:
        seq = plain_sequence(tokens)
        matched = self.blocks.match(seq)
        lacking = self.blocks.num_needed(seq, len(tokens)) - len(matched)
        if lacking + self.blocks.num_idle(matched) > self.blocks.num_available:
            return
        self.blocks.adopt(seq, matched)
        assert seq.num_computed < len(tokens)
        held = [t for i in matched for t in self.content[i]]
        assert held == tokens[: seq.num_computed], "a match holds other tokens"
        for _ in range(lacking):
            self.blocks.append(seq)
        self.write(seq, len(tokens))
        self.live.append(seq)

    def write(self, seq: Sequence, upto: int) -> None:
        size = self.blocks.block_size
        for position in range(seq.num_computed, upto):
            block = seq.block_table[position // size]
            assert self.blocks.blocks[block].ref_count == 1
            assert not self.blocks.blocks[block].identity, "a published block is written"
            self.content[block][position % size] = seq.token_ids[position]
        seq.num_computed = upto
        self.blocks.publish(seq)

    @rule(pick=st.integers(0, 99), token=st.integers(0, ALPHABET - 1))
    def grow(self, pick: int, token: int) -> None:
        if not self.live:
            return
        seq = self.live[pick % len(self.live)]
        if self.blocks.num_needed(seq, seq.num_computed + 1) > self.blocks.num_available:
            return
        if seq.shares_tail:
            copy = self.blocks.own_tail(seq)
            if copy is not None:
                self.content[copy[1]] = list(self.content[copy[0]])
        for _ in range(self.blocks.num_needed(seq, seq.num_computed + 1)):
            self.blocks.append(seq)
        seq.token_ids.append(token)
        self.write(seq, seq.num_computed + 1)

    @rule(pick=st.integers(0, 99), at=st.integers(0, 99))
    def fork(self, pick: int, at: int) -> None:
        """At any point of what the parent has computed, as a beam search would."""
        parent = self.live[pick % len(self.live)] if self.live else None
        if parent is None or parent.num_computed == 0:
            return
        keep = at % parent.num_computed
        child = plain_sequence(parent.token_ids[:keep])
        self.blocks.fork(parent, child, keep)
        self.live.append(child)

    @rule(pick=st.integers(0, 99))
    def close(self, pick: int) -> None:
        if self.live:
            self.blocks.release(self.live.pop(pick % len(self.live)))

    @rule()
    def reset(self) -> None:
        self.blocks.reset_prefix_cache()

    @invariant()
    def all_holds(self) -> None:
        if not hasattr(self, "blocks"):
            return
        blocks, size = self.blocks, self.blocks.block_size
        owners = [0] * len(blocks.blocks)
        for seq in self.live:
            for index in seq.block_table:
                owners[index] += 1
            held = [t for i in seq.block_table for t in self.content[i]]
            assert held[: seq.num_computed] == seq.token_ids[: seq.num_computed]
        assert [b.ref_count for b in blocks.blocks] == owners
        owned = [i for i, n in enumerate(owners) if n]
        assert sorted([*blocks.free, *blocks.cached, *owned]) == list(
            range(1, blocks.num_blocks + 1)
        )
        assert {b.hash: b.index for b in blocks.blocks if b.identity} == blocks.index
        for index in blocks.index.values():
            named = memoryview(blocks.blocks[index].token_ids).cast("I").tolist()
            assert self.content[index] == named
            assert len(named) == size


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = MACHINE
TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = MACHINE

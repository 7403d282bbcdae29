"""The oracle with states, for models with linear attention, and faults of their block manager.

The state of a row is the list of all pairs (token, position) that it has consumed. It must be equal
to what the row reads through its block table. Each snapshot must have consumed the tokens up to the
end of its block. tests/features/models/hybrid/test_state_blocks.py catches more. No torch.
"""

import random
from types import ModuleType
from typing import NamedTuple

from lessons.oracle.mutants import Mutant
from lessons.oracle.oracle import History, OracleRunner, require
from nanovllm.engine import scheduler
from nanovllm.engine.sequence import Status
from nanovllm.features.models.hybrid import state_blocks
from nanovllm.plan import StepPlan

MUTANTS = {
    "a match does not copy the state": Mutant(
        state_blocks, "attach_cached", "self._sources[seq] = self.snapshots[last]", "pass"
    ),
    "a snapshot is one block early": Mutant(
        state_blocks,
        "cache_blocks",
        "end // self.block_size * self.block_size",
        "(end // self.block_size - 1) * self.block_size",
    ),
    "a slot that is freed is still named": Mutant(
        state_blocks, "_drop", "self.snapshots.pop(block_id)", "self.snapshots[block_id]"
    ),
    "a match uses a state of the plan": Mutant(
        state_blocks, "is_ready", "self.snapshots[matched[-1].block_id] not in self._fresh", "True"
    ),
}


class State(NamedTuple):
    """What a model with linear attention would have computed its state from."""

    pairs: tuple[tuple[int, int], ...] | None  # None: unknown, because a step failed


class HybridRunner(OracleRunner):
    """An oracle whose rows have states. A row samples only from the state of its context."""

    def __init__(self, num_blocks: int, block_size: int, num_rows: int, num_states: int) -> None:
        super().__init__(num_blocks, block_size, num_rows)
        self.states = [State(None)] * num_states

    def run(self, plan: StepPlan) -> list[int]:
        states, decoded = self.states, {row: self.last[row] for row in plan.decode_rows}
        starts = {row: self.positions[row] for row in plan.decode_rows}
        read = [states[source] for source, _ in plan.state_copies]
        for (_, target), state in zip(plan.state_copies, read, strict=True):
            states[target] = state
        written = [save.target for save in plan.state_saves]
        require(
            len(set(written)) == len(written), "state slots", "a slot is written twice in a step"
        )
        rows = len(self.tables)
        require(all(slot > rows for slot in written), "state slots", "a save overwrites a row")
        drawn = super().run(plan)  # KV and tokens; `last` and `positions` have changed
        work = [(c.row, c.start, c.token_ids) for c in plan.chunks]
        work += [(row, starts[row], [token]) for row, token in decoded.items()]
        computed = {row for row, *_ in work}
        require(all(save.row in computed for save in plan.state_saves), "state slots")
        for row, start, ids in work:
            saves = [save for save in plan.state_saves if save.row == row]
            state = State(()) if start == 0 else states[row]
            for number in range(len(ids) + 1):
                for save in saves:
                    if save.tokens_after == len(ids) - number:
                        states[save.target] = state
                if number < len(ids):
                    position = start + number
                    pair = (ids[number], position)
                    state = State(None if state.pairs is None else (*state.pairs, pair))
            states[row] = state
            consumed = "unknown tokens" if state.pairs is None else [*state.pairs]
            detail = f"row {row} has consumed {consumed} and its context is {self.context(row)}"
            require(state.pairs == tuple(self.context(row)), "states", detail)
        return drawn

    def forget_states(self) -> None:
        """No state may be used any more: a step has failed, or the cache has been reset."""
        self.states = [State(None)] * len(self.states)


class HybridHistory(History):
    """Most of these histories repeat the beginnings of earlier requests."""

    repeats = 0.8
    collisions = False  # a state depends on all tokens, of which a match compares one block's
    runner: HybridRunner

    def __init__(
        self, seed: int, schedulers: ModuleType = scheduler, managers: ModuleType = state_blocks
    ) -> None:
        super().__init__(seed, schedulers, managers)
        sizes = self.num_blocks, self.size, self.max_num_seqs, self.num_states
        self.runner = HybridRunner(*sizes)

    def make_blocks(self, managers: ModuleType) -> state_blocks.StateBlockManager:
        rng: random.Random = self.rng
        caches = rng.random() < 0.9
        num_slots = rng.choice((0, 1, 2, 3, 5, 8, 40))
        self.num_states = self.max_num_seqs + 1 + num_slots
        sizes = self.num_blocks, self.size, caches, self.max_num_seqs, self.num_states
        manager: state_blocks.StateBlockManager = managers.StateBlockManager(*sizes)
        return manager

    def planned(self) -> None:
        if self.rng.random() < 0.03:
            self.abort()

    def abandon(self) -> None:
        super().abandon()
        self.runner.forget_states()

    def forget_memory(self) -> None:
        super().forget_memory()
        self.runner.forget_states()

    def check(self) -> None:
        super().check()
        manager: state_blocks.StateBlockManager = self.block_manager
        named = [
            *manager.free_slots,
            *manager._returned,
            *manager.snapshots.values(),
            *(slot for _, slot in manager.unknown.values()),
            *manager.fork_slots.values(),
        ]
        require(
            sorted(named) == list(manager.all_slots),
            "state slots",
            f"the slots with a use are {sorted(named)}",
        )
        for block_id, slot in manager.snapshots.items():
            block, state = manager.blocks[block_id], self.runner.states[slot]
            require(block.is_cached, "snapshots", "a block with a snapshot is not cached")
            pairs = state.pairs or ()
            held = self.runner.memory[block_id * self.size : (block_id + 1) * self.size]
            name = f"the snapshot of block {block_id} has consumed {[*pairs]}"
            detail = f"{name} and the block holds {held}"
            require(list(pairs[-self.size :]) == held, "snapshots", detail)
            tokens = [token for token, _ in pairs]
            parent_block_hash = b""
            for start in range(0, len(tokens), self.size):
                of_block = tokens[start : start + self.size]
                parent_block_hash = manager.hash_block(parent_block_hash, of_block)
            detail = f"{name}, which is another prefix than that of the block"
            require(parent_block_hash == block.block_hash, "snapshots", detail)
        require(set(manager.rolling.values()) <= manager.snapshots.keys(), "snapshots")
        for seq in (*manager.rolling, *manager.unknown, *manager._sources, *manager.wanted):
            require(
                seq.status is Status.RUNNING, "state slots", "a sequence that does not run has one"
            )

    def drain(self) -> None:
        super().drain()
        manager = self.block_manager
        held = len(manager.free_slots) + len(manager._returned) + len(manager.snapshots)
        require(held == len(manager.all_slots), "returned", "slots are missing")

"""The oracle with states, for models with linear attention, and faults of their block manager.

A state is the list of all pairs (token, position) that it has consumed, or None if it is unknown. A
row's must be equal to what the row reads through its block table. A snapshot must have consumed the
tokens up to the end of its block. tests/features/models/hybrid/test_state_blocks.py catches more.
"""

from types import ModuleType
from typing import Any, TypeAlias

from lessons.oracle.mutants import read
from lessons.oracle.oracle import History, OracleRunner, require
from nanovllm.engine import scheduler
from nanovllm.engine.sequence import Status
from nanovllm.features.models.hybrid import state_blocks
from nanovllm.plan import StepPlan

MUTANTS = read(
    """
    a match does not copy the state | attach_cached \
        | self._sources[seq] = self.snapshots[last] | pass
    a snapshot is one block early | cache_blocks \
        | boundary = end // | boundary = (end - self.block_size) //
    a slot that is freed is still named | _drop \
        | self.snapshots.pop(block_id) | self.snapshots[block_id]
    a match uses a state of the plan | is_ready \
        | self.snapshots[matched[-1].block_id] not in self._fresh | True
    """,
    state_blocks,
)
State: TypeAlias = list[tuple[int, int]] | None


class HybridRunner(OracleRunner):
    """An oracle whose rows have states. A row samples only from the state of its context."""

    def __init__(self, num_blocks: int, block_size: int, num_rows: int, num_states: int) -> None:
        super().__init__(num_blocks, block_size, num_rows)
        self.states: list[State] = [None] * num_states

    def run(self, plan: StepPlan) -> list[int]:
        work = self.work(plan)
        states = self.states
        read = [states[source] for source, _ in plan.state_copies]
        for (_, target), state in zip(plan.state_copies, read, strict=True):
            states[target] = state
        targets = {save.target for save in plan.state_saves}
        detail = "a slot is written twice in a step"
        require(len(targets) == len(plan.state_saves), "state_slots", detail)
        rows = range(len(self.tables) + 1)
        require(targets.isdisjoint(rows), "state_slots", "a save overwrites a row")
        computed = {row for row, *_ in work}
        require(all(save.row in computed for save in plan.state_saves), "state_slots")
        drawn = super().run(plan)
        for row, start, ids, _ in work:
            before: State = states[row] if start else []
            pairs = [(token, position) for position, token in enumerate(ids, start)]
            after = [None if before is None else before + pairs[:i] for i in range(len(ids) + 1)]
            for save in plan.state_saves:
                if save.row == row:
                    states[save.target] = after[len(ids) - save.tokens_after]
            states[row] = after[-1]
            context = self.context(row)
            detail = f"row {row} has consumed {after[-1]} and its context is {context}"
            require(after[-1] == context, "states", detail)
        return drawn

    def forget(self) -> None:
        super().forget()
        self.states = [None] * len(self.states)


class HybridHistory(History):
    """Most of these histories repeat the beginnings of earlier requests."""

    repeats = 0.8
    late_aborts = 0.03
    collisions = False  # a state depends on all tokens, of which a match compares one block's
    runner: HybridRunner

    def __init__(
        self, seed: int, schedulers: ModuleType = scheduler, managers: ModuleType = state_blocks
    ) -> None:
        super().__init__(seed, schedulers, managers)
        sizes = self.num_blocks, self.size, self.max_num_seqs, self.num_states
        self.runner = HybridRunner(*sizes)

    def make_blocks(self, managers: ModuleType) -> Any:
        caches = self.rng.random() < 0.9
        num_snapshots = self.rng.choice((0, 1, 2, 3, 5, 8, 40))
        self.num_states = self.max_num_seqs + 1 + num_snapshots
        sizes = self.num_blocks, self.size, caches, self.max_num_seqs, self.num_states
        return managers.StateBlockManager(*sizes)

    def check(self) -> None:
        super().check()
        manager: state_blocks.StateBlockManager = self.block_manager
        used = [*manager.snapshots.values(), *manager.fork_slots.values()]
        used += [slot for _, slot in manager.uncached_snapshots.values()]
        slots = sorted([*manager.free_slots, *manager._returned, *used])
        require(slots == [*manager.all_slots], "state_slots", f"the slots with a use are {slots}")
        for block_id, slot in manager.snapshots.items():
            block = manager.blocks[block_id]
            pairs = self.runner.states[slot] or []
            require(block.is_cached, "snapshots", "a block with a snapshot is not cached")
            held = self.runner.memory[self.runner.slots_of(block_id)]
            name = f"the snapshot of block {block_id} has consumed {pairs}"
            require(pairs[-self.size :] == held, "snapshots", f"{name} and the block holds {held}")
            tokens = [token for token, _ in pairs]
            parent_block_hash = b""
            for i in range(0, len(tokens), self.size):
                parent_block_hash = manager.hash_block(parent_block_hash, tokens[i : i + self.size])
            detail = f"{name}, which is another prefix than that of the block"
            require(parent_block_hash == block.block_hash, "snapshots", detail)
        require(set(manager.latest_snapshot.values()) <= manager.snapshots.keys(), "snapshots")
        for seq in (
            *manager.latest_snapshot,
            *manager.uncached_snapshots,
            *manager._sources,
            *manager.resumable_at,
        ):
            is_running = seq.status is Status.RUNNING
            require(is_running, "state_slots", "a sequence that does not run has one")

    def drain(self) -> None:
        super().drain()
        manager = self.block_manager
        held = len(manager.free_slots) + len(manager._returned) + len(manager.snapshots)
        require(held == len(manager.all_slots), "returned", "slots are missing")

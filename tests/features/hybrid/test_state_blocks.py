"""The states of hybrid models in random histories on the oracle, and the faults that they catch."""

from types import ModuleType

import pytest
from beam_history import BeamHistory
from beam_history import run_history as run_beam_history
from hybrid_history import HybridHistory

from nanovllm.engine import scheduler
from nanovllm.features.hybrid import state_blocks
from nanovllm.tools.oracle.mutants import Mutant, apply
from nanovllm.tools.oracle.oracle import run_history

STATES, SCHEDULER = state_blocks, scheduler

MUTANTS = {
    "a snapshot is one block early": Mutant(
        STATES, "record_computed", "end // A * B", "(end // A - 1) * B"
    ),
    "a snapshot is one token late": Mutant(
        STATES, "_save", "A.num_computed - position", "A.num_computed - position - 1"
    ),
    "a snapshot where a match ran out is one block early": Mutant(
        STATES,
        "record_computed",
        "self._snapshot(A, position, B)",
        "self._snapshot(A, position - self.block_size, B)",
    ),
    "a snapshot is of another row": Mutant(STATES, "_save", "seq.row", "0"),
    "a fork begins with the row of its parent": Mutant(
        STATES, "fork", "self.fork_slots[A]", "A.row"
    ),
    "a beam begins without a state": Mutant(STATES, "fork", "self._sources[A] = B.row", "pass"),
    "a fork needs no state": Mutant(STATES, "can_fork", "A and B", "True"),
    "a match passes a block without a state": Mutant(
        STATES, "match", "B.block_id not in self.snapshots", "B.block_id < 0"
    ),
    "a match does not copy the state": Mutant(
        STATES, "attach_cached", "self._sources[A] = B", "pass"
    ),
    "a match uses a state of the plan": Mutant(STATES, "is_ready", "A not in self._fresh", "True"),
    "a slot that is freed is still named": Mutant(
        STATES, "_drop", "self.snapshots.pop(A)", "self.snapshots[A]"
    ),
    "a slot that the plan writes is written again": Mutant(
        STATES, "_return_slot", "A in self._fresh", "False"
    ),
    "a snapshot outlives its block": Mutant(
        STATES, "_uncache", "A.block_id in self.snapshots", "False"
    ),
    "a snapshot of a token that is not known is shared": Mutant(
        STATES, "_snapshot_at_boundary", "A < boundary", "False"
    ),
    "a snapshot in flight is not returned": Mutant(
        STATES, "_forget_blocks", "self._return_unknown(A)", "pass"
    ),
    "a preempted sequence still copies a state": Mutant(
        STATES, "_forget_blocks", "(A, B, C)", "(B, C)"
    ),
}


class HybridBeamHistory(BeamHistory, HybridHistory):
    pass


@pytest.mark.parametrize(
    "seeds", [range(500), pytest.param(range(500, 10_000), marks=pytest.mark.slow)]
)
def test_random_histories_with_states(seeds: range) -> None:
    hits = evictions = preemptions = 0
    for seed in seeds:
        history = run_history(seed, make=HybridHistory)
        hits += history.block_manager.state_hits
        evictions += history.block_manager.state_evictions
        preemptions += history.scheduler.preemptions
    assert min(hits, evictions, preemptions) > 2 * len(seeds)


def test_random_histories_with_beams_and_states() -> None:
    histories = [run_beam_history(seed, make=HybridBeamHistory) for seed in range(200)]
    assert sum(history.block_manager.state_hits for history in histories) > 100
    assert sum(history.scheduler.preemptions for history in histories) > 200


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_of_states_are_caught(name: str) -> None:
    mutant = MUTANTS[name]
    modules: dict[str, ModuleType] = {"managers": apply(mutant)}
    with pytest.raises(AssertionError, match="fails"):
        for seed in range(1000):
            run_history(seed, make=HybridHistory, **modules)
            if seed % 5 == 0:
                run_beams(seed, **modules)


def run_beams(seed: int, managers: ModuleType) -> None:
    def make(seed: int, schedulers: ModuleType) -> HybridBeamHistory:
        class Faulty(HybridBeamHistory):
            def make_blocks(self, _: ModuleType) -> state_blocks.StateBlockManager:
                return super().make_blocks(managers)

        return Faulty(seed, schedulers)

    run_beam_history(seed, make=make)

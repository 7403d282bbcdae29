"""The states of hybrid models in random histories on the oracle, and the faults that they catch."""

from types import ModuleType

import pytest
from beam_history import BeamHistory
from beam_history import run_history as run_beam_history

from lessons.oracle.mutants import Mutant, apply
from lessons.oracle.oracle import run_history
from lessons.oracle.states import MUTANTS, HybridHistory
from nanovllm.features.models.hybrid import state_blocks


class HybridBeamHistory(BeamHistory, HybridHistory):
    pass


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 600), marks=pytest.mark.slow)]
)
def test_random_histories_with_states(seeds: range) -> None:
    hits = evictions = preemptions = 0
    for seed in seeds:
        history = run_history(seed, make=HybridHistory)
        hits += history.block_manager.state_hits
        evictions += history.block_manager.state_evictions
        preemptions += history.scheduler.preemptions
    assert min(hits, evictions, preemptions) > len(seeds)


def test_random_histories_with_beams_and_states() -> None:
    histories = [run_beam_history(seed, make=HybridBeamHistory) for seed in range(100)]
    assert sum(history.block_manager.state_hits for history in histories) > 50
    assert sum(history.scheduler.preemptions for history in histories) > 100


# Faults, besides the ones that are exercises.
FAULTS = MUTANTS | {
    "a snapshot is one token late": Mutant(
        state_blocks, "_save", "seq.num_computed - position", "seq.num_computed - position - 1"
    ),
    "a snapshot where a match ran out is one block early": Mutant(
        state_blocks,
        "_snapshot_of_cached",
        "self._snapshot(seq, position, block)",
        "self._snapshot(seq, position - self.block_size, block)",
    ),
    "a snapshot is of another row": Mutant(state_blocks, "_save", "seq.row", "0"),
    "a fork begins with the row of its parent": Mutant(
        state_blocks, "fork", "self.fork_slots[parent]", "parent.row"
    ),
    "a beam begins without a state": Mutant(
        state_blocks, "fork", "self._sources[child] = parent.row", "pass"
    ),
    "a fork needs no state": Mutant(
        state_blocks, "can_fork", "has_state and parent not in self._sources", "True"
    ),
    "a match passes a block without a state": Mutant(
        state_blocks,
        "match",
        "matched[-1].block_id not in self.snapshots",
        "matched[-1].block_id < 0",
    ),
    "a slot that the plan writes is written again": Mutant(
        state_blocks, "_return_slot", "slot in self._fresh", "False"
    ),
    "a snapshot outlives its block": Mutant(
        state_blocks, "_evict", "block.block_id in self.snapshots", "False"
    ),
    "a snapshot of a token that is not known is shared": Mutant(
        state_blocks,
        "_snapshot_at_boundary",
        "seq.num_cached_blocks * self.block_size < boundary",
        "False",
    ),
    "a snapshot in flight is not returned": Mutant(
        state_blocks, "_forget_blocks", "self._return_uncached(seq)", "pass"
    ),
    "a preempted sequence still copies a state": Mutant(
        state_blocks,
        "_forget_blocks",
        "(self._sources, self.resumable_at, self.latest_snapshot)",
        "(self.resumable_at, self.latest_snapshot)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_states_are_caught(name: str) -> None:
    mutant = FAULTS[name]
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

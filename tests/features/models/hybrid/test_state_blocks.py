"""The states of hybrid models in random histories on the oracle, and the faults that they catch."""

from types import ModuleType

import pytest
from beam_history import BeamHistory
from beam_history import run_history as run_beam_history

from lessons.oracle.mutants import apply
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


@pytest.mark.slow
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

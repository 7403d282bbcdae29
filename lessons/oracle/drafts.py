"""Histories with speculation, in which drafts are right, partly right and wrong, and its faults.

tests/features/requests/test_ngram.py catches these and more. No torch.
"""

import random
from types import ModuleType

from lessons.oracle.mutants import Mutant
from lessons.oracle.oracle import History, answer
from nanovllm.config import SpeculativeConfig
from nanovllm.engine import block_manager, scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.requests import ngram

MUTANTS = {
    "a token after a wrong draft is accepted": Mutant(
        ngram, "accept", "[*matches, False].index(False)", "sum(matches)"
    ),
    "a wrong draft counts as computed, and a block that ends with it is cached": Mutant(
        ngram,
        "_take_back",
        "num_drafts - num_accepted",
        "num_drafts - num_accepted - (num_accepted < num_drafts)",
    ),
}


class DraftHistory(History):
    """A part of the drafts is replaced by right tokens, up to a random one."""

    def __init__(
        self,
        seed: int,
        schedulers: ModuleType = scheduler,
        managers: ModuleType = block_manager,
        ngrams: ModuleType = ngram,
    ) -> None:
        super().__init__(seed, schedulers, managers)
        rng: random.Random = self.rng
        config = SpeculativeConfig(
            num_speculative_tokens=rng.choice((1, 2, 3, 5, 8)),
            prompt_lookup_max=3,
            prompt_lookup_min=1,
        )
        speculation = ngrams.NgramSpeculation(config, rng.choice((4, 8, 64)))
        self.share_of_right = rng.choice((0.0, 0.3, 0.8, 1.0))
        propose = speculation.propose

        def improved(planner: scheduler.Scheduler, seq: Sequence, budget: int) -> list[int]:
            drafts: list[int] = propose(planner, seq, budget)
            if drafts and rng.random() < self.share_of_right:
                known, number = seq.token_ids, rng.randint(0, len(drafts))
                drafts[:number] = answer(known, len(known) + number, frozenset(), seq.sampling.seed)
            return drafts

        speculation.propose = improved
        self.scheduler.speculation = speculation

"""Histories with speculation, and its faults; tests/features/sampling/test_ngram.py has more."""

from types import ModuleType

from lessons.oracle.mutants import read
from lessons.oracle.oracle import History, answer
from nanovllm.config import SpeculativeConfig
from nanovllm.engine import scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.sampling import ngram

MUTANTS = read(
    """
    a token after a wrong draft is accepted | accept | [*matches, False].index(False) | sum(matches)
    a wrong draft counts as computed, and a block that ends with it is cached | _take_back \
        | num_drafts - num_accepted | max(0, num_drafts - num_accepted - 1)
    """,
    ngram,
)


class DraftHistory(History):
    """Replaces a part of the drafts by right tokens, up to a random one."""

    def __init__(self, seed: int, ngrams: ModuleType = ngram) -> None:
        super().__init__(seed)
        rng = self.rng
        longest = self.rng.choice((1, 2, 3, 5, 8))
        config = SpeculativeConfig("ngram", longest, prompt_lookup_max=3, prompt_lookup_min=1)
        speculation = ngrams.NgramSpeculation(config, rng.choice((4, 8, 64)))
        share_of_right = rng.choice((0.0, 0.3, 0.8, 1.0))
        propose = speculation.propose

        def improved(planner: scheduler.Scheduler, seq: Sequence, budget: int) -> list[int]:
            drafts: list[int] = propose(planner, seq, budget)
            if drafts and rng.random() < share_of_right:
                known = seq.token_ids
                number = rng.randint(0, len(drafts))
                drafts[:number] = answer(known, len(known) + number, frozenset(), seq.sampling.seed)
            return drafts

        speculation.propose = improved
        self.scheduler.speculation = speculation

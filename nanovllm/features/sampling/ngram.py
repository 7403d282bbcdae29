"""Speculation by n-grams (prompt lookup): several tokens of a row in one step, if its text repeats.

Computing six tokens takes about as long as one, because both read all weights once. If the last
tokens of a row occurred earlier in its prompt or output, the tokens that followed them there are
*drafts* for the next ones. A chunk computes the last known token and the drafts:

    known   [ a b c d e a b ]   the last occurrence of "a b" was followed by c d e
    chunk         [ b | c d e ]     with drafts c, d, e; "a" is computed already
    drawn           c   d x y       the sampler draws a token at each of the four
    result          c   d x         c and d are the drafts, x is not e, so y follows a wrong token

**Why the result is exact.** The token that is drawn at a position depends on the logits there and
on a number that is a function of (seed, position) alone (models/sampler.py). The logits depend on
the tokens before the position. A draft counts only if it equals the token that was drawn in its
place, so by induction each token that is kept was drawn after the tokens that a run without
speculation has, from the same logits and with the same number. This holds for greedy sampling,
every temperature and every filter, and no rejection sampling is needed. The other way (Leviathan et
al. 2023, arXiv:2211.17192) accepts a draft with the ratio of two probabilities. It keeps the
distribution, not the tokens, and needs the probabilities of the drafts.

With the CPU's kernels the logits are the same bits. In plain torch and on a GPU they are equal up
to rounding, because a step with more rows may add in another order. In lower precision, an almost
equally likely token may then be drawn: in plain torch, by the embedded model in bfloat16 and int8
once in 4,900 tokens, in int4 once in 1,200, and with an fp8 KV cache not once in 4,700.

Rules that depend on the output (penalties, bad words, grammars) are applied at each position of a
chunk, to the output that ends with the drafts before it (logit_rules/row_rules.py). Logits
processors may have a state, and the thinking of a row has one, which could not be taken back: rows
with these, and beams, take no drafts. Nor do the states of hybrid models allow it, so these models
are refused. The KV of drafts is not cached as a prefix before they are accepted, and the next
tokens overwrite the slots of the others. Drafts pay while a step is limited by reading weights
(lesson 4). Steps with drafts therefore have at most 16 tokens on a CPU and 64 on a GPU
(config.MAX_DRAFT_STEP): with so many rows or more, no row gets drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from nanovllm.engine.sequence import Sequence, Status
from nanovllm.plan import ResultKind
from nanovllm.utils.log import logger

if TYPE_CHECKING:
    from nanovllm.config import SpeculativeConfig
    from nanovllm.engine.scheduler import InFlightStep, Scheduler

# After its drafts have failed, a row gets none for this many tokens: the first time, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 8, 64


class Lookup:
    """The n-grams of one sequence, and how long its next draft may be."""

    def __init__(self, max_drafts: int) -> None:
        self.text = ""  # the known tokens, each as one character, because str has a fast search
        self.limit = self.max_drafts = max_drafts
        self.pause, self.pause_end = FIRST_PAUSE, 0

    def find(self, token_ids: list[int], sizes: range) -> int | None:
        """Return the position after the last occurrence of the longest n-gram at the end."""
        self.text += "".join(map(chr, token_ids[len(self.text) :]))
        for size in sizes:
            at = self.text.rfind(self.text[-size:], 0, -1)
            if at >= 0:
                return at + size
        return None

    def record(self, drafted: int, accepted: int, length: int) -> None:
        """Adjust the length of the next draft of a sequence, which had `length` tokens."""
        if accepted == drafted:
            self.limit, self.pause = min(2 * self.limit, self.max_drafts), FIRST_PAUSE
            return
        self.limit = max(accepted, self.limit // 2)
        if self.limit == 0:
            self.limit, self.pause_end = 1, length + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)


class NgramSpeculation:
    """Proposes drafts to the scheduler, and accepts those that were drawn."""

    def __init__(self, config: SpeculativeConfig, max_tokens: int) -> None:
        """max_tokens: a step with drafts has at most so many tokens."""
        self.max_drafts, self.max_tokens = config.num_speculative_tokens, max_tokens
        self.sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self.drafted_tokens = self.accepted_tokens = 0
        self.logged: set[str] = set()  # reasons why rows have no drafts

    def stats(self) -> dict[str, int]:
        """Return the counters that are added to `LLMEngine.stats`."""
        return {"drafted_tokens": self.drafted_tokens, "accepted_tokens": self.accepted_tokens}

    def plan(self, scheduler: Scheduler, step: InFlightStep, seq: Sequence, budget: int) -> int:
        """Plan the last known token of `seq` with drafts, if it gets any. Returns their number."""
        drafts = self.propose(scheduler, seq, budget - 1)
        has_rules = seq.lookup is not None and seq.sampling.rules is not None
        # After a step with drafts, only the engine knows the tokens that the rules have to read.
        is_after_drafts = not seq.decoding and seq.num_computed == len(seq.token_ids) - 1
        if not drafts and not (has_rules and seq.known_to_runner and is_after_drafts):
            return 0
        if not scheduler.plan_chunk(step, seq, 1):
            return 0
        chunk = step.plan.chunks[-1]
        chunk.output = seq.output_ids if has_rules else None
        if drafts:
            chunk.token_ids += drafts
            chunk.num_drafts = len(drafts)
            step.plan.new_blocks += scheduler.allocate(seq, len(drafts))
            seq.num_computed += len(drafts)
        return 1 + len(drafts)

    def propose(self, scheduler: Scheduler, seq: Sequence, budget: int) -> list[int]:
        """Return at most `budget` drafts for a running sequence, or none."""
        length = len(seq.token_ids)
        if len(scheduler.running) >= self.max_tokens:
            self._log_once(f"no drafts while {self.max_tokens} or more sequences run")
        budget = min(budget, budget - scheduler.token_budget + self.max_tokens)
        number = min(budget, seq.max_length - length - 1)  # the token after the last draft fits too
        # All tokens but the last one must be computed, so no token is in flight.
        if number <= 0 or seq.num_computed != length - 1 or not seq.num_output:
            return []
        if (at := self._find(seq)) is None:
            return []
        number = min(number, seq.lookup.limit)
        blocks = scheduler.block_manager
        needed = blocks.num_needed(seq, length + number)
        if needed > 0 and needed + scheduler.reserve() > blocks.num_available:
            return []
        drafts: list[int] = []
        for i in range(at, at + number):  # beyond the known tokens, the drafts repeat themselves
            drafts.append(seq.token_ids[i] if i < length else drafts[i - length])
        return drafts

    def _find(self, seq: Sequence) -> int | None:
        """Return the position whose token is the first draft of a sequence, if it may have any."""
        rules = seq.sampling.rules
        if rules is not None and (rules.logits_processors or rules.thinking):
            self._log_once("no drafts for requests with logits processors or rules of thinking")
            return None
        if seq.result_kind is not ResultKind.TOKEN:
            return None
        lookup: Lookup = seq.lookup or Lookup(self.max_drafts)
        seq.lookup = lookup
        is_paused = len(seq.token_ids) < lookup.pause_end
        return None if is_paused else lookup.find(seq.token_ids, self.sizes)

    def needs_results(self, step: InFlightStep) -> bool:
        """Return whether a step has drafts, or a sequence of it may have some in the next step."""
        if any(chunk.num_drafts for chunk in step.plan.chunks):
            return True
        seqs = step.seqs.values() if len(step.seqs) < self.max_tokens else ()
        return any(seq.decoding and self._find(seq) is not None for seq in seqs)

    def accept(
        self, step: InFlightStep, results: Iterable[tuple[Sequence, int]]
    ) -> Iterator[tuple[Sequence, int]]:
        """Yield the results of a step, without tokens that were drawn after a wrong draft."""
        results = iter(results)
        for chunk in step.plan.chunks:
            if chunk.result_kind is not ResultKind.TOKEN:
                continue
            drawn = list(islice(results, 1 + chunk.num_drafts))
            if chunk.num_drafts:
                drafts = chunk.token_ids[-chunk.num_drafts :]
                matches = [a == b for a, (_, b) in zip(drafts, drawn, strict=False)]
                num_accepted = [*matches, False].index(False)
                drawn = drawn[: num_accepted + 1]
                # Before a token is appended, because that may cache blocks.
                self._take_back(step.seqs[chunk.row], len(drafts), num_accepted)
            yield from drawn
        yield from results

    def _take_back(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Make the tokens after the accepted drafts of a sequence uncomputed."""
        self.drafted_tokens += num_drafts
        self.accepted_tokens += num_accepted
        if seq.status is Status.RUNNING:  # else it was aborted
            seq.num_computed -= num_drafts - num_accepted
            seq.num_output_placeholders = num_accepted + 1
            seq.decoding = False  # the host knows its next token, and the runner does not
            seq.lookup.record(num_drafts, num_accepted, len(seq.token_ids))

    def _log_once(self, reason: str) -> None:
        if reason not in self.logged:
            self.logged.add(reason)
            logger.info(f"speculative_config: {reason}")

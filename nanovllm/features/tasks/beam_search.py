"""Beam search: finds the `beam_width` most likely outputs. Names are the same as in vLLM.

Every beam is a sequence of the engine. Its row yields the most likely next tokens instead of one
sampled token (`ResultKind.CANDIDATES`). When all beams of a prompt have their candidates,
`BeamSearch` drops some beams, forks others copy-on-write, and appends a token to each. The prompt
is therefore computed once, a step computes one token for each beam, and beams are batched,
preempted and resumed like all sequences.

Scores, normalization and the stopping rule are the same as in transformers' beam search with
early_stopping=False.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nanovllm.engine import result_kinds
from nanovllm.engine.request import Request, Sample, Task
from nanovllm.engine.sequence import Sequence
from nanovllm.features.tasks.results import BeamSearchOutput, BeamSearchSequence
from nanovllm.plan import LogitRules, ResultKind, RowResult
from nanovllm.sampling_params import BeamSearchParams

if TYPE_CHECKING:
    from nanovllm.engine.input_processor import InputProcessor
    from nanovllm.engine.scheduler import Scheduler


@dataclass
class Beams:
    """The state of one search."""

    scores: dict[Sequence, float]  # beam -> sum of log-probabilities
    # Beam -> candidates, for the beams that have received them.
    candidates: dict[Sequence, list[tuple[int, float]]] = field(default_factory=dict)
    # The results with their normalized scores and the beams that they end, the best first.
    finished: list[tuple[float, Sequence, BeamSearchSequence]] = field(default_factory=list)


class BeamSearch(Task):
    """The task of a beam search."""

    result_kind = ResultKind.CANDIDATES
    changes_queues = True

    def __init__(
        self, inputs: InputProcessor, params: BeamSearchParams, scheduler: Scheduler
    ) -> None:
        """Check the parameters. Raises TypeError or ValueError. May compile a grammar."""
        self.tokenizer = inputs.tokenizer
        self.scheduler = scheduler
        self.params = params = replace(params)  # fields may have been set since the last check
        self.vocab_size = inputs.vocab_size
        if params.beam_width > self.vocab_size:
            raise ValueError(
                f"beam_width={params.beam_width} is more than the vocabulary={self.vocab_size}; "
                "lower it"
            )
        if params.beam_width > (rows := scheduler.max_num_seqs):
            raise ValueError(
                f"beam_width={params.beam_width} is more than max_num_seqs={rows}; lower it or "
                "raise max_num_seqs"
            )
        self.stops = frozenset() if params.ignore_eos else inputs.eos_token_ids
        self.rules: LogitRules | None = None
        if params.structured_outputs is not None:
            if not self.stops:
                raise ValueError(
                    "structured_outputs in a beam search needs an end-of-sequence token: set "
                    "ignore_eos to False, and use a checkpoint that has one"
                )
            stops = sorted(self.stops)
            grammar = inputs.grammars().compile(params.structured_outputs, stops)
            self.rules = LogitRules(grammar=grammar)
        # Each end token occurs at most once per beam, so beam_width other candidates remain.
        self.num_candidates = max(2, 1 + len(self.stops)) * params.beam_width

    def start(self, request: Request) -> None:
        first = request.samples[0].seq
        first.num_candidates = min(self.num_candidates, self.vocab_size)
        first.sampling = replace(first.sampling, rules=self.rules)
        request.state = Beams({first: 0.0})

    def receive(self, request: Request, seq: Sequence, result: RowResult) -> None:
        """Record the candidates of a beam. When all beams have candidates, choose new beams."""
        if result.candidates:
            beams: Beams = request.state
            beams.candidates[seq] = result.candidates
            if len(beams.candidates) == len(beams.scores):
                self._choose(request, beams)

    def _choose(self, request: Request, beams: Beams) -> None:
        """Continue the best candidates of all beams, or finish if no better result is possible."""
        width = self.params.beam_width
        ranked = sorted(
            (
                (score + logprob, beam, token)
                for beam, score in beams.scores.items()
                for token, logprob in beams.candidates[beam]
                if logprob > -math.inf
            ),
            key=lambda candidate: -candidate[0],
        )
        chosen: list[tuple[float, Sequence, int]] = []
        for rank, (score, beam, token) in enumerate(ranked[: self.num_candidates]):
            at_end = len(beam.token_ids) + 1 >= beam.max_length
            if token not in self.stops and not at_end:
                chosen.append((score, beam, token))
            elif rank < width:
                self._add_finished(beams, score, beam, token)
        if not chosen or self._is_final(beams, chosen[0][0], chosen[0][1].num_output + 1):
            # If no candidate has a finite log-probability, the search ends with an error.
            for beam in beams.scores:
                self.scheduler.finish(beam, "stop" if ranked else "error")
        else:
            self._continue(request, beams, chosen[:width])

    def _add_finished(self, beams: Beams, score: float, beam: Sequence, token: int) -> None:
        tokens = [*beam.token_ids, token]
        stopped = token in self.stops
        normalized = score / (beam.num_output + 1) ** self.params.length_penalty
        if stopped and not self.params.include_stop_str_in_output:
            tokens.pop()
        reason = "stop" if stopped else "length"
        result = BeamSearchSequence(tokens, score, reason, token if stopped else None)
        beams.finished.append((normalized, beam, result))
        beams.finished.sort(key=lambda entry: -entry[0])
        del beams.finished[self.params.beam_width :]

    def _is_final(self, beams: Beams, score: float, length: int) -> bool:
        """Return whether `score`, of the best beam, is too low to beat any finished beam.

        As in transformers, its expected score is normalized by its current length.
        """
        if len(beams.finished) < self.params.beam_width:
            return False
        return score / length**self.params.length_penalty <= beams.finished[-1][0]

    def _continue(
        self, request: Request, beams: Beams, chosen: list[tuple[float, Sequence, int]]
    ) -> None:
        """Append tokens to beams. A beam's first token continues it; further tokens fork it."""
        kept = {beam for _, beam, _ in chosen}
        for beam in beams.scores:  # not a set, whose order differs between processes
            if beam not in kept:
                self.scheduler.finish(beam, "dropped")  # frees a row and blocks for the forks
        new = []
        for index, (_, parent, token) in enumerate(chosen):
            beam = parent
            if parent in kept:
                kept.remove(parent)
            else:
                token_ids = [*parent.token_ids, token]
                beam = result_kinds.make_fork(parent, token_ids, parent.sampling, index)
                self.scheduler.num_unfinished += 1
                parent.parent = None  # else a beam would keep all its ancestors in memory
            beam.index = index
            new.append(beam)
        request.samples[:] = [Sample(beam) for beam in new]
        # Fork before a token is appended to the parent, because the last block may be shared.
        for (_, parent, _), beam in zip(chosen, new, strict=True):
            if beam is not parent:
                result_kinds.fork(self.scheduler, parent, beam, len(parent.token_ids))
        for (_, parent, token), beam in zip(chosen, new, strict=True):
            if beam is parent:
                result_kinds.append(self.scheduler, beam, token)
        beams.scores = dict(zip(new, (score for score, *_ in chosen), strict=True))
        beams.candidates = {}

    def output(self, request: Request) -> BeamSearchOutput:
        """Return the results of a search, and after an abort or an error also its beams."""
        beams: Beams = request.state
        results = [result for *_, result in beams.finished]
        for beam, score in beams.scores.items():
            if beam.finish_reason != "stop":
                tokens = list(beam.token_ids)
                results.append(BeamSearchSequence(tokens, score, beam.finish_reason))
        results = results[: self.params.beam_width]
        if self.tokenizer is not None:
            decode = self.tokenizer.backend_tokenizer.decode
            for result in results:
                skips = self.params.skip_special_tokens
                result.text = decode(result.tokens, skip_special_tokens=skips)
        return BeamSearchOutput(results)

"""Beam search: the `beam_width` most likely outputs that a search finds, with vLLM's names.

Every beam is a sequence of the engine whose row yields the most likely next tokens instead of one
sampled token (`Yield.CANDIDATES`). When all beams of a prompt have theirs, `BeamSearch` chooses: it
drops beams, forks others copy-on-write, and appends a token to each. The prompt is therefore
computed once, a step computes one token for each beam, and beams are batched, preempted and resumed
like all sequences.

Scores, their normalization and the rule when to stop are those of transformers' beam search with
early_stopping=False.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from nanovllm.api.checks import Positive, check_scalars, refuse_unknown_fields
from nanovllm.api.sampling_params import SamplingParams
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.input_processor import CheckedPrompt
from nanovllm.engine.request import Request, Sample
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.structured import StructuredOutputsParams
from nanovllm.plan import Yield

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine


@refuse_unknown_fields("field of BeamSearchParams")
@dataclass
class BeamSearchParams:
    """How a prompt is searched.

    Raises TypeError for a wrong type or an unknown field, ValueError for a wrong value.
    """

    beam_width: Annotated[int, 1, 16_384]  # beams of each prompt, and results of each prompt
    max_tokens: Positive  # output tokens of a beam
    ignore_eos: bool = False  # continue after an end-of-sequence token
    # As in vLLM it changes nothing: scores are log-probabilities before the temperature.
    temperature: Annotated[float, 0, math.inf] = 0.0
    # Finished beams are compared by cum_logprob / (output tokens) ** length_penalty. 0 compares the
    # sums, which favours short outputs; a larger value favours longer ones. Beyond 10 a length to
    # this power could overflow.
    length_penalty: Annotated[float, -10, 10] = 1.0
    include_stop_str_in_output: bool = False  # whether `tokens` has the end-of-sequence token
    # A grammar that every result follows, as in SamplingParams. Its tokens keep their scores.
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True  # leave special tokens out of the text

    def __post_init__(self) -> None:
        check_scalars(self)


@dataclass
class BeamSearchSequence:
    """One result: `cum_logprob` is the sum of the log-probabilities of its output tokens."""

    tokens: list[int]  # prompt and output
    cum_logprob: float  # not normalized
    # "stop", "length", "abort", or "error" if the model computed NaN
    finish_reason: str | None
    stop_reason: int | str | None = None
    text: str | None = None  # of `tokens`; None without a tokenizer


@dataclass
class BeamSearchOutput:
    """The results of one prompt, the best first: `beam_width`, or fewer if there are no more."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search of one prompt. All its methods are called while the engine's lock is held."""

    def __init__(
        self, params: BeamSearchParams, scheduler: Scheduler, eos_token_ids: frozenset[int]
    ) -> None:
        self.params, self.scheduler = params, scheduler
        self.stops = frozenset() if params.ignore_eos else eos_token_ids
        # At most beam_width candidates of each end token end a beam, so that enough others remain.
        self.num_candidates = max(2, 1 + len(self.stops)) * params.beam_width
        self.scores: dict[Sequence, float] = {}  # of the beams, the sums
        self.candidates: dict[Sequence, list[tuple[int, float]]] = {}  # of those that have theirs
        self.finished: list[tuple[float, BeamSearchSequence]] = []  # normalized; the best first

    def start(self, seqs: list[Sequence]) -> None:
        """Search from the sequence of a request that has just been made and is not queued yet."""
        (first,) = seqs
        first.yields, self.scores = Yield.CANDIDATES, {first: 0.0}

    def receive(self, request: Request, seq: Sequence, candidates: list[tuple[int, float]]) -> None:
        """Note the candidates of a beam; if it is the last one of the step, choose the next beams."""
        self.candidates[seq] = candidates
        if len(self.candidates) == len(self.scores):
            self._choose(request)

    def _choose(self, request: Request) -> None:
        """Continue the best candidates of all beams. Finish all sequences if no better can come."""
        width = self.params.beam_width
        ranked = sorted(
            (
                (score + logprob, beam, token)
                for beam, score in self.scores.items()
                for token, logprob in self.candidates[beam]
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
                self._add_finished(score, beam, token)
        if not chosen or self._is_final(chosen[0][0], chosen[0][1].num_output + 1):
            # Without a candidate of finite probability there is nothing to choose from.
            for beam in self.scores:
                self.scheduler.finish(beam, "stop" if ranked else "error")
        else:
            self._continue(request, chosen[:width])

    def _add_finished(self, score: float, beam: Sequence, token: int) -> None:
        tokens, stopped = [*beam.token_ids, token], token in self.stops
        normalized = score / (beam.num_output + 1) ** self.params.length_penalty
        if stopped and not self.params.include_stop_str_in_output:
            tokens.pop()
        reason = "stop" if stopped else "length"
        result = BeamSearchSequence(tokens, score, reason, token if stopped else None)
        self.finished.append((normalized, result))
        self.finished.sort(key=lambda entry: -entry[0])
        del self.finished[self.params.beam_width :]

    def _is_final(self, score: float, length: int) -> bool:
        """Whether no beam, the best of which has `score`, is expected to beat a finished one.

        As in transformers, a beam is expected to be normalized by its present length.
        """
        enough = len(self.finished) == self.params.beam_width
        return enough and score / length**self.params.length_penalty <= self.finished[-1][0]

    def _continue(self, request: Request, chosen: list[tuple[float, Sequence, int]]) -> None:
        """Make each (score, beam, token) a beam: the first of a beam goes on in it, others fork."""
        kept = {beam for _, beam, _ in chosen}
        for beam in self.scores:  # not a set, whose order is another one in each process
            if beam not in kept:
                self.scheduler.finish(beam, "abort")  # its row and blocks are free for the forks
        beams = []
        for index, (_, parent, token) in enumerate(chosen):
            beam = parent
            if parent in kept:
                kept.remove(parent)
            else:
                beam = Sequence(
                    parent.request_id,
                    parent.arrival,
                    [*parent.token_ids, token],
                    parent.num_prompt,
                    parent.max_length,
                    parent.stop_token_ids,
                    parent.sampling,
                    yields=parent.yields,
                    parent=parent,
                )
                self.scheduler.num_unfinished += 1
                parent.parent = None  # else a beam would keep all that were before it in memory
            beam.index = index
            beams.append(beam)
        request.samples[:] = [Sample(beam) for beam in beams]
        # Before a token is appended to its parent, because it may share the parent's last block.
        for (_, parent, _), beam in zip(chosen, beams, strict=True):
            if beam is not parent:
                self.scheduler.fork(parent, beam, len(parent.token_ids))
        for (_, parent, token), beam in zip(chosen, beams, strict=True):
            if beam is parent:
                self.scheduler.append(beam, token)
        self.scores = dict(zip(beams, (score for score, *_ in chosen), strict=True))
        self.candidates = {}

    def output(self, request: Request) -> BeamSearchOutput:
        """Return the results of a request that has ended; after an abort or error the beams as well."""
        results = [result for _, result in self.finished]
        for beam, score in self.scores.items():
            if beam.finish_reason != "stop":
                ids, reason = list(beam.token_ids), beam.finish_reason
                results.append(BeamSearchSequence(ids, score, reason))
        results = results[: self.params.beam_width]
        for result in results:
            if request.tokenizer is not None:
                skip = self.params.skip_special_tokens
                result.text = Detokenizer(request.tokenizer, skip).decode(result.tokens)
        return BeamSearchOutput(results)


def submit(engine: LLMEngine, prompt: Any, params: BeamSearchParams) -> Request:
    """Queue the search of one prompt. Raises TypeError or ValueError if it can never run."""
    requests: list[Request] = []
    list(engine.add([check(engine, prompt, params)], requests))
    return requests[0]


def check(engine: LLMEngine, prompt: Any, params: BeamSearchParams) -> CheckedPrompt:
    """Check the search of one prompt, as `engine.check` does for samples."""
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params must be a BeamSearchParams, not {params!r}")
    params = replace(params)  # fields may have been set since the last check
    scheduler, vocab_size = engine.scheduler, engine.inputs.vocab_size
    most = min(vocab_size, scheduler.max_num_seqs)
    if params.beam_width > most:
        name = "the vocabulary" if most == vocab_size else "max_num_seqs"
        raise ValueError(
            f"beam_width={params.beam_width} is more than {name}={most}; lower it"
            + " or raise max_num_seqs" * (most != vocab_size)
        )
    search = BeamSearch(params, scheduler, engine.outputs.eos_token_ids)
    if params.structured_outputs is not None and not search.stops:
        raise ValueError(
            "structured_outputs in a beam search needs an end-of-sequence token: set ignore_eos to "
            "False, and use a checkpoint that has one"
        )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        logprobs=min(search.num_candidates, vocab_size),
        structured_outputs=params.structured_outputs,
    )
    [checked] = engine.check([(prompt, sampling)], is_search=True)
    return checked._replace(search=search)

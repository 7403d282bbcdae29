"""Request: what a caller has asked for and what it has become so far, beside the tokens.

OutputProcessor changes it. The caller reads `output` at its end, or `read_stream` while it runs.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from nanovllm.api.outputs import Logprob, RequestMetrics, StreamOutput
from nanovllm.api.sampling_params import SamplingParams
from nanovllm.engine.detokenizer import Detokenizer, Tokenizer
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.features.embeddings.pooling import PoolingParams
from nanovllm.features.loglikelihood import ScoringParams
from nanovllm.plan import TokenLogprobs


@dataclass(slots=True)
class Sample:
    """One of the n samples of a request, and its data in addition to the tokens."""

    seq: Sequence
    detokenizer: Detokenizer | None = None  # for stop strings and streams
    text: str = ""
    num_detokenized: int = 0  # output tokens that `text` contains
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    # What `read_stream` has returned so far.
    chars_streamed: int = 0
    tokens_streamed: int = 0
    stream_ended: bool = False


class Search(Protocol):
    """Chooses the tokens of a request whose rows yield candidates: see nanovllm/features/beam_search.py."""

    candidates: dict[Sequence, list[tuple[int, float]]]  # of sequences that await a token

    def start(self, seqs: list[Sequence]) -> None: ...

    def receive(
        self, request: "Request", seq: Sequence, candidates: list[tuple[int, float]]
    ) -> None: ...

    def output(self, request: "Request") -> Any: ...


@dataclass(slots=True)
class Call:
    """The requests of one call, counted when something happens to one of them.

    Nothing here is computed from all requests, of which there can be a million.
    """

    num_ended: int = 0
    num_prompt_tokens: int = 0  # of requests that have their first token
    num_ended_tokens: int = 0  # output tokens of requests that have ended
    started: set["Request"] = field(default_factory=set)  # have a token, and have not ended
    changed: set["Request"] = field(default_factory=set)  # streams that were not read since
    error: Exception | None = None  # the first that ended a request

    @property
    def num_output_tokens(self) -> int:
        # A copy: another thread may run a step meanwhile.
        return self.num_ended_tokens + sum(r.num_output for r in list(self.started))


@dataclass(slots=True, eq=False)
class Request:
    samples: list[Sample]
    prompt: str | None
    params: SamplingParams
    metrics: RequestMetrics
    returned_by_step: bool  # else the caller has this object, and `step` does not return its output
    stream: bool  # read with `read_stream` while it runs; it has no output
    eos_token_ids: frozenset[int]  # end an output with stop_reason None; empty with ignore_eos
    tokenizer: Tokenizer | None  # None with detokenize=False
    search: Search | None = None  # chooses its tokens and makes its output
    ended: bool = False
    output: Any = None  # an Output, or that of `search`, when it has ended
    error: Exception | None = None  # raised by its own data in a step, which ended it
    # By position, in this order also after a preemption, which computes all from the first again.
    prompt_logprobs: dict[int, dict[int, Logprob]] = field(default_factory=dict)
    task: PoolingParams | ScoringParams | None = None  # what it asks for instead of new tokens
    embedding: list[float] | None = None
    call: Call | None = None  # counts it

    def end(self) -> None:
        """Note that it has ended, and count it."""
        is_new, self.ended = not self.ended, True
        if is_new and (call := self.call) is not None:
            call.num_ended += 1
            call.num_ended_tokens += self.num_output
            call.started.discard(self)
            if self.stream:
                call.changed.add(self)

    def read_stream(self, request_index: int) -> list[StreamOutput]:
        """Return the output of each sample since the last call; nothing after its finish_reason."""
        outputs = []
        for sample in self.samples:
            seq, end = sample.seq, len(sample.text)
            token_ids = seq.token_ids[seq.num_prompt + sample.tokens_streamed :]
            if sample.stream_ended or not (token_ids or seq.finish_reason):
                continue
            stops = () if self.params.include_stop_str_in_output else self.params.stop
            if seq.finish_reason is None and stops:
                # These characters may be the beginning of a stop string, which is left out.
                end -= max(map(len, stops)) - 1
            text = sample.text[sample.chars_streamed : end] if end > sample.chars_streamed else ""
            logprobs = sample.logprobs[sample.tokens_streamed :]
            first = token_ids and sample.tokens_streamed == 0 and seq.parent is None
            outputs.append(
                StreamOutput(
                    request_index=request_index,
                    index=seq.index,
                    text=text,
                    token_ids=token_ids,
                    finish_reason=seq.finish_reason,
                    stop_reason=self.stop_reason(seq),
                    logprobs=None if self.params.logprobs is None else logprobs,
                    prompt_logprobs=self.all_prompt_logprobs() if first else None,
                )
            )
            sample.chars_streamed += len(text)
            sample.tokens_streamed += len(token_ids)
            sample.stream_ended = seq.finish_reason is not None
        return outputs

    def stop_reason(self, seq: Sequence) -> int | str | None:
        return None if seq.stop_reason in self.eos_token_ids else seq.stop_reason

    def text_ids(self, seq: Sequence) -> list[int]:
        """Return the output tokens that the text contains: no stop token, unless requested."""
        hidden = isinstance(seq.stop_reason, int) and not self.params.include_stop_str_in_output
        return seq.output_ids[:-1] if hidden else seq.output_ids

    def target_logprobs(self) -> list[Logprob]:
        """Return the log-probabilities of the prompt's own tokens that are known, in their order."""
        entries = self.prompt_logprobs.values()
        return [next(iter(entry.values())) for entry in entries]  # its own comes first

    def all_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Return one entry for each prompt token, None for the first; None if not requested."""
        if self.params.prompt_logprobs is None:
            return None
        return [None, *self.prompt_logprobs.values()]

    def decode_logprobs(
        self, entry: TokenLogprobs, seq: Sequence, position: int
    ) -> dict[int, Logprob]:
        """Return the log-probabilities at a position of the prompt or of the output."""
        first = seq.num_prompt if position >= seq.num_prompt else 0
        before = seq.token_ids[max(first, position - 4) : position]  # UTF-8 has at most 4 bytes
        return {token: Logprob(p, rank, self.decode(token, before)) for token, p, rank in entry}

    def decode(self, token: int, before: list[int]) -> str | None:
        """Return the text of a token. As in vLLM, the last token of a character has all of it."""
        if self.tokenizer is None:
            return None
        decode = Detokenizer(self.tokenizer, skip_special_tokens=False).decode
        texts = (decode([*before[n:], token]) for n in range(len(before), -1, -1))
        return next((text for text in texts if not text.endswith("\ufffd")), "")

    @property
    def num_output(self) -> int:
        """Output tokens of all samples."""
        return sum(sample.seq.num_output for sample in self.samples)

    @property
    def request_id(self) -> str:
        return self.samples[0].seq.request_id

    @property
    def num_unfinished(self) -> int:
        """How many samples have not finished."""
        return sum(sample.seq.status is not Status.FINISHED for sample in self.samples)

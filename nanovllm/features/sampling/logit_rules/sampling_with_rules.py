"""Sampling with logit rules, and with log-probabilities of output tokens and of the prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from nanovllm.engine.detokenizer import CONTEXT, Detokenizer, Tokenizer
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.request import Request, Sample, TaskFactory
from nanovllm.engine.sampling import Sampling
from nanovllm.engine.sequence import Sequence
from nanovllm.features.sampling.logit_rules.params import make_rules, num_logprobs
from nanovllm.features.sampling.repetition import Repetition, as_params
from nanovllm.features.sampling.thinking import Splitter, check_markers, opened, special_markers
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, StreamOutput
from nanovllm.plan import RowResult, TokenLogprobs
from nanovllm.sampling_params import SamplingParams


@dataclass(slots=True)
class SampleState:
    splitter: Splitter
    repetition: Repetition | None = None


class SamplingWithRules(Sampling):
    """The task of requests with SamplingParams. Without rules it is Sampling."""

    has_tools = False  # whether the caller parses tool calls; set by cli/jobs/openai_format.py

    def __init__(
        self, input_processor: InputProcessor, params: SamplingParams, separates: bool = False
    ) -> None:
        """separates: whether thinking is separated from the text, as by `reasoning_parser`."""
        super().__init__(input_processor, params)
        self.separates = separates and params.detokenize
        self.repetition = as_params(params.repetition_detection)
        if params.logprob_token_ids and params.logprobs is None:
            self.params.logprobs = 0
        self.rules = make_rules(self.params, input_processor, self.stop_token_ids, separates)
        self.num_prompt_logprobs = num_logprobs(
            input_processor, "prompt_logprobs", params.prompt_logprobs
        )

    def start(self, request: Request) -> None:
        super().start(request)
        request.is_watched = request.is_watched or self.params.logprobs is not None
        if self.num_prompt_logprobs is not None:  # the first sample reports them for all samples
            first = request.samples[0].seq
            first.targets = first.token_ids[1:]
            first.num_logprobs = self.num_prompt_logprobs
            request.state = {}  # position -> entry; after a preemption, they are computed again
        if self.separates or self.repetition is not None:
            request.is_watched = request.is_watched or self.repetition is not None
            prompt, inputs = request.seqs[0].token_ids, self.input_processor
            is_open = self.separates and opened(inputs.get_tokenizer(), prompt) is not None
            call_ends = self.params.structured_outputs is None
            removed = [m for m in self.markers().values() if not self.has_tools or "tool" not in m]
            for sample in request.samples:
                sample.state = SampleState(Splitter(is_open, call_ends, removed))
                if self.repetition is not None:
                    sample.state.repetition = Repetition(self.repetition, sample.seq)

    def markers(self) -> dict[int, str]:
        """Return the special tokens that texts keep until their parsers have seen them."""
        if not self.params.skip_special_tokens or not (self.separates or self.has_tools):
            return {}
        markers = special_markers(self.input_processor.get_tokenizer())
        return {i: text for i, text in markers.items() if self.separates or "tool" in text}

    def detokenizer(self, seq: Sequence) -> Detokenizer:
        detokenizer = super().detokenizer(seq)
        detokenizer.kept = self.markers()
        return detokenizer

    def receive(self, request: Request, seq: Sequence, result: RowResult) -> None:
        sample = request.samples[seq.index]
        # If the sequence ended while this token was in flight, its log-probabilities are dropped.
        for entry in result.logprobs[: seq.num_output - len(sample.logprobs)]:
            position = seq.num_prompt + len(sample.logprobs)
            sample.logprobs.append(self.decode_logprobs(entry, seq, position))
        for i, entry in enumerate(result.prompt_logprobs, result.first_position):
            request.state[i] = self.decode_logprobs(entry, seq, i)
        if self.repetition is not None:
            length = sample.state.repetition.find(seq, self.params.min_tokens)
            # As in vLLM, a stop token or the largest length takes precedence at the same token.
            if length is not None and (length < seq.num_output or seq.finish_reason is None):
                del seq.token_ids[seq.num_prompt + length :]  # with drafts, a step yields several
                seq.finish_reason, seq.stop_reason = "repetition", "repetition_detected"
        super().receive(request, seq, result)
        del sample.logprobs[seq.num_output :]  # of tokens after a stop string or a repetition

    def decode_logprobs(
        self, entry: TokenLogprobs, seq: Sequence, position: int
    ) -> dict[int, Logprob]:
        """Return the log-probabilities at a position of the prompt or of the output."""
        first = seq.num_prompt if position >= seq.num_prompt else 0
        before = seq.token_ids[max(first, position - CONTEXT) : position]

        def text(token: int) -> str | None:
            tokenizer = self.tokenizer
            return None if tokenizer is None else decode_token(tokenizer, token, before)

        return {token: Logprob(p, rank, text(token)) for token, p, rank in entry}

    def request_output(self, request: Request, outputs: list[CompletionOutput]) -> RequestOutput:
        output = super().request_output(request, outputs)
        if request.state is None:
            return output
        return replace(output, prompt_logprobs=prompt_logprobs(request))

    def completion(self, sample: Sample) -> CompletionOutput:
        completion = super().completion(sample)
        if self.separates:
            streamed = sample.state.splitter
            splitter = Splitter(streamed.is_open, streamed.call_ends, streamed.removed)
            reasoning, text = splitter.add(completion.text, is_last=True)
            thought = reasoning if splitter.has_thought else None
            completion = replace(completion, text=text, reasoning=thought)
        if self.params.logprobs is None:
            return completion
        # The sampled token comes first in each entry.
        total = sum(next(iter(entry.values())).logprob for entry in sample.logprobs)
        return replace(completion, logprobs=sample.logprobs, cumulative_logprob=total)

    def read_sample(self, request: Request, sample: Sample) -> StreamOutput:
        start = sample.tokens_streamed
        new = super().read_sample(request, sample)
        if self.separates:
            reasoning, text = sample.state.splitter.add(
                new.text, is_last=new.finish_reason is not None
            )
            new = replace(new, text=text, reasoning=reasoning)
        if self.params.logprobs is not None:
            new = replace(new, logprobs=sample.logprobs[start:])
        if start == 0 and new.token_ids and sample.seq.parent is None:
            new = replace(new, prompt_logprobs=prompt_logprobs(request))
        return new


def with_parser(input_processor: InputProcessor, parser: str) -> TaskFactory:
    """Return the factory of tasks that separate thinking. Raises ValueError without markers."""
    check_markers(input_processor, f"reasoning_parser={parser!r}")
    return partial(SamplingWithRules, separates=True)


def prompt_logprobs(request: Request) -> list[dict[int, Logprob] | None] | None:
    """Return an entry for each prompt token, or None if not requested. The first entry is None."""
    return None if request.state is None else [None, *request.state.values()]


def decode_token(tokenizer: Tokenizer, token: int, before: list[int]) -> str:
    """Return the text of one token after the tokens `before`, as vLLM's `decoded_token`.

    The text of a token that completes a character is the whole character, and the text of the
    other tokens of the character is empty. A decoder removes the space at the start of a text;
    it is inserted again here.
    """
    rules = tokenizer.backend_tokenizer
    context = before[-CONTEXT:]
    for start in range(len(context), -1, -1):
        text: str = rules.decode([*context[start:], token], skip_special_tokens=False)
        if not text.endswith("\ufffd"):
            piece = rules.id_to_token([*context[start:], token][0]) or ""
            num_spaces = len(piece) - len(piece.lstrip("▁"))
            return " " * (num_spaces - len(text) + len(text.lstrip(" "))) + text
    return ""

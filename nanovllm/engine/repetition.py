"""Detection of outputs that repeat a pattern of tokens without end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import RepetitionDetectionParams
from nanovllm.utils.checks import from_dict


def as_params(value: Any) -> RepetitionDetectionParams | None:
    """Return the field `repetition_detection`, which may be a dict, or None if it is disabled."""
    if isinstance(value, Mapping):
        value = from_dict(RepetitionDetectionParams, "repetition_detection", value)
    if not isinstance(value, RepetitionDetectionParams | None):
        kinds = "a RepetitionDetectionParams or a dict of its fields"
        raise TypeError(f"repetition_detection must be {kinds}, not {value!r:.80}")
    return value if value and value.max_pattern_size else None


class Repetition:
    """Follows one output. Its time for a token does not depend on the length of the output."""

    def __init__(self, params: RepetitionDetectionParams, seq: Sequence) -> None:
        """seq: before its first output token."""
        import numpy as np  # here, because the control plane runs without numpy

        max_output = seq.max_length - seq.num_prompt
        most = min(params.max_pattern_size, max_output // params.min_count)
        self.least = params.min_pattern_size or 1
        # A pattern occurs `min_count` times if so many tokens equal the ones a pattern before. This
        # is of the sizes from `least` to `most`, which can be thousands: hence arrays.
        self.needed = np.arange(self.least, most + 1, dtype=np.int32) * (params.min_count - 1)
        self.output = np.zeros(max_output, np.int32)
        self.reset()

    def reset(self) -> None:
        self.num_read = 0  # output tokens
        self.runs = 0 * self.needed  # equal tokens up to the last one, by size

    def find(self, seq: Sequence, min_tokens: int) -> int | None:
        """Read the new tokens. Return the length at which the output first ends, or None."""
        if self.num_read > seq.num_output:
            self.reset()  # a failed step has removed tokens
        for token in seq.token_ids[seq.num_prompt + self.num_read :]:
            self.output[self.num_read] = token
            end = self.num_read - self.least + 1  # of the tokens that are at least `least` before
            count = max(0, min(len(self.runs), end))
            runs, before = self.runs[:count], self.output[end - count : end][::-1]
            runs[:] = (runs + 1) * (before == token)
            self.num_read += 1
            if self.num_read >= min_tokens and (runs >= self.needed[:count]).any():
                return self.num_read
        return None

    def end(self, seq: Sequence, min_tokens: int) -> None:
        """End the sequence if its new tokens complete a repetition."""
        length = self.find(seq, min_tokens)
        # As in vLLM, a stop token or the largest length takes precedence at the same token.
        if length is not None and (length < seq.num_output or seq.finish_reason is None):
            del seq.token_ids[seq.num_prompt + length :]  # with drafts, a step yields several
            seq.finish_reason, seq.stop_reason = "repetition", "repetition_detected"

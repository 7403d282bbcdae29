"""Detection of outputs that repeat a pattern of tokens without end."""

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


def find_repetition(seq: Sequence, start: int, params: RepetitionDetectionParams) -> int | None:
    """Return the length, more than `start`, at which the output first ends, or None."""
    longest = params.max_pattern_size * params.min_count
    for length in range(start + 1, seq.num_output + 1):
        end = seq.num_prompt + length
        if repeats(seq.token_ids[max(seq.num_prompt, end - longest) : end], params):
            return length
    return None


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """Return whether the last tokens are a pattern `min_count` times in a row."""
    most = min(params.max_pattern_size, len(tokens) // params.min_count)
    for size in range(params.min_pattern_size or 1, most + 1):
        before = size * (params.min_count - 1)  # tokens that equal the ones a pattern before
        if all(tokens[-i] == tokens[-i - size] for i in range(1, before + 1)):
            return True
    return False

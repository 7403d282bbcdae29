"""Repetition: ends where vLLM's definition says, whatever the steps, and bad values are refused."""

import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_llm

from nanovllm import LLM, RepetitionDetectionParams, SamplingParams
from nanovllm.engine.repetition import find_repetition
from nanovllm.engine.sequence import Sequence

PROMPTS = [[1, 2, 3], [5] * 20, [7, 8] * 9]


def first_end(output: list[int], params: RepetitionDetectionParams, least: int = 0) -> int | None:
    """The length at which vLLM ends an output: its last tokens are a pattern so many times."""
    for length in range(max(least, 1), len(output) + 1):
        for size in range(params.min_pattern_size or 1, params.max_pattern_size + 1):
            end = output[length - size * params.min_count : length]
            if size * params.min_count <= length and end == end[:size] * params.min_count:
                return length
    return None


def test_the_definition() -> None:
    """Random outputs of few tokens, in steps of several tokens, after a prompt that repeats."""
    rng, ends = random.Random(0), 0
    for _ in range(4000):
        most = rng.randint(1, 5)
        params = RepetitionDetectionParams(most, rng.randint(0, most), rng.randint(2, 4))
        output, least = rng.choices([4, 5], k=rng.randrange(40)), rng.choice([0, 0, 9])
        seq = Sequence("", 0, [4] * 9, 9, 9 + len(output))
        found = None
        while found is None and seq.num_output < len(output):
            start = max(seq.num_output, least - 1)
            seq.token_ids += output[seq.num_output :][: rng.randint(1, 4)]
            found = find_repetition(seq, start, params)
        assert found == first_end(output, params, least)
        ends += found is not None
    assert 1000 < ends < 3900


@pytest.fixture(scope="session")
def repeater(path: Path) -> LLM:
    return random_llm(path)


def samples(llm: LLM, **fields: Any) -> list[Any]:
    settings = dict(n=2, temperature=0.5, seed=1, max_tokens=60, ignore_eos=True, detokenize=False)
    params = SamplingParams(**(settings | fields))
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [sample for output in outputs for sample in output.outputs]


@pytest.mark.parametrize("temperature", [0, 0.5])
def test_outputs_end(repeater: LLM, path: Path, temperature: float) -> None:
    """Where the same output without the field would first repeat itself, also with log-probabilities
    and min_tokens, after preemptions, in asynchronous steps, and with drafts."""
    params = RepetitionDetectionParams(max_pattern_size=6, min_count=3)
    whole = samples(repeater, temperature=temperature)
    for least in (0, 30):
        fields = dict(temperature=temperature, min_tokens=least, logprobs=1)
        found = samples(repeater, repetition_detection=params, **fields)
        for sample, other in zip(found, whole, strict=True):
            length = first_end(other.token_ids, params, least)
            ended = length is not None and length < 60
            wanted = ("repetition", "repetition_detected") if ended else ("length", None)
            assert (sample.finish_reason, sample.stop_reason) == wanted
            assert sample.token_ids == other.token_ids[:length]
            assert len(sample.logprobs) == len(sample.token_ids)
        assert any(sample.finish_reason == "repetition" for sample in found)
        for options in (
            dict(num_kv_cache_blocks=6, max_model_len=90, max_num_batched_tokens=16),
            dict(async_scheduling=True),
            dict(speculative_config={"prompt_lookup_min": 1}),
        ):
            other_llm = random_llm(path, **options)
            again = samples(other_llm, repetition_detection=vars(params), **fields)
            for one, two in zip(again, found, strict=True):
                assert (one.token_ids, one.finish_reason) == (two.token_ids, two.finish_reason)
            if "speculative_config" in options and not temperature:
                assert other_llm.stats()["accepted_tokens"] > 0
            if "num_kv_cache_blocks" in options and temperature:
                assert other_llm.stats()["preemptions"] > 0


def test_other_ends_and_streams(embedded: LLM) -> None:
    """At one token a stop token, a stop string and the length come first, as in vLLM."""
    comma = embedded.get_tokenizer().encode(", ")[0]
    params = RepetitionDetectionParams(max_pattern_size=1, min_count=3)
    fields: dict[str, Any] = dict(temperature=0, repetition_detection=params, max_tokens=9)
    always = {"logit_bias": {comma: 1000}}
    text = embedded.get_tokenizer().decode([comma])
    cases: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({}, (text * 3, "repetition", "repetition_detected")),
        ({"max_tokens": 3}, (text * 3, "length", None)),
        ({"stop": text * 3}, ("", "stop", text * 3)),
        ({"stop": text * 2}, ("", "stop", text * 2)),
        ({"stop": text * 4}, (text * 3, "repetition", "repetition_detected")),
        ({"stop_token_ids": [comma]}, ("", "stop", comma)),
        ({"repetition_detection": None}, (text * 9, "length", None)),
        ({"repetition_detection": {}}, (text * 9, "length", None)),
        ({"min_tokens": 5}, (text * 5, "repetition", "repetition_detected")),
    ]
    for more, wanted in cases:
        p = SamplingParams(**(fields | always | more))
        sample = embedded.generate("Hi\n", p, use_tqdm=False)[0].outputs[0]
        assert (sample.text, sample.finish_reason, sample.stop_reason) == wanted
        parts = list(embedded.stream("Hi\n", p))
        assert "".join(part.text for part in parts) == sample.text
        assert [t for part in parts for t in part.token_ids] == sample.token_ids
        assert parts[-1].finish_reason == sample.finish_reason


WRONG: list[tuple[Any, type[Exception], str]] = [
    (3, TypeError, "repetition_detection must be a RepetitionDetectionParams or a dict"),
    ({"max_pattern_size": 5}, ValueError, "repetition_detection: min_count must be at least 2"),
    ({"max_pattern_size": 5, "min_count": 1}, ValueError, "min_count must be at least 2, not 1"),
    (
        {"max_pattern_size": 2, "min_pattern_size": 3},
        ValueError,
        "min_pattern_size=3, max_pattern_size=2",
    ),
    ({"max_pattern_siz": 2}, ValueError, "unknown field .* 'max_pattern_siz'; did you mean"),
    ({3: 2}, ValueError, "field of repetition_detection '3'; known: max_pattern_size, min_pattern"),
]


@pytest.mark.parametrize(("value", "kind", "message"), WRONG)
def test_what_is_refused(embedded: LLM, value: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        embedded.generate("a", SamplingParams(repetition_detection=value), use_tqdm=False)

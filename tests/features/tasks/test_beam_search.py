"""Beams are transformers' beams, whole or preempted; they share blocks and leave none behind."""

import random

import pytest
import torch
from checkpoints import VOCAB, make_checkpoint, random_llm

from nanovllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, Trace

ENDS = [0, 3, 17, 18, 19, 20, 21, 22]  # many, so that beams end at different lengths


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("beams")
    return path, make_checkpoint(path, eos_token_id=ENDS)


@pytest.fixture(scope="session")
def llm(checkpoint):
    return random_llm(checkpoint[0])


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(30, VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(number)]


@torch.inference_mode()
def reference(model, prompt, params):
    """Return (tokens, normalized score) of each beam of transformers, the best first."""
    ends = None if params.ignore_eos else ENDS
    out = model.generate(
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=False,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    results = []
    for tokens, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        output = tokens[len(prompt) :]
        end = next((i for i, token in enumerate(output) if ends and token in ends), len(output))
        results.append((prompt + output[: end + 1], score))
    return results


def assert_equal(output, expected, prompt, params):
    assert len(output.sequences) == params.beam_width
    for beam, (tokens, score) in zip(output.sequences, expected, strict=True):
        assert beam.tokens == tokens
        length = len(tokens) - len(prompt)
        assert beam.cum_logprob / length**params.length_penalty == pytest.approx(score, abs=1e-4)
        stopped = not params.ignore_eos and tokens[-1] in ENDS
        assert beam.finish_reason == ("stop" if stopped else "length")
        assert beam.stop_reason == (tokens[-1] if stopped else None)


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
def test_beams_are_those_of_transformers(checkpoint, llm, width, penalty):
    params = BeamSearchParams(width, 14, length_penalty=penalty, include_stop_str_in_output=True)
    items = prompts(5)
    outputs = llm.beam_search(items, params, use_tqdm=False)
    reasons = set()
    for prompt, output in zip(items, outputs, strict=True):
        assert_equal(output, reference(checkpoint[1], prompt, params), prompt, params)
        reasons |= {beam.finish_reason for beam in output.sequences}
    assert "stop" in reasons
    assert llm.stats()["blocks_in_use"] == 0


@pytest.mark.parametrize(
    ("blocks", "policy", "prefix_caching"),
    [(9, "fcfs", False), (9, "sjf", True), (14, "sjf", False), (40, "fcfs", True)],
)
def test_beams_that_are_preempted(checkpoint, llm, prefix_caching, policy, blocks):
    """The same results from pools in which few beams fit at a time, and with few rows."""
    params = BeamSearchParams(4, 14)
    items = prompts(6, seed=2)
    expected = llm.beam_search(items, params, use_tqdm=False)
    small = random_llm(
        checkpoint[0],
        num_kv_cache_blocks=blocks,
        block_size=8,
        max_model_len=64,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        enable_prefix_caching=prefix_caching,
        scheduling_policy=policy,
    )
    outputs = small.beam_search(items, params, use_tqdm=False)
    for output, other in zip(outputs, expected, strict=True):
        assert [beam.tokens for beam in output.sequences] == [b.tokens for b in other.sequences]
        for beam, same in zip(output.sequences, other.sequences, strict=True):
            assert beam.cum_logprob == same.cum_logprob
    stats = small.stats()
    assert stats["preemptions"] > 0 or blocks == 40
    assert stats["running"] == stats["waiting"] == stats["blocks_in_use"] == 0


def test_the_prompt_is_computed_once_and_each_beam_one_token_a_step(llm):
    llm.reset_prefix_cache()
    with Trace(llm) as trace:
        (output,) = llm.beam_search(
            [[30 + i for i in range(40)]], BeamSearchParams(4, 6, ignore_eos=True)
        )
    plans = [event["chunks"] for event in trace.events if "plan" in event]
    assert [sum(count for *_, count in chunks) for chunks in plans] == [40, 4, 4, 4, 4, 4]
    # The trace has the tokens of every beam, also of those that were forked later.
    known = [seq.tokens for seq in trace._state.seqs]
    assert all(beam.tokens[:-1] in known for beam in output.sequences)
    assert "None" not in str(trace)
    names = [seq.name for seq in trace._state.seqs]
    assert len(set(names)) == len(names) > 4


def test_an_abort_returns_the_beams_so_far(llm):
    request = llm.engine.submit([40, 41, 42], BeamSearchParams(3, 50, True))
    for _ in range(4):
        llm.engine.run_step()
    llm.engine.abort([request])
    assert [len(beam.tokens) for beam in request.output.sequences] == [7, 7, 7]
    assert {beam.finish_reason for beam in request.output.sequences} == {"abort"}
    assert llm.stats()["blocks_in_use"] == 0
    assert not llm.engine.scheduler.has_work()


@pytest.mark.extra
def test_beams_follow_a_grammar(embedded: LLM):
    """All results match, also after preemption, and the best is the most likely that matches."""
    pytest.importorskip("llguidance")
    names = ["apple", "melon", "plum", "pear", "peach", "lemon", "grape", "mango"]
    grammar = StructuredOutputsParams(choice=names)
    params = BeamSearchParams(8, 12, length_penalty=0.0, structured_outputs=grammar)
    question = "Name a fruit.\n"
    (output,) = embedded.beam_search(question, params, use_tqdm=False)
    texts = [beam.text.removeprefix(question) for beam in output.sequences]
    assert len(texts) == 8
    assert set(texts) <= set(names)  # a text has several tokenizations
    small = LLM(
        dtype="float32",
        device="cpu",
        num_kv_cache_blocks=12,
        block_size=4,
        max_model_len=32,
        max_num_seqs=8,
    )
    (again,) = small.beam_search(question, params, use_tqdm=False)
    assert [beam.tokens for beam in again.sequences] == [b.tokens for b in output.sequences]
    assert small.stats()["preemptions"] > 0
    for beam in output.sequences:
        scored = embedded.generate(
            {"prompt_token_ids": [*beam.tokens, beam.stop_reason]},
            SamplingParams(max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )
        entries = scored[0].prompt_logprobs[len(embedded.engine.input_processor.encode(question)) :]
        total = sum(next(iter(entry.values())).logprob for entry in entries)
        assert beam.cum_logprob == pytest.approx(total, abs=1e-3)
    with pytest.raises(ValueError, match="set ignore_eos to False"):
        ignoring = BeamSearchParams(2, 5, True, structured_outputs=grammar)
        embedded.beam_search(question, ignoring)


@pytest.mark.extra
@pytest.mark.parametrize("width", [2, 3, 8])
def test_fewer_beams_than_before(embedded: LLM, width):
    """A grammar leaves fewer continuations than there were beams, while another request runs."""
    pytest.importorskip("llguidance")
    grammar = StructuredOutputsParams(choice=["yes", "no"])
    params = BeamSearchParams(width, 20, structured_outputs=grammar)
    request = embedded.engine.submit("What is 12 + 30?\n", params)
    other = embedded.engine.submit([40, 41], SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in embedded.engine.run([request, other]):
        pass
    texts = {beam.text.split("\n")[-1] for beam in request.output.sequences}
    assert texts <= {"yes", "no"}
    assert request.error is None
    assert len(other.output.outputs[0].token_ids) == 30


def test_wrong_calls(llm):
    for width, name in ((VOCAB + 1, "the vocabulary=199"), (20_000, "beam_width must be")):
        with pytest.raises(ValueError, match=name):
            llm.beam_search([[5]], BeamSearchParams(width, 3), use_tqdm=False)
    with pytest.raises(TypeError, match="must be a BeamSearchParams, not SamplingParams"):
        llm.beam_search([[5]], SamplingParams())
    with pytest.raises(ValueError, match="prompts.1.: the prompt is empty"):
        llm.beam_search([[5], []], BeamSearchParams(2, 3), use_tqdm=False)
    assert llm.beam_search([], BeamSearchParams(2, 3)) == []
    assert not llm.engine.scheduler.has_work()

"""The rules of a row: against transformers, in mixed batches, and after a preemption."""

import contextlib
import functools
import gc
import math
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, random_llm
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm import LLM, BeamSearchParams, GenerationError, SamplingParams
from nanovllm.features.sampling.logit_rules import penalties
from nanovllm.features.sampling.logit_rules.logprobs import processed_logits
from nanovllm.features.sampling.logit_rules.row_rules import RowRules, RulesBatch, RulesState
from nanovllm.models.batch import SamplingBatch
from nanovllm.models.sampler import sample
from nanovllm.plan import FILTERS, LogitRules, NewRow, RowSampling

PROMPT, OUTPUT = [3, 5, 5, 7], [5, 9, 9, 2]


def applied(rules: LogitRules, logits: torch.Tensor, output: list[int] = OUTPUT) -> torch.Tensor:
    """The logits after the rules of a row that drew `output` one by one."""
    device, position = torch.device("cpu"), torch.tensor([len(PROMPT) + 1])
    new_row = NewRow(1, [], RowSampling(0.0, 0, rules=rules), PROMPT, output[:1])
    state = RulesState(2, 40, len(logits), device)
    state.penalties.add_row(new_row.row, PROMPT, output[:1])
    batch = RulesBatch([(0, RowRules(rules, new_row))], state)
    for token in output[1:]:
        batch.length = int(position) + 1
        batch.apply(logits[None], position)
        batch.append(torch.tensor([token]), lambda token=token: [token])
        position = position + 1
    batch.length = int(position) + 1
    return batch.apply(logits[None], position)[0]


IDS = torch.tensor([PROMPT + OUTPUT])
DETERMINISTIC = [
    (LogitRules(repetition_penalty=1.3), RepetitionPenaltyLogitsProcessor(1.3)),
    (LogitRules(repetition_penalty=0.8), RepetitionPenaltyLogitsProcessor(0.8)),
    (
        LogitRules(logit_bias=((4, 2.5), (9, -100.0))),
        SequenceBiasLogitsProcessor([[[4], 2.5], [[9], -100.0]]),
    ),
    (
        LogitRules(allowed_token_ids=(1, 4, 19)),
        PrefixConstrainedLogitsProcessor(lambda *_: [1, 4, 19], 1),
    ),
    (LogitRules(min_tokens=5, stops=(2, 8)), MinNewTokensLengthLogitsProcessor(4, 5, [2, 8])),
    (LogitRules(min_tokens=4, stops=(2, 8)), MinNewTokensLengthLogitsProcessor(4, 4, [2, 8])),
    (
        LogitRules(bad_words=((6,), (9, 2, 11), (2, 12), (1, 2, 13))),
        NoBadWordsLogitsProcessor([[6], [9, 2, 11], [2, 12], [1, 2, 13]]),
    ),
]


@pytest.mark.parametrize(("rules", "theirs"), DETERMINISTIC)
def test_same_logits_as_transformers(rules: LogitRules, theirs) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20) * 3
    want = theirs(IDS, logits[None].clone())[0]
    assert not torch.equal(want, logits) or rules.min_tokens == 4
    torch.testing.assert_close(applied(rules, logits), want)


def test_presence_and_frequency_penalties() -> None:
    """OpenAI's definition, over the output alone."""
    logits = torch.randn(20)
    want = logits.clone()
    for token, count in ((5, 1), (9, 2), (2, 1)):
        want[token] -= 0.7 + 0.4 * count
    torch.testing.assert_close(
        applied(LogitRules(presence_penalty=0.7, frequency_penalty=0.4), logits), want
    )


@pytest.mark.parametrize("at_a_time", [1, 70, penalties.TOKENS_AT_A_TIME])
def test_penalties_of_rows_of_every_length(monkeypatch, at_a_time: int) -> None:
    """Rows that are new at different times and repeat few tokens, against counts of the whole list.

    What is read at a time is bounded: the profile, whose rows are short, does not measure it.
    """
    read = penalties.PenaltyState.read

    def bounded(state: Any, *args: Any) -> Any:
        tokens, counts = read(state, *args)
        assert tokens.numel() <= max(at_a_time, tokens.shape[1])
        return tokens, counts

    monkeypatch.setattr(penalties.PenaltyState, "read", bounded)
    monkeypatch.setattr(penalties, "TOKENS_AT_A_TIME", at_a_time)
    rng, size, device = random.Random(0), 6, torch.device("cpu")
    state, rows = RulesState(5, 64, size, device), {}
    rules = LogitRules(repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.7)
    for step in range(60):
        if step % 5 == 0:  # a new sequence, also in the place of an old one
            prompt, output = (rng.choices(range(size), k=n) for n in (rng.randint(1, 3), step % 3))
            new_row = NewRow(rng.randrange(5), [], RowSampling(0.0, 0, rules=rules), prompt, output)
            rows[new_row.row] = (RowRules(rules, new_row), [*prompt, *output])
            state.penalties.add_row(new_row.row, prompt, output)
        batch = RulesBatch([(i, row) for i, (row, _) in enumerate(rows.values())], state)
        known = [tokens for _, tokens in rows.values()]
        positions = torch.tensor([len(tokens) for tokens in known])
        logits = torch.randn(len(rows), size)
        wanted = logits.clone()
        for i, (row, tokens) in enumerate(rows.values()):
            for token in set(tokens):
                wanted[i, token] *= 1 / 1.5 if wanted[i, token] > 0 else 1.5
                count = tokens[len(row.prompt) :].count(token)
                wanted[i, token] -= 0.3 * count + 0.7 * (count > 0)
        batch.length = max(map(len, known)) + 1
        torch.testing.assert_close(batch.apply(logits, positions), wanted)
        sampled = torch.randint(size, (len(rows),))
        batch.append(sampled, sampled.tolist)
        for tokens, token in zip(known, sampled.tolist(), strict=True):
            tokens.append(token)


def test_rules_that_name_the_same_token() -> None:
    """A bad word that is also a stop token and has a bias stays hidden after min_tokens."""
    rules = LogitRules(
        bad_words=((4,),), min_tokens=1, stops=(4, 6), logit_bias=((4, 3.0), (6, 1.0))
    )
    logits = torch.randn(20)
    wanted = logits.clone()
    wanted[4], wanted[6] = float("-inf"), logits[6] + 1
    torch.testing.assert_close(applied(rules, logits), wanted)


# ---- logprobs_mode="processed_logprobs" ----

PROCESSED: list[dict[str, Any]] = [
    dict(temperature=0.7),
    dict(temperature=2.0, top_k=7),
    dict(top_p=0.8),
    dict(min_p=0.15),
    dict(temperature=1.4, top_k=60, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
    dict(temperature=0, top_k=3, top_p=0.5, repetition_penalty=0.7),
]


def processed(params: SamplingParams, ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The log-probabilities [V] after transformers' processors. Greedy rows have no warpers."""
    steps: list[Any] = [RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    if params.temperature:
        steps += [TemperatureLogitsWarper(params.temperature)]
        steps += [TopKLogitsWarper(params.top_k or VOCAB)]
        steps += [TopPLogitsWarper(params.top_p), MinPLogitsWarper(params.min_p)]
    scores = logits[None].clone()
    for step in steps:
        scores = step(torch.tensor([ids]), scores)
    return scores[0].log_softmax(dim=-1)


def test_processed_logits_are_those_of_transformers() -> None:
    torch.manual_seed(1)
    params = [SamplingParams(**fields | {"repetition_penalty": 1.0}) for fields in PROCESSED]
    logits = torch.randn(len(params), VOCAB) * 3
    filters = {name: torch.tensor([getattr(x, name) for x in params]) for name in FILTERS}
    seeds = torch.arange(len(params))
    batch = SamplingBatch(torch.tensor([x.temperature for x in params]), seeds, seeds, filters)
    found = processed_logits(logits, batch, sample(logits, batch)).log_softmax(dim=-1)
    for x, row, each in zip(found, logits, params, strict=True):
        torch.testing.assert_close(x, processed(each, [0], row), rtol=0, atol=1e-5)
    # A token that only a kernel has kept has its probability, relative to the most likely one.
    batch.filters["top_p"].fill_(0.01)
    rarest = logits.argmin(dim=-1)
    found = processed_logits(logits, batch, rarest)
    for row, token, x, each in zip(found, rarest, logits, params, strict=True):
        difference = (x[token] - x.max()) / (each.temperature or 1)
        assert row[token] - row.max() == pytest.approx(difference.item(), rel=1e-5)


@pytest.mark.parametrize(
    "options", [{"attention_backend": "numba"}, {"attention_backend": "sdpa", "max_num_seqs": 2}]
)
def test_processed_logprobs(checkpoint, options: dict[str, Any]) -> None:
    """Of all tokens, in one batch with requests that report none; raw ones of the prompt."""
    path, model = checkpoint
    llm = random_llm(path, max_logprobs=-1, logprobs_mode="processed_logprobs", **options)
    fields = dict(max_tokens=6, ignore_eos=True, prompt_logprobs=0, logprobs=-1)
    params = [SamplingParams(**fields | each, seed=i) for i, each in enumerate(PROCESSED)]
    params.insert(2, SamplingParams(top_k=2, max_tokens=6))
    for each, out in zip(params, llm.generate([PROMPT] * 7, params, use_tqdm=False), strict=True):
        if each.logprobs is None:
            assert out.outputs[0].logprobs is None
            continue
        output = out.outputs[0].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + output])).logits[0]
        total = 0.0
        for i, (token, entry) in enumerate(zip(output, out.outputs[0].logprobs, strict=True)):
            wanted = processed(each, PROMPT + output[:i], logits[len(PROMPT) + i - 1])
            assert sorted(entry) == list(range(VOCAB))
            found = torch.tensor([entry[t].logprob for t in range(VOCAB)])
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)
            assert entry[token].rank == 1 + (found > found[token]).sum()
            total += entry[token].logprob
        assert out.outputs[0].cumulative_logprob == pytest.approx(total)
        assert math.isfinite(total)
        raw = logits.log_softmax(dim=-1)
        for i, entry in enumerate(out.prompt_logprobs[1:]):
            assert entry[PROMPT[i + 1]].logprob == pytest.approx(
                float(raw[i, PROMPT[i + 1]]), abs=2e-4
            )


def test_processed_logprobs_of_drafts_and_after_preemptions(path: Path) -> None:
    """The log-probabilities of sampled tokens do not depend on how they were computed."""
    fields = dict(temperature=0.3, top_k=4, max_tokens=40, ignore_eos=True, logprobs=0, n=4)
    prompts = [[5, 6, 7] * 6, [9] * 12, PROMPT]

    def results(**options: Any) -> tuple[list[list[int]], list[float], dict[str, Any]]:
        llm = random_llm(path, logprobs_mode="processed_logprobs", block_size=4, **options)
        outputs = llm.generate(prompts, SamplingParams(**fields, seed=3), use_tqdm=False)
        samples = [x for out in outputs for x in out.outputs]
        return [x.token_ids for x in samples], [x.cumulative_logprob for x in samples], llm.stats()

    drafts = {"method": "ngram", "prompt_lookup_min": 1}
    tokens, totals, _ = results(num_kv_cache_blocks=400)
    for options in (dict(speculative_config=drafts, max_num_seqs=4), dict(num_kv_cache_blocks=30)):
        found, their_totals, stats = results(**options)
        assert found == tokens
        assert their_totals == totals
        assert stats.get("accepted_tokens", 0) > 9 or stats["preemptions"] > 2


def test_processed_logprobs_without_a_token(path: Path) -> None:
    """A row in which everything is masked ends alone; beams and log-likelihoods stay raw."""
    llm = random_llm(path, logprobs_mode="processed_logprobs")
    masked = SamplingParams(logits_processors=[lambda ids, x: x - math.inf], logprobs=2)
    with pytest.raises(GenerationError) as error:
        llm.generate([PROMPT] * 2, [masked, SamplingParams(logprobs=2)], use_tqdm=False)
    reasons = [out.outputs[0].finish_reason for out in error.value.outputs]
    assert reasons[0] == "error" != reasons[1]
    raw = random_llm(path)
    beams = [x.beam_search(PROMPT, BeamSearchParams(2, 4), use_tqdm=False)[0] for x in (llm, raw)]
    assert len({str(x.sequences) for x in beams}) == 1
    scores = [x.loglikelihood(PROMPT, [3, 4], use_tqdm=False)[0].logprob for x in (llm, raw)]
    assert scores[0] == scores[1]


def test_processed_logprobs_with_filters_that_float32_rounds_to_off(path: Path) -> None:
    llm = random_llm(path, logprobs_mode="processed_logprobs")
    for rounded, off in (
        (dict(top_p=0.99999999), {}),
        (dict(min_p=1e-50), {}),
        (dict(temperature=1e-50, top_k=3), dict(temperature=0)),
    ):
        params = [SamplingParams(**each, seed=0, logprobs=2) for each in (rounded, off)]
        found = [llm.generate(PROMPT, each, use_tqdm=False)[0].outputs[0] for each in params]
        assert found[0] == found[1]


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value, other=None):
        return value if rng.random() < 0.3 else other

    return SamplingParams(
        n=rng.choice((1, 1, 1, 2)),
        temperature=rng.choice((0.0, 0.5, 1.0, 1.7)),
        top_p=maybe(rng.uniform(0.2, 1), 1.0),
        top_k=maybe(rng.randint(1, 300), 0),
        min_p=maybe(rng.uniform(0, 0.3), 0.0),
        seed=rng.randrange(1000),
        max_tokens=rng.randint(4, 12),
        min_tokens=maybe(rng.randint(0, 4), 0),
        stop_token_ids=maybe([rng.randrange(VOCAB) for _ in range(20)], ()),
        ignore_eos=rng.random() < 0.5,
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        logit_bias=maybe({rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(3)}),
        allowed_token_ids=maybe([rng.randrange(VOCAB) for _ in range(30)]),
        logprobs=maybe(rng.randint(0, 3)),
        prompt_logprobs=maybe(rng.randint(0, 2)),
        logits_processors=maybe([lambda ids, logits: logits.roll(len(ids))], ()),
    )


@pytest.mark.slow
def test_mixed_batch_equals_each_alone(checkpoint) -> None:
    """150 random combinations of parameters in one batch give what each gives alone."""
    rng = random.Random(4)
    llm = random_llm(checkpoint[0], num_kv_cache_blocks=400, max_num_batched_tokens=64)
    params = [random_params(rng) for _ in range(150)]
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 20))] for _ in params]
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = random_llm(checkpoint[0], enable_prefix_caching=False)
    for prompt, p, out in zip(prompts, params, together, strict=True):
        want = alone.generate(prompt, p, use_tqdm=False)[0]
        assert [c.token_ids for c in out.outputs] == [c.token_ids for c in want.outputs], p
        for a, b in zip(out.outputs, want.outputs, strict=True):
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
            if p.logprobs is not None:
                assert a.cumulative_logprob == b.cumulative_logprob
        assert (out.prompt_logprobs is None) == (p.prompt_logprobs is None)


class Large:
    """What a logits processor refers to."""


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_processors_are_released(path: Path, monkeypatch, raises: bool, asynchronous: bool) -> None:
    """No row keeps what a processor refers to after the end of its request, whatever ended it."""
    llm = random_llm(path)
    monkeypatch.setattr(llm.engine, "async_scheduling", asynchronous)
    alive: list[weakref.ref[Large]] = []
    calls = 0

    def make_params(**fields: Any) -> SamplingParams:
        def processor(output_ids: list[int], logits: torch.Tensor, large: Large = Large()) -> None:  # noqa: B008
            nonlocal calls
            calls += 1
            if raises and len(output_ids) > 2:
                raise OSError("no such file")

        alive.append(weakref.ref(processor.__defaults__[0]))
        return SamplingParams(max_tokens=5, logits_processors=[processor], **fields)

    def run(**fields: Any) -> None:
        llm.generate([[1, 2], [3]], make_params(**fields), use_tqdm=False)

    def leave() -> None:
        assert next(llm.stream([[1, 2]], make_params()))
        llm.engine.run_step()  # commits the step in flight, if there is one

    def abort() -> None:
        llm.engine.add_request([1], make_params(), "a")
        llm.engine.step()
        llm.engine.abort_request("a")
        llm.engine.run_step()

    early = functools.partial(run, stop_token_ids=list(range(1, VOCAB)))
    for action in (run, functools.partial(run, n=3, logprobs=2), early, leave, abort):
        with contextlib.suppress(OSError):
            action()
        if raises:
            llm.engine.run_step()  # what is in flight has an error too, with the processor's frame
        gc.collect()
        assert [ref() for ref in alive] == [None] * len(alive)
    assert calls > 10


def test_logits_processors_as_in_vllm(embedded: LLM) -> None:
    """Three parameters get the prompt too; a result may be None, of NumPy, infinite, or wrong."""
    seven = embedded.get_tokenizer().encode("7")[0]
    seen: list[tuple[list[int], list[int]]] = []

    def three(prompt: list[int], output: list[int], logits: torch.Tensor) -> None:
        seen.append((prompt, output))
        logits[seven] = float("inf")

    class Callable:
        def __call__(self, ids: list[int], logits: torch.Tensor, scale: float = 0.0):
            changed = scale * logits.numpy()
            changed[seven] = 1.0
            return changed

    for processor in (three, Callable(), lambda *args: three([], *args)):
        for temperature in (0.0, 0.01):
            params = SamplingParams(
                temperature=temperature, max_tokens=3, logits_processors=[processor]
            )
            out = embedded.generate("hello", params, use_tqdm=False)[0]
            assert out["text"] == "777"
            if processor is three:
                assert seen[-1] == (out.prompt_token_ids, [seven, seven])
    short = SamplingParams(max_tokens=3, logits_processors=[lambda ids, logits: logits[:5]])
    with pytest.raises(ValueError, match=r"lambda.*returned the shape \[5\], not"):
        embedded.generate("hello", short, use_tqdm=False)
    assert embedded.generate("hello", params, use_tqdm=False)[0]["text"] == "777"
    for wrong in (lambda logits: logits, lambda a, b, c, d: d):
        with pytest.raises(TypeError, match=r"\(output ids, logits\) or .* does not take"):
            embedded.generate("hello", SamplingParams(logits_processors=[wrong]))


def test_a_bad_word_without_tokens(embedded: LLM, monkeypatch) -> None:
    """A normalizer can remove a whole word. It was accepted, and its space was forbidden."""
    inputs = embedded.engine.input_processor
    encode = inputs.encode

    def normalized(text: str, add_special_tokens: bool = True) -> list[int]:
        text = text.replace("\ufe0f", "")
        return encode(text, add_special_tokens) if text else []

    monkeypatch.setattr(inputs, "encode", normalized)
    params = SamplingParams(bad_words=["cat", "\ufe0f"])
    with pytest.raises(ValueError, match="the tokenizer has no tokens; remove it"):
        embedded.generate("Spell cat\n", params, use_tqdm=False)

"""Speculation by n-grams: results equal those without it, in histories and in whole engines."""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from engines import is_idle
from oracle_engine import Engine, right, sequence
from safetensors.torch import load_file, save_file

from lessons.oracle.drafts import MUTANTS, DraftHistory
from lessons.oracle.mutants import Mutant, apply
from lessons.oracle.oracle import run_history
from nanovllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanovllm.config import SpeculativeConfig
from nanovllm.engine import sampling
from nanovllm.features.sampling import ngram
from nanovllm.features.sampling.logit_rules import row_rules, rules_of_row
from nanovllm.features.sampling.ngram import FIRST_PAUSE, LONGEST_PAUSE, Lookup, NgramSpeculation
from nanovllm.loading.checkpoint import find_checkpoint
from nanovllm.runner import rows

SLOW = pytest.mark.slow

# ---- n-grams ----


def found(token_ids: list[int], sizes: range) -> int | None:
    """The definition: the longest n-gram first, and its last occurrence before the end."""
    for size in sizes:
        last = token_ids[-size:]
        for end in range(len(token_ids) - 1, size - 1, -1):
            if len(last) == size and token_ids[end - size : end] == last:
                return end
    return None


def test_the_last_occurrence_of_the_longest_n_gram() -> None:
    rng = random.Random(0)
    for _ in range(200):
        sizes = range(rng.randint(1, 4), 0, -1)
        lookup, token_ids, hits = Lookup(5), [rng.randrange(3)], 0
        for _ in range(40):
            token_ids += [rng.randrange(3) for _ in range(rng.choice((1, 1, 3)))]
            assert lookup.find(token_ids, sizes) == found(token_ids, sizes)
            hits += found(token_ids, sizes) is not None
        assert hits > 20


def test_drafts_get_shorter_and_pause() -> None:
    lookup, lengths = Lookup(5), []
    while not lookup.pause_end:
        lengths.append(lookup.limit)
        lookup.record(lookup.limit, 0, 100)
    assert lengths == [5, 2, 1]
    assert lookup.pause_end == 100 + FIRST_PAUSE
    pauses = []
    for _ in range(9):
        lookup.record(1, 0, 0)
        pauses.append(lookup.pause_end)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2] == LONGEST_PAUSE
    lengths = []
    for _ in range(4):
        lengths.append(lookup.limit)
        lookup.record(lookup.limit, lookup.limit, 0)
    assert lengths == [1, 2, 4, 5]
    lookup.record(5, 3, 0)
    assert lookup.limit == 3


def speculating(
    engine: Engine, drafts: int = 3, smallest: int = 1, max_tokens: int = 64
) -> NgramSpeculation:
    config = SpeculativeConfig(
        num_speculative_tokens=drafts, prompt_lookup_max=3, prompt_lookup_min=smallest
    )
    engine.scheduler.speculation = speculation = NgramSpeculation(config, max_tokens)
    return speculation


@pytest.mark.parametrize(
    ("budget", "max_tokens", "drafts"), [(64, 64, [3, 3]), (5, 64, [3, 0]), (64, 4, [2, 0])]
)
def test_each_sequence_computes_its_own_token_first(
    budget: int, max_tokens: int, drafts: list[int]
) -> None:
    engine = Engine(40, 4, 4, budget)
    speculation = speculating(engine, max_tokens=max_tokens)
    engine.add(*(sequence([0, 1, 2] * 2, 20, arrival) for arrival in range(2)))
    plan = engine.step()
    while not any(chunk.num_drafts for chunk in plan.chunks):
        plan = engine.step()
    counts = {chunk.row: chunk.num_drafts for chunk in plan.chunks}
    planned = [*counts, *plan.decode_rows]
    assert sorted(planned) == sorted(seq.row for seq in engine.scheduler.running)
    assert [counts.get(seq.row, 0) for seq in engine.scheduler.running] == drafts
    engine.run()
    assert all(map(right, engine.finished))
    assert speculation.stats()["drafted_tokens"] > 0


def test_drafts_end_before_the_last_position() -> None:
    engine = Engine(40, 4, 1, 64)
    speculating(engine, drafts=8)
    seq = sequence([0] * 8, 12)
    engine.add(seq)
    engine.run()
    ends = [chunk.start + len(chunk.token_ids) for p in engine.plans for chunk in p.chunks]
    assert max(ends) < seq.max_length
    assert right(seq)


# ---- histories ----


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 1000), marks=SLOW)])
def test_random_histories_with_drafts(seeds: range) -> None:
    drafted = accepted = preemptions = 0
    for seed in seeds:
        history = run_history(seed, make=DraftHistory)
        drafted += history.scheduler.speculation.drafted_tokens
        accepted += history.scheduler.speculation.accepted_tokens
        preemptions += history.scheduler.preemptions
    assert drafted - accepted > 5 * len(seeds)
    assert accepted > 5 * len(seeds)
    assert preemptions > len(seeds)


# Faults, besides the ones that are exercises.
DRAFT_FAULTS = MUTANTS | {
    "one token too many is accepted": Mutant(
        ngram, "accept", "drawn[: num_accepted + 1]", "drawn[:num_accepted + 2]"
    ),
    "a draft is compared with the token before": Mutant(
        ngram,
        "accept",
        "chunk.token_ids[-chunk.num_drafts :]",
        "chunk.token_ids[-chunk.num_drafts - 1:-1]",
    ),
    "the runner is asked for a token that it does not know": Mutant(
        ngram, "_take_back", "seq.decoding = False", "pass"
    ),
    "a step with drafts stays in flight": Mutant(
        ngram, "needs_results", "return True", "return False"
    ),
    "drafts are not in the budget": Mutant(ngram, "plan", "return 1 + len(drafts)", "return 1"),
    "drafts are more than the budget": Mutant(ngram, "plan", "budget - 1", "budget"),
    "drafts take blocks that are not available": Mutant(
        ngram, "propose", "needed + scheduler.reserve() > blocks.num_available", "False"
    ),
    "the blocks of drafts are not reported": Mutant(
        ngram,
        "plan",
        "step.plan.new_blocks += scheduler.allocate(seq, len(drafts))",
        "scheduler.allocate(seq, len(drafts))",
    ),
    "drafts follow a token that is not known": Mutant(
        ngram, "propose", "seq.num_computed != length - 1", "False"
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] * (i % 4 > 0)) for i, name in enumerate(DRAFT_FAULTS)]
)
def test_fault_is_caught(name: str) -> None:
    faulty = apply(DRAFT_FAULTS[name])
    with pytest.raises(AssertionError, match="fails"):
        for seed in range(200):
            run_history(seed, make=DraftHistory, ngrams=faulty)


# ---- whole engines ----

TEXTS = (
    "What is 12 + 30?\n12 + 30 = 42\n\nWhat is 12 + 31?\n",
    "Reverse the word planet.\ntenalp\nReverse the word planet.\n",
    "2, 3, 5, 7, 11, 13, 2, 3, 5, 7,",
    "a b a b a b a",
    "x",
)
GREEDY: dict[str, Any] = dict(temperature=0, max_tokens=40, ignore_eos=True)
PLENTY = dict(num_kv_cache_blocks=200)
# Preemption, chunked prefill, steps in flight, shortest job first, no prefix cache.
TIGHT: dict[str, dict[str, Any]] = {
    "few blocks": dict(num_kv_cache_blocks=30),
    "async": dict(async_scheduling=True, num_kv_cache_blocks=30),
    "small budget": dict(max_num_batched_tokens=7, scheduling_policy="sjf"),
    "no prefix cache": dict(enable_prefix_caching=False, max_num_seqs=2),
    "host cache": dict(num_kv_cache_blocks=30, swap_space=0.001),
}


FOLDER = TemporaryDirectory()


@cache
def one_layer() -> str:
    """A checkpoint of the embedded model with its first layer only, which repeats itself."""
    source, target = find_checkpoint("qwen3-nano"), Path(FOLDER.name, "model")
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    kept = {n: w for n, w in weights.items() if ".layers." not in n or ".layers.0." in n}
    save_file(kept, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": None}
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


def engine_of(speculative: bool = True, **options: Any) -> LLM:
    settings = dict(dtype="float32", device="cpu", attention_backend="numba", block_size=4)
    settings |= dict(max_model_len=96, max_num_seqs=6)
    drafts = {"method": "ngram", "prompt_lookup_min": 1} if speculative else None
    return LLM(one_layer(), **(settings | options), speculative_config=drafts)


def random_params(rng: random.Random) -> SamplingParams:
    params: dict[str, Any] = dict(
        temperature=rng.choice((0, 0, 0.3, 1.0)),
        seed=rng.randrange(9),
        max_tokens=rng.randint(1, 40),
        ignore_eos=rng.random() < 0.7,
        n=rng.choice((1, 1, 1, 3)),
    )
    for name, values in {
        "top_k": (0, 0, 5),
        "top_p": (1.0, 0.9),
        "min_p": (0.0, 0.05),
        "logprobs": (None, 0, 2),
        "prompt_logprobs": (None, None, 1),
        "stop": (None, ["a", "12"], [" = "], ["\n"]),
        "stop_token_ids": (None, None, [rng.randrange(300)]),
        "include_stop_str_in_output": (False, True),
        "min_tokens": (0, 0, 5),
        "repetition_penalty": (1.0, 1.0, 1.0, 1.2),
        "frequency_penalty": (0.0, 0.0, 0.0, 0.1, -0.1),
        "presence_penalty": (0.0, 0.0, 0.0, -0.2),
        "bad_words": (None, None, ["12 +", "planet"]),
        "logit_bias": (None, None, {17: -2.0}),
    }.items():
        params[name] = rng.choice(values)
    params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
    return SamplingParams(**params)


def workload(seed: int, number: int = 24) -> tuple[list[str], list[SamplingParams]]:
    rng = random.Random(seed)
    return [rng.choice(TEXTS) for _ in range(number)], [random_params(rng) for _ in range(number)]


def results(llm: LLM, seed: int, number: int = 24, grammars: bool = False) -> list[Any]:
    prompts, params = workload(seed, number)
    for i, each in enumerate(params if grammars else ()):
        each.structured_outputs, each.bad_words = GRAMMARS[i % len(GRAMMARS)], None
        each.ignore_eos = False
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (out.token_ids, out.text, out.finish_reason, out.stop_reason, entries(out.logprobs))
        for request in outputs
        for out in request.outputs
    ] + [entries(request.prompt_logprobs) for request in outputs]


def stopped(llm: LLM, whole: list[str]) -> list[Any]:
    """Results of requests that a stop string or the length ends, at many places of their text."""
    pairs = list(zip(TEXTS, whole, strict=True))
    cases = [
        (prompt, {**GREEDY, "logprobs": 1, "stop": [text[at : at + 4]]})
        for prompt, text in pairs
        for at in range(len(text) // 3, len(text) - 4, 3)
    ]
    cases += [(prompt, {**GREEDY, "max_tokens": 20 + i}) for prompt in TEXTS for i in range(9)]
    prompts = [prompt for prompt, _ in cases]
    params = [SamplingParams(**fields) for _, fields in cases]
    outputs = [request.outputs[0] for request in llm.generate(prompts, params, use_tqdm=False)]
    return [(out.token_ids, out.text, out.finish_reason, entries(out.logprobs)) for out in outputs]


def whole_texts(llm: LLM) -> list[str]:
    params = SamplingParams(**GREEDY)
    return [out.outputs[0].text for out in llm.generate(list(TEXTS), params, use_tqdm=False)]


def entries(logprobs: Any) -> list[Any]:
    """(token, rank, log-probability) of each position."""
    return [
        [(token, x.rank, x.logprob) for token, x in (entry or {}).items()]
        for entry in logprobs or ()
    ]


@pytest.fixture(scope="module")
def without() -> LLM:
    return engine_of(speculative=False, **PLENTY)


@pytest.mark.parametrize("how", [h if h == "async" else pytest.param(h, marks=SLOW) for h in TIGHT])
def test_results_are_those_without_speculation(without: LLM, how: str) -> None:
    """Tokens, texts, finish reasons and log-probabilities, greedy and sampled."""
    llm = engine_of(**TIGHT[how])
    for seed in range(4):
        assert results(llm, seed) == results(without, seed)
    stats = llm.stats()
    assert 50 < stats["accepted_tokens"] < stats["drafted_tokens"] - 50
    if llm.engine.scheduler.block_manager.num_blocks == 30:
        assert stats["preemptions"] > 5
    assert is_idle(llm.engine)


# The last one ends before `min_tokens`, so that all its end tokens are hidden.
GRAMMARS = [
    StructuredOutputsParams(regex=r"(12 \+ 3\d = 4\d\n)+"),
    StructuredOutputsParams(regex=r"[a-e ]{3,60}"),
    StructuredOutputsParams(json={"type": "array", "items": {"enum": ["planet", 12]}}),
    StructuredOutputsParams(choice=["a a a", "x"]),
]


@pytest.mark.extra
@pytest.mark.parametrize("how", ["async", pytest.param("few blocks", marks=SLOW)])
def test_grammars_read_drafts(without: LLM, how: str) -> None:
    pytest.importorskip("llguidance")
    llm = engine_of(**TIGHT[how])
    for seed in range(4):
        assert results(llm, seed, grammars=True) == results(without, seed, grammars=True)
    stats = llm.stats()
    assert 50 < stats["accepted_tokens"] < stats["drafted_tokens"] - 50
    assert is_idle(llm.engine)


RULES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    (dict(logit_bias={5: 1.0}, min_tokens=2, allowed_token_ids=[5, 6], logprobs=1), True),
    (dict(repetition_penalty=1.001, bad_words=["planet"]), True),
    (dict(logits_processors=[lambda ids, logits: logits]), False),
]


def test_rules_that_have_a_state_take_no_drafts(caplog) -> None:
    llm = engine_of(**PLENTY)
    for rules, has_drafts in RULES:
        before = llm.stats()["drafted_tokens"]
        llm.generate(list(TEXTS), SamplingParams(**GREEDY, **rules), use_tqdm=False)
        assert (llm.stats()["drafted_tokens"] > before) == has_drafts, rules
    before = llm.stats()["drafted_tokens"]
    llm.beam_search(list(TEXTS), BeamSearchParams(2, 20), use_tqdm=False)
    assert llm.stats()["drafted_tokens"] == before
    assert caplog.text.count("no drafts for requests with logits processors or rules of") == 1
    llm.engine.scheduler.speculation.max_tokens = 4
    llm.generate(list(TEXTS), SamplingParams(**GREEDY), use_tqdm=False)
    assert caplog.text.count("no drafts while 4 or more sequences run") == 1


def test_ends_in_the_middle_of_accepted_drafts(without: LLM) -> None:
    whole = whole_texts(without)
    assert stopped(engine_of(**PLENTY), whole) == stopped(without, whole)


def test_streams_get_several_tokens_at_once(without: LLM) -> None:
    prompts, params = workload(1)
    want = without.generate(prompts, params, use_tqdm=False)
    llm, longest = engine_of(**PLENTY), 0
    got: dict[tuple[int, int], list[Any]] = {}
    for part in llm.stream(prompts, params):
        got.setdefault((part.request_index, part.index), []).append(part)
        longest = max(longest, len(part.token_ids))
    assert longest > 3
    for i, output in enumerate(want):
        for out in output.outputs:
            parts = got[i, out.index]
            assert "".join(part.text for part in parts) == out.text
            assert [t for part in parts for t in part.token_ids] == out.token_ids
            assert parts[-1].finish_reason == out.finish_reason


FAULTS = {
    "the random number is one position late": Mutant(
        rows,
        "build",
        "context_lens[step.sampled] - step.tokens_after",
        "context_lens[step.sampled]",
    ),
    "logits are of the last draft": Mutant(
        rows, "_start_step", "starts[1:][sampled] - 1 - tokens_after", "starts[1:][sampled] - 1"
    ),
    "penalties do not count drafts": Mutant(
        rules_of_row, "at_each_position", "self.output + rules.drafts_before", "self.output"
    ),
    "penalties do not count accepted drafts": Mutant(
        row_rules,
        "replace_output",
        "self.penalties.add_row(chunk.row, row.prompt, row.output)",
        "pass",
    ),
    "tokens after a stop string stay": Mutant(
        sampling, "_add_text", "del seq.token_ids[seq.num_prompt + i + 1 :]", "pass"
    ),
    "log-probabilities after a stop string stay": Mutant(
        sampling, "receive", "del sample.logprobs[seq.num_output :]", "pass"
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] * (i > 0)) for i, name in enumerate(FAULTS)]
)
def test_fault_of_results_is_caught(without: LLM, name: str, monkeypatch) -> None:
    whole = whole_texts(without)
    want = results(without, 0), stopped(without, whole)
    mutant, faulty = FAULTS[name], apply(FAULTS[name])
    classes = [cls for cls in vars(mutant.module).values() if isinstance(cls, type)]
    own = [cls for cls in classes if cls.__module__ == mutant.module.__name__]
    owner = next(cls for cls in own if mutant.function in vars(cls))
    function = getattr(getattr(faulty, owner.__name__), mutant.function)
    monkeypatch.setattr(owner, mutant.function, function)
    llm = engine_of(**PLENTY)
    with pytest.raises((AssertionError, IndexError)):  # a wrong position may not exist
        assert (results(llm, 0), stopped(llm, whole)) == want

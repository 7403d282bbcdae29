"""Each field of SamplingParams beyond the filters: against transformers, and in mixed batches."""

import contextlib
import dataclasses
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
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.sequence import Sequence
from nanovllm.models import logit_rules
from nanovllm.models.logit_rules import RowRules, RulesBatch, RulesState
from nanovllm.plan import Join, LogitRules, RowSampling

PROMPT, OUTPUT = [3, 5, 5, 7], [5, 9, 9, 2]


def applied(rules: LogitRules, logits: torch.Tensor, output: list[int] = OUTPUT) -> torch.Tensor:
    """The logits after the rules of a row that drew `output` one by one."""
    device, position = torch.device("cpu"), torch.tensor([len(PROMPT) + 1])
    join = Join(1, [], RowSampling(0.0, 0, rules=rules), PROMPT, output[:1])
    state = RulesState(2, 40, len(logits), device)
    state.join(join.row, PROMPT, output[:1])
    batch = RulesBatch([(0, RowRules(rules, join, len(logits)))], state)
    for token in output[1:]:
        batch.length = int(position) + 1
        batch.apply(logits[None], position)
        batch.append(position, torch.tensor([token]), lambda token=token: [token])
        position = position + 1
    batch.length = int(position) + 1
    return batch.apply(logits[None], position)[0]


IDS = torch.tensor([PROMPT + OUTPUT])
DETERMINISTIC = [
    (LogitRules(repetition_penalty=1.3), RepetitionPenaltyLogitsProcessor(1.3)),
    (LogitRules(repetition_penalty=0.8), RepetitionPenaltyLogitsProcessor(0.8)),
    (LogitRules(logit_bias=((4, 2.5), (9, -100.0))), SequenceBiasLogitsProcessor([[[4], 2.5], [[9], -100.0]])),
    (LogitRules(allowed_token_ids=(1, 4, 19)), PrefixConstrainedLogitsProcessor(lambda *_: [1, 4, 19], 1)),
    (LogitRules(min_tokens=5, stops=(2, 8)), MinNewTokensLengthLogitsProcessor(4, 5, [2, 8])),
    (LogitRules(min_tokens=4, stops=(2, 8)), MinNewTokensLengthLogitsProcessor(4, 4, [2, 8])),
    (LogitRules(bad_words=((6,), (9, 2, 11), (2, 12), (1, 2, 13))),
     NoBadWordsLogitsProcessor([[6], [9, 2, 11], [2, 12], [1, 2, 13]])),
]  # fmt: skip


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


@pytest.mark.parametrize("at_a_time", [1, 70, logit_rules.TOKENS_AT_A_TIME])
def test_penalties_of_rows_of_every_length(monkeypatch: pytest.MonkeyPatch, at_a_time: int) -> None:
    """Rows that join at different times and repeat few tokens, against counts of the whole list."""
    monkeypatch.setattr(logit_rules, "TOKENS_AT_A_TIME", at_a_time)
    rng, size, device = random.Random(0), 6, torch.device("cpu")
    state, rows = RulesState(5, 64, size, device), {}
    rules = LogitRules(repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.7)
    for step in range(60):
        if step % 5 == 0:  # a new sequence, also in the place of an old one
            prompt, output = (rng.choices(range(size), k=n) for n in (rng.randint(1, 3), step % 3))
            join = Join(rng.randrange(5), [], RowSampling(0.0, 0, rules=rules), prompt, output)
            rows[join.row] = (RowRules(rules, join, size), [*prompt, *output])
            state.join(join.row, prompt, output)
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
        batch.append(positions, sampled, sampled.tolist)
        for tokens, token in zip(known, sampled.tolist(), strict=True):
            tokens.append(token)


@pytest.mark.parametrize("token", [-1, 20, 25])
def test_no_rule_reaches_another_row(token: int) -> None:
    """The logits of a step are one array, in which an index of one row could be that of another."""
    for fields in (
        dict(bad_words=((token,),)),
        dict(bad_words=((1, token),)),
        dict(bad_words=((token, 1),)),
        dict(logit_bias=((token, 1.0),)),
        dict(min_tokens=3, stops=(token,)),
        dict(allowed_token_ids=(1, token)),
    ):
        with pytest.raises(ValueError, match=f"{token}.* exceed a vocabulary of 20"):
            applied(LogitRules(**fields), torch.zeros(20))
    for prompt, output in (([1, token], []), ([1], [token])):
        with pytest.raises(ValueError, match="exceed a vocabulary of 20"):
            RulesState(2, 40, 20, torch.device("cpu")).join(0, prompt, output)


def test_rules_that_name_the_same_token() -> None:
    """A bad word that is also a stop token and has a bias stays hidden after min_tokens."""
    rules = LogitRules(
        bad_words=((4,),), min_tokens=1, stops=(4, 6), logit_bias=((4, 3.0), (6, 1.0))
    )
    logits = torch.randn(20)
    wanted = logits.clone()
    wanted[4], wanted[6] = float("-inf"), logits[6] + 1
    torch.testing.assert_close(applied(rules, logits), wanted)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"async_scheduling": True}])
def test_logprobs(checkpoint, options: dict) -> None:
    """Of prompt and output, before temperature and rules, also in chunks and after a prefix hit."""
    path, model = checkpoint
    llm = random_llm(path, **options)
    prompt = [1 + 7 * i % 150 for i in range(40)]
    params = SamplingParams(
        temperature=3.0, seed=1, max_tokens=9, ignore_eos=True, logprobs=4, prompt_logprobs=2,
        top_k=20, repetition_penalty=1.2,
    )  # fmt: skip
    llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)  # the prefix is cached now
    out = llm.generate(prompt, params, use_tqdm=False)[0]
    ids = torch.tensor([prompt + out["token_ids"]])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    found = [*out.prompt_logprobs, *out.outputs[0].logprobs]
    assert out.prompt_logprobs[0] is None
    assert len(found) == len(prompt) + 9
    total = 0.0
    for position in range(1, len(found)):
        token, want = ids[0, position].item(), logprobs[position - 1]
        k = 2 if position < len(prompt) else 4
        entry = found[position][token]
        assert entry.logprob == pytest.approx(want[token].item(), abs=1e-3)
        assert entry.rank == (want > want[token]).sum() + 1
        top = set(want.topk(k).indices.tolist())
        assert set(found[position]) == top | {token}
        if position >= len(prompt):
            total += entry.logprob
    assert out.outputs[0].cumulative_logprob == pytest.approx(total)


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
    llm = random_llm(checkpoint[0], num_kvcache_blocks=400, max_num_batched_tokens=64)
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
                assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-2)
        assert (out.prompt_logprobs is None) == (p.prompt_logprobs is None)


@pytest.mark.slow
def test_rules_survive_preemption(checkpoint) -> None:
    params = SamplingParams(
        temperature=1.0, seed=2, max_tokens=40, ignore_eos=True, frequency_penalty=1.5,
        repetition_penalty=1.4, min_tokens=30, logprobs=1,
    )  # fmt: skip
    prompts = [[i] * 20 for i in range(1, 5)]
    want = random_llm(checkpoint[0]).generate(prompts, params, use_tqdm=False)
    for asynchronous in (False, True):
        llm = random_llm(
            checkpoint[0],
            kvcache_block_size=4,
            num_kvcache_blocks=30,
            async_scheduling=asynchronous,
        )
        got = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats()["preemptions"] > 0
        assert [o["token_ids"] for o in got] == [o["token_ids"] for o in want]
        assert all(len(o.outputs[0].logprobs) == 40 for o in got)


# ---- text ----


@pytest.mark.slow
def test_stop_strings(embedded: LLM) -> None:
    chat = [{"role": "user", "content": "Count from 10 to 30"}]
    whole = embedded.chat(chat, use_tqdm=False)[0]["text"]
    for stop, cut in (
        ("15", "15"),
        (", 2", ", 2"),
        ("9, 20, ", "9, 20, "),
        (["25", "17, 1"], "17, 1"),
    ):
        for include in (False, True):
            params = SamplingParams(
                temperature=0, max_tokens=99, stop=stop, include_stop_str_in_output=include
            )
            out = embedded.chat(chat, params, use_tqdm=False)[0].outputs[0]
            assert out.text == whole[: whole.find(cut) + len(cut) * include]
            assert (out.finish_reason, out.stop_reason) == ("stop", cut)
    late = SamplingParams(temperature=0, max_tokens=99, stop="1", min_tokens=20)
    assert len(embedded.chat(chat, late, use_tqdm=False)[0]["token_ids"]) > 20
    never = SamplingParams(temperature=0, max_tokens=99, stop="zebra")
    assert embedded.chat(chat, never, use_tqdm=False)[0]["text"] == whole
    assert not embedded.engine.outputs.per_token_samples


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["b", "abc"], "xa", "b"),  # the earliest end, not the earliest beginning
        (["abc", "b"], "xa", "b"),
        (["c", "bc", "zebra"], "xab", "c"),  # the same end: the first in the list
        (["bc", "c", "zebra"], "xa", "bc"),
    ],
)
def test_stop_strings_in_one_token(stop: list[str], text: str, reason: str) -> None:
    """The choice depends on the text alone, whether it comes in one token or in several."""
    for pieces in (["xabcd"], ["x", "a", "b", "c", "d"], ["xa", "bcd"]):
        for include in (False, True):
            outputs = OutputProcessor(FakeTokenizer(pieces), frozenset())
            params = SamplingParams(stop=stop, include_stop_str_in_output=include)
            seq = Sequence("0", 0, [0], 1, 99, frozenset(), RowSampling(0.0, 0))
            request = outputs.add([seq], None, params, returned_by_step=False, stream=True)
            streamed, found = "", None
            for token in range(len(pieces)):
                seq.token_ids.append(token)
                if found := outputs._detokenize(seq):
                    seq.finish_reason = "stop"
                streamed += "".join(new.text for new in request.read_stream(0))
                if found:
                    break
            assert found == reason
            assert streamed == request.samples[0].text == text + reason * include


class FakeTokenizer:
    """Token i is pieces[i]."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(self.pieces[i] for i in ids)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_text_of_a_stop_token(embedded: LLM, asynchronous: bool) -> None:
    """It is left out unless requested, also where it ends an incomplete character."""
    script = [*embedded.get_tokenizer().encode("cat\u00e9")[:-1], 7]  # é has two bytes
    ids = embedded.get_tokenizer().encode("cat")
    assert script[: len(ids)] == ids
    seven = embedded.get_tokenizer().decode([7])

    def follow(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        known = token_ids and token_ids[-1] in script
        following = script.index(token_ids[-1]) + 1 if known else 0
        logits.fill_(-math.inf)[script[following % len(script)]] = 0.0
        return logits

    llm = embedded
    if asynchronous:
        llm = LLM(dtype="float32", device="cpu", async_scheduling=True, num_kvcache_blocks=64)
    for include, stop in ((False, ()), (True, ()), (False, "zebra"), (True, "zebra")):
        params = SamplingParams(
            temperature=0, stop_token_ids=[7], include_stop_str_in_output=include, stop=stop,
            logits_processors=[follow],
        )  # fmt: skip
        out = llm.generate([[1]], params, use_tqdm=False)[0].outputs[0]
        assert out.text == "cat\ufffd" + seven * include
        assert (out.token_ids, out.finish_reason, out.stop_reason) == (script, "stop", 7)
        pieces = list(llm.stream([[1]], params))
        assert "".join(piece.text for piece in pieces) == out.text
        assert [token for piece in pieces for token in piece.token_ids] == script
        assert pieces[-1].stop_reason == 7


def test_generate_and_stream_decode_alike(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tokenizer.decode` may clean up spaces by default, which a stream cannot do."""
    decode = embedded.engine.tokenizer.decode

    def cleans(ids: list[int], **options: object) -> str:
        text = decode(ids, **options)
        return text if "clean_up_tokenization_spaces" in options else text.replace(" ", "")

    monkeypatch.setattr(embedded.engine.tokenizer, "decode", cleans)
    params = SamplingParams(temperature=0, max_tokens=8)
    want = embedded.generate("Count from 1 to 9\n", params, use_tqdm=False)[0]["text"]
    assert " " in want
    assert "".join(new.text for new in embedded.stream("Count from 1 to 9\n", params)) == want


def test_logprobs_of_a_stream(embedded: LLM) -> None:
    prompts = ["Count from 1 to 9\n", "What is 3 + 4?\n"]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=9, n=2, logprobs=2)
    asked = [params, dataclasses.replace(params, prompt_logprobs=1)]
    want = embedded.generate(prompts, asked, use_tqdm=False)
    found: dict[tuple[int, int], list] = {}
    in_prompt: list = []
    for new in embedded.stream(prompts, asked):
        assert len(new.logprobs) == len(new.token_ids)
        found.setdefault((new.request_index, new.index), []).extend(new.logprobs)
        in_prompt += [new.prompt_logprobs] * (new.prompt_logprobs is not None)
    for i, out in enumerate(want):
        for c in out.outputs:
            assert [list(entry) for entry in found[i, c.index]] == [list(e) for e in c.logprobs]
    assert [list(entry) for entry in in_prompt[0][1:]] == [
        list(entry) for entry in want[1].prompt_logprobs[1:]
    ]
    assert len(in_prompt) == 1
    for new in embedded.stream(prompts, dataclasses.replace(params, logprobs=None)):
        assert new.logprobs is None


def test_plain_parameters_make_no_rules(embedded: LLM) -> None:
    """Rows with rules take a slower path, so the usual parameters must not have any."""
    for fields in ({}, {"stop_token_ids": [3]}, {"top_k": 5, "seed": 1}, {"logits_processors": []}):
        params = SamplingParams(**fields)
        assert embedded.engine.inputs.logit_rules(params) is None


def test_logprobs_of_the_whole_vocabulary(checkpoint) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    out = random_llm(checkpoint[0], max_logprobs=-1).generate([[1, 2]], params, use_tqdm=False)[0]
    for entry in (*out.outputs[0].logprobs, out.prompt_logprobs[1]):
        assert sorted(entry) == list(range(VOCAB))
        assert sum(math.exp(e.logprob) for e in entry.values()) == pytest.approx(1)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_max_logprobs(path: Path, name: str) -> None:
    """For both fields, in every call; -1 is the whole vocabulary, and candidates do not count."""
    for most, good, bad in (
        (3, (0, 3), (4, VOCAB, -1)),
        (0, (0,), (1, -1)),
        (-1, (0, VOCAB, -1), ()),
        (VOCAB - 1, (VOCAB - 1,), (VOCAB, -1)),
        (VOCAB + 1, (VOCAB, -1), ()),
    ):
        llm = random_llm(path, max_logprobs=most)
        for k in good:
            params = SamplingParams(max_tokens=2, ignore_eos=True, **{name: k})
            (out,) = llm.generate([[1, 2]], params, use_tqdm=False)
            entries = out.outputs[0].logprobs if name == "logprobs" else out.prompt_logprobs[1:]
            assert {len(entry) for entry in entries} <= {max(k, 1), k + 1, VOCAB}
            assert any(new.finish_reason for new in llm.stream([[1, 2]], params))
        for k in bad:
            params, message = SamplingParams(**{name: k}), f"{name}={k} is more than max_logprobs="
            with pytest.raises(ValueError, match=f"{message}{most}"):
                llm.generate([[1]], params, use_tqdm=False)
            with pytest.raises(ValueError, match=f"{message}{most}"):
                next(llm.stream([[1]], params))
            with pytest.raises(ValueError, match=f"{message}{most}"):
                llm.engine.add_request([1], params)
        (found,) = llm.beam_search([1, 2], BeamSearchParams(16, 2), use_tqdm=False)
        assert len(found.sequences) == 16
        assert not llm.engine.has_unfinished_requests()


class Large:
    """What a logits processor refers to."""


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_processors_are_released(
    path: Path, monkeypatch: pytest.MonkeyPatch, raises: bool, asynchronous: bool
) -> None:
    """No row keeps what a processor refers to after the end of its request, whatever ended it."""
    llm = random_llm(path)
    monkeypatch.setattr(llm.engine, "max_in_flight", int(asynchronous))
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


def test_spaces_are_not_cleaned_up(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tokenizer's default is: in samples, beams and the texts of single tokens."""
    tokenizer = embedded.get_tokenizer()
    for name in ("", "_for_bpe_even_though_it_will_corrupt_output"):
        monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces" + name, True)
    prompt = "Sort 4 , 2 , 3 .\n"
    ids = tokenizer.encode(prompt)
    assert tokenizer.decode(ids) == "Sort 4, 2, 3.\n"
    (found,) = embedded.beam_search(prompt, BeamSearchParams(2, 3), use_tqdm=False)
    assert found.sequences[0].text.startswith(prompt)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (out,) = embedded.generate(prompt, params, use_tqdm=False)
    entries = zip(ids[1:], out.prompt_logprobs[1:], strict=True)
    assert "".join(entry[token].decoded_token for token, entry in entries) == prompt[len("Sort") :]


def test_bad_words_and_text_options(embedded: LLM) -> None:
    chat = [{"role": "user", "content": "Spell cat"}]
    plain = SamplingParams(temperature=0, max_tokens=20)
    assert embedded.chat(chat, plain, use_tqdm=False)[0]["text"] == "c-a-t"
    without = SamplingParams(temperature=0, max_tokens=20, bad_words=["a"])
    assert "a" not in embedded.chat(chat, without, use_tqdm=False)[0]["text"]
    for include, text in ((False, "c-a-t"), (True, "c-a-t<|im_end|>")):
        special = SamplingParams(
            temperature=0, skip_special_tokens=False, include_stop_str_in_output=include
        )
        assert embedded.chat(chat, special, use_tqdm=False)[0]["text"] == text
    for detokenize, text, first in ((True, "c-a-t", "c"), (False, "", None)):
        params = SamplingParams(temperature=0, detokenize=detokenize, logprobs=1)
        out = embedded.chat(chat, params, use_tqdm=False)[0].outputs[0]
        assert out.text == text
        assert next(iter(out.logprobs[0].values())).decoded_token == first


def test_stream_is_generate_in_pieces(embedded: LLM) -> None:
    questions = ["Count from 5 to 20", "Reverse wolf", "What is a block?", "What is 3 + 4?"]
    tokenizer = embedded.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False
        )
        for q in questions
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=99),
        SamplingParams(temperature=0.5, seed=2, max_tokens=20, n=3),
        SamplingParams(temperature=0, max_tokens=99, stop=["the KV", "zebra"]),
        SamplingParams(temperature=0, max_tokens=99),
    ]
    want = embedded.generate(prompts, params, use_tqdm=False)
    texts: dict[tuple[int, int], str] = {}
    tokens: dict[tuple[int, int], list[int]] = {}
    ended: dict[tuple[int, int], str] = {}
    pieces = 0
    for new in embedded.stream(prompts, params):
        key = (new.request_index, new.index)
        assert key not in ended
        texts[key] = texts.get(key, "") + new.text
        tokens[key] = tokens.get(key, []) + new.token_ids
        if new.finish_reason is not None:
            ended[key] = new.finish_reason
        pieces += 1
    assert pieces > 40
    for i, out in enumerate(want):
        for c in out.outputs:
            assert texts[i, c.index] == c.text
            assert tokens[i, c.index] == c.token_ids
            assert ended[i, c.index] == c.finish_reason


def test_leaving_a_stream_frees_everything(embedded: LLM) -> None:
    for new in embedded.stream(["Count from 1 to 50\n"] * 3, SamplingParams(max_tokens=200)):
        if new.token_ids:
            break
    assert not embedded.engine.has_unfinished_requests()
    stats = embedded.stats()
    assert (stats["running"], stats["waiting"], stats["blocks_in_use"]) == (0, 0, 0)
    with pytest.raises(ValueError, match="empty"):
        next(embedded.stream(["fine", ""]))
    assert not embedded.engine.has_unfinished_requests()


def test_detokenizer_on_every_prefix(embedded: LLM) -> None:
    """What is handed out is a prefix of the full decode at every token, and all of it at the end."""
    from nanovllm.engine.detokenizer import Detokenizer

    tokenizer = embedded.get_tokenizer()
    rng = random.Random(0)
    pieces = [
        "🙂",
        "日本語",
        "e\u0301",
        "नि",
        "ab c",
        " the",
        "\n",
        "👩‍👩‍👧",
        "ÿ",
        "<|im_end|>",
        "7",
    ]
    size = len(tokenizer)
    for trial in range(150):
        ids: list[int] = []
        while len(ids) < 60:
            if rng.random() < 0.5:
                ids += tokenizer.encode(rng.choice(pieces))
            else:  # broken bytes: any token
                ids += [rng.randrange(256 if trial % 2 else size) for _ in range(rng.randint(1, 8))]
        detokenizer, text = Detokenizer(tokenizer), ""
        for i, token in enumerate(ids):
            text += detokenizer.add([token])
            full = tokenizer.decode(ids[: i + 1], skip_special_tokens=True)
            assert full.startswith(text)
            assert len(full) - len(text) <= 1
        assert text + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=True)


def test_detokenizing_broken_bytes_is_linear(embedded: LLM) -> None:
    from nanovllm.engine.detokenizer import WINDOW, Detokenizer

    detokenizer = Detokenizer(embedded.get_tokenizer())
    broken = embedded.get_tokenizer().encode("\u00e9")[:1]  # the first byte of two
    longest = 0
    for _ in range(2000):
        detokenizer.add(broken)
        longest = max(longest, len(detokenizer.window))
    assert longest <= WINDOW + 1


def test_logits_processor_sees_and_shapes(embedded: LLM) -> None:
    seen: list[list[int]] = []

    def only_sevens(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(ids))
        masked = torch.full_like(logits, -math.inf)
        masked[seven] = 0.0
        return masked

    seven = embedded.get_tokenizer().encode("7")[0]
    params = SamplingParams(max_tokens=4, logits_processors=[only_sevens])
    out = embedded.generate("hello", params, use_tqdm=False)[0]
    assert out["text"] == "7777"
    assert seen == [[seven] * i for i in range(4)]


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
    with pytest.raises(ValueError, match=r"lambda.*returned \[5\] numbers in place of"):
        embedded.generate("hello", short, use_tqdm=False)
    assert embedded.generate("hello", params, use_tqdm=False)[0]["text"] == "777"


@pytest.mark.slow
def test_streams_share_an_engine(embedded: LLM) -> None:
    """Two streams read by turns, and a `generate` within a third: nothing is lost, nothing is left."""
    params = SamplingParams(temperature=0, max_tokens=60)
    prompts = ["Count from 1 to 9\n", "Reverse garden\n"]
    want = [o["text"] for o in embedded.generate(prompts, params, use_tqdm=False)]
    streams = [embedded.stream(p, params) for p in prompts]
    texts, live = ["", ""], [0, 1]
    while live:
        for i in list(live):
            new = next(streams[i], None)
            if new is None:
                live.remove(i)
            else:
                texts[i] += new.text
    assert texts == want
    stream = embedded.stream(prompts[0], params)
    text = next(stream).text
    embedded.generate(
        "Count from 1 to 40\n", SamplingParams(temperature=0, max_tokens=200), use_tqdm=False
    )
    pieces = list(stream)
    assert text + "".join(p.text for p in pieces) == want[0]
    assert pieces[-1].finish_reason == "stop"
    assert not embedded.engine.has_unfinished_requests()

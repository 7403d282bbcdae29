"""What ends a sequence, and its text: stop tokens, stop strings, and the texts of tokens."""

import math
from types import SimpleNamespace

import pytest
import torch
from checkpoints import VOCAB
from tokenizers import Tokenizer, decoders, models

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.progress import Progress
from nanovllm.engine.request import Request, Sample
from nanovllm.engine.sampling import Sampling
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import RowResult


def test_decoded_tokens_of_split_characters(embedded: LLM) -> None:
    """As in vLLM: the last part of a character has all of it, the other parts have ""."""
    text = "naïve 🙂√ “x”\n"
    ids = embedded.get_tokenizer().encode(text)
    parts = ["n", "a", "", "ï", "v", "e", " ", *[""] * 3, "🙂", "", "", "√", " "]
    parts += ["", "", "“", "x", "", "", "”", "\n"]

    def forced(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[ids[len(output_ids)]] = float("inf")
        return logits

    params = SamplingParams(
        logprobs=5, prompt_logprobs=3, max_tokens=len(ids), logits_processors=[forced]
    )
    for budget in (embedded.engine.scheduler.token_budget, 4):  # 4: the prompt in chunks
        embedded.engine.scheduler.token_budget, before = (
            budget,
            embedded.engine.scheduler.token_budget,
        )
        out = embedded.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
        embedded.engine.scheduler.token_budget = before
        sample = out.outputs[0]
        assert sample.text == text
        assert [e[t].decoded_token for e, t in zip(sample.logprobs, ids, strict=True)] == parts
        shown = [e[t].decoded_token for e, t in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]
        assert shown == parts[1:]
        for entry in (*sample.logprobs, *out.prompt_logprobs[1:]):
            assert not any(one.decoded_token.endswith("\ufffd") for one in entry.values())


def test_stops(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    tokens = llm.generate([7, 7], free, use_tqdm=False)[0]["token_ids"]
    stop = tokens[4]
    at = tokens.index(stop)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    out = llm.generate([7, 7], params, use_tqdm=False)[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (tokens[: at + 1], "stop", stop)
    engine, before = llm.engine, llm.engine.input_processor.eos_token_ids
    both = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop])
    engine.input_processor.eos_token_ids = frozenset({stop, VOCAB - 1})
    try:
        own = SamplingParams(temperature=0, max_tokens=30)
        short, full, given, ignored = llm.generate(
            [[7, 7]] * 4, [own, free, both, params], use_tqdm=False
        )
        *_, last = llm.stream([7, 7], params)
    finally:
        engine.input_processor.eos_token_ids = before
    assert (short["token_ids"], short.outputs[0].stop_reason) == (tokens[: at + 1], None)
    assert full["token_ids"] == tokens
    assert given.outputs[0].stop_reason is None
    assert ignored.outputs[0].stop_reason == last.stop_reason == stop


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
            rules = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, ""))
            rules.decoder = decoders.Fuse()
            tokenizer = SimpleNamespace(backend_tokenizer=rules)
            inputs = InputProcessor(tokenizer, 99, 99, frozenset(), SamplingParams(), 0)
            params = SamplingParams(stop=stop, include_stop_str_in_output=include)
            task = Sampling(inputs, params)
            seq = Sequence("0", 0, [0], 1, 99)
            request = Request(task, None, Progress(), stream=True, samples=[Sample(seq)])
            task.start(request)
            streamed = ""
            for token in range(len(pieces)):
                seq.token_ids.append(token)
                task.receive(request, seq, RowResult())
                streamed += "".join(new.text for new in task.read_stream(request))
                if seq.finish_reason is not None:
                    break
            assert (seq.finish_reason, seq.stop_reason) == ("stop", reason)
            assert streamed == request.samples[0].text == text + reason * include


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
        llm = LLM(dtype="float32", device="cpu", async_scheduling=True, num_kv_cache_blocks=64)
    for include, stop in ((False, ()), (True, ()), (False, "zebra"), (True, "zebra")):
        params = SamplingParams(
            temperature=0,
            stop_token_ids=[7],
            include_stop_str_in_output=include,
            stop=stop,
            logits_processors=[follow],
        )
        out = llm.generate([[1]], params, use_tqdm=False)[0].outputs[0]
        assert out.text == "cat" + ("\ufffd" + seven) * include
        assert (out.token_ids, out.finish_reason, out.stop_reason) == (script, "stop", 7)
        pieces = list(llm.stream([[1]], params))
        assert "".join(piece.text for piece in pieces) == out.text
        assert [token for piece in pieces for token in piece.token_ids] == script
        assert pieces[-1].stop_reason == 7


def test_spaces_are_not_cleaned_up(embedded: LLM, monkeypatch) -> None:
    """Whatever the tokenizer's default is: in samples, beams and the texts of single tokens."""
    tokenizer = embedded.get_tokenizer()
    for name in ("", "_for_bpe_even_though_it_will_corrupt_output"):
        monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces" + name, True)
    prompt = "Sort 4 , 2 , 3 .\n"
    ids = tokenizer.encode(prompt)
    assert tokenizer.decode(ids) == "Sort 4, 2, 3.\n"
    params = SamplingParams(temperature=0, max_tokens=8)
    [out] = embedded.generate(prompt, params, use_tqdm=False)
    assert "".join(new.text for new in embedded.stream(prompt, params)) == out["text"]
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
    late = SamplingParams(temperature=0, max_tokens=20, stop=["-"], min_tokens=3)
    assert embedded.chat(chat, late, use_tqdm=False)[0]["text"] == "c-a"
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

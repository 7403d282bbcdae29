"""The text of an output, in pieces: spaces and characters of several tokens, by each kind of tokenizer."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import make_checkpoint, random_llm
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.token_logprobs import decode_token
from nanovllm.loading.checkpoint import find_checkpoint

WORDS = ["The", "quick", "brown", "fox", ",", "12", "é"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentence_piece(kind: str) -> Tokenizer:
    """A tokenizer with words, the same words after a space, and bytes for all other characters."""
    pieces = ["<unk>", "<s>", "</s>", *BYTES, "▁", *WORDS, *(f"▁{word}" for word in WORDS)]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    vocab |= {letter: len(vocab) + i for i, letter in enumerate("Tquickbrownfx1")}
    merges = []
    for word in WORDS:  # every word from left to right, then with the space
        for end in range(2, len(word) + 1):
            for part in (word[: end - 1], word[end - 1], word[:end]):
                vocab.setdefault(part, len(vocab))
            merges.append((word[: end - 1], word[end - 1]))
        merges.append(("▁", word))
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if kind == "llama":
        steps: list[Any] = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
        parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


KINDS = ["llama", "metaspace", "byte-level"]


def make(kind: str) -> Any:
    if kind == "byte-level":
        rules = Tokenizer.from_file(str(find_checkpoint("qwen3-nano") / "tokenizer.json"))
    else:
        rules = sentence_piece(kind)
    return SimpleNamespace(backend_tokenizer=rules)


def whole(tokenizer: Any, ids: list[int]) -> str:
    """The text of all tokens up to the last one that ends a character."""
    for end in range(len(ids), 0, -1):
        text = tokenizer.backend_tokenizer.decode(ids[:end])
        if not text.endswith("\ufffd"):
            return text
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_cut_at_every_place(kind: str) -> None:
    """The prompt is before one place and the output before another, also within a character."""
    tokenizer = make(kind)
    text = "The quick 🙂🙃 fox,  12 日本 é brown🙂 fox"
    ids = tokenizer.backend_tokenizer.encode(text).ids
    for start in range(1, len(ids)):
        before = tokenizer.backend_tokenizer.decode(ids[:start])
        detokenizer, got = Detokenizer(tokenizer, ids[:start]), ""
        for end in range(start + 1, len(ids) + 1):
            got += detokenizer.add([ids[end - 1]])
            if before.endswith("\ufffd"):  # the prompt ends within a character
                assert got == whole(tokenizer, ids[start:end])
            else:
                known = whole(tokenizer, ids[:end])
                assert before + got == max(known, before, key=len)
        if not before.endswith("\ufffd"):
            assert before + got == text


@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens(kind: str) -> None:
    """The text is the same in any pieces, and no part of it is from the prompt."""
    tokenizer, rng = make(kind), random.Random(0)
    size = tokenizer.backend_tokenizer.get_vocab_size()
    lost = 0
    for trial in range(200):
        ids = [rng.randrange(3, 259 if trial % 2 else size) for _ in range(40)]
        cut = rng.randrange(1, 40)
        once = Detokenizer(tokenizer, ids[:cut]).add(ids[cut:])
        detokenizer, pieces = Detokenizer(tokenizer, ids[:cut]), []
        while cut < 40:
            step = rng.randint(1, 5)
            pieces.append(detokenizer.add(ids[cut : cut + step]))
            cut += step
        assert "".join(pieces) == once
        lost += once == ""
    assert lost < 60


def test_invalid_bytes_after_a_character() -> None:
    """The decoder then replaces bytes that were part of a returned character; the text goes on."""
    tokenizer = make("llama")
    ids = tokenizer.backend_tokenizer.encode("fox 🙂🙂fox fox").ids
    emoji = ids.index(tokenizer.backend_tokenizer.token_to_id("<0xF0>"))
    del ids[emoji + 6 : emoji + 8]  # the second half of the second one
    assert Detokenizer(tokenizer, ids[:1]).add(ids[1:]) == " 🙂fox fox"


def test_special_tokens_at_the_end_of_a_prompt() -> None:
    tokenizer = make("llama")
    start, *_ = tokenizer.backend_tokenizer.encode("<s>").ids
    fox = tokenizer.backend_tokenizer.token_to_id("▁fox")
    assert Detokenizer(tokenizer, [start]).add([fox, start, fox]) == "fox fox"
    assert Detokenizer(tokenizer, [start], False).add([fox, start]) == " fox<s>"


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_tokens_are_the_text(kind: str) -> None:
    """A decoder removes the space of a token that it decodes alone."""
    tokenizer = make(kind)
    text = "The quick 🙂🙃 fox,  12 日本"
    ids = tokenizer.backend_tokenizer.encode(text).ids
    texts = [decode_token(tokenizer, token, ids[:at]) for at, token in enumerate(ids)]
    assert "".join(texts).removeprefix(" ") == text


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_generate_and_stream_return_the_same_text(kind: str, tmp_path) -> None:
    rules = sentence_piece(kind)
    make_checkpoint(tmp_path, vocab_size=rules.get_vocab_size(), eos_token_id=2)
    PreTrainedTokenizerFast(
        tokenizer_object=rules, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    llm = random_llm(tmp_path, skip_tokenizer_init=False)
    prompts = ["The quick fox", "fox 🙂", [5, 6, 7], "brown"]
    free = dict(max_tokens=60, ignore_eos=True, seed=1, temperature=2)
    words = {rules.token_to_id(f"▁{word}"): 30.0 for word in WORDS}
    for bias in (None, words):
        params = SamplingParams(**free, logit_bias=bias)
        want = [out["text"] for out in llm.generate(prompts, params, use_tqdm=False)]
        never = SamplingParams(**free, logit_bias=bias, stop=["zebra"])
        assert [out["text"] for out in llm.generate(prompts, never, use_tqdm=False)] == want
        streamed = [""] * len(prompts)
        for new in llm.stream(prompts, params):
            streamed[new.request_index] += new.text
        assert streamed == want
    first, second, *_ = want[0].split()
    assert want[0].startswith(f" {first} {second}")
    stops = SamplingParams(**free, logit_bias=words, stop=[f"{first} {second}"])
    [out] = llm.generate(prompts[0], stops, use_tqdm=False)
    assert (out["text"], out.outputs[0].finish_reason) == (" ", "stop")
